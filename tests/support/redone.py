"""Scripts whose calls are cut short and run again, as a run would do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from torchrelay.worker.retry.redo import Redo
from torchrelay.worker.state import random_state
from torchrelay.worker.state.state import State


class Cut(BaseException):
    """What unwinds a step at a fault."""


class Script:
    """A step with all that a forward and backward pass may change; each hook lets a test add to it."""

    def __init__(self, *, zero: str = "inside") -> None:
        torch.manual_seed(1)
        self.model: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 4))
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.model.register_buffer("mask", torch.ones(4))
        everything = nn.ModuleList([self.model, self.unused, self.frozen])
        self.optimizer = torch.optim.AdamW(everything.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        self.schedule = lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.generator = torch.Generator().manual_seed(3)
        self.log: dict[str, Any] = {"calls": 0, "seen": []}
        self.zero = zero
        self.before_gate: Callable[[], None] = lambda: None
        self.steps = 0
        extra = {"scaler": self.scaler, "schedule": self.schedule, "generator": self.generator, "log": self.log}
        self.state = State(everything, self.optimizer, extra)
        self.redo = Redo(self.state, every=6)

    def forward_and_backward(self) -> None:
        if self.zero.startswith("inside"):
            self.optimizer.zero_grad(set_to_none=self.zero == "inside")
        noise = torch.randn(6, 4, generator=self.generator)
        for _ in range(2):  # micro-batches
            self.scaler.scale(self.model(torch.randn(6, 4) + noise).square().mean()).backward()
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 * (self.steps + 1)
        self.before_gate()

    def call(self, *, cut: str = "") -> None:
        """One call, as a run makes it; `cut` in one place, and redone."""
        while True:
            self.redo.mark()
            self.redo.probe_entry()
            rng = random_state.capture()
            try:
                self._attempt(cut)
            except Cut:
                cut = ""
                self.redo.rewind()
                for _, parameter in self.state.parameters():  # what renewing DDP does
                    parameter.grad = None
                self.redo.rewind()
                random_state.restore(rng)
            else:
                break
        self.steps += 1
        if self.zero == "after":
            self.optimizer.zero_grad(set_to_none=False)

    def _attempt(self, cut: str) -> None:
        if cut == "entry":
            raise Cut
        if cut == "forward":
            self.model(torch.randn(6, 4))
            raise Cut
        self.forward_and_backward()
        if cut == "backward":
            raise Cut
        self.redo.probe_gate(self.optimizer)
        if cut == "gate":
            raise Cut
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.log["calls"] += 1


def digests(script: Script, cuts: dict[int, str], calls: int = 8) -> list[str]:
    torch.manual_seed(9)
    found = []
    for number in range(calls):
        script.call(cut=cuts.get(number, ""))
        found.append(script.state.digest())
    return found


class SaverScript:
    """A script that gave save and load, and whose optimizer is known by its step only."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.count = 0
        self.state = State(save=self.save, load=self.load)
        self.redo = Redo(self.state)

    def save(self) -> dict[str, Any]:
        return {"m": self.model.state_dict(), "o": self.optimizer.state_dict(), "count": self.count}

    def load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["m"])
        self.optimizer.load_state_dict(saved["o"])

    def call(self, *, cut: bool = False, count: bool = False) -> None:
        self.redo.mark()
        self.redo.probe_entry()
        rng = random_state.capture()
        self.optimizer.zero_grad()
        self.optimizer.param_groups[0]["lr"] *= 0.9
        self.count += count
        self.model(torch.randn(3, 4)).square().sum().backward()
        if cut:
            self.redo.rewind()
            random_state.restore(rng)
            self.call()
            return
        self.state.watch(self.optimizer)  # from the hook of its step
        self.redo.probe_gate(self.optimizer)
        self.optimizer.step()
