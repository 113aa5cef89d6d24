"""Two step functions a turn, as of a GAN in a class: the first leaves a tensor with its graph for the second.

MODE  (none)  the second step reads it
      prints  the script reads it again behind both
      large   the same, with more than is carried
      lock    the first leaves a lock for the second
      raises  the second step raises an error of its own in rank 1, whoever holds that
"""

import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, net, note, note_end, strike


class Gan:
    def __init__(self, rank):
        self.rank, self.turn = rank, 0
        self.generator = DistributedDataParallel(net())
        self.critic = DistributedDataParallel(nn.Linear(1, 1))
        self.update_generator = torch.optim.SGD(self.generator.parameters(), lr=0.05)
        self.update_critic = torch.optim.SGD(self.critic.parameters(), lr=0.05)

    def step_generator(self, inputs, targets):
        self.fake = self.generator(inputs)
        if MODE == "lock":
            self.lock = threading.Lock()
        loss = ((self.fake - targets) ** 2).mean() + self.critic(self.fake).mean()
        self.update_generator.zero_grad()
        loss.backward()
        strike("generator", self.turn, self.rank)
        self.update_generator.step()
        return loss.detach()

    def step_critic(self, targets):
        if MODE == "raises" and self.turn == 9 and self.rank == 1:
            raise ValueError("of the script's own")
        if MODE == "lock":
            self.lock.acquire()
        loss = (self.critic(self.fake.detach()) - self.critic(targets)).abs().mean()
        self.update_critic.zero_grad()
        loss.backward()
        strike("critic", self.turn, self.rank)
        self.update_critic.step()
        return loss.detach()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    gan = Gan(rank)
    data = Pairs(80)
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, 4, sampler=sampler)
    run = torchrelay.protect(model=[gan.generator, gan.critic], optimizer=[gan.update_generator, gan.update_critic])
    step_generator, step_critic = run.step(gan.step_generator), run.step(gan.step_critic)
    for epoch in run.epochs(3):
        sampler.set_epoch(epoch)
        for inputs, targets in run.batches(loader):
            gan.turn += 1
            if MODE == "large":
                inputs, targets = inputs.repeat(20, 1), targets.repeat(20, 1)
            losses = {"generator": step_generator(inputs, targets), "critic": step_critic(targets)}
            strike("after", gan.turn, rank)
            if MODE in ("prints", "large"):
                losses["fake"] = gan.fake.detach().sum()
            note(rank, gan.turn, **losses)
    note_end(rank, gan.generator.module, gan.critic.module)
    run.atomic(dist.barrier)


if __name__ == "__main__":
    main()
