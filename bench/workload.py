"""The workload of the benches: an MLP under DDP or spread otherwise, the same with torchrelay and under torchrun.

It writes the time of each committed step (CLOCK_MONOTONIC, ns) to --times, and dies in backward when told: if the file
--kill/rank-<r> appears, that rank notes the time in it and sends itself SIGKILL while its gradients are reduced.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchrelay
from spread import LAYOUTS, TENSOR, spread

SIZES = {"4m": (1024, 4), "tiny": (16, 2), "1gb": (4096, 5), "1gb-frozen": (1024, 2)}
FROZEN_ROWS = {"1gb-frozen": 250_000}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="4m")
    parser.add_argument("--layout", choices=LAYOUTS, default="ddp")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--times", required=True, help="directory for the times of the steps")
    parser.add_argument("--kill", default="", help="directory of kill orders")
    parser.add_argument("--checkpoint", default="", help="file, written every --every steps and loaded at the start")
    parser.add_argument("--every", type=int, default=10)
    return parser.parse_args()


class Base(torch.nn.Module):
    """A large table that is looked up and not trained, as of a base model that is tuned: much state, short steps."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(rows, width)
        self.table.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        looked_up: torch.Tensor = self.table(torch.arange(len(x)))
        return x + looked_up


def build(size: str, layout: str = "ddp") -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    width, depth = SIZES[size]
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = [Base(FROZEN_ROWS[size], width)] if size in FROZEN_ROWS else []
    for _ in range(depth):
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    model = spread(layout, torch.nn.Sequential(*layers))
    return model, torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-4)


def die_when_told(model: torch.nn.Module, orders: str, rank: int) -> None:
    """In backward, between the reductions of gradients."""
    told = Path(orders) / f"rank-{rank}"

    def hook(grad: torch.Tensor) -> None:
        del grad
        if told.exists():
            told.with_suffix(".tmp").write_text(str(time.monotonic_ns()))
            os.replace(told.with_suffix(".tmp"), Path(orders) / f"done-{rank}")
            told.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    if isinstance(model, DistributedDataParallel):
        next(one for one in model.module.parameters() if one.requires_grad).register_hook(hook)
        return

    def watch(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
        del module, inputs
        if output.requires_grad:
            output.register_hook(hook)  # type: ignore[no-untyped-call]

    next(model.children()).register_forward_hook(watch)  # FSDP2's gradients come by no hook of a parameter


class Times:
    """The times of the committed steps of one rank, appended as lines of JSON."""

    def __init__(self, folder: str, rank: int) -> None:
        self.file = (Path(folder) / f"rank-{rank}.jsonl").open("a", buffering=1)

    def note(self, step: int) -> None:
        self.file.write(json.dumps([step, time.monotonic_ns(), time.process_time_ns()]) + "\n")


def load(path: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not path or not Path(path).exists():
        return 0
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def save(path: str, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def batches(size: str, batch: int, seed: int, numbers: Iterator[int]) -> Iterator[tuple[int, torch.Tensor]]:
    width, _ = SIZES[size]
    fixed = torch.randn(batch, width, generator=torch.Generator().manual_seed(seed))
    for number in numbers:
        yield number, fixed + number * 1e-3


def main() -> None:
    options = arguments()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, optimizer = build(options.size, options.layout)
    first = load(options.checkpoint, model, optimizer)
    if options.kill:
        die_when_told(model, options.kill, rank)
    times = Times(options.times, rank)
    run = torchrelay.protect(model=model, optimizer=optimizer)

    @run.step
    def train_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    seed = rank // TENSOR.get(options.layout, 1)  # who shares a layer's tensors sees the same samples
    for number, x in batches(options.size, options.batch, seed, iter(run.steps(options.steps))):
        if number < first:
            continue
        train_step(x)
        times.note(number + 1)
        if options.checkpoint and (number + 1) % options.every == 0 and rank == 0:
            save(options.checkpoint, number + 1, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
