"""One rank does not do what the others do: has fewer batches, ends early, or makes other collectives.

MODE   fewer batches on rank 1, and then   eval: a section follows   next: the next epoch   end: the script's end
       barrier    a barrier every few steps by a queue that nobody looks into; harmless until a rank is struck
       counted    the same by a counter, which is carried
       unlike     between two steps rank 0 comes to a barrier, and rank 1 to an all-reduce
       inside     in a step rank 0 waits in a barrier, and rank 1 comes to the gate
       last       rank 0 comes to a barrier at the end of its script, and rank 1 does not
       zero       rank 1 ends with 0 in the middle       code: with 7, whenever it comes there
       abort      rank 1 aborts, whenever it comes there
       quit       rank 1 leaves by os._exit(0), whenever it comes there
"""

import os
import queue
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset

import torchrelay
from casework import MODE, Pairs, net, note, note_end, pace, strike

STEP = 6  # after which rank 1 does it

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DDP(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
fewer = 12 if MODE in ("eval", "next", "end") else 0
loader = DataLoader(Subset(Pairs(80), range(rank, 80 - fewer * rank, 2)), 4)
run = torchrelay.protect(model=model, optimizer=optimizer)
counted, numbers = 0, queue.SimpleQueue()
for number in range(1, 1000):
    numbers.put(number)


@run.step
def step(batch):
    optimizer.zero_grad()
    loss = ((model(batch[0]) - batch[1]) ** 2).mean()
    loss.backward()
    strike("grad", run.global_step + 1, rank)
    if MODE == "inside" and run.global_step == STEP and rank == 0:
        dist.barrier()
    optimizer.step()
    return loss.detach()


def evaluate():
    total = torch.ones(())
    dist.all_reduce(total)
    return total


def misbehave():
    if rank == 1 and MODE == "zero":
        sys.exit(0)
    if rank == 1 and MODE == "code":
        sys.exit(7)
    if rank == 1 and MODE == "abort":
        os.abort()
    if rank == 1 and MODE == "quit":
        os._exit(0)
    if MODE == "unlike":
        dist.barrier() if rank == 0 else dist.all_reduce(torch.ones(()))


for _ in run.epochs(1 if MODE in ("end", "last") else 2):
    for batch in run.batches(loader):
        loss = step(batch)
        note(rank, run.global_step, loss=loss)
        pace(run.global_step)
        counted += 1
        if run.global_step == STEP:
            misbehave()
        number = numbers.get() if MODE == "barrier" else 0
        if (MODE == "barrier" and number % 8 == 0) or (MODE == "counted" and counted % 8 == 0):
            dist.barrier()
    if MODE == "eval":
        run.atomic(evaluate)
if MODE == "last" and rank == 0:
    dist.barrier()
note_end(rank, model.module)
