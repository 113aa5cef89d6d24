"""Made: what is a value through and through; and such values of classes, told by their class and what is in them.

Numbers, texts and containers of them are plain. Members of enumerations, named tuples, frozen dataclasses, and dicts of
other classes (Counter, OrderedDict, defaultdict) are as good: a script puts another one in place of the last, or fills
it; a replacement makes it anew. No code of the script is run for that, and no module imported.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import sys
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from torchrelay.worker.source.lines import is_of_the_script
from torchrelay.worker.tensors.entries import entries_of, items_of, keys_of

_OF_NUMPY = {np.dtype(code).type for code in "?bhilBHILefdFD"}  # a NumPy schedule gives those, as a metric does
PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None), *_OF_NUMPY})
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
ARRAYS = (torch.Tensor, np.ndarray, np.generic)
WIDTH = 64  # entries of a container that are looked into
NESTED = 3  # containers within one another that are one value
MISSING = object()
DICTS = (collections.Counter, collections.OrderedDict, collections.defaultdict)
_MARK = "torchrelay made"


def is_made(value: Any) -> bool:
    """Whether it is of one of these classes, whatever is in it."""
    kind = type(value)
    if kind is dict:  # by members of an enumeration
        return any(isinstance(key, enum.Enum) for key in keys_of(value, WIDTH))
    if kind in PLAIN or kind in CONTAINERS:
        return False
    return issubclass(kind, enum.Enum) or kind in DICTS or _is_named_tuple(kind) or _is_frozen(kind)


def tell(value: Any, most: int) -> list[Any] | None:
    """What it takes to make it again, as plain values; None if there is something else in it, or more than `most`."""
    kind = type(value)
    if isinstance(value, dict) and len(value) > most:
        return None
    if issubclass(kind, enum.Enum):
        inner: Any = value.value if value.name is None else value.name
        how = "value" if value.name is None else "name"
    elif kind in DICTS or kind is dict:
        how, inner = "dict", [[_told(each) for each in pair] for pair in items_of(value)]
    elif _is_named_tuple(kind):
        how, inner = "tuple", [_told(each) for each in value]
    else:
        names = [one.name for one in dataclasses.fields(value)]
        how, inner = "fields", [[name, _told(getattr(value, name, None))] for name in names]
    if isinstance(inner, list) and (len(inner) > most or not all(is_plain(entry) for entry in inner)):
        return None
    return [_MARK, how, kind.__module__, kind.__qualname__, inner]


def _told(value: Any) -> Any:
    """A value within another one: a member of an enumeration is told, all else is what it is."""
    return tell(value, 0) if isinstance(value, enum.Enum) and type(value) not in PLAIN else value


def _again(told: Any) -> Any:
    if isinstance(told, torch.Tensor):
        return told.clone()
    return make(told, None) if is_told(told) else told


def is_told(told: Any) -> bool:
    """Whether `tell` has said it."""
    return type(told) is list and len(told) == 5 and told[0] == _MARK


def make(told: list[Any], live: Any) -> Any:
    """The value; `MISSING` if its class is not to be found here. A dict that is there, `live`, is filled anew."""
    _, how, module, name, inner = told
    kind = _find(module, name, live)
    if kind is None:
        return MISSING
    if how in ("name", "value"):
        return kind[inner] if how == "name" else kind(inner)
    if how == "dict":
        return _filled(kind, inner, live)
    if how == "tuple":
        return tuple.__new__(kind, [_again(each) for each in inner])
    found = object.__new__(kind)
    for field, value in inner:
        object.__setattr__(found, field, _again(value))
    return found


# ---------------------------------------------------------------- objects that come up in a container

# A script that keeps an AverageMeter for each name in a dict makes it when the name comes up. A replacement has none.

MOST = 1024  # entries that are told
_NO_ENTRIES: tuple[type, ...] = (torch.nn.Module, torch.Tensor, Dataset, Sampler, BaseException, type)


class Filled:
    """A container that has objects of the script's classes, or had none yet."""

    __slots__ = ("container",)

    def __init__(self, container: Any) -> None:
        self.container = container

    def tell(self) -> list[Any] | None:
        """Its entries, by their keys; None if one of them cannot be told, or there are too many."""
        here = self.container
        if len(here) > MOST:
            return None
        found = [[key, tell_entry(entry)] for key, entry in pairs(here)]
        whole = all(type(key) in PLAIN and told is not MISSING for key, told in found)
        return found if whole else None

    def fill(self, told: list[Any]) -> bool:
        """Make it so. Objects that are there stay the same ones; returns whether all classes were found."""
        here = self.container
        present = dict(pairs(here))
        entries = [(key, make_entry(one, present.get(key, MISSING))) for key, one in told]
        if any(entry is MISSING for _, entry in entries):
            return False
        # A class of the script's may do more than that in methods of its own.
        kind = _base_of(here)
        kind.clear(here)
        if isinstance(here, dict):
            kind.update(here, dict(entries))
        else:
            kind.extend(here, [entry for _, entry in entries])
        return True


def _base_of(container: Any) -> Any:
    return next(each for each in (*DICTS, dict, list, deque) if isinstance(container, each))


def pairs(container: Any) -> Iterable[tuple[Any, Any]]:
    """Keys and entries, or numbers and entries, whatever its class makes of it."""
    return items_of(container) if isinstance(container, dict) else enumerate(entries_of(container))


def holds_objects(container: Any) -> bool:
    """Whether an object of the script's classes is in it."""
    return any(_is_object(type(entry)) for entry in entries_of(container, WIDTH))


def _is_object(kind: type) -> bool:
    return kind not in PLAIN and kind not in CONTAINERS and is_of_the_script(kind) and not issubclass(kind, _NO_ENTRIES)


def tell_entry(entry: Any) -> Any:
    kind = type(entry)
    if is_plain(entry) or is_made(entry):
        return entry if not is_made(entry) else _or_missing(tell(entry, WIDTH))
    if isinstance(entry, torch.Tensor):
        fits = entry.numel() <= WIDTH and entry.is_cpu and not entry.requires_grad
        return entry.detach().clone() if fits else MISSING
    fields = getattr(entry, "__dict__", None)
    if not _is_object(kind) or type(fields) is not dict or "<locals>" in kind.__qualname__:
        return MISSING
    inner = [[name, tell_entry(value)] for name, value in items_of(fields)]
    return (
        MISSING
        if any(told is MISSING for _, told in inner)
        else [_MARK, "object", kind.__module__, kind.__qualname__, inner]
    )


def make_entry(told: Any, live: Any) -> Any:
    if not is_told(told) or told[1] != "object" or (type(live).__module__, type(live).__qualname__) != tuple(told[2:4]):
        return make(told, live) if is_told(told) else told
    fields = {name: make_entry(value, getattr(live, "__dict__", {}).get(name)) for name, value in told[4]}
    vars(live).clear()
    vars(live).update(fields)
    return live


def _or_missing(told: Any) -> Any:
    return MISSING if told is None else told


def _filled(kind: Any, pairs: list[list[Any]], live: Any) -> Any:
    if type(live) is not kind:
        if kind is collections.defaultdict:
            return MISSING  # what it makes of a key that it does not have nobody has told
        live = kind()
    live.clear()
    for key, value in pairs:
        live[_again(key)] = _again(value)
    return live


def _find(module: str, name: str, live: Any) -> Any:
    """A class by its name; one that a function has made is known by what stands in its place."""
    kind = type(live)
    if (kind.__module__, kind.__qualname__) == (module, name):
        return kind
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) and found.__qualname__ == name else None


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and kind.__bases__ == (tuple,) and "_fields" in vars(kind)


def _is_frozen(kind: type) -> bool:
    settings = vars(kind).get("__dataclass_params__")
    return settings is not None and bool(settings.frozen)


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether it is a value through and through: a number, a text, or a container of such."""
    kind = type(value)
    if kind in PLAIN:
        return True
    if kind not in CONTAINERS or depth >= NESTED:
        return False
    if kind is dict:
        return all(type(key) in PLAIN and is_plain(entry, depth + 1) for key, entry in items_of(value, WIDTH))
    return all(is_plain(entry, depth + 1) for entry in entries_of(value, WIDTH))
