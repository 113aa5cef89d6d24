"""Ends itself in a step where something looks wrong, as many scripts do at a loss that is not finite.

MODE: "caught" catches what a broken collective raises, and exits; "own" exits in step 40, whatever happens;
"child" forks between steps, and the child exits; "early" exits with 0 before protect(), and is waited for; "logs" and
"leaves" raise, and exit, between two steps, on one rank.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, net, note, note_end, pace, strike

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
if MODE == "early" and rank == 1:
    sys.exit(0)
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
    if MODE == "own" and run.global_step == 40:
        sys.exit(3)
    try:
        loss.backward()
        strike("grad", run.global_step + 1, rank)
        total = loss.detach().clone()
        dist.all_reduce(total)
    except RuntimeError as error:
        print(f"training is broken: {error}", file=sys.stderr)
        sys.exit(3)
    optimizer.step()
    return total


for epoch in run.epochs(3):
    sampler.set_epoch(epoch)
    for batch in run.batches(loader):
        loss = step(batch)
        note(rank, run.global_step, loss=loss)
        if MODE == "logs" and rank == 1 and run.global_step == 12:
            print({}["grad_norm"])
        if MODE == "leaves" and rank == 1 and run.global_step == 12:
            sys.exit(3)
        if MODE == "child" and rank == 1 and run.global_step % 10 == 5:
            child = os.fork()
            if child == 0:
                sys.exit(3)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        pace(run.global_step)
note_end(rank, model.module)
