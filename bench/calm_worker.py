"""The worker of the calm bench: nothing is wrong with it, and it does what detectors take for a hang.

It compiles in its first step, waits for slow data now and then, evaluates in a section in which ranks take differently
long, and rank 0 alone saves a checkpoint for 20 s while the others wait for it in the next step.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchrelay

WIDTH = 64
STEP_S = 0.25  # a step mostly sleeps, so that an hour of it disturbs nobody
SLOW_DATA = 101  # every so many steps, for so many seconds
SLOW_DATA_S = 4.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--folder", required=True, help="where each rank writes how far it has come")
    parser.add_argument("--save-s", type=float, default=20.0, help="how long rank 0 saves a checkpoint")
    parser.add_argument("--save-every-s", type=float, default=300.0)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fast_loss = torch.compile(lambda predicted: (predicted.square() + predicted.abs().sqrt()).mean())
    run = torchrelay.protect(model=model, optimizer=optimizer)
    torch.manual_seed(100 + rank)

    @run.step
    def train_step(x: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = fast_loss(model(x))
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def evaluate() -> float:
        time.sleep(5.0 * rank)  # uneven shares
        with torch.no_grad():
            total = model.module(torch.ones(1, WIDTH)).sum()
        dist.all_reduce(total)
        return float(total)

    told = Path(options.folder, f"rank-{rank}")
    end = run.once("end", lambda: time.time() + 60 * options.minutes)
    saved = time.monotonic()
    for number in run.steps(10**9):
        if number % SLOW_DATA == SLOW_DATA - 1 and number // SLOW_DATA % dist.get_world_size() == rank:
            time.sleep(SLOW_DATA_S)
        time.sleep(STEP_S)
        train_step(torch.randn(16, WIDTH))
        if number % 500 == 499:
            run.atomic(evaluate)
        if rank == 0 and time.monotonic() - saved > options.save_every_s:
            torch.save(model.state_dict(), Path(options.folder, "checkpoint.pt"))
            time.sleep(options.save_s)  # a file system that is slow today
            saved = time.monotonic()
            with Path(options.folder, "saves").open("a") as file:
                file.write("x")
        # All leave together: when rank 0 says so.
        if number % 50 == 49:
            told.write_text(str(number + 1))
            if run.atomic(over, end):
                break
    dist.destroy_process_group()


def over(end: float) -> bool:
    """Whether rank 0's clock has come to the end."""
    flag = torch.tensor(float(time.time() >= end))
    dist.broadcast(flag, src=0)
    return bool(flag.item())


if __name__ == "__main__":
    main()
