"""Attempt: one run of a call's function, from its entry until it is committed or cut short."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchrelay.protocol.messages.ids import Point
from torchrelay.worker.data import cursor as places
from torchrelay.worker.state import random_state


class Attempt:
    """One run of a call's function."""

    __slots__ = ("call", "compares", "gathered", "given", "kind", "passed", "pending", "private", "rng", "rng_at_gate")

    def __init__(self, kind: str, pending: Point, rng: random_state.Seen, given: Callable[[], bytes] = bytes) -> None:
        self.kind = kind
        self.given = given  # tells what the call is made with
        self.pending = pending  # the point that it is to commit
        self.rng = rng  # at the entry
        self.compares = False  # replicas compare what they hold, in its gate
        self.rng_at_gate: random_state.Seen | None = None
        self.private = b""  # the private state at the gate, as it was kept
        self.passed = False
        self.call: places.Call | None = None
        self.gathered = False  # ZeRO's parameters, behind the gate


def do_all(steps: Sequence[Callable[[], None]]) -> None:
    """One after the other, as all ranks do."""
    for step in steps:
        step()
