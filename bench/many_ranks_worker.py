"""The worker of the bench of many ranks: a small model, and steps that mostly sleep, so that recoveries can be seen.

Each rank notes in `MANY_RANKS_NOTES` what CPU time its process uses while it stands still in a recovery.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchrelay
from torchrelay.worker.step.safepoint import Safepoint

WIDTH = 64
STEP_S = 1.0
STEPS = 100_000  # it is ended from outside


def note_stops() -> None:
    """From where it stops until it goes on: rewiring, agreement, and what else a recovery is."""
    stop = Safepoint.stop

    def noting(self: Safepoint, **how: Any) -> None:
        before = time.process_time()
        stop(self, **how)
        with open(os.environ["MANY_RANKS_NOTES"], "a") as notes:
            notes.write(f"{1000 * (time.process_time() - before)}\n")

    setattr(Safepoint, "stop", noting)  # noqa: B010


def main() -> None:
    note_stops()
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
