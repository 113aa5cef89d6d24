"""Embeddings with sparse gradients under DDP. MODE: "both" has dense parameters too, and an optimizer for each."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchrelay
from casework import MODE, note, note_end, pace, strike


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(40, 8, sparse=True)
        if MODE == "both":
            self.last = nn.Linear(8, 1)

    def forward(self, at):
        found = self.items(at)
        return self.last(found) if MODE == "both" else found


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(Scores())
optimizers = [torch.optim.SparseAdam(model.module.items.parameters(), lr=0.02)]
if MODE == "both":
    optimizers.append(torch.optim.Adam(model.module.last.parameters(), lr=0.02))
run = torchrelay.protect(model=model, optimizer=optimizers)


@run.step
def step(at):
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = model(at).square().mean()
    loss.backward()
    strike("grad", run.global_step + 1, rank)
    for optimizer in optimizers:
        optimizer.step()
    return loss.detach()


for at in run.steps(30):
    loss = step(torch.arange(4) + at + rank)
    note(rank, run.global_step, loss=loss)
    pace(run.global_step)
    strike("after", run.global_step, rank)
run.atomic(dist.barrier)
note_end(rank, model.module)
