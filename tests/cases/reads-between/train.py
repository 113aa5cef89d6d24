"""Changes something between two steps, and reads the model afterwards, each MODE something else.

What a replacement does there is done with the state of its predecessor: with what it has changed itself, and with
nothing that other ranks have done since.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

import torchrelay
from casework import MODE, Pairs, note, note_end, pace, strike


class Late(nn.Module):
    """Registers a buffer in its first forward pass."""

    def forward(self, x):
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros(()))
        self.seen += 1
        return x


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
data = Pairs(120)
width, out = data.inputs.shape[1], data.targets.shape[1]
inner = nn.Sequential(nn.Linear(width, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, out))
if MODE == "buffer":
    inner.append(Late())
model = DistributedDataParallel(inner, find_unused_parameters=MODE == "freeze", broadcast_buffers=MODE != "buffer")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
torch.manual_seed(50 + rank)
sampler = DistributedSampler(data, seed=5)
loader = DataLoader(data, 3, sampler=sampler)
held_out = DataLoader(Subset(data, range(rank, 60, 2)), 5, shuffle=True)
told = {"best": 9.0, "seen": []}
run = torchrelay.protect(model=model, optimizer=optimizer, state={"schedule": schedule, "told": told})


@run.step
def step(batch):
    optimizer.zero_grad()
    loss = ((model(batch[0]) - batch[1]) ** 2).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def evaluate():
    inner.eval()
    with torch.no_grad():
        found = sum(float(((inner(x) - y) ** 2).sum()) for x, y in held_out)
    inner.train()
    return found


def between(turn):
    """What is noted, of a turn."""
    if MODE == "eval":
        return evaluate() if turn % 5 == 0 else 0.0
    if MODE == "norm":  # from the eighth turn on, for good
        if turn == 8:
            inner[1].eval()
        return float(inner[1].running_mean.sum()) if turn > 8 else 0.0
    if MODE == "rate":
        schedule.step()
        return float(inner[0].weight.sum()) * optimizer.param_groups[0]["lr"]
    if MODE == "gradient":
        return float(inner[0].weight.grad.norm())
    if MODE == "zeroes":
        optimizer.zero_grad()
        return 0.0
    if MODE == "moments":
        kept = next(iter(optimizer.state.values()))["momentum_buffer"]
        return (
            float(kept.sum()) + len(optimizer.state) + float(optimizer.state[inner[0].weight]["momentum_buffer"].sum())
        )
    if MODE == "freeze":
        trained = inner[0].weight.requires_grad
        inner[0].weight.requires_grad_(turn % 4 != 0)
        return float(inner[0].weight.sum()) * (2 if trained else 1)
    told["best"] = min(told["best"], abs(float(data.inputs[turn].sum())))
    told["seen"] = [*told["seen"], turn]
    return float(inner[0].weight.sum()) * told["best"] + len(told["seen"])


for _ in run.epochs(1):
    for batch in run.batches(loader):
        loss = step(batch)
        turn = run.global_step
        found = between(turn)
        note(rank, turn, loss=loss, found=found)
        pace(turn)
        strike("late", turn, rank)
note_end(rank, inner)
run.atomic(dist.barrier)
