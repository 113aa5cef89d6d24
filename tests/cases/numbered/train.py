"""Goes by `run.global_step` inside a step, after its update, and in sections: the number is that of plain PyTorch."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import Pairs, net, note, note_end, pace, strike

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = Pairs(120)
sampler = DistributedSampler(data, seed=5)
loader = DataLoader(data, 3, sampler=sampler)
run = torchrelay.protect(model=model, optimizer=optimizer)


@run.step
def step(batch):
    optimizer.zero_grad()
    before = run.global_step
    loss = ((model(batch[0]) - batch[1]) ** 2).mean()
    loss.backward()
    strike("grad", run.global_step + 1, rank)
    optimizer.step()
    strike("update", run.global_step + 1, rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 - 1 / (10 + run.global_step))
    return loss.detach(), before


for epoch in run.epochs(2):
    sampler.set_epoch(epoch)
    for batch in run.batches(loader):
        loss, before = step(batch)
        note(rank, run.global_step, loss=loss, before=before)
        if run.global_step % 10 == 0:
            note(rank, run.global_step, inside=run.atomic(lambda: run.global_step))
        pace(run.global_step)
note_end(rank, model.module)
