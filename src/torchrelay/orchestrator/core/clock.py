"""Clock: the orchestrator's own time, in ms. It goes on from where the journal ended and never goes back.

Time in which the orchestrator could not listen does not count: nobody may be called late because the one who listens
was away. It is left out when the process did not run (stopped, swapped out, its machine asleep), while it had so much
to do that it looked at nothing else, and while the clock is held (after a start, until the agents are back; while the
journal cannot be written; while what was decided waits for heirs). What was sent meanwhile is heard first, then
deadlines go on. How much was left out is known: training may have stood still in it. (While a machine sleeps, its
monotonic clock stands still: that time is known to nobody, and no rank on it trains.)
"""

from __future__ import annotations

import time
from collections.abc import Callable

# The orchestrator asks for the time twice a second, at least. A longer gap means that it was not running.
GAP_NS = 1_500_000_000
# What counts of such a gap.
COUNTED_NS = 50_000_000
# One that is busy asks all the time, and hears nothing. How late it may be for its next look at what is due: the rest
# does not count. Answers of a large job may lie unread for longer than any deadline.
LATE_NS = 1_000_000_000
# What is left out in smaller pieces is noted when it comes to so much: of one that is busy each note takes time, too.
WORTH_NS = 20_000_000
WORTH_WHILE_BUSY_NS = 500_000_000

# Why the clock is held: agents are not heard, or do not hear what was decided.
UNHEARD, UNSAID = "unheard", "unsaid"


class Clock:
    """`now_ms()` starts at `start_ms`, `away_ms` later. `source` gives nanoseconds that never go back."""

    def __init__(self, start_ms: int, source: Callable[[], int] = time.monotonic_ns, *, away_ms: int = 0) -> None:
        self._source = source
        self._left_out_ns = away_ms * 1_000_000
        self._asked_ns = source()
        self._passed_ns = start_ms * 1_000_000
        self._ran_ns = 0
        self._allowed_ns: int | None = None  # what may still count until somebody looks; None: all
        self._noted_ns = self._left_out_ns  # of what was left out, when it was last noted
        self._holds: set[str] = set()
        self.skips = 0  # times that something worth noting was left out

    @property
    def held(self) -> bool:
        return bool(self._holds)

    def is_held(self, why: str) -> bool:
        return why in self._holds

    def now_ms(self) -> int:
        """The time now, without the gaps."""
        now = self._source()
        passed = now - self._asked_ns
        ran = COUNTED_NS if passed > GAP_NS else passed
        self._ran_ns += ran
        counted = 0 if self.held else ran
        if self._allowed_ns is not None:
            counted = min(counted, self._allowed_ns)
            self._allowed_ns -= counted
        self._asked_ns = now
        self._passed_ns += counted
        self._leave_out(passed - counted)
        return self._passed_ns // 1_000_000

    def look(self, again_s: float) -> None:
        """All that has arrived is heard, and what was due is done; the next look is planned in so many seconds."""
        self.now_ms()
        self._allowed_ns = int(again_s * 1e9) + LATE_NS

    def _leave_out(self, more_ns: int) -> None:
        self._left_out_ns += more_ns
        if not self.held and self._left_out_ns - self._noted_ns >= self.worth_ns():
            self._noted_ns = self._left_out_ns
            self.skips += 1

    def worth_ns(self) -> int:
        """How much of what is left out is worth noting now."""
        return WORTH_WHILE_BUSY_NS if self._allowed_ns == 0 else WORTH_NS

    def left_out_ms(self) -> int:
        """How much was left out until now, `away_ms` included."""
        self.now_ms()
        return self._left_out_ns // 1_000_000

    def ran_ms(self) -> int:
        """For how long the orchestrator has run since its start, also while the clock was held."""
        self.now_ms()
        return self._ran_ns // 1_000_000

    def hold(self, why: str = UNHEARD) -> None:
        """Stop the time, until `release` for the same reason."""
        self.now_ms()
        self._holds.add(why)

    def release(self, why: str = UNHEARD) -> None:
        """Let the time go on from where it was held, if nothing else holds it."""
        if why in self._holds:
            self.now_ms()
            self._holds.remove(why)
            if not self._holds:
                self._noted_ns = self._left_out_ns
                self.skips += 1


def wall_clock_ms() -> int:
    """What the clock on the wall says, in ms since 1970. For people only; nothing is decided by it."""
    return time.time_ns() // 1_000_000
