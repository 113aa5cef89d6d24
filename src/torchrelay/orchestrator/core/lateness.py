"""Lateness: how long what an agent says was under way, or lay unread while the orchestrator did not run.

Both ends have clocks of their own. The least difference that was ever seen between them, when something is read and
when it was sent, is that of a message that was read at once; what exceeds it is lateness. As clocks drift (some 50
millionths), and may stand still for a while (a virtual machine that is paused), it is remembered for half a minute to a
minute: after that long, what was read late has been followed by what was not.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SPAN_MS = 30_000


class Lateness:
    """Of one connection."""

    def __init__(self, source: Callable[[], int] = time.monotonic_ns) -> None:
        self._source = source
        self._since_ms = 0
        self._least_ms: int | None = None  # in this span
        self._before_ms: int | None = None  # in the one before it

    def of(self, sent_ms: int) -> int:
        """How late, in ms, something is read now that was sent at `sent_ms` of the sender's clock (0: unknown)."""
        if not sent_ms:
            return 0
        now_ms = self._source() // 1_000_000
        apart = now_ms - sent_ms
        if self._least_ms is None or now_ms - self._since_ms >= SPAN_MS:
            self._since_ms, self._before_ms, self._least_ms = now_ms, self._least_ms, apart
        self._least_ms = min(self._least_ms, apart)
        least = self._least_ms if self._before_ms is None else min(self._least_ms, self._before_ms)
        return apart - least
