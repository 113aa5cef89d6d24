"""The entries of a script's container as they are at one moment, though another thread may be changing it.

A loop over a dict fails when a thread (a prefetcher, a logger) adds a key meanwhile. A copy is made in one call of the
interpreter, which switches threads between its instructions only; if a finalizer ran in between, it is made again.
Methods of the script's own classes are not called.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from itertools import islice
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
