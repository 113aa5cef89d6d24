"""Alongside: what counts along with a tracked loop, such as `enumerate()`, goes on in a replacement where it was.

    for number, batch in enumerate(to_device(run.batches(loader))):
    for batch, weight in zip(run.batches(loader), weights):

A replacement enters the loop in the middle, but these count, or go through the others, from their start, and nobody can
set them. So each item of a tracked loop is recorded with the positions of those around it (`consumers`). On the way to
its place, and only then, a replacement has stand-ins, and those that are under way when it enters the loop are set.

Scripts bind `islice` by name before anything is known of their place: it has its stand-in from the start, which makes
plain ones.
"""

from __future__ import annotations

import builtins
import itertools
import operator
import threading
from builtins import enumerate as plain_enumerate
from builtins import map as plain_map
from builtins import zip as plain_zip
from collections.abc import Callable, Iterator, Sequence
from itertools import islice as plain_islice
from typing import Any

from torchrelay.worker.data.cursor import Diverged

Position = tuple[str, int]  # of what kind it is, and how far

_LEAD_NOWHERE = ("builtins", "collections", "numpy", "torch")  # their containers: no tracked loop is behind them
_on_way = False


class _UnderWay(threading.local):
    """Stand-ins that are fetching an item in this thread, outermost first."""

    def __init__(self) -> None:
        self.stack: list[Along] = []


_under_way = _UnderWay()


class Along:
    """A stand-in."""

    kind = ""
    even = True  # it gives an item for each that it is given
    position = 0  # what is fetched now, or next: its number, or how many were fetched before it

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise NotImplementedError

    def go_to(self, position: int) -> None:
        """A tracked loop has been entered in the middle, by what is being fetched."""
        self.position = position

    def _pull(self, items: Iterator[Any]) -> Any:
        stack = _under_way.stack
        stack.append(self)
        try:
            return next(items)
        finally:
            stack.pop()


class Numbered(Along):
    """In place of enumerate()."""

    kind = "enumerate"

    def __init__(self, iterable: Any, start: int = 0) -> None:
        self._items = iter(iterable)
        self.position = operator.index(start)

    def __next__(self) -> Any:
        item = self._pull(self._items)
        self.position += 1
        return self.position - 1, item


class Sliced(Along):
    """In place of islice()."""

    kind = "islice"

    def __init__(self, iterable: Any, *bounds: int | None) -> None:
        plain_islice((), *bounds)  # raises what it raises for these
        bound = slice(*bounds)
        self._items: Iterator[Any] | None = iter(iterable)
        self._start, self._stop, self._step = bound.start or 0, bound.stop, bound.step or 1
        self._next = self._start
        self.even = (self._start, self._step) == (0, 1)

    def __next__(self) -> Any:
        while self._items is not None and not self._over():
            try:
                item = self._pull(self._items)
            except StopIteration:
                break
            wanted = self.position >= self._next
            self.position += 1
            if wanted:
                self._wait_for(self._next + self._step)
                return item
        self._items = None  # as the plain one does: a loop that is not gone on with is left
        raise StopIteration

    def go_to(self, position: int) -> None:
        super().go_to(position)
        self._wait_for(self._start + max(-(-(position - self._start) // self._step), 0) * self._step)

    def _wait_for(self, position: int) -> None:
        self._next = position if self._stop is None else min(position, self._stop)

    def _over(self) -> bool:
        return self._stop is not None and self.position >= max(self._stop, self._next)


class Zipped(Along):
    """In place of zip()."""

    kind = "zip"

    def __init__(self, *iterables: Any, strict: bool = False) -> None:
        self._all = [iter(each) for each in iterables]
        self._strict = strict
        self._behind = 0  # rows that the others have to pass over

    def __next__(self) -> Any:
        if not self._all:
            raise StopIteration
        row: list[Any] = []
        for at, items in plain_enumerate(self._all):
            try:
                row.append(self._pull(items))
            except StopIteration:
                if self._strict:
                    self._end_together(at)
                raise
            if self._behind:
                self._pass_over(row)
        self.position += 1
        return tuple(row)

    def go_to(self, position: int) -> None:
        self._behind += position - self.position
        super().go_to(position)

    def _pass_over(self, row: list[Any]) -> None:
        """Those before the loop have given their first item already, those behind it have not."""
        rows, self._behind = self._behind, 0
        before, after = self._all[: len(row) - 1], self._all[len(row) :]
        try:
            for _ in range(rows):
                for items in after:
                    next(items)
                row[:-1] = [next(items) for items in before]
        except StopIteration:
            raise Diverged(
                "this worker takes over a rank, and what goes along with a tracked loop in its zip() or map() ends "
                "before the item at which the lost worker was: has it changed?"
            ) from None

    def _end_together(self, at: int) -> None:
        """This one has come to its end. Raises `ValueError` if others go on."""
        if at:
            raise ValueError(f"zip() argument {at + 1} is shorter than argument{_and_before(at)}")
        for number, items in plain_enumerate(self._all[1:], 1):
            for _ in items:
                raise ValueError(f"zip() argument {number + 1} is longer than argument{_and_before(number)}")


def _and_before(number: int) -> str:
    return " 1" if number == 1 else f"s 1-{number}"


class Mapped(Zipped):
    """In place of map() over several."""

    kind = "map"

    def __init__(self, function: Callable[..., Any], *iterables: Any) -> None:
        super().__init__(*iterables)
        self._function = function

    def __next__(self) -> Any:
        return self._function(*super().__next__())


def enter(recorded: Sequence[Position]) -> None:
    """A tracked loop is entered where a predecessor was: set those around it, innermost first.

    Raises `Diverged` if they are others.
    """
    found = _under_way.stack[::-1]
    if [each.kind for each in found] != [kind for kind, _ in recorded]:
        raise Diverged(
            f"this worker takes over a rank, and goes through a tracked loop by {_names(found)}; the lost worker went "
            f"through it by {_names(recorded)}, whose place cannot be told to this one. Write these where the loop "
            "is gone through: `for number, batch in enumerate(run.batches(loader)):`"
        )
    for each, (_, position) in plain_zip(found, recorded, strict=True):
        each.go_to(position)


def _names(found: Sequence[Along | Position]) -> str:
    kinds = [each.kind if isinstance(each, Along) else each[0] for each in found]
    return ", ".join(kinds) if kinds else "nothing that counts"


# ---------------------------------------------------------------- in place of the plain ones


class _AsPlain(type):
    """Plain ones are instances."""

    def __instancecheck__(cls, thing: object) -> bool:
        return isinstance(thing, cls.__base__)  # type: ignore[arg-type]


class _Enumerate(plain_enumerate, metaclass=_AsPlain):  # type: ignore[type-arg]
    def __new__(cls, iterable: Any, start: int = 0) -> Any:
        return Numbered(iterable, start) if _may_lead(iterable) else plain_enumerate(iterable, start)


class _Zip(plain_zip, metaclass=_AsPlain):  # type: ignore[type-arg]
    def __new__(cls, *iterables: Any, strict: bool = False) -> Any:
        made = Zipped if any(plain_map(_may_lead, iterables)) else plain_zip
        return made(*iterables, strict=strict)


class _Map(plain_map, metaclass=_AsPlain):  # type: ignore[type-arg]
    def __new__(cls, function: Any, *iterables: Any) -> Any:
        made = Mapped if len(iterables) > 1 and any(plain_map(_may_lead, iterables)) else plain_map
        return made(function, *iterables)


class _Islice(plain_islice, metaclass=_AsPlain):  # type: ignore[type-arg]
    def __new__(cls, iterable: Any, *bounds: Any) -> Any:
        return Sliced(iterable, *bounds) if _on_way and _may_lead(iterable) else plain_islice(iterable, *bounds)


def _may_lead(iterable: Any) -> bool:
    """Whether a tracked loop may be behind it."""
    kind = type(iterable)
    return hasattr(kind, "__next__") or str(kind.__module__).partition(".")[0] not in _LEAD_NOWHERE


def prepare() -> None:
    """Before the script runs, which may bind these names."""
    for stand_in in (_Enumerate, _Zip, _Map, _Islice):
        stand_in.__name__ = stand_in.__qualname__ = str(stand_in.__base__.__name__)  # type: ignore[union-attr]
    itertools.islice = _Islice  # type: ignore[misc]


def install() -> None:
    """The script is on its way."""
    global _on_way
    _on_way = True
    builtins.enumerate, builtins.zip, builtins.map = _Enumerate, _Zip, _Map  # type: ignore[misc]


def remove() -> None:
    """It is in its place."""
    global _on_way
    _on_way = False
    builtins.enumerate, builtins.zip, builtins.map = plain_enumerate, plain_zip, plain_map  # type: ignore[misc]
