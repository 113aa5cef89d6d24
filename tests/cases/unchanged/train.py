"""Nothing of torchrelay in it. MODE zero: rank 1 ends with 0 in the middle; the other one waits for its gradients."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from casework import MODE, Pairs, net, note, note_end, pace, strike

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
data = Pairs(80)
sampler = DistributedSampler(data, seed=5)
loader = DataLoader(data, 4, sampler=sampler)
done = 0
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        done += 1
        optimizer.zero_grad()
        loss = ((model(inputs) - targets) ** 2).mean()
        loss.backward()
        strike("grad", done, rank)
        optimizer.step()
        note(rank, done, loss=loss.item())
        pace(done)
        if MODE == "zero" and rank == 1 and done == 6:
            sys.exit(0)
note_end(rank, model.module)
dist.barrier()
