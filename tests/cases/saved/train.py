"""Gives save() and load() instead of what the state is made of, and goes on with it between two steps.

MODE: "schedule" steps a schedule there and adds up learning rates, for a factor that counts from step 40 on; "path" is
the same with files; "norm" has running statistics of each rank's own; "counter" counts there in an object that is
saved; "random" saves states of generators as well, and draws there; "mean" changes a tensor there that is saved, which
nobody can tell as it was; "own" saves what each rank has counted in its own way.
"""

import multiprocessing

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, net, note, note_end, pace, strike

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1 + rank)
inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), *net()) if MODE == "norm" else net()
model = DistributedDataParallel(inner, broadcast_buffers=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
data = Pairs(120)
sampler = DistributedSampler(data, seed=5)
loader = DataLoader(data, 3, sampler=sampler)
own = torch.zeros(1)
block = multiprocessing.Array("f", 8192)  # it is large: nobody looks there


def means():
    return torch.frombuffer(block.get_obj(), dtype=torch.float32)[:2]


class Progress:
    def __init__(self):
        self.turns = 0


progress = Progress()


def save():
    saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "turns": progress.turns}
    saved |= {"schedule": schedule.state_dict(), "mean": means(), "own": own}
    if MODE == "random":
        saved["random"] = torch.get_rng_state()
    return saved


def load(saved):
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    progress.turns = saved["turns"]
    means().copy_(saved["mean"]), own.copy_(saved["own"])


def save_at(path):
    torch.save(save(), path)


def load_from(path):
    load(torch.load(path, weights_only=True))


by_path = MODE == "path"
run = torchrelay.protect(save=save_at if by_path else save, load=load_from if by_path else load)


@run.step
def step(batch, factor):
    optimizer.zero_grad()
    loss = ((model(batch[0]) - batch[1]) ** 2).mean() * factor
    loss.backward()
    strike("grad", run.global_step + 1, rank)
    optimizer.step()
    if MODE == "own":
        own.add_(rank)
    return loss.detach()


def evaluate():
    model.eval()
    with torch.no_grad():
        total = model(data.inputs[rank::2]).sum()
    model.train()
    dist.all_reduce(total)
    return total.item()


total = 0.0
for epoch in run.epochs(3):
    sampler.set_epoch(epoch)
    for batch in run.batches(loader):
        loss = step(batch, 1 / (1 + total) if run.global_step >= 40 else 1.0)
        schedule.step()
        total += schedule.get_last_lr()[0]
        if MODE == "counter":
            progress.turns += 1
            total += progress.turns / 1000
        if MODE == "random":
            total += float(torch.rand(()))
        if MODE == "mean":
            means().mul_(0.9).add_(next(model.parameters()).detach().flatten()[:2])
            total += float(means().sum())
        note(rank, run.global_step, loss=loss, total=total)
        pace(run.global_step)
    note(rank, 1000 + epoch, value=run.atomic(evaluate))
note_end(rank, model.module)
