"""A script with a handler for preemption: it sets a flag, the ranks agree on it in a section, save, and leave with 3.

MODE=raise leaves from the handler itself, with 0; MODE=deaf goes on training; MODE=count only counts SIGUSR1.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, OUT, Pairs, net, note, note_end, pace, strike

SAVE_S = float(os.environ.get("SAVE_S", "0.5"))


def write(name):
    (OUT / name).open("a").write(f"{os.getpid()}\n")


def listen(rank):
    """Handlers for what ends a job; returns the list in which they note what came."""
    asked = []

    def handler(number, _):
        write(f"got-{signal.Signals(number).name}-{rank}")
        if MODE == "raise":
            sys.exit(0)
        if MODE not in ("deaf", "count"):
            asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, handler)
    return asked


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    asked = listen(rank)
    torch.manual_seed(1)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = Pairs(80)
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, 4, sampler=sampler)
    run = torchrelay.protect(model=model, optimizer=optimizer)

    @run.step
    def step(batch):
        optimizer.zero_grad()
        loss = ((model(batch[0]) - batch[1]) ** 2).mean()
        loss.backward()
        strike("grad", run.global_step + 1, rank)
        mean = loss.detach() / world
        dist.all_reduce(mean)
        optimizer.step()
        return mean

    def agree():
        told = torch.tensor(float(len(asked)))
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return bool(told)

    for epoch in run.epochs(6):
        sampler.set_epoch(epoch)
        for batch in run.batches(loader):
            step(batch)
            note(rank, run.global_step, epoch=epoch)
            pace(run.global_step)
            if run.atomic(agree):
                strike("asked", run.global_step, rank)
                if rank == 0:
                    time.sleep(SAVE_S)
                    torch.save({"model": model.module.state_dict(), "step": run.global_step}, OUT / "saved.pt")
                run.atomic(dist.barrier)
                write(f"left-{rank}")
                sys.exit(3)
    note_end(rank, model.module)
    run.atomic(dist.barrier)


if __name__ == "__main__":
    main()
