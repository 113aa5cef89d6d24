"""Still: what has never moved, asked in every call, so that the first time is not missed.

A look takes too long to be made in every call. What it has found to stand still is asked for by loops of the
interpreter's own: some 50 ns for each value, and for each object and container how many names or entries it has.

    at the entry of a call    what it all is; whether it is time for a look
    at its gate, its return   the same: what moves for the first time belongs into the record
    when the call is redone   what was another one at its entry is put back, and what it has made itself is taken away
"""

from __future__ import annotations

import copy
import os
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from operator import getitem
from typing import Any

import numpy as np
import torch

from torchrelay.worker.hardware import raw_memory
from torchrelay.worker.hardware.settings import Settings
from torchrelay.worker.hidden_state import generators, graph, made, told
from torchrelay.worker.hidden_state.doers import is_function, name_of
from torchrelay.worker.hidden_state.graph import MISSING, Leaf
from torchrelay.worker.hidden_state.leaves import Named, NamedLeaf, Within
from torchrelay.worker.hidden_state.made import Filled
from torchrelay.worker.hidden_state.signatures import EACH, LARGEST, SMALL
from torchrelay.worker.parallel import of_state
from torchrelay.worker.source.lines import is_of_the_script
from torchrelay.worker.tensors import absent, memory
from torchrelay.worker.tensors.entries import entries_of, keys_of

ENTRIES = 1024  # of a container that is compared whole
BYTES = 4096  # of an array
GLANCES = 32  # of what is asked in turn
RESTLESS = 8  # times that an object may get names before that is no reason for a look any more
_FLAT = graph.PLAIN | {torch.Tensor}
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
        restless: dict[Any, int] | None = None,
        doers: Iterable[tuple[Leaf, str]] = (),
        moving: Iterable[Leaf] = (),
    ) -> None:
        """`leaves`: of numbers, texts and flags. `absent`: globals that are not there yet.

        `holders`: of names, such as attributes. `containers`: that may grow. `filled`: those in which objects come up.
        `things`: small ones that may be changed where they lie, or give way to others. `seldom`: holders of which some
        leaves are asked in each call, all in turn, as there are many: what torch's own modules were made with.
        `restless`: by the id of a holder, in how many looks it had other names than before; by the path of an object,
        in how many it was another one. `doers`: functions and
        objects that may give way to others, and what they are called. `moving`: those that are told each time.
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
        self._keep(list(things))
        self._doers = _Doers(doers, moving, self._restless)
        self._unmade: list[tuple[Any, Any]] = []
        self._entry, self._named, self._filled = self._values, list(map(len, self._names)), self._lengths()

    def _keep(self, things: list[tuple[Leaf, Any]]) -> None:
        self._things = [thing for _, thing in things]
        self._glances = list(map(_glance, self._things))
        self._paths = [leaf.path for leaf, _ in things]
        self._copies = list(map(_copy, self._things))
        self._placed = [(leaf, *place, thing) for leaf, thing in things if (place := _place(leaf)) is not None]
        self._within = [each for each in things if type(each[0].name) is Within and each[0].holder is not None]
        self._thing_holders = [holder for _, holder, _, _ in self._placed]
        self._thing_names = [name for _, _, name, _ in self._placed]
        self._thing_ids = [id(thing) for _, _, _, thing in self._placed]

    def has_changed(self) -> bool:
        """The same, and whether something has changed where it lies: some 0.3 µs for each."""
        if self.has_stirred() or self._doers.have_changed():
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
        self._doers.enter()
        self._unmade = [(holder, name) for holder, name in self._absent if name not in holder]

    def note_names(self) -> None:
        """A look follows: who has other names again and again need not be looked at for it."""
        self._doers.note()
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
        self._doers.put_back()
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
            if _is_place(holder, name):
                leaf.put(thing)
        for leaf, thing in self._within:
            if leaf.read() is not thing:
                leaf.put(thing)
        for path, thing, glance, copied in zip(self._paths, self._things, self._glances, self._copies, strict=True):
            if not (_put_tensor if isinstance(thing, torch.Tensor) else _put_back)(thing, glance, copied):
                raise absent.in_place(path)

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


class _Doers:
    """Functions, values of classes, and objects in their places."""

    def __init__(self, doers: Iterable[tuple[Leaf, str]], moving: Iterable[Leaf], restless: dict[Any, int]) -> None:
        """`moving`: those that are told each time, and only put back here. `restless`: see `Still`."""
        self._moving = list(moving)
        self._stood = self._now()
        there = [(leaf, _thing(leaf.read()), called) for leaf, called in doers]
        functions = [one for one in there if is_function(one[1]) or made.is_made(one[1])]
        objects = [one for one in there if not (is_function(one[1]) or made.is_made(one[1]))]
        self._rows = [(row, list(row)) for _, row, _ in there if type(row) in (list, deque)]
        self._functions = _Places([leaf for leaf, _, _ in functions])
        called = {id(leaf): name for leaf, _, name in functions}
        self._called = [called[id(leaf)] for leaf in self._functions.leaves]
        self._objects = _Places([leaf for leaf, _, _ in objects])
        self._here = self._functions.now()
        self._ids = list(map(id, self._here))
        things = self._objects.now()
        # One that is another one again and again is made anew in each step: then its class counts, and what it holds.
        self._watched = [restless.get(leaf.path, 0) < RESTLESS for leaf in self._objects.leaves]
        watched = zip(self._watched, things, strict=True)
        self._known = [id(thing) if often else id(type(thing)) for often, thing in watched]
        self._things = [thing if often else None for often, thing in zip(self._watched, things, strict=True)]
        self._restless = restless

    def enter(self) -> None:
        """A call begins."""
        if self._moving:
            self._stood = self._now()

    def _now(self) -> list[Any]:
        return [_thing(leaf.read()) for leaf in self._moving]

    def note(self) -> None:
        """A look follows: see `Still.note_names`."""
        for leaf, now, known in zip(self._objects.leaves, self._now_known(), self._known, strict=True):
            if now != known:
                self._restless[leaf.path] = self._restless.get(leaf.path, 0) + 1

    def _now_known(self) -> list[int]:
        now = zip(self._watched, self._objects.now(), strict=True)
        return [id(thing) if often else id(type(thing)) for often, thing in now]

    def have_changed(self) -> bool:
        """Whether another one stands in some place. A function that is made anew in each step is the same one."""
        if self._objects.leaves and self._now_known() != self._known:
            return True
        if any(list(map(id, row)) != list(map(id, before)) for row, before in self._rows):
            return True
        now = self._functions.now()
        ids = list(map(id, now))
        if ids == self._ids:
            return False
        for one, before, called in zip(now, self._here, self._called, strict=True):
            if one is not before and (one is MISSING or called_now(one) != called):
                return True
        self._here, self._ids = now, ids
        return False

    def put_back(self) -> None:
        """Let each stand in its place again."""
        for leaf, before in zip(self._moving, self._stood, strict=True):
            if before is not MISSING and _thing(leaf.read()) is not before:
                leaf.put(before)
        for leaf, now, stood in zip(self._functions.leaves, self._functions.now(), self._here, strict=True):
            if now is not stood and stood is not MISSING:
                leaf.put(stood)
        for row, entries in self._rows:
            if list(map(id, row)) != list(map(id, entries)):
                row.clear()
                row.extend(entries)
        for leaf, now, before in zip(self._objects.leaves, self._objects.now(), self._things, strict=True):
            if before is not None and now is not before:
                leaf.put(before)


class _Places:
    """What stands in some places, asked for by a loop of the interpreter's own where that can be."""

    def __init__(self, leaves: list[Leaf]) -> None:
        placed = [(place, leaf) for leaf in leaves if (place := _place(leaf)) is not None]
        self._others = [leaf for leaf in leaves if _place(leaf) is None]
        self.leaves = [leaf for _, leaf in placed] + self._others
        self._holders = [place[0] for place, _ in placed]
        self._names = [place[1] for place, _ in placed]

    def now(self) -> list[Any]:
        try:
            found = list(map(getitem, self._holders, self._names))
        except (KeyError, IndexError):  # there is no such name any more
            found = [Leaf.read(leaf) for leaf in self.leaves[: len(self._names)]]
        return found + [Leaf.read(leaf) for leaf in self._others] if self._others else found


def found(walk: graph.Walk, kept: Mapping[str, Leaf], noted: Container[str], restless: dict[Any, int]) -> Still:
    """What stands still after a look. `kept`: told each time. `noted`: paths that were seen to change."""
    called = {path: name for path, leaf in walk.leaves.items() if (name := _called(path, leaf, kept, noted))}
    return Still(
        [leaf for path, leaf in walk.leaves.items() if path not in noted and _is_still(leaf)],
        [leaf for leaf in walk.absent.values() if told.is_global(leaf)],
        [holder for holder in walk.holders.values() if id(holder) not in walk.of_torch],
        walk.containers,
        [leaf.value.container for leaf in walk.leaves.values() if isinstance(leaf.value, Filled)] + walk.hooks,
        _may_move(walk, noted),
        lambda holder: id(holder) in walk.of_torch,
        restless,
        [(walk.leaves[path], name) for path, name in called.items()],
        [leaf for path, leaf in kept.items() if path.endswith(graph.STANDS)],
    )


def _is_still(leaf: Leaf) -> bool:
    fixed = type(leaf.value) in (tuple, frozenset) and len(leaf.value) <= SMALL and graph.is_plain(leaf.value)
    return (type(leaf.value) in graph.PLAIN or fixed) and leaf.holder is not None


def _may_move(walk: graph.Walk, noted: Container[str]) -> list[tuple[Leaf, Any]]:
    """What may begin to move where it lies: small, and seen by this walk."""
    leaves = (
        (leaf, leaf.value.container if type(leaf.value) is Filled else leaf.value)
        for path, leaf in walk.leaves.items()
        if path not in noted
    )
    return [(leaf, value) for leaf, value in leaves if type(value) not in graph.PLAIN and is_glanced_at(value)]


def _called(path: str, leaf: Leaf, kept: Container[str], noted: Container[str]) -> str:
    """By what name it goes that stands there; empty if it is told each time, or looked at now and then only."""
    value = leaf.value
    seldom = isinstance(leaf.holder, type) or leaf.holder is None or path in noted or path in kept
    if seldom or not (type(leaf) is NamedLeaf or (made.is_made(value) and not isinstance(value, dict))):
        return ""  # as of hooks
    return called_now(value.value if isinstance(value, Named) else value)


def called_now(value: Any) -> str:
    """What a function is called, or what a value of a class is made of."""
    return made.shown(made.tell(value, LARGEST)) if made.is_made(value) else name_of(value)


def _thing(read: Any) -> Any:
    return read.value if isinstance(read, Named) else read


def _is_place(holder: Any, name: Any) -> bool:
    return name < len(holder) if type(holder) is list else name in holder


def is_glanced_at(value: Any) -> bool:
    """Whether it is small, and may be changed where it lies."""
    if type(value) is np.ndarray:
        return value.nbytes <= BYTES and not value.dtype.hasobject and value.flags.writeable
    if raw_memory.is_carried(value):
        return raw_memory.size_of(value) <= BYTES
    if type(value) in (list, dict, set, deque, *made.DICTS):
        return len(value) <= ENTRIES and _is_plain(value)
    if graph.is_own(value):
        return len(value) <= ENTRIES and all(graph.is_plain(entry) for _, entry in made.pairs(value))
    return _is_tensor(value) or graph.is_generator(value)


def _is_plain(value: Any) -> bool:
    """Whether it is made of values, by keys that are such or members of an enumeration."""
    entries = entries_of(value)
    keys = keys_of(value) if isinstance(value, dict) else []
    return all(map(graph.is_plain, entries)) and all(type(key) in graph.PLAIN or isinstance(key, Enum) for key in keys)


def _is_tensor(value: Any) -> bool:
    """Whether it is one whose memory may be written to; not a parameter that comes with the state."""
    return type(value) is torch.Tensor or (type(value) is torch.nn.Parameter and of_state.is_free(value))


def _glance(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return memory.version_of(value)
    if type(value) is np.ndarray:
        return value.tobytes()
    if graph.is_generator(value):
        return generators.bytes_of(value)
    if graph.is_own(value):  # no method of the script's is called
        return list(made.pairs(value))
    if raw_memory.is_carried(value):
        return raw_memory.bytes_of(value)
    if isinstance(value, raw_memory.FIXED):  # it was given back
        return None
    kind = type(value)
    entries = list(value.values()) if isinstance(value, dict) else value
    if kind is set or _FLAT.issuperset(map(type, entries)):  # nearly all there is
        return dict(value) if isinstance(value, dict) else value.copy()
    return copy.deepcopy(dict(value) if isinstance(value, dict) else value)


def _copy(value: Any) -> torch.Tensor | None:
    """Of a small tensor, whose glance does not tell what is in it."""
    if not _is_tensor(value) or value.grad_fn is not None or not (memory.is_dense(value) and memory.is_near(value)):
        return None
    if value.nbytes > EACH or value.is_inference():
        return None
    memory.settle(value)
    found: torch.Tensor = value.detach().clone()
    return found


def _put_tensor(thing: torch.Tensor, version: int, copied: torch.Tensor | None) -> bool:
    """Returns whether it is what it was."""
    is_given = of_state.is_of_state(thing) and not of_state.is_free(thing)
    if memory.version_of(thing) == version or is_given or thing.grad_fn is not None:
        return True
    return copied is not None and memory.fill(thing, copied)


def _put_back(thing: Any, glance: Any, _: object) -> bool:
    """Make it again what it was; containers in it stay the same ones. Returns whether that can be."""
    kind = type(thing)
    if isinstance(thing, raw_memory.FIXED) or kind in raw_memory.GROWING:
        here = _glance(thing)
        # What another process writes, too, may be its word, such as to stop.
        return bool(here == glance) or (not raw_memory.is_shared(thing) and raw_memory.fill(thing, glance))
    if kind is np.ndarray:
        np.copyto(thing, np.frombuffer(glance, thing.dtype).reshape(thing.shape))
    elif kind in (list, dict, set, deque, *made.DICTS) and thing != glance:
        _fill(thing, glance)
    return True


def _fill(thing: Any, glance: Any) -> None:
    if isinstance(thing, dict):
        entries = {key: _entry(thing.get(key), before) for key, before in glance.items()}
        thing.clear()
        thing.update(entries)
    elif type(thing) is set:
        thing.clear()
        thing.update(glance)
    else:
        there = [*thing, *([None] * len(glance))]
        row = [_entry(there[at], before) for at, before in enumerate(glance)]
        thing.clear()
        thing.extend(row)


def _entry(live: Any, before: Any) -> Any:
    """The container that is there, filled anew; or a copy, as what is put back may be asked for again."""
    if type(live) in (list, dict, deque) and type(live) is type(before):
        _fill(live, before)
        return live
    return copy.deepcopy(before)


def _place(leaf: Leaf) -> tuple[Any, Any] | None:
    """Where the interpreter finds it by itself: what holds it, and its name or index there; None if that is nowhere."""
    holder = leaf.holder
    if type(leaf.name) is Within:
        return None
    if type(holder) in (dict, list, Settings):
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
            value = vars(holder).get(name)
            if is_of_the_script(holder) or type(value) in graph.PLAIN or isinstance(value, _VALUES):
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


# ---------------------------------------------------------------- what counts between calls

_COUNT = ("value", "number", "tensor")


def counting(changed: list[str], now: Mapping[str, Any], data: Sequence[str]) -> list[str]:
    """Of what has changed all but what the next items are made of, which is told with them: by the paths of `data`."""
    return [path for path in changed if now[path][0] in _COUNT or not path.startswith(tuple(data))] if data else changed
