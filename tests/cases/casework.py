"""Casework: what case scripts have in common. A script has `from casework import ...`; `running` sets its path.

OUT      a folder: each rank writes a line per step, and one at its end, to rank-R.jsonl there
MODE     which variant of the script this is
STRIKE   where:step:rank[,...]: the process that comes to such a place kills itself there, once
SLOW     after so many steps each takes 6 s longer, until $OUT/go is there: time for who disturbs from outside
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

OUT = Path(os.environ["OUT"])
MODE = os.environ.get("MODE", "")
PAUSE_S = float(os.environ.get("PAUSE", "0.005"))
SLOW = int(os.environ.get("SLOW", "0"))


def note(rank: int, step: int, **values: Any) -> None:
    """A line of this rank. All values are compared with those of the undisturbed run; a tensor or float to its bits."""
    told = {name: bits(value) for name, value in values.items()}
    with (OUT / f"rank-{rank}.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, **told}) + "\n")


def note_end(rank: int, *modules: nn.Module) -> None:
    """The last line of this rank, with the digest of its final model."""
    with (OUT / f"rank-{rank}.jsonl").open("a") as file:
        file.write(json.dumps({"end": True, "model": digest(*modules)}) + "\n")


def bits(value: Any) -> Any:
    """A value as it can be compared without rounding."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return bits(value.item())
        return hashlib.sha256(value.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]
    return value.hex() if isinstance(value, float) else value


def digest(*modules: nn.Module) -> str:
    """Of all parameters and buffers."""
    sums = hashlib.sha256()
    for module in modules:
        for name, value in module.state_dict().items():
            sums.update(name.encode())
            sums.update(value.detach().cpu().contiguous().numpy().tobytes())
    return sums.hexdigest()[:16]


def strike(where: str, step: int, rank: int) -> None:
    """Kill this process if STRIKE names this place, and nobody was killed here before."""
    if once("STRIKE", f"{where}:{step}:{rank}"):
        os.kill(os.getpid(), signal.SIGKILL)


def once(variable: str, place: str) -> bool:
    """Whether the variable names this place, for the first time."""
    if place not in os.environ.get(variable, "").split(","):
        return False
    try:
        (OUT / f"struck-{place.replace(':', '-')}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def holder(rank: int) -> int:
    """0 for the first process that has held this rank, 1 for its replacement, and so on."""
    number = 0
    while True:
        try:
            (OUT / f"holder-{rank}-{number}").touch(exist_ok=False)
        except FileExistsError:
            number += 1
        else:
            return number


def pace(step: int) -> None:
    """After a step: a moment's rest, or a longer one where somebody is to disturb us from outside."""
    until = time.monotonic() + (6.0 if SLOW and step >= SLOW else PAUSE_S)
    while time.monotonic() < until:
        if SLOW and (OUT / "go").exists():
            break
        time.sleep(0.005)


class Pairs(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Some data, the same in every process."""

    def __init__(self, size: int, width: int = 8) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(size, width, generator=generator)
        self.targets = torch.randn(size, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


def net(width: int = 8) -> nn.Module:
    """A small model."""
    return nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, 1))


def train(
    run: Any,
    step: Callable[[Any], Any],
    loader: Any,
    *,
    epochs: int,
    rank: int,
    before: Callable[[int], None] | None = None,
) -> None:
    """The usual loops: a line per step, and a place `after` at which a rank can be struck."""
    for epoch in run.epochs(epochs):
        if before is not None:
            before(epoch)
        for batch in run.batches(loader):
            loss = step(batch)
            note(rank, run.global_step, epoch=epoch, loss=loss)
            pace(run.global_step)
            strike("after", run.global_step, rank)
