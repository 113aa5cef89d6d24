"""Layers are frozen or trained after DDP was made. The first layer is the backbone, the last one the head.

MODE    before    frozen between DDP and protect(), and for good
        flag      the same, and trained from step 8 on
        group     the same, and given to the optimizer only then
        freeze    trained at first, frozen from step 8 on
        wrapped   frozen before DDP is made, trained from step 8 on: DDP does not average its gradients
        skipped   the head of two that a step uses is chosen by its number, so that some parameters have no gradient
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, note, note_end, pace, strike

CHANGE = 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.head, self.other = nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(16, 1)

    def forward(self, x, other):
        return (self.other if other else self.head)(torch.tanh(self.backbone(x)))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    inner = Model()
    if MODE == "wrapped":
        inner.backbone.requires_grad_(False)
    model = DistributedDataParallel(inner, find_unused_parameters=True)
    if MODE not in ("freeze", "skipped"):
        inner.backbone.requires_grad_(False)
    first = inner.head if MODE == "group" else inner
    optimizer = torch.optim.SGD(first.parameters(), lr=0.05, momentum=0.9)
    data = Pairs(320)
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, seed=5))
    run = torchrelay.protect(model=model, optimizer=optimizer)

    @run.step
    def step(batch, number):
        optimizer.zero_grad()
        loss = ((model(batch[0], MODE == "skipped" and number % 3 == 0) - batch[1]) ** 2).mean()
        loss.backward()
        strike("grad", number, rank)
        mean = loss.detach() / world
        dist.all_reduce(mean)
        optimizer.step()
        return mean

    for batch in run.batches(loader):
        if run.global_step == CHANGE and MODE in ("flag", "group", "freeze", "wrapped"):
            inner.backbone.requires_grad_(MODE != "freeze")
            if MODE == "group":
                optimizer.add_param_group({"params": list(inner.backbone.parameters()), "lr": 0.01})
        loss = step(batch, run.global_step + 1)
        note(rank, run.global_step, loss=loss)
        pace(run.global_step)
        strike("after", run.global_step, rank)
    note_end(rank, model.module)
    run.atomic(dist.barrier)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
