"""Keeps what decides about numbers in places that are easily overlooked.

Closures of hooks of modules and parameters, an attribute of a class, settings of torch's own modules, itertools.count,
a global of a collate function, an attribute of a dataset's class, and an optimizer's own attribute.
"""

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import Pairs, note_end, strike, train

collated = 0


def collate(items):
    global collated
    collated += 1
    inputs, targets = (torch.stack(parts) for parts in zip(*items, strict=True))
    return inputs * (1 + 0.01 * collated), targets


class Fetched(Pairs):
    times = 0

    def __getitem__(self, index):
        Fetched.times += 1
        inputs, targets = super().__getitem__(index)
        return inputs * (1 + 0.001 * Fetched.times), targets


class Scaled(torch.autograd.Function):
    factor = 1.0

    @staticmethod
    def forward(_, inputs):
        Scaled.factor *= 1.01
        return inputs * Scaled.factor

    @staticmethod
    def backward(_, gradient):
        return gradient * Scaled.factor


class Decaying(torch.optim.SGD):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / (1 + 0.05 * self.steps)
        return super().step(closure)


def growing(by):
    calls = 0

    def hook(_, __, out):
        nonlocal calls
        calls += 1
        return out * (1 + by * calls)

    return hook


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    inner = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 1))
    inner[0].register_forward_hook(growing(0.01))
    inner[3].register_forward_hook(growing(-0.005))
    numbers = itertools.count(1)
    inner[0].weight.register_hook(lambda gradient: gradient / next(numbers) ** 0.1)
    model = DistributedDataParallel(inner)
    optimizer = Decaying(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.HuberLoss(delta=1.0)
    data = Fetched(80)
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, seed=5), collate_fn=collate)
    run = torchrelay.protect(model=model, optimizer=optimizer)

    @run.step
    def step(batch):
        optimizer.zero_grad()
        loss = criterion(Scaled.apply(model(batch[0])), batch[1])
        loss.backward()
        strike("grad", run.global_step + 1, rank)
        mean = loss.detach() / world
        dist.all_reduce(mean)
        optimizer.step()
        return mean

    def stepping(batch):
        criterion.delta *= 0.98
        inner[1].p = max(0.0, inner[1].p - 0.004)
        return step(batch)

    train(run, stepping, loader, epochs=4, rank=rank)
    note_end(rank, model.module)
    run.atomic(dist.barrier)


if __name__ == "__main__":
    main()
