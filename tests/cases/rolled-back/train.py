"""Shards without a replica: a fault rolls all ranks back. A schedule is stepped, and read, between the steps."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import Pairs, net, note, pace, strike

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = fully_shard(net(), mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.98**step)
data = Pairs(96)
sampler = DistributedSampler(data, seed=5)
loader = DataLoader(data, 4, sampler=sampler)
run = torchrelay.protect(model=model, optimizer=optimizer, state={"schedule": schedule})


@run.step
def step(inputs, targets):
    optimizer.zero_grad()
    loss = (model(inputs) - targets).square().mean()
    loss.backward()
    strike("grad", run.global_step + 1, rank)
    optimizer.step()
    return loss.detach()


total = 0.0
for epoch in run.epochs(2):
    sampler.set_epoch(epoch)
    for inputs, targets in run.batches(loader):
        loss = step(inputs, targets)
        schedule.step()
        total += schedule.get_last_lr()[0]
        note(rank, run.global_step, loss=loss, rate=schedule.get_last_lr()[0], epoch=schedule.last_epoch, total=total)
        pace(run.global_step)
        strike("after", run.global_step, rank)
run.atomic(dist.barrier)
