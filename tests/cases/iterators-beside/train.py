"""Something counts along with the loop, or goes along with it: its first values are equal for a while, the last not.

MODE: how the batches are gone through; the last four are refused.
"""

import itertools
from itertools import islice

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, net, note, note_end, pace, strike

WEIGHTS = [1.0] * 7 + [0.5] * 3


def to_device(batches):
    for x, y in batches:
        yield x.to("cpu"), y.to("cpu")


def numbered(batches):
    for number, batch in enumerate(to_device(batches)):
        yield number + 0, batch


def prefetch(batches):
    ahead = None
    for x, y in batches:
        if ahead is not None:
            yield ahead
        ahead = x.to("cpu", copy=True), y.to("cpu", copy=True)
    yield ahead


def keep_odd(batches):
    for number, batch in enumerate(batches):
        if number % 2:
            yield batch


class Sums:
    def __init__(self, batches):
        self.items, self.last = iter(batches), None

    def __iter__(self):
        return self

    def __next__(self):
        x, y = next(self.items)
        self.last, last = x, self.last
        return x if last is None else x + last, y


WAYS = {
    "generator": lambda batches: enumerate(to_device(batches)),
    "islice": lambda batches: enumerate(islice(batches, 9)),
    "list": lambda batches: zip(WEIGHTS, batches, strict=True),
    "count": lambda batches: zip(itertools.count(), batches),
    "inner": numbered,
    "map": lambda batches: map(lambda weight, batch: (weight, batch), WEIGHTS, batches),
    "progress": lambda batches: enumerate(batch for batch in batches),
    "prefetch": lambda batches: ((0, batch) for batch in prefetch(batches)),
    "tee": lambda batches: enumerate(itertools.tee(batches)[0]),
    "keep": lambda batches: enumerate(keep_odd(batches)),
    "sums": lambda batches: ((0, batch) for batch in Sums(batches)),
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
    def step(batch, scale):
        optimizer.zero_grad()
        loss = scale * ((model(batch[0]) - batch[1]) ** 2).mean()
        loss.backward()
        strike("grad", run.global_step + 1, rank)
        optimizer.step()
        return loss.detach()

    for epoch, rate in zip(run.epochs(3), [0.05, 0.04, 0.03], strict=True):
        sampler.set_epoch(epoch)
        for group in optimizer.param_groups:
            group["lr"] = rate
        for number, batch in WAYS[MODE](run.batches(loader)):
            scale = number if MODE in ("list", "map") else 0.5 if number > 6 else 1.0
            loss = step(batch, scale)
            note(rank, run.global_step, loss=loss, rate=rate)
            pace(run.global_step)
    note_end(rank, model.module)
    run.atomic(dist.barrier)


main()
