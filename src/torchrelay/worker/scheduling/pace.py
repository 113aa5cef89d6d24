"""Pace: the target of a move works in small portions, and rests after each while the processors have enough to do.

A low priority alone (`niceness`) does not keep it out of the way of ranks that train on the same processors: they wait
for one another in each step, a target fills each of these gaps at once, and whoever wakes up finds its processor taken,
for as long as it takes to make the page that it is about to touch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

SHARE = 0.1  # of one processor, for who works beside others
LIMIT_S = 5.0  # all rests of one kind of work together: a move that was asked for is to come
ROOM = 0.25  # of all processors idle: then nobody is in anybody's way
SHORTEST_S = 0.002  # no rest is worth less
_STAT = Path("/proc/stat")


class Pace:
    """Measures the processor time of this process and rests in proportion.

    rest       does nothing for so many seconds, or less if there is a reason to hurry
    since_s    the processor time from which on it counts, if not from now on
    """

    def __init__(
        self,
        rest: Callable[[float], None],
        since_s: float | None = None,
        *,
        cpu_s: Callable[[], float] = time.process_time,
    ) -> None:
        self._rest = rest
        self._cpu_s = cpu_s
        self._left_s = LIMIT_S
        self._since_s = cpu_s() if since_s is None else since_s
        self._times = idle_and_all()
        self._room = False  # whether processors were idle when we last looked

    def __call__(self) -> None:
        """A portion is done: rest, if no processor has been idle meanwhile."""
        used = self._cpu_s() - self._since_s
        rest = min(used * (1 / SHARE - 1), self._left_s)
        if rest < SHORTEST_S:
            return
        self._look()
        if not self._room:
            begin = time.monotonic()
            self._rest(rest)
            self._left_s -= time.monotonic() - begin
        self._since_s = self._cpu_s()

    def _look(self) -> None:
        idle, total = idle_and_all()
        if total > self._times[1]:
            self._room = (idle - self._times[0]) / (total - self._times[1]) >= ROOM
            self._times = idle, total


def no_pace() -> None:
    """No rest at all."""


def idle_and_all() -> tuple[int, int]:
    """Ticks that the processors of this machine were idle, and all ticks: proc(5), the first line of /proc/stat."""
    try:
        ticks = [int(field) for field in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return sum(ticks[3:5]), sum(ticks)
