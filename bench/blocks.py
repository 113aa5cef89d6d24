"""The worker of the overhead bench: does a block of steps when told, and idles between blocks.

The driver lets a job under torchrelay and one under torchrun take turns, so that both meet the same machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist

import torchrelay
from spread import LAYOUTS
from workload import SIZES, build


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", required=True)
    parser.add_argument("--layout", choices=LAYOUTS, default="ddp")
    parser.add_argument("--steps", type=int, required=True, help="steps of a block")
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--folder", required=True, help="where orders come from and times go to")
    parser.add_argument("--snapshots", type=int, default=0, help="steps between two of them")
    parser.add_argument("--bare", action="store_true", help="one bare all-reduce of 4 bytes before each update")
    parser.add_argument("--each", action="store_true", help="write the time and CPU time of each step, too")
    return parser.parse_args()


def wait_for_block(folder: Path, block: int) -> None:
    """The driver has created the file of this block."""
    while not (folder / f"go-{block}").exists():
        time.sleep(0.02)  # seldom: those who wait must not take the cores from those who work


def all_reduce(flag: torch.Tensor) -> int:
    """A bare all-reduce of 4 bytes, and a look at its result."""
    group = dist.group.WORLD
    assert group is not None, "the process group is there"
    group.allreduce([flag]).wait()
    return int(flag.item())


def all_reduces_in_a_row(times: int) -> int:
    """Nanoseconds of one bare all-reduce, mean of a row of them."""
    flag = torch.ones(1, dtype=torch.int32)
    begin = time.monotonic_ns()
    for _ in range(times):
        all_reduce(flag)
    return (time.monotonic_ns() - begin) // times


def main() -> None:
    options = arguments()
    dist.init_process_group("gloo")
    model, optimizer = build(options.size, options.layout)
    width, _ = SIZES[options.size]
    x = torch.randn(64 if width > 64 else 8, width)
    run = torchrelay.protect(
        model=model, optimizer=optimizer, options=torchrelay.Options(snapshot_every=options.snapshots)
    )

    flag = torch.ones(1, dtype=torch.int32)

    @run.step
    def train_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        if options.bare:
            all_reduce(flag)
        optimizer.step()
        return loss.detach()

    folder = Path(options.folder)
    out = (folder / f"rank-{dist.get_rank()}.jsonl").open("a", buffering=1)
    steps = iter(run.steps(options.steps * options.blocks))
    for block in range(options.blocks):
        wait_for_block(folder, block)
        dist.barrier()
        clock = [(time.monotonic_ns(), time.process_time_ns())]
        for _ in range(options.steps):
            next(steps)
            train_step(x)
            clock.append((time.monotonic_ns(), time.process_time_ns()))
        took = clock[-1][0] - clock[0][0]
        row: list[object] = [block, took / options.steps, all_reduces_in_a_row(50)]
        if options.each:
            row += [[after[n] - before[n] for before, after in itertools.pairwise(clock)] for n in (0, 1)]
        out.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
