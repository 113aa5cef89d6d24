"""Lowers its learning rate near the end, after the last usual comparison; a replacement of the rank does not.

By what they decide nobody can carry: whether this process is the first that holds its rank. MODE: "atomic" ends with a
section, "bare" with nothing; "early" is "atomic", but decides sooner. "own-end" decides nothing, and on rank 0 alone
changes the model when all is done.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, holder, net, note, note_end, pace, strike

dist.init_process_group("gloo")
rank = dist.get_rank()
first = holder(rank) == 0 and MODE != "own-end"
turn = 45 if MODE == "early" else 57
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
    loss = ((model(batch[0]) - batch[1]) ** 2).mean()
    loss.backward()
    strike("grad", run.global_step + 1, rank)
    optimizer.step()
    return loss.detach()


for epoch in run.epochs(3):
    sampler.set_epoch(epoch)
    for batch in run.batches(loader):
        loss = step(batch)
        if run.global_step == turn and first:
            optimizer.param_groups[0]["lr"] *= 0.1
        note(rank, run.global_step, loss=loss)
        pace(run.global_step)
note_end(rank, model.module)
if MODE == "own-end" and rank == 0:
    model.module.double()
if MODE in ("atomic", "early"):
    run.atomic(dist.barrier)
