"""Draws a number for each item between the head of its loop and the step, as mixup does, and goes by what it has drawn.

MODE: "global" draws from the global generators; "numpy", "python" and "torch" from one in a variable, "attribute" from
one in an object that is in a variable; "after" is "numpy", and draws between the step and the next item, too; "workers"
is "global" with workers of the loader; "epoch" draws an order at the head of each epoch and goes through it by hand.
What was drawn is mixed into the batch, and added up for a factor that counts from step 40 on.
"""

import random

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, net, note, note_end, pace, strike

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1 + rank), np.random.seed(rank), random.seed(rank)
model = DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = Pairs(120)
sampler = DistributedSampler(data, seed=5)
loader = DataLoader(data, 3, sampler=sampler, num_workers=2 if MODE == "workers" else 0)
numbers, words = np.random.default_rng(rank), random.Random(rank)
generator = torch.Generator().manual_seed(rank)


class Augment:
    def __init__(self):
        self.numbers = np.random.default_rng(rank)

    def draw(self):
        return float(self.numbers.beta(0.4, 0.4))


augment = Augment()
run = torchrelay.protect(model=model, optimizer=optimizer)


def draw():
    if MODE == "attribute":
        return augment.draw()
    if MODE in ("numpy", "after"):
        return float(numbers.beta(0.4, 0.4))
    if MODE == "python":
        return words.betavariate(0.4, 0.4)
    if MODE == "torch":
        return float(torch.rand((), generator=generator))
    return float(np.random.beta(0.4, 0.4)) + random.random() * float(torch.rand(())) / 10


@run.step
def step(batch, scale):
    optimizer.zero_grad()
    loss = ((model(batch[0]) - batch[1]) ** 2).mean() * scale
    loss.backward()
    strike("grad", run.global_step + 1, rank)
    optimizer.step()
    return loss.detach()


total = 0.0
for epoch in run.epochs(3):
    sampler.set_epoch(epoch)
    order = torch.randperm(60)
    for at in run.steps(20) if MODE == "epoch" else run.batches(loader):
        batch = (
            [each[order[3 * at : 3 * at + 3] * 2 + rank] for each in (data.inputs, data.targets)]
            if MODE == "epoch"
            else at
        )
        part = draw()
        total += part
        mixed = [part * each + (1 - part) * each.flip(0) for each in batch]
        loss = step(mixed, 1 / (1 + total) if run.global_step >= 40 else 1.0)
        note(rank, run.global_step, loss=loss, part=part, total=total)
        if MODE == "after":
            total += draw()
        pace(run.global_step)
note_end(rank, model.module)
