"""Still: what has never moved, asked in every call, so that the first time is not missed.

A look takes too long to be made in every call. What it has found to stand still is asked for by loops of the
interpreter's own: some 50 ns for each value, and for each object and container how many names or entries it has.

    at the entry of a call    what it all is; whether it is time for a look
    at its gate, its return   the same: what moves for the first time belongs into the record
    when the call is redone   what was another one at its entry is put back, and what it has made itself is taken away
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from operator import getitem
from typing import Any

import numpy as np
import torch

from torchrelay.worker.hidden_state import generators, graph, made
from torchrelay.worker.hidden_state.graph import MISSING, Leaf
from torchrelay.worker.hidden_state.leaves import Within

SMALL = 64  # entries of what is compared whole
GLANCES = 32  # of what is asked in turn
RESTLESS = 8  # times that an object may get names before that is no reason for a look any more
_SLICED = (list, *graph.BUFFERS)
_environment: dict[Any, Any] = getattr(os.environ, "_data", {})
_MODULE, _GLOBALS = "_parameters", "__builtins__"  # names by which attributes are a module's, in the one sense or other
_VALUES = (*made.CONTAINERS, torch.Tensor, np.ndarray, np.generic)


class Still:
    """Of one rank, as the last look has found it."""

    def __init__(
        self,
        leaves: Iterable[Leaf] = (),
        absent: Iterable[Leaf] = (),
        holders: Iterable[Any] = (),
        containers: Iterable[Any] = (),
        filled: Iterable[Any] = (),
        things: Iterable[tuple[Leaf, Any]] = (),
        seldom: Callable[[Any], bool] = lambda _: False,
        restless: dict[int, int] | None = None,
    ) -> None:
        """`leaves`: of numbers, texts and flags. `absent`: globals that are not there yet.

        `holders`: of names, such as attributes. `containers`: that may grow. `filled`: those in which objects come up.
        `things`: small ones that may be changed where they lie, or give way to others. `seldom`: holders of which some
        leaves are asked in each call, all in turn, as there are many: what torch's own modules were made with.
        `restless`: by the id of a holder, in how many looks it had other names than before.
        """
        self._absent = [(leaf.holder, leaf.name) for leaf in absent]
        self._restless = {} if restless is None else restless
        leaves = list(leaves)
        self._in_turn = [leaf for leaf in leaves if seldom(leaf.holder)]
        self._turn = 0
        found = [(_place(leaf), leaf) for leaf in leaves if not seldom(leaf.holder)]
        self._leaves = [leaf for place, leaf in found if place] + [leaf for place, leaf in found if not place]
        self._held_by = [place[0] for place, _ in found if place]
        self._called = [place[1] for place, _ in found if place]
        self._others = self._leaves[len(self._called) :]
        self._values = self._now()
        self._holders = [holder for holder in holders if _names(holder) is not None]
        self._names = [_names(holder) for holder in self._holders]
        self._containers = [one for one in containers if type(one) in (list, dict, *made.DICTS)]
        watched = [*zip(self._holders, self._names, strict=True), *((one, one) for one in filled)]
        self._watched = [names for holder, names in watched if self._restless.get(id(holder), 0) < RESTLESS]
        self._watches = [holder for holder, _ in watched if self._restless.get(id(holder), 0) < RESTLESS]
        self._counts = list(map(len, self._watched))
        things = list(things)
        self._things = [thing for _, thing in things]
        self._glances = list(map(_glance, self._things))
        self._placed = [(leaf, *place, thing) for leaf, thing in things if (place := _place(leaf)) is not None]
        self._within = [each for each in things if type(each[0].name) is Within and each[0].holder is not None]
        self._thing_holders = [holder for _, holder, _, _ in self._placed]
        self._thing_names = [name for _, _, name, _ in self._placed]
        self._thing_ids = [id(thing) for _, _, _, thing in self._placed]
        self._unmade: list[tuple[Any, Any]] = []
        self._entry, self._named, self._filled = self._values, list(map(len, self._names)), self._lengths()

    def has_changed(self) -> bool:
        """The same, and whether something has changed where it lies: some 0.3 µs for each."""
        if self.has_stirred():
            return True
        try:
            if list(map(id, map(getitem, self._thing_holders, self._thing_names))) != self._thing_ids:
                return True
            if self._within and any(leaf.read() is not thing for leaf, thing in self._within):
                return True
        except (KeyError, IndexError):  # there is no such name any more
            return True
        try:
            return list(map(_glance, self._things)) != self._glances
        except (RuntimeError, ValueError):  # what has come into it cannot be compared: a tensor, or an array
            return True

    def has_stirred(self) -> bool:
        """Whether something is another one than it was at the last look."""
        if self._now() != self._values or list(map(len, self._watched)) != self._counts:
            return True
        if any(name in holder for holder, name in self._absent):
            return True
        self._turn = self._turn + GLANCES if self._turn + GLANCES < len(self._in_turn) else 0
        asked = self._in_turn[self._turn : self._turn + GLANCES]
        return any((now := leaf.read()) is not leaf.value and now != leaf.value for leaf in asked)

    def enter(self) -> None:
        """A call begins: what is another one afterwards, that has done."""
        self._entry, self._named, self._filled = self._now(), list(map(len, self._names)), self._lengths()
        self._unmade = [(holder, name) for holder, name in self._absent if name not in holder]

    def note_names(self) -> None:
        """A look follows: who has other names again and again need not be looked at for it."""
        if list(map(len, self._watched)) == self._counts:
            return
        for holder, names, count in zip(self._watches, self._watched, self._counts, strict=True):
            if len(names) != count:
                self._restless[id(holder)] = self._restless.get(id(holder), 0) + 1

    def rewind(self) -> None:
        """Make it as it was at the entry of the call. May be done twice."""
        for leaf, before, now in zip(self._leaves, self._entry, self._now(), strict=True):
            if before is not MISSING and not (now is before or (type(now) is type(before) and now == before)):
                leaf.put(os.environ.decodevalue(before) if leaf.holder is os.environ else before)
        self._put_things()
        for holder, names, count in zip(self._holders, self._names, self._named, strict=True):
            if len(names) > count:
                _take_away(holder, list(names)[count:])
        for holder, name in self._unmade:
            holder.pop(name, None)
        for container, length in zip(self._containers, self._filled, strict=True):
            if len(container) > length:
                _cut(container, length)

    def _put_things(self) -> None:
        """At the entry each was there, and as it was at the last look, or there would have been another one."""
        for leaf, holder, name, thing in self._placed:
            if name < len(holder) if type(holder) is list else name in holder:
                leaf.put(thing)
        for leaf, thing in self._within:
            if leaf.read() is not thing:
                leaf.put(thing)
        for thing, glance in zip(self._things, self._glances, strict=True):
            _put_back(thing, glance)

    def _now(self) -> list[Any]:
        try:
            found = list(map(getitem, self._held_by, self._called))
        except (KeyError, IndexError):  # there is no such name any more
            found = [leaf.read() for leaf in self._leaves[: len(self._called)]]
        if self._others:
            found += [leaf.read() for leaf in self._others]
        return found

    def _lengths(self) -> list[int]:
        return list(map(len, self._containers))


def is_glanced_at(value: Any) -> bool:
    """Whether it is small, and may be changed where it lies."""
    if type(value) in (list, dict, set, deque):
        return len(value) <= SMALL and graph.is_plain(value)
    if type(value) in graph.BUFFERS:
        return len(value) <= SMALL
    if graph.is_own(value):
        return len(value) <= SMALL and all(graph.is_plain(entry) for _, entry in made.pairs(value))
    return type(value) is torch.Tensor or graph.is_generator(value)


def _glance(value: Any) -> Any:
    if type(value) is torch.Tensor:
        return value._version
    if graph.is_generator(value):
        return generators.bytes_of(value)
    if graph.is_own(value):  # no method of the script's is called
        return list(made.pairs(value))
    return value[:] if type(value) in _SLICED else value.copy()


def _put_back(thing: Any, glance: Any) -> None:
    if type(thing) in (list, bytearray):
        thing[:] = glance
    elif type(thing) in (dict, set, deque) and thing != glance:
        thing.clear()
        (thing.extend if type(thing) is deque else thing.update)(glance)


def _place(leaf: Leaf) -> tuple[Any, Any] | None:
    """Where the interpreter finds it by itself: what holds it, and its name or index there; None if that is nowhere."""
    holder = leaf.holder
    if type(leaf.name) is Within:
        return None
    if type(holder) in (dict, list):
        return holder, leaf.name
    if holder is os.environ and _environment:
        return _environment, os.environ.encodekey(leaf.name)
    return (vars(holder), leaf.name) if isinstance(holder, type) and leaf.name in vars(holder) else None


def _names(holder: Any) -> Any:
    """All names that a holder has, now and later; None if it gets none."""
    if type(holder) is dict:
        return holder
    if holder is os.environ:
        return _environment
    return vars(holder) if isinstance(holder, type) else None


def _take_away(holder: Any, names: Sequence[Any]) -> None:
    """What a call has made that is cut short. Of modules values alone: what belongs to libraries may hang on them."""
    only_values = type(holder) is dict and (_MODULE in holder or _GLOBALS in holder)
    for name in names:
        if holder is os.environ:
            os.environ.pop(os.environ.decodekey(name), None)
        elif isinstance(holder, type):
            with suppress(AttributeError):
                delattr(holder, name)
        elif str(name).startswith(("__", "_torchrelay")):
            continue
        elif not only_values or type(holder[name]) in graph.PLAIN or isinstance(holder[name], _VALUES):
            del holder[name]


def _cut(container: Any, length: int) -> None:
    """The last entries are those that came last."""
    if type(container) is list:
        del container[length:]
    else:
        for key in list(container)[length:]:
            del container[key]
