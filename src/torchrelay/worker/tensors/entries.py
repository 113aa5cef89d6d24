"""The entries of a script's container as they are at one moment, though another thread may be changing it.

A loop over a dict fails when a thread (a prefetcher, a logger) adds a key meanwhile. A copy is made in one call of the
interpreter, which switches threads between its instructions only; if a finalizer ran in between, it is made again.
Methods of the script's own classes are not called.
"""

from __future__ import annotations

import dis
import functools
import itertools
import queue
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from types import CodeType, FrameType
from typing import Any

_TRIES = 1000
_READ: dict[type, Callable[[Any], Iterable[Any]]] = {
    OrderedDict: OrderedDict.values,
    dict: dict.values,
    **{kind: kind.__iter__ for kind in (list, tuple, deque, set, frozenset)},
}


def entries_of(container: Iterable[Any], most: int | None = None) -> list[Any]:
    """The values of a dict, or what is in another container: all of them, or the first `most`."""
    read = _READ.get(type(container)) or next((_READ[kind] for kind in _READ if isinstance(container, kind)), iter)
    return _first(read, container, most)


def items_of(container: dict[Any, Any], most: int | None = None) -> list[tuple[Any, Any]]:
    """Keys and values of a dict: all of them, or the first `most`."""
    return _first(OrderedDict.items if isinstance(container, OrderedDict) else dict.items, container, most)


def keys_of(container: dict[Any, Any], most: int | None = None) -> list[Any]:
    """The keys of a dict: all of them, or the first `most`."""
    return _first(OrderedDict.keys if isinstance(container, OrderedDict) else dict.keys, container, most)


def _first(read: Callable[[Any], Iterable[Any]], container: Any, most: int | None) -> list[Any]:
    for _ in range(_TRIES):
        try:
            return list(read(container) if most is None else islice(read(container), most))
        except RuntimeError:  # it has changed in between
            continue
    return list(read(container) if most is None else islice(read(container), most))


# ---------------------------------------------------------------- queues

_drained: weakref.WeakSet[queue.Queue[Any]] = weakref.WeakSet()
_TAKES, _PUTS = frozenset({"get", "get_nowait"}), frozenset({"put", "put_nowait"})
_BETWEEN = frozenset({"CACHE", "EXTENDED_ARG", "NOP"})
_CODES = 4096  # functions of which it is kept what they take from
_STACK = 16  # calls of a thread in which its queue may be


def is_drained(waiting: queue.Queue[Any]) -> bool:
    """Whether another thread takes from this queue, such as one that writes logs: what is in it is a matter of time.

    Once a thread was seen to wait for it, or to run a function that takes from it, that is so for good.
    """
    if waiting in _drained:
        return True
    if vars(waiting.not_empty).get("_waiters") or any(_takes_from(frame, waiting) for frame in _of_other_threads()):
        _drained.add(waiting)
        return True
    return False


def _of_other_threads() -> Iterator[FrameType]:
    here = threading.get_ident()
    for thread, frame in sys._current_frames().items():
        one: FrameType | None = frame if thread != here else None
        for _ in range(_STACK):
            if one is None:
                break
            yield one
            one = one.f_back


def _takes_from(frame: FrameType, waiting: object) -> bool:
    """Whether it is the queue of a variable, or of an attribute of one, from which this function takes.

    What a function keeps in other variables is held for as long as it runs once these are asked for, before
    Python 3.13; so only those that take from some queue are asked.
    """
    if frame.f_code is queue.Queue.get.__code__:
        return frame.f_locals.get("self") is waiting
    names = _taken_from(frame.f_code)
    held = list(frame.f_locals.items()) if names else []
    attributes = [pair for _, each in held for pair in _attributes(each)]
    return any(each is waiting and name in names for name, each in [*held, *attributes])


@functools.lru_cache(_CODES)
def _taken_from(code: CodeType) -> frozenset[str]:
    """Names of what `get` or `get_nowait` is asked of, as in `self.NAME.get()`, and nothing is put into."""
    done = [step.argval for step in dis.get_instructions(code) if step.opname not in _BETWEEN]
    steps = [str(one) for each in done for one in (each if type(each) is tuple else (each,))]  # two at once: 3.13
    pairs = list(itertools.pairwise(steps))
    puts = {name for name, called in pairs if called in _PUTS}
    return frozenset(name for name, called in pairs if called in _TAKES) - puts


def _attributes(thing: Any) -> list[tuple[str, Any]]:
    try:
        return list(object.__getattribute__(thing, "__dict__").items())
    except (AttributeError, TypeError):  # it has none, or is a class
        return []
