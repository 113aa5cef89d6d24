"""Progress: a line on stderr that says how far long work is, on a terminal only; it is gone when the work is done."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torchrelay.terminal.show import milliseconds

BAR = 24  # characters
AGAIN_S = 0.1  # a line that is drawn more often costs more than it tells
SURE_S = 2.0  # before that, the time that is left is a guess
_CLEAR = "\r\x1b[K"


class Told(Protocol):
    """Says that so many are done, and what else there is to say."""

    def __call__(self, done: int, every: int, note: str = "", /) -> None: ...


@contextmanager
def progress(what: str) -> Iterator[Told]:
    """Shows how many of these are done. Where stderr is no terminal it shows nothing."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    begun = time.monotonic()
    drawn = -math.inf

    def told(done: int, every: int, note: str = "") -> None:
        nonlocal drawn
        now = time.monotonic()
        if now - drawn < AGAIN_S and done < every:
            return
        drawn = now
        text = line(what, done, every, now - begun, note)
        print(_CLEAR + text[: shutil.get_terminal_size().columns - 1], end="", file=sys.stderr, flush=True)

    try:
        yield told
    finally:
        print(_CLEAR, end="", file=sys.stderr, flush=True)


def line(what: str, done: int, every: int, passed_s: float, note: str = "") -> str:
    """[######                  ] 25 of 100 runs, 3 min 5 s left; note."""
    filled = BAR * done // every if every else BAR
    text = f"[{'#' * filled}{' ' * (BAR - filled)}] {done} of {every} {what}"
    if 0 < done < every and passed_s >= SURE_S:
        left_s = max(1, round(passed_s * (every - done) / done))
        text += f", {left_s} s left" if left_s < 60 else f", {milliseconds(left_s * 1000)} left"
    return f"{text}; {note}" if note else text
