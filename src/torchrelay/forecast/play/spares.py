"""Spares: nodes that wait for a rank to go on, and those that other jobs give up; as plain counting sees them.

(For migration the protocol core keeps the spares itself; see `driving`.)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Usage:
    """What the spares of one run were used for."""

    taken: int = 0  # how often a spare took the place of a lost node
    preempted: int = 0  # how often another job had to give up a node
    borrowed_h: float = 0.0  # node-hours of other jobs' nodes
    empty_h: float = 0.0  # for how long there was no spare at all
    waited_h: float = 0.0  # for how long training waited for a node
    in_use: int = 0  # nodes of other jobs that we have now
    most_down: int = 0


class Bench:
    """The dedicated spares and the floating ones."""

    def __init__(self, dedicated: int | None, floating: int, usage: Usage) -> None:
        self.unlimited = dedicated is None
        self.ready = dedicated or 0
        self.floating = floating
        self.usage = usage

    def take(self) -> float | None:
        """A dedicated spare: True if there is one. None: nobody can give one up; else how many are to be preempted."""
        if self.unlimited or self.ready:
            self.ready -= not self.unlimited
            self.usage.taken += 1
            return 0.0
        if self.floating > self.usage.in_use:
            self.usage.in_use += 1
            self.usage.preempted += 1
            self.usage.taken += 1
            return 1.0
        return None

    def give(self) -> None:
        """A repaired node comes back: other jobs get theirs first."""
        if self.unlimited:
            return
        if self.usage.in_use:
            self.usage.in_use -= 1
        else:
            self.ready += 1
