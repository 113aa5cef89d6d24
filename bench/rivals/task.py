"""Task: what every system trains in `bench/compare.py`, and what each rank writes down about it.

It runs in environments that have torch and one of the systems, and nothing of ours. A batch depends on its number
alone: `step * ranks + rank` belongs to that rank in that step. There is no dropout, so that nobody fails to come to the
same bits for want of saved random numbers. What the example imports for other layouts is not imported here: whoever
starts its processes again after a fault would pay for it each time, and needs none of it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
UNUSED = (
    "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel", "torchrelay",
)  # fmt: skip
WINDOWS = 200_000
BLOCK = 64  # bytes in a window, as in the example
NOT_MINE = -1  # the batch of a line whose rank gave nothing to the update


@dataclass(frozen=True)
class Order:
    """What is to be done, as it stands in the folder's order.json."""

    folder: str
    corpus: str
    size: str  # of the example's `SIZES`
    batch: int
    steps: int
    ranks: int
    early: int  # after this step a digest is taken: the first fault comes later
    every: int = 0  # steps between checkpoints; 0: none
    asynchronous: bool = False
    timeout_s: float = 10.0  # of collectives
    tuned: bool = False  # the system with short timeouts
    notice: bool = False  # SIGUSR1: the rank is to leave, and a checkpoint is taken before
    measure: bool = False  # at the end: what a checkpoint costs
    turns: tuple[int, ...] = ()  # after these steps it waits at the pipe go-STEP, as jobs take turns


def read_order(folder: str) -> Order:
    return Order(**json.loads((Path(folder) / "order.json").read_text()))


class Unused(ModuleType):
    """Stands for a module that the example imports, and that is not needed here."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def example() -> ModuleType:
    """The script of the examples as a module."""
    absent = [name for name in UNUSED if name not in sys.modules]
    for name in absent:
        sys.modules[name] = Unused(name)
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    finally:
        for name in absent:
            del sys.modules[name]
    return module


class Task:
    """Model, optimizer and batches; the same on every rank and in every system."""

    def __init__(self, order: Order) -> None:
        torch.set_num_threads(1)
        self._example = gpt = example()
        self._size, self._rows = order.size, order.batch
        self.build()
        size = Path(order.corpus).stat().st_size
        text = torch.from_file(order.corpus, shared=False, size=size, dtype=torch.uint8)
        self._windows = gpt.Windows(text, BLOCK, min(WINDOWS, size // BLOCK - 1))

    def build(self) -> None:
        """The model and the optimizer, as before the first step."""
        torch.manual_seed(1)
        self.model: torch.nn.Module = self._example.GPT(*self._example.SIZES[self._size], BLOCK, 0.0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.1)

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and what follows them, each (batch, 64) of int64."""
        first = number * self._rows
        rows = [self._windows[(first + at) % len(self._windows)] for at in range(self._rows)]
        return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])

    def loss(self, model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self._example.loss_of(model(batch[0]), batch[1])
        return loss

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def digest(self) -> str:
        """A fingerprint of all parameters, to the last bit."""
        sums = hashlib.sha256()
        for parameter in self.model.parameters():
            sums.update(parameter.detach().contiguous().numpy().tobytes())
        return sums.hexdigest()


def process_began_ns() -> int:
    """When this process was started, by the monotonic clock (to 10 ms)."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return round(ticks / os.sysconf("SC_CLK_TCK") * 1e9)


class Log:
    """What a rank has done: lines of steps, marks of what came before the first of them, and digests."""

    def __init__(self, order: Order, rank: int) -> None:
        self._order, self._rank, self._pid = order, rank, os.getpid()
        self._folder = Path(order.folder)
        for name in ("log", "marks", "pids", "early", "digests", "turns"):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        self._lines = (self._folder / "log" / f"rank-{rank}.jsonl").open("a", buffering=1)
        self._marks = (self._folder / "marks" / f"rank-{rank}.jsonl").open("a", buffering=1)

    def here(self) -> None:
        """This process is the rank now."""
        self._put("pids", str(self._pid))

    def mark(self, name: str, at_ns: int | None = None) -> None:
        self._marks.write(json.dumps([name, time.monotonic_ns() if at_ns is None else at_ns, self._pid]) + "\n")

    def began(self) -> None:
        """The marks that every new process has behind it when it knows its rank."""
        self.here()
        self.mark("started", process_began_ns())
        self.mark("imported")

    def step(self, step: int, batch: int, together: int, task: Task, *, committed: bool = True) -> None:
        """So many steps are done, the last one with this batch, by so many ranks together."""
        line = [step, time.monotonic_ns(), time.process_time_ns(), batch, together, self._pid, int(committed)]
        self._lines.write(json.dumps(line) + "\n")
        if committed and step == self._order.early:
            self._put("early", task.digest())
        if committed and step == self._order.steps:
            self._put("digests", task.digest())

        if committed and step in self._order.turns:
            self._wait(step)

    def _wait(self, step: int) -> None:
        """For this job's next turn: until somebody opens this pipe to write. Who waits so uses no processor."""
        os.close(os.open(self._folder / f"go-{step}", os.O_RDONLY))
        with (self._folder / "turns" / f"rank-{self._rank}.jsonl").open("a") as file:
            file.write(json.dumps([step, time.monotonic_ns()]) + "\n")

    def _put(self, folder: str, text: str) -> None:
        draft = self._folder / folder / f".rank-{self._rank}.{self._pid}"
        draft.write_text(text)
        draft.replace(self._folder / folder / f"rank-{self._rank}")
