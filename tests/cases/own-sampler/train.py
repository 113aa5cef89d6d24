"""Samplers that keep what their order comes from: a generator of each kind, a counter of their own epochs, the order.

MODE numpy, python, torch, epochs, in-place; seed: DistributedSampler with set_epoch, the control.
"""

import random

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Sampler

import torchrelay
from casework import MODE, Pairs, net, note_end, strike, train


class Own(Sampler):
    def __init__(self, size, rank, world):
        self.size, self.rank, self.world, self.times = size, rank, world, 0
        self.order = list(range(size))
        makers = {"numpy": np.random.default_rng, "python": random.Random, "in-place": random.Random}
        self.source = torch.Generator().manual_seed(5) if MODE == "torch" else makers.get(MODE, int)(5)

    def __len__(self):
        return self.size // self.world

    def __iter__(self):
        order = list(range(self.size))
        if MODE == "numpy":
            order = self.source.permutation(self.size).tolist()
        elif MODE == "python":
            self.source.shuffle(order)
        elif MODE == "in-place":
            self.source.shuffle(self.order)
            order = list(self.order)
        elif MODE == "torch":
            order = torch.randperm(self.size, generator=self.source).tolist()
        else:
            order = torch.randperm(self.size, generator=torch.Generator().manual_seed(5 + self.times)).tolist()
            self.times += 1
        return iter(order[self.rank :: self.world])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = Pairs(80)
    sampler = DistributedSampler(data, seed=5) if MODE == "seed" else Own(len(data), rank, world)
    loader = DataLoader(data, 4, sampler=sampler)
    run = torchrelay.protect(model=model, optimizer=optimizer)

    @run.step
    def step(batch):
        optimizer.zero_grad()
        loss = ((model(batch[0]) - batch[1]) ** 2).mean()
        loss.backward()
        strike("grad", run.global_step + 1, rank)
        mean = loss.detach() / world
        dist.all_reduce(mean)
        optimizer.step()
        return mean

    train(run, step, loader, epochs=3, rank=rank, before=sampler.set_epoch if MODE == "seed" else None)
    note_end(rank, model.module)
    run.atomic(dist.barrier)


if __name__ == "__main__":
    main()
