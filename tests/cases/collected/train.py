"""Collects the losses of an epoch, and their sum weighs the next one's. MODE: what collects them.

In a comprehension, and in sum(), what has been collected so far lies where nobody can look; a `for` keeps it in a
variable, whatever expression its items come through.
"""

import functools

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, net, note, note_end, pace, strike


class Wrapped:
    def __init__(self, batches):
        self.items = iter(batches)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.items)


def ways_of(one):
    """How the results of a loop's calls come together, by MODE."""

    def plain(batches):
        total = 0.0
        for batch in (each for each in batches):
            total += one(batch)
        return total

    def by_next(batches):
        items, total = iter(batches), 0.0
        while (batch := next(items, None)) is not None:
            total += one(batch)
        return total

    return {
        "list": lambda batches: sum([one(batch) for batch in batches]),
        "set": lambda batches: sum({one(batch) for batch in batches}),
        "dict": lambda batches: sum({batch[0].sum(): one(batch) for batch in batches}.values()),
        "nested": lambda batches: sum([one(batch) for _ in range(1) for batch in batches]),
        "sum": lambda batches: sum(one(batch) for batch in batches),
        "star": lambda batches: sum([*(one(batch) for batch in batches)]),
        "map": lambda batches: sum(map(one, batches)),
        "reduce": lambda batches: functools.reduce(lambda total, batch: total + one(batch), batches, 0.0),
        "wrapped": lambda batches: sum([one(batch) for batch in Wrapped(batches)]),
        "next": by_next,
        "plain": plain,
    }


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = Pairs(80)
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, 4, sampler=sampler)
    run = torchrelay.protect(model=model, optimizer=optimizer)

    @run.step
    def step(batch, weight):
        optimizer.zero_grad()
        loss = ((model(batch[0]) - batch[1]) ** 2).mean()
        (loss * weight).backward()
        strike("grad", run.global_step + 1, rank)
        optimizer.step()
        return loss.detach()

    def one(batch):
        loss = step(batch, weight)
        note(rank, run.global_step, loss=loss)
        pace(run.global_step)
        return loss.item()

    weight = 1.0
    for epoch in run.epochs(5):
        sampler.set_epoch(epoch)
        weight = 1 / (1 + ways_of(one)[MODE](run.batches(loader)))
    note_end(rank, model.module)
    run.atomic(dist.barrier)


main()
