"""Gives to state= what each rank counts by itself, and goes by it from step 40 on.

MODE: "meter" is an object with state_dict(), "dict" a dict, "tensor" a tensor, "array" a NumPy array, "buffer" a buffer
of the model that is written between steps; "inside" is "dict", changed in the step after its update; "late" is "dict",
and begins to differ after step 66; "large" is a replay buffer of the rank's own samples.
"""

from collections import deque

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, net, note, note_end, pace, strike


class Meter:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value):
        self.total, self.count = self.total + value, self.count + 1

    def state_dict(self):
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, told):
        self.total, self.count = told["total"], told["count"]


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
inner = net()
inner.register_buffer("seen", torch.zeros(3))
model = DistributedDataParallel(inner, broadcast_buffers=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = Pairs(240)
sampler = DistributedSampler(data, seed=5)
loader = DataLoader(data, 3, sampler=sampler)
kept = {
    "meter": Meter(),
    "tensor": torch.zeros(2),
    "array": np.zeros(2),
    "buffer": None,
    "large": deque(maxlen=2000),
}.get(MODE, {"total": 0.0})
run = torchrelay.protect(model=model, optimizer=optimizer, state={} if kept is None else {"kept": kept})


def count(value):
    if MODE == "meter":
        kept.update(value)
    elif MODE in ("tensor", "array"):
        kept[0] += value
    elif MODE == "buffer":
        inner.seen[0] += value
    elif MODE == "large":
        kept.extend([value] * 300)
    elif MODE != "late" or run.global_step > 66:
        kept["total"] += value


def total():
    if MODE == "meter":
        return kept.total / max(1, kept.count)
    if MODE in ("tensor", "array"):
        return float(kept[0])
    if MODE == "buffer":
        return float(inner.seen[0])
    return sum(kept) if MODE == "large" else kept["total"]


@run.step
def step(batch, scale):
    optimizer.zero_grad()
    loss = ((model(batch[0]) - batch[1]) ** 2).mean() * scale
    loss.backward()
    strike("grad", run.global_step + 1, rank)
    optimizer.step()
    strike("update", run.global_step + 1, rank)
    if MODE == "inside":
        count(loss.item())
    return loss.detach()


for epoch in run.epochs(3):
    sampler.set_epoch(epoch)
    for batch in run.batches(loader):
        loss = step(batch, 1 / (1 + total()) if run.global_step >= 40 else 1.0)
        if MODE != "inside":
            count(loss.item())
        note(rank, run.global_step, loss=loss, total=total())
        pace(run.global_step)
note_end(rank, model.module)
