"""A forward pass binds a buffer anew: `self.center = 0.9 * self.center + ...`, as teachers of images do.

MODE: "own" lets each rank keep its own (DDP does not broadcast them).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, net, note, note_end, pace, strike


class Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()
        self.register_buffer("center", torch.zeros(1))
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, inputs):
        found = self.inner(inputs)
        if self.training:
            self.center = 0.9 * self.center + 0.1 * found.detach().mean(0)
            self.passes = self.passes + 1
        return found - self.center


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(Centered(), broadcast_buffers=MODE != "own")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = Pairs(160)
sampler = DistributedSampler(data, seed=5)
loader = DataLoader(data, 4, sampler=sampler)
run = torchrelay.protect(model=model, optimizer=optimizer)


@run.step
def step(inputs, targets):
    optimizer.zero_grad()
    loss = (model(inputs) - targets).square().mean()
    loss.backward()
    strike("grad", run.global_step + 1, rank)
    optimizer.step()
    return loss.detach()


for epoch in run.epochs(2):
    sampler.set_epoch(epoch)
    for inputs, targets in run.batches(loader):
        loss = step(inputs, targets)
        note(rank, run.global_step, loss=loss, center=model.module.center, passes=model.module.passes)
        pace(run.global_step)
        strike("after", run.global_step, rank)
run.atomic(dist.barrier)
note_end(rank, model.module)
