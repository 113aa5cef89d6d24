"""Numbering: `enumerate(run.batches(loader))` of a replacement goes on with the numbers of its predecessor.

It enters the loop in the middle, but Python's enumerate() counts from its start, and nobody can set it. So on the way
to its place, and only then, a replacement has one that begins with the item at which the loop is entered.
"""

from __future__ import annotations

import builtins
from typing import Any

from torchrelay.worker.data.loops import Loop

_HOPS = 4  # what lies around a loop, such as a progress bar
_plain = builtins.enumerate


class _FromTheMiddle(_plain):  # type: ignore[type-arg]
    """The same, over a tracked loop from the item at which that is entered."""

    def __new__(cls, iterable: Any, start: int = 0) -> Any:
        inner = iterable
        for _ in range(_HOPS):
            if isinstance(inner, Loop):
                return _plain(iterable, start + inner.passed_over())
            inner = getattr(inner, "iterable", None)
        return _plain(iterable, start)


def install() -> None:
    """The script is on its way."""
    builtins.enumerate = _FromTheMiddle  # type: ignore[misc]


def remove() -> None:
    """It is in its place."""
    builtins.enumerate = _plain  # type: ignore[misc]
