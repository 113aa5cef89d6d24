"""Counts and decides in variables of its loops, as most scripts do; all of it is late, long after a replacement came.

A step counter, enumerate(), the best loss and how long ago that was, the last losses, a meter and a global: each
changes what a step is made with, or the learning rate, at some turn in the third or fourth epoch.
"""

import math
from collections import deque

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import Pairs, net, note, note_end, pace, strike

global_step = 0


class Meter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, value):
        self.sum += value
        self.count += 1


def main():
    global global_step
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
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
        mean = loss.detach() / world
        dist.all_reduce(mean)
        optimizer.step()
        return mean

    count, best, since = 0, math.inf, 0
    recent, total, all_of_it = deque(maxlen=5), torch.zeros(()), Meter()
    for epoch in run.epochs(4):
        sampler.set_epoch(epoch)
        meter = Meter()
        for at, batch in enumerate(run.batches(loader)):
            count += 1
            global_step += 1
            scale = 0.5 if count > 22 else 1.0
            scale += 0.1 * (at > 6) + 0.01 * (global_step > 27) + 0.001 * (all_of_it.count > 31)
            loss = step(batch, scale)
            note(rank, run.global_step, epoch=epoch, loss=loss)
            recent.append(loss.item())
            total += loss
            meter.update(loss.item())
            all_of_it.update(loss.item())
            if count == 25 or (at == 5 and epoch > 1 and sum(recent) > 0.3 * meter.sum):
                for group in optimizer.param_groups:
                    group["lr"] *= 0.8
            pace(run.global_step)
            strike("after", run.global_step, rank)
        best, since = (meter.sum, 0) if meter.sum < best else (best, since + 1)
        if since > 1:
            break
    note(rank, 1000, total=total, count=count, sum=all_of_it.sum)
    note_end(rank, model.module)
    run.atomic(dist.barrier)


if __name__ == "__main__":
    main()
