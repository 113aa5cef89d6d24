"""Adds to its parameters what is each rank's own, and takes it away again, as SAM does that is written by hand.

The sum of two numbers less one of them is not the other one: replicas drift apart in their last bits, with no fault.
MODE: "sum" does that; "copy" puts back a copy.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, net, note, note_end, pace, strike

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(net())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = Pairs(120)
sampler = DistributedSampler(data, seed=5)
loader = DataLoader(data, 3, sampler=sampler)
run = torchrelay.protect(model=model, optimizer=optimizer)


def loss_of(batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()


@run.step
def step(batch):
    optimizer.zero_grad()
    with model.no_sync():
        loss = loss_of(batch)
        loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    with torch.no_grad():
        before = [parameter.clone() for parameter in model.parameters()]
        added = [parameter.grad * (0.05 / norm) for parameter in model.parameters()]
        for parameter, more in zip(model.parameters(), added, strict=True):
            parameter.add_(more)
    optimizer.zero_grad()
    loss_of(batch).backward()
    with torch.no_grad():
        for parameter, more, value in zip(model.parameters(), added, before, strict=True):
            parameter.copy_(value) if MODE == "copy" else parameter.sub_(more)
    strike("grad", run.global_step + 1, rank)
    optimizer.step()
    return loss.detach()


for epoch in run.epochs(2):
    sampler.set_epoch(epoch)
    for batch in run.batches(loader):
        loss = step(batch)
        note(rank, run.global_step, loss=loss)
        pace(run.global_step)
note_end(rank, model.module)
