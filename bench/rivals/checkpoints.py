"""Checkpoints of rank 0: written in the step or beside the training, loaded by all, and what they cost."""

from __future__ import annotations

import copy
import json
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from task import Order, Task


class Checkpoints:
    """Every `every` steps. Asynchronous: a copy is taken in the step, and written by a thread; one at a time."""

    def __init__(self, order: Order, rank: int) -> None:
        self._folder = Path(order.folder)
        self._path, self._wish = self._folder / "checkpoint.pt", self._folder / "save-now"
        self._every = order.every if rank == 0 else 0
        self._writer = ThreadPoolExecutor(1) if order.asynchronous else None
        self._under_way: Future[None] | None = None

    def load(self, task: Task) -> int:
        """Returns the step of the last checkpoint; 0 if there is none."""
        if not self._path.exists():
            return 0
        saved: dict[str, Any] = torch.load(self._path, weights_only=True)
        task.load(saved)
        return int(saved["step"])

    def after(self, step: int, task: Task) -> None:
        """Called when so many steps are done. Raises what the writing of the one before raised."""
        if not self._every:
            return
        if self._wish.exists():
            self.wait()
            self._write({**task.state(), "step": step})
            self._wish.unlink()
        elif step % self._every == 0:
            state = {**task.state(), "step": step}
            if self._writer is None:
                self._write(state)
            else:
                self.wait()
                self._under_way = self._writer.submit(self._write, copy.deepcopy(state))

    def ask(self) -> None:
        """Ask rank 0 for one now, from whichever rank."""
        self._wish.touch()

    def asked(self) -> bool:
        """Whether one that was asked for has not been written yet."""
        return self._wish.exists()

    def wait(self) -> None:
        if self._under_way is not None:
            self._under_way.result()

    def _write(self, state: dict[str, Any]) -> None:
        """Whole or not at all, and on the disk: one that a power cut takes away is none."""
        draft = self._path.with_suffix(f".{os.getpid()}")
        with draft.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._path)

    def measure(self, task: Task, times: int = 5) -> None:
        """What one costs, in seconds: `copy` stops the training when it is written beside it, `write` otherwise too."""
        costs: dict[str, list[float]] = {"copy": [], "write": []}
        for _ in range(times):
            begin = time.monotonic()
            state = copy.deepcopy({**task.state(), "step": 0})
            middle = time.monotonic()
            self._write(state)
            costs["copy"].append(middle - begin)
            costs["write"].append(time.monotonic() - middle)
        (self._folder / "costs.json").write_text(json.dumps(costs))
