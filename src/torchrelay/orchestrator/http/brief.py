"""Brief: what libraries log of single requests costs a short line each, and so many lines in a minute at most.

A peer without a token can make them log as often as it likes: with a traceback, and with all that it has sent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

SOURCES = ("aiohttp.server", "aiohttp.web", "aiohttp.websocket", "aiohttp.internal", "asyncio")
LONGEST = 200  # characters of a line
TRACE = 4_000  # characters of the trace of an error that is our own, from its end
MOST, WITHIN_S = 20, 60.0


class Brief(logging.Filter):
    """For the loggers of libraries. `clock` in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._begun_s = -WITHIN_S
        self._said = 0
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = self._clock()
        if now_s - self._begun_s >= WITHIN_S:
            self._begun_s, self._said = now_s, 0
        if self._said >= MOST:
            self._left_out += 1
            return False
        self._said += 1
        text = one_line(record)
        if self._left_out:
            text += f" ({self._left_out} lines like this were left out before)"
            self._left_out = 0
        record.msg, record.args, record.exc_info, record.exc_text = text, None, None, None
        return True


def one_line(record: logging.LogRecord) -> str:
    """What it says, and the error that it tells of; of an error of ours its trace, too."""
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    text = ascii(record.getMessage())[1:-1]
    if error is not None:
        text += f": {type(error).__name__}: {ascii(str(error))[1:-1]}"
    text = text[:LONGEST]
    if error is not None and record.exc_info and not type(error).__module__.startswith("aiohttp"):
        text += "\n" + logging.Formatter().formatException(record.exc_info)[-TRACE:]
    return text


def be_brief() -> None:
    """From now on, in this process."""
    brief = Brief()
    for name in SOURCES:
        logging.getLogger(name).addFilter(brief)
