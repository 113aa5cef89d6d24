"""The worker of the bench of many ranks: a small model, and steps that mostly sleep, so that recoveries can be seen."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchrelay

WIDTH = 64
STEP_S = 1.0
STEPS = 100_000  # it is ended from outside


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = torchrelay.protect(model=model, optimizer=optimizer)

    @run.step
    def train_step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in run.steps(STEPS):
        time.sleep(STEP_S)
        train_step(torch.randn(8, WIDTH))


if __name__ == "__main__":
    main()
