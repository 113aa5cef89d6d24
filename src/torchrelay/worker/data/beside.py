"""Beside: DataLoaders that are gone through beside a tracked loop, and that no replacement could go on with.

    others = iter(second)                    the usual way to have two streams of data
    for batch in run.batches(first):
        step(batch, next(others))

A replacement enters the loop in the middle, and begins `others` anew. So an iterator of a DataLoader that is not
tracked may live within one item of each tracked loop, or within a call, which are gone through again; if it is gone on
with in a later item, the script is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from torchrelay.errors import RefusedError
from torchrelay.protocol.messages.ids import Point
from torchrelay.worker.data.cursor import Cursor

FIRST = 64  # steps within which a script is refused for it; later the replacement's own data will tell
_BEGUN = "_torchrelay_begun"
REMEDY = (
    "let one loop of run.batches() give both: a dataset whose items have a part of each "
    "(torch.utils.data.StackDataset), or go through all of the other one inside a step or section"
)

_watch: Watch | None = None
_ours = 0  # a tracked loop is fetching


@contextmanager
def fetching_tracked() -> Iterator[None]:
    """What is begun or fetched herein is a tracked loop's own."""
    global _ours
    _ours += 1
    try:
        yield
    finally:
        _ours -= 1


class Watch:
    """Watches over the iterators of DataLoaders of this process."""

    def __init__(self, cursor: Cursor, inside_call: Callable[[], bool]) -> None:
        self._cursor = cursor
        self._inside_call = inside_call
        self._warned = False

    def begin(self, items: Any) -> None:
        """An iterator begins: remember in which items of which loops."""
        begun: Any = None
        if not _ours:
            inside = self._inside_call()
            begun = self._cursor.point if inside else [(frame, frame.count) for frame in self._cursor.frames[1:]]
        setattr(items, _BEGUN, begun)

    def check(self, items: Any) -> None:
        """It is asked for its next item. Raises `RefusedError` if a replacement would get another one."""
        begun: Any = getattr(items, _BEGUN, ())  # those from before protect() bear nothing
        if begun is None or _ours or self._cursor.replaying:
            return
        if self._inside_call():
            if begun != self._cursor.point:
                self._found("inside a step or section that did not begin it")
            return
        if isinstance(begun, Point):
            self._found("after the step or section that began it")
            return
        frames = self._cursor.frames[1:]
        for at, frame in enumerate(frames):
            count = begun[at][1] if at < len(begun) and begun[at][0] is frame else 1
            if frame.count > count:
                self._found(f"in item after item of a loop of {frame.kind}")
                return

    def _found(self, where: str) -> None:
        reason = (
            f"a DataLoader that is in no tracked loop is gone on with ({_place()}) {where}: a replacement would "
            "begin it anew, and get other data"
        )
        if self._cursor.point.step <= FIRST:
            raise RefusedError(reason, REMEDY)
        if not self._warned:
            self._warned = True
            print(f"torchrelay: {reason}. {REMEDY[:1].upper()}{REMEDY[1:]}", file=sys.stderr, flush=True)


def watch(cursor: Cursor, inside_call: Callable[[], bool]) -> None:
    """From now on."""
    global _watch
    if _watch is None:
        _install()
    _watch = Watch(cursor, inside_call)


def _install() -> None:
    begin, fetch = DataLoader.__iter__, _BaseDataLoaderIter.__next__

    def begin_watched(loader: Any) -> Any:
        items = begin(loader)
        if _watch is not None:
            _watch.begin(items)
        return items

    def fetch_watched(items: Any) -> Any:
        if _watch is not None:
            _watch.check(items)
        return fetch(items)

    DataLoader.__iter__ = begin_watched  # type: ignore[method-assign]
    _BaseDataLoaderIter.__next__ = fetch_watched  # type: ignore[method-assign, assignment]


def _place() -> str:
    """The line of the script."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("torch", "torchrelay"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
