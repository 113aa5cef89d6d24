"""A small job that trains to a step, waits there until a file is there, and trains to its end.

    torchrelay run --nproc-per-node 2 lonely.py STEPS HOLD FILE

At its end each rank prints a line from an atexit function: what is printed when a worker leaves in order.
"""

import atexit
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchrelay

steps, hold, go = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
dist.init_process_group("gloo")
for seed in (torch.manual_seed, random.seed, np.random.seed):
    seed(dist.get_rank())
layers = torch.nn.Linear(16, 32), torch.nn.Dropout(), torch.nn.Linear(32, 4)
model = DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run = torchrelay.protect(model=model, optimizer=optimizer)


@run.step
def train():
    optimizer.zero_grad()
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


for number in run.steps(steps):
    while number >= hold and not go.exists():
        time.sleep(0.02)
    train()
    if number == hold - 1:
        print(f"held at {hold}", flush=True)
atexit.register(print, "left in order")
