"""Lines: how a head's journal comes to an heir.

What is sent over a line arrives in its order. While nothing gets through it waits. A line that one end has closed is
never opened again; the other end sees that as soon as anything gets through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Protocol

from torchrelay.simulation.ports import Timeline

RETRY_MS = 50
SLOW_MS = (0, 0, 0, 100, 1_000)  # how long an heir may take to write what it is given, for as long as there are faults


class End(Protocol):
    """A process at one end of a line."""

    @property
    def up(self) -> bool: ...
    @property
    def frozen(self) -> bool: ...


class Line:
    """Between a head and one copy."""

    def __init__(self, world: Timeline, chance: Random, above: End, below: End, passes: Callable[[], bool]) -> None:
        self.world = world
        self.chance = chance
        self.above, self.below = above, below
        self.passes = passes
        self.closed = False
        self.slow_ms = chance.choice(SLOW_MS)
        self._ways: dict[bool, deque[tuple[int, Callable[..., None], tuple[Any, ...]]]] = {
            True: deque(),
            False: deque(),
        }

    def down(self, receive: Callable[..., None], *given: Any) -> None:
        """Send to the heir."""
        self._send(False, receive, given)

    def up(self, receive: Callable[..., None], *given: Any) -> None:
        """Send to the head."""
        self._send(True, receive, given)

    def close(self) -> None:
        self.closed = True

    @property
    def is_seen_closed(self) -> bool:
        """Whether the other end knows by now."""
        return self.closed and self.passes()

    def _send(self, up: bool, receive: Callable[..., None], given: tuple[Any, ...]) -> None:
        if self.closed:
            return
        way = self._ways[up]
        latency_ms = self.chance.randint(*self.world.plan.weather.latency_ms)
        if self.world.stormy and not up:
            latency_ms += self.chance.randint(0, self.slow_ms)
        at_ms = max(self.world.now + latency_ms, way[-1][0] if way else 0)
        way.append((at_ms, receive, given))
        if len(way) == 1:
            self.world.after(at_ms - self.world.now, self._arrive, up)

    def _arrive(self, up: bool) -> None:
        """All that is due, if it gets through and somebody reads it."""
        way = self._ways[up]
        reader = self.above if up else self.below
        while way and not self.closed:
            at_ms, receive, given = way[0]
            if at_ms > self.world.now or not self.passes() or reader.frozen:
                self.world.after(max(at_ms - self.world.now, 0) or RETRY_MS, self._arrive, up)
                return
            way.popleft()
            if reader.up:
                receive(*given)
