"""Ahead: loops whose items are fetched before they are needed, or kept for later ones, which no replacement can do.

    def prefetch(batches):
        ahead = None
        for batch in batches:
            if ahead is not None:
                yield ahead
            ahead = batch.cuda(non_blocking=True)

A replacement enters such a loop at the item that was fetched last, and has not what was kept of the ones before. So in
the first items of a loop it is looked at what functions between it and its user still need of what they had before,
and whether items are fetched at several places of the script without a call between them.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Protocol

import torch

from torchrelay.errors import RefusedError
from torchrelay.worker.data import alongside
from torchrelay.worker.data.alongside import Position
from torchrelay.worker.data.beside import FIRST
from torchrelay.worker.data.consumers import (
    NOTHING,
    Chain,
    Counting,
    Unknown,
    consumers_of,
    handing_on,
    line_of,
    place_of,
)
from torchrelay.worker.data.cursor import Cursor, Frame
from torchrelay.worker.source import flow
from torchrelay.worker.tensors.entries import entries_of, items_of

ITEMS = 8  # of each loop that are looked at
_IN_A_THREAD = Unknown(
    "a thread goes through a tracked loop, ahead of the steps: a replacement enters the loop at the item that was "
    "fetched last, and lacks those that wait",
    "go through the loop where the steps are called, and let the DataLoader fetch ahead (num_workers, prefetch_factor, "
    "pin_memory)",
)
AGAIN = frozenset({1, 2, 4, 8, 16, 32, 64})  # after so many it is seen whether it is still the same that counts
_DEPTH = 4
_PLAIN = frozenset({int, float, str, bytes, bool, type(None)})
_FILLED = (list, tuple, deque, set)
LOST = Chain([Counting("what does not tell its place", 0)])
FETCH = "let the DataLoader fetch ahead (num_workers, prefetch_factor, pin_memory)"


_MOST_SEEN = 4096
_seen: set[tuple[tuple[int, ...], int]] = set()


class Around(Protocol):
    """What lies around a loop."""

    def fetch(self, caller: FrameType | None, count: int, called: bool) -> list[Position]:
        """An item is fetched after so many. Returns where those are that count.

        `called`: there were calls, or loops, since the last one. Raises `RefusedError`.
        """


class Entered:
    """Of a loop that was entered in the middle: all of it was seen by a predecessor."""

    def __init__(self, frame: Frame) -> None:
        alongside.enter(frame.along)
        self._chain = Chain([Counting(kind, position - frame.count + 1) for kind, position in frame.along])

    def fetch(self, caller: FrameType | None, count: int, called: bool) -> list[Position]:
        del caller, called
        return self._chain.positions(count)


class Watch:
    """Of a loop that was begun here."""

    def __init__(self, walk: Callable[[], Any], cursor: Cursor) -> None:
        self._walk = walk
        self._cursor = cursor
        self.chain: Chain = NOTHING
        self._place: tuple[int, ...] = ()
        self._kept: list[dict[str, Any]] = []

    def fetch(self, caller: FrameType | None, count: int, called: bool) -> list[Position]:
        if self.chain is LOST:
            return LOST.positions(0)
        if threading.current_thread() is not threading.main_thread():
            self._cursor.refuse(RefusedError(*_IN_A_THREAD))
            self.chain = LOST
            return LOST.positions(0)
        found = self.go_on(caller, count, called) if count else self.begin(caller)
        if found is not None:
            if self._cursor.point.step <= FIRST:
                raise RefusedError(*found)
            # After so many steps it is a replacement that is refused.
            print(f"torchrelay: {found.reason}. {found.remedy[:1].upper()}{found.remedy[1:]}", file=sys.stderr)
            self.chain = LOST
        return self.chain.positions(count)

    def begin(self, caller: FrameType | None) -> Unknown | None:
        """The first item is fetched. Returns why it cannot be gone on like this, if so."""
        found = consumers_of(self._walk(), caller, 0)
        if isinstance(found, Unknown):
            return found
        self.chain, self._place = found, place_of(caller)
        self._kept = [_kept(frame) for frame in handing_on(caller)]
        return None

    def go_on(self, caller: FrameType | None, count: int, called: bool) -> Unknown | None:
        """The same of a later one, after so many. `called`: there were calls, or loops, since the last one."""
        former, self._place = self._place, place_of(caller)
        if count >= ITEMS:
            self._kept.clear()
            return self._look_again(caller, count, self._place != former)
        if self._place != former and not called:
            return Unknown(
                "items of a tracked loop are fetched at several places of the script, without a step between them, "
                f"the last one at {line_of(caller)}: a replacement enters the loop at one of them, and lacks the rest",
                f"fetch them at one place, `for batch in run.batches(loader):`, and {FETCH}; items that belong "
                "together come together with run.batches(loader, micro_batches=n)",
            )
        for frame, before in zip(handing_on(caller), self._kept, strict=False):
            name = _kept_on(before, _kept(frame), called)
            if name is not None:
                return Unknown(
                    f"`{name}` of {frame.f_code.co_qualname}() ({line_of(frame)}) is kept from one item of a tracked "
                    "loop to the next: a replacement enters the loop in the middle, without it",
                    f"yield what is made of an item before the next one is fetched, and {FETCH}",
                )
        return self._look_again(caller, count, self._place != former)

    def _look_again(self, caller: FrameType | None, count: int, elsewhere: bool) -> Unknown | None:
        """Whether it is gone through by the same."""
        if not elsewhere:
            if count not in AGAIN or not self.chain.counting or (self._place, count) in _seen:
                return None
            if len(_seen) >= _MOST_SEEN:
                _seen.clear()
            _seen.add((self._place, count))
        found = consumers_of(self._walk(), caller, count)
        if isinstance(found, Unknown):
            return found
        if found.positions(count) == self.chain.positions(count):
            return None
        kind = (found.counting or self.chain.counting)[0].kind
        return Unknown(
            f"a tracked loop is gone through in portions, by one {kind}() after another ({line_of(caller)}): a "
            "replacement enters in the middle of one, and lacks the items before",
            "write run.batches(loader, micro_batches=n), or one `for` over the whole loop",
        )


def _kept(frame: FrameType) -> dict[str, Any]:
    """What this function has now and needs once the item has come, by name."""
    code, local = frame.f_code, frame.f_locals
    found = {name: local[name] for name in flow.of(code, frame.f_lasti).needed if name in local}
    first = local.get(code.co_varnames[0]) if code.co_argcount else None
    if code.co_varnames[:1] == ("self",) and isinstance(getattr(first, "__dict__", None), dict):
        found |= {f"self.{name}": value for name, value in items_of(vars(first))}
    # Iterators not: the loop's own is one of them, and whoever holds it keeps it from its end.
    return {name: _copy(value, _DEPTH) for name, value in found.items() if not hasattr(type(value), "__next__")}


def _copy(value: Any, depth: int) -> Any:
    """A container as it is now."""
    if depth and type(value) in _FILLED:
        return [_copy(each, depth - 1) for each in entries_of(value)]
    if depth and isinstance(value, Mapping):
        return [_copy(each, depth - 1) for pair in list(value.items()) for each in pair]
    return None if hasattr(type(value), "__next__") else value


def _kept_on(before: dict[str, Any], now: dict[str, Any], called: bool) -> str | None:
    """The name of what is not what it was, and too much to be told with the variables."""
    for name, value in now.items():
        if not _same(before.get(name), value) and not _is_small(value, called):
            return name
    return None


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) is list:
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) in _PLAIN and one == other


def _is_small(value: Any, called: bool) -> bool:
    """`called`: whatever it is, steps and sections are made with it, which are compared."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    if type(value) is list:
        return all(_is_small(each, called) for each in value)
    return called or type(value) in _PLAIN
