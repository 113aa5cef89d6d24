"""A step of an object in two parts, called again and again under the eyes of `Hidden`; and what takes over from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchrelay.worker.hidden_state.hidden import Hidden
from torchrelay.worker.hidden_state.signatures import FIRST

CALLS = 14  # more than are looked at in any case


class Trainer:
    """A step in two parts: `before` the gate, and `after` it."""

    def __init__(self, kept: Any, before: Callable[[Any], Any], after: Callable[[Any], Any] | None = None) -> None:
        self.kept, self.before, self.after = kept, before, after

    def change(self, how: Callable[[Any], Any] | None) -> None:
        new = None if how is None else how(self.kept)
        self.kept = self.kept if new is None else new


class Life:
    """Calls of a trainer's step."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.hidden, self.calls = trainer, Hidden(), 0
        self.hidden.add(lambda: trainer.kept)

    def call(self, times: int = 1) -> None:
        for _ in range(times):
            self.enter()
            self.pass_gate()
            self.leave()

    def enter(self) -> None:
        self.hidden.mark()
        self.calls += 1
        self.hidden.look_entry(only_if_stirred=self.calls > FIRST)

    def pass_gate(self) -> None:
        self.trainer.change(self.trainer.before)
        self.hidden.look_gate()
        self.hidden.record()

    def leave(self) -> None:
        self.trainer.change(self.trainer.after)
        self.hidden.look_return()


def after(life: Life, kept: Any) -> Life:
    """What takes over."""
    found = Life(Trainer(kept, life.trainer.before, life.trainer.after))
    found.hidden.load(life.hidden.record())
    return found
