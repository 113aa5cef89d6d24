"""Keeps copies of its model that protect() was not given, each taken in its own way: MODE says which."""

import copy

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, net, note, note_end, pace, strike


class Average:
    def __init__(self, model):
        self.shadow = {name: value.detach().clone() for name, value in model.named_parameters()}

    def update(self, model):
        for name, value in model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * value.detach()

    def state_dict(self):
        return self.shadow

    def load_state_dict(self, state):
        self.shadow.update(state)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    inner = torch.nn.Sequential(torch.nn.Linear(8, 600), torch.nn.Tanh(), torch.nn.Linear(600, 1))
    model = DistributedDataParallel(net() if MODE == "best" else inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = Pairs(40)
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, 4, sampler=sampler)
    teacher, average, best = copy.deepcopy(inner), Average(model.module), None
    run = torchrelay.protect(model=model, optimizer=optimizer, state={"average": average} if MODE == "told" else {})

    @run.step
    def step(batch):
        optimizer.zero_grad()
        loss = ((model(batch[0]) - batch[1]) ** 2).mean()
        if MODE == "teacher":
            with torch.no_grad():
                expected = teacher(batch[0])
            loss = loss + ((model(batch[0]) - expected) ** 2).mean()
        loss.backward()
        strike("grad", run.global_step + 1, rank)
        mean = loss.detach() / world
        dist.all_reduce(mean)
        optimizer.step()
        if MODE == "told":
            average.update(model.module)
        return mean

    for epoch in run.epochs(4):
        sampler.set_epoch(epoch)
        for batch in run.batches(loader):
            loss = step(batch)
            note(rank, run.global_step, loss=loss)
            if MODE == "average":
                average.update(model.module)
            if MODE == "teacher" and run.global_step % 4 == 0:
                teacher.load_state_dict(model.module.state_dict())
            pace(run.global_step)
        if MODE == "best" and (best is None or loss.item() < best[0]):
            best = loss.item(), copy.deepcopy(model.module.state_dict())
    if best is not None:
        model.module.load_state_dict(best[1])
    note(rank, 1000, average=torch.cat([value.flatten() for value in average.shadow.values()]))
    note_end(rank, model.module)
    run.atomic(dist.barrier)


if __name__ == "__main__":
    main()
