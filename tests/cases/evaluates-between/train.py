"""A transformer is evaluated between steps, every five of them: torch takes a faster way then, with other bits."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchrelay
from casework import note, note_end, pace, strike

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
model = DistributedDataParallel(layer)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run = torchrelay.protect(model=model, optimizer=optimizer)
inputs = torch.randn(4, 8, 16)


@run.step
def step():
    optimizer.zero_grad()
    loss = model(inputs).sin().mean()
    loss.backward()
    strike("grad", run.global_step + 1, rank)
    optimizer.step()
    return loss.detach()


for at in run.steps(20):
    loss = step()
    if at % 5 == 4:
        layer.eval()
        with torch.no_grad():
            found = layer(inputs)
        layer.train()
        note(rank, 1000 + at, found=found)
    note(rank, at + 1, loss=loss)
    pace(at)
    strike("after", at + 1, rank)
run.atomic(dist.barrier)
note_end(rank, layer)
