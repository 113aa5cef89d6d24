"""Trains for a few steps; rank 0 starts a set-uid program once, and is killed: becoming.py PROGRAM MARK."""

import os
import signal
import subprocess
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchrelay

STEPS = 12


def main():
    program, mark = sys.argv[1:]
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
        if step == 3 and dist.get_rank() == 0 and not os.path.exists(mark):
            child = subprocess.Popen([program], stdout=subprocess.PIPE, text=True, process_group=0)
            uid = child.stdout.readline().strip()
            with open(mark, "w") as file:
                file.write(f"{child.pid} {uid}")
            os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


main()
