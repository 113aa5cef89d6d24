"""Prints a lot in each step: by Python, straight to the descriptor, and from a child."""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import torchrelay

folder, go_on = Path(sys.argv[1]), Path(sys.argv[2])
torch.manual_seed(0)
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run = torchrelay.protect(model=model, optimizer=optimizer)


@run.step
def step(batch):
    optimizer.zero_grad()
    loss = model(batch).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.item()


for number in run.steps(60):
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    loss = step(torch.randn(8, 16, generator=generator))
    print(number, loss.hex(), "." * 5000, flush=True)
    os.write(2, b"to the descriptor\n")
    if number % 20 == 0:
        subprocess.run(["echo", "a child"], check=True)
    if number == 9:
        (folder / f"at-ten-{dist.get_rank()}").touch()
        while not go_on.exists():
            time.sleep(0.01)
    if number == 40:
        (folder / f"at-forty-{dist.get_rank()}").touch()
        while not (folder / "end").exists():
            time.sleep(0.01)
bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
(folder / f"bits-{dist.get_rank()}").write_text(hashlib.sha256(bits).hexdigest())
