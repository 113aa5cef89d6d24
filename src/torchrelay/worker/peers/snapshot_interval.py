"""Snapshot interval: steps between two snapshots, where they are to be found out (`Options(snapshot_every="auto")`).

What is lost is least at about sqrt(2 C M) seconds from one to the next (J. W. Young, "A first order approximation to
the optimum checkpoint interval", Communications of the ACM 17, 1974), where C is how much longer a step with a snapshot
takes than one without, and M the time from one fault of the job to the next. C is measured; M comes of what is known of
large clusters, and of the interruptions that the worker which has been there longest has seen. All ranks take the
largest figures that any has: they tell one another in the gates of some snapshots. In each generation all begin anew,
with the same interval.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable

# A rank's mean time between unexpected interruptions: 16,384 GPUs had 419 in 54 days ("The Llama 3 Herd of Models",
# 2024, section 3.3.4), which is one in 50,700 hours for each of them.
RANK_MTBF_S = 50_700 * 3600.0
MOST_S = 600.0  # of work, that is made again at most
LEAST_COST_S = 1e-4  # less than this cannot be told from the steps' own differences
FIRST, FACTOR = 3, 4  # they agree at the snapshots 3, 12, 48, ... of a generation
KEPT = 64  # steps whose times are remembered; 16 of those with snapshots


def best_interval(cost_s: float, step_s: float, mtbf_s: float) -> int:
    """Steps from one snapshot to the next; at least 1, and not more than `MOST_S` take."""
    between = min(math.sqrt(2 * max(cost_s, LEAST_COST_S) * mtbf_s), MOST_S)
    return max(1, round(between / max(step_s, 1e-6)))


def mtbf_s(world: int, faults: int, elapsed_s: float) -> float:
    """Seconds from one fault of a job to the next: what is expected of so many ranks counts as one fault seen."""
    return (RANK_MTBF_S / world + elapsed_s) / (1 + faults)


class SnapshotInterval:
    """Of one rank."""

    def __init__(
        self, world: int, largest: Callable[[list[float]], list[float]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`largest`: collective over all ranks, of each number the largest that any has."""
        self._world = world
        self._largest = largest
        self._clock = clock
        self._begun = clock()
        self._last: float | None = None
        self._plain: deque[float] = deque(maxlen=KEPT)
        self._with: deque[float] = deque(maxlen=KEPT // 4)
        self._next = FIRST
        self._wired = 0

    def renew(self) -> None:
        """A new generation, after an interruption; the first of a worker is none."""
        self._last, self._next = None, FIRST
        self._wired += 1

    def passed(self, *, snapshot: bool, counts: bool = True) -> None:
        """A gate was passed; `snapshot`: one was taken on the way to it; `counts`: that was a step and no more."""
        now = self._clock()
        if self._last is not None and counts:
            (self._with if snapshot else self._plain).append(now - self._last)
        self._last = now

    def due(self, count: int) -> bool:
        """Whether all ranks agree in the gate of this snapshot, the `count`th of the generation (from 0)."""
        return count >= self._next

    def agree(self) -> int:
        """Collective over all ranks: the interval from now on."""
        self._next *= FACTOR
        step = statistics.median(self._plain) if self._plain else 0.0
        cost = max(0.0, statistics.median(self._with) - step) if self._with else 0.0
        # Who has been here longest has seen most; a replacement knows of nothing.
        mine = [cost, step, float(max(0, self._wired - 1)), self._clock() - self._begun]
        cost, step, faults, elapsed = self._largest(mine)
        return best_interval(cost, step, mtbf_s(self._world, round(faults), elapsed))


__all__ = ["FACTOR", "FIRST", "MOST_S", "RANK_MTBF_S", "SnapshotInterval", "best_interval", "mtbf_s"]
