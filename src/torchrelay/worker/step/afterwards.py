"""Afterwards: nothing but local work may follow the gate of a step, as it is not repeated and nobody helps with it.

What a step has begun in its groups after its gate is compared with what it had begun there. In the default group one
time is enough. In other groups also the script's own threads may communicate (a checkpoint that is written in the
background does), at any time: there it counts if the step does it every time that it is looked at.
"""

from __future__ import annotations

from collections.abc import Callable

from torchrelay.protocol.health.wait_for_graph import DEFAULT
from torchrelay.worker.process_groups import groups


class Afterwards:
    """What this worker's steps begin after their gates."""

    def __init__(self, repeatable: frozenset[int] = frozenset()) -> None:
        """`repeatable`: keys of groups whose collectives after the gate can be repeated, and so are let be."""
        self._repeatable = repeatable
        self._at_gate: dict[int, int] = {}
        self._before: frozenset[int] | None = None  # the groups in which the step that was looked at last communicated

    def note(self) -> None:
        """At the gate of a step that is to be looked at."""
        self._at_gate = _begun()

    def excuse(self, act: Callable[[], None]) -> None:
        """What `act` begins after the gate does not count: it can be repeated, and will be if it is cut."""
        before = _begun()
        act()
        for key, begun in _begun().items():
            self._at_gate[key] = self._at_gate.get(key, 0) + begun - before.get(key, 0)

    def found(self) -> bool:
        """At the end of that step: whether it communicates after its gate."""
        now = _begun()
        moved = frozenset(key for key, begun in now.items() if begun != self._at_gate.get(key, 0)) - self._repeatable
        before, self._before = self._before, moved
        return DEFAULT in moved or bool(before and before & moved)


def _begun() -> dict[int, int]:
    return {DEFAULT: groups.collectives(), **dict(groups.begun_elsewhere() or ())}
