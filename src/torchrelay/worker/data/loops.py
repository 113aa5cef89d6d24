"""Tracked loops: what run.epochs(), run.batches() and run.steps() return."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from torchrelay.errors import UndeclaredError, UnprovedError
from torchrelay.worker.data.ahead import Around, Entered, Watch
from torchrelay.worker.data.beside import fetching_tracked
from torchrelay.worker.data.cursor import Cursor, Diverged, Frame
from torchrelay.worker.data.holdings import Holdings
from torchrelay.worker.data.loaders import Source
from torchrelay.worker.data.own_loops import Place, Places
from torchrelay.worker.hidden_state import variables
from torchrelay.worker.source.names import collects_items
from torchrelay.worker.state import random_state
from torchrelay.worker.tensors import arguments

_COLLECTS = (
    "a comprehension, or sum() or its like, goes through a loop of {}: what it had collected in the lost worker "
    "nobody can tell. Write `for` over the loop, and collect in a variable"
)
T_co = TypeVar("T_co", covariant=True)


class Loop(Generic[T_co]):
    """An iterable whose place is part of every record. Each `iter()` is a loop of its own."""

    def __init__(
        self,
        cursor: Cursor,
        kind: str,
        source: Source,
        *,
        group: int | None = None,
        name: str | None = None,
        length: Callable[[], int],
        inside_call: Callable[[], bool],
        arrive: Callable[[], None],
        here: Callable[[int], Place] | None = None,
        keeps: bool = False,
        holds: Holdings | None = None,
        plain: Callable[[], bytes] = bytes,
        since: Callable[[], tuple[bytes, bytes]] | None = None,
    ) -> None:
        """`group`: yield lists of so many items of the source; None: the items themselves. `name`: of the loader.

        `arrive`: called when a loop begins, which has a place then, or inside a call. `here`: see `own_loops.Places`.

        `keeps`: the script's variables, see `variables`. `holds`: the data that the loop's objects hold.

        `plain`: values of the state now. `since`: see `cursor.Since`.
        """
        self._cursor = cursor
        self._kind = kind
        self._source = source
        self._group = group
        self._name = f"the loader of a loop of {kind}" if name is None else f"{name} of a loop of {kind}"
        self._length = length
        self._inside_call = inside_call
        self._arrive = arrive
        self._here = Places().here if here is None else here
        self._keeps = keeps
        self._holds = holds
        self._plain_values = plain
        self._since = since

    def __len__(self) -> int:
        return self._length() if self._group is None else -(-self._length() // self._group)

    def __iter__(self) -> Iterator[T_co]:
        # A call is repeated as a whole: loops inside it have no place of their own.
        if self._inside_call():
            return self._plain()
        itself: list[weakref.ref[Any]] = []
        walk = self._walk(itself)
        itself.append(weakref.ref(walk))
        return walk

    def _plain(self) -> Iterator[T_co]:
        self._arrive()
        if self._source.hidden is not None:
            self._source.hidden.within_call()
        if self._holds is not None:
            self._holds.see()
        items = self._source.begin(self._source.mark())
        while (taken := self._take(items)) is not None:
            yield taken[0]

    def _walk(self, itself: list[weakref.ref[Any]]) -> Iterator[T_co]:
        self._arrive()
        cursor, source, hidden = self._cursor, self._source, self._source.hidden
        if cursor.looks:
            cursor.come(self._here(1))
        holds = bytes if self._holds is None else self._holds.told
        opened = cursor.open(self._kind, self._known_length(), holds, self._since)
        frame = opened.frame
        if hidden is not None:
            hidden.enter()
        try:
            if opened.recorded:
                if frame.count == 0:
                    return
                if frame.count > 1 and collects_items(sys._getframe(1)):
                    raise UnprovedError(_COLLECTS.format(frame.kind))
                items, item = self._enter(frame)
                around: Around = Entered(frame)
                cursor.enter_item(frame)
                if cursor.on_way is not None:
                    cursor.on_way(bool(frame.drawn), frame.plain)
                variables.put(sys._getframe(1), frame.kept)
                yield item
                mark = frame.mark
            else:
                around = Watch(itself[0], cursor)
                mark = source.mark()
                with fetching_tracked():
                    items = source.begin(mark)
            while True:
                if source.moves:
                    mark = source.mark()
                moved = b"" if hidden is None else hidden.before_item(frame.count)
                if self._holds is not None and frame.count and frame.count & (frame.count - 1) == 0:
                    frame.holds = self._holds.told()  # what items are made in has changed by now
                drawn = random_state.capture()  # what the script draws with the item, if fetching does not
                taken = self._take(items)
                if taken is None:
                    return
                digest = arguments.digest(taken[0]) if source.moves else b""
                kept = variables.told(sys._getframe(1)) if self._keeps else b""
                along = around.fetch(sys._getframe(1), frame.count, bool(frame.trace))
                cursor.next_item(frame, mark, drawn, moved, digest, kept, along, self._plain_values())
                yield taken[0]
        finally:
            if hidden is not None:
                hidden.leave()
            cursor.close(frame)

    def _known_length(self) -> int:
        """How many items there are; -1 if that is not known."""
        try:
            return len(self)
        except (TypeError, NotImplementedError):  # torch's own answers for loaders that do not know
            return -1

    def _enter(self, frame: Frame) -> tuple[Iterator[Any], T_co]:
        """The source's iterator at the recorded item, and this item."""
        if self._holds is not None:
            self._holds.check(frame.holds)
        skip = 0 if self._source.moves else (frame.count - 1) * (self._group or 1)
        with fetching_tracked():
            items = self._source.enter(frame.mark, skip)
        if self._source.hidden is not None:
            self._source.hidden.put(frame.moved)
        if frame.drawn:
            random_state.restore(frame.drawn)
        taken = self._take(items)
        if taken is None:
            raise Diverged(f"item {frame.count} of a loop of {frame.kind} is not there: has the data changed?")
        if frame.item and arguments.digest(taken[0]) != frame.item:
            raise UndeclaredError(
                f"{self._name} was put where its state_dict() of the lost worker tells, and gives another item "
                f"{frame.count} there: its state does not tell all. Go through a DataLoader with a sampler that is "
                "seeded with the epoch, without a state of its own"
            )
        return items, taken[0]

    def _take(self, items: Iterator[Any]) -> tuple[Any] | None:
        """The next item, or group of items; None at the end."""
        found = []
        with fetching_tracked():
            for _ in range(self._group or 1):
                try:
                    found.append(next(items))
                except StopIteration:
                    break
        if not found:
            return None
        return (found[0] if self._group is None else found,)
