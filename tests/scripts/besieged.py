"""Trains for a few steps; at the fourth all wait for FOLDER/go, and later rank 0 is killed once: besieged.py FOLDER."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchrelay

STEPS, WAITS, DIES = 12, 3, 7


def keys_in_store():
    """What anybody who reaches the store could list."""
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store.list_keys()


def main():
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = torchrelay.protect(model=model, optimizer=optimizer)

    @run.step
    def train():
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    for step in run.steps(STEPS):
        train()
        rank = dist.get_rank()
        if step == WAITS:
            (folder / f"keys-{rank}").write_text("\n".join(keys_in_store()))
            (folder / f"at-{rank}").touch()
            while not (folder / "go").exists():
                time.sleep(0.005)
        if step == DIES and rank == 0 and not (folder / "struck").exists():
            (folder / "struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


main()
