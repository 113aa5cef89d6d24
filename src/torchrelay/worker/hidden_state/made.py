"""Made: what is a value through and through; and such values of classes, told by their class and what is in them.

Numbers, texts and containers of them are plain. Members of enumerations, named tuples, frozen dataclasses, and dicts of
other classes (Counter, OrderedDict, defaultdict) are as good, with the small tensors in them: a script puts another one
in place of the last, or fills it; a replacement makes it anew. No code of the script is run for that, and no module
imported.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from torchrelay.worker.parallel.of_state import is_all_of_state
from torchrelay.worker.source.lines import is_of_the_script
from torchrelay.worker.tensors import absent, arguments, memory, words
from torchrelay.worker.tensors.entries import entries_of, items_of, keys_of

_OF_NUMPY = {np.dtype(code).type for code in "?bhilBHILefdFD"}  # a NumPy schedule gives those, as a metric does
PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None), *_OF_NUMPY})
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
ARRAYS = (torch.Tensor, np.ndarray, np.generic)
WIDTH = 64  # entries of a container that are looked into
NESTED = 3  # containers within one another that are one value
NODES = 512  # values in one that are looked at
LONGEST = 1024  # numbers of a tensor, or tensors of a row, that are told with what they are in
MISSING = object()
DICTS = (collections.Counter, collections.OrderedDict, collections.defaultdict)
_MARK = "torchrelay made"


def is_made(value: Any) -> bool:
    """Whether it is of one of these classes, whatever is in it."""
    kind = type(value)
    if kind is dict:  # by members of an enumeration
        return any(isinstance(key, enum.Enum) for key in keys_of(value, WIDTH))
    if kind is set or kind is frozenset:  # of members of an enumeration, say
        return not is_plain(value)
    if kind in PLAIN or kind in CONTAINERS:
        return False
    if issubclass(kind, enum.Enum) or kind in DICTS or _is_named_tuple(kind) or _is_frozen(kind):
        return True
    return words.how_told(kind) != ""


def tell(value: Any, most: int, depth: int = 0) -> list[Any] | None:
    """What it takes to make it again, as plain values and small tensors.

    None if there is something else in it, or more than `most`.
    """
    kind = type(value)
    if depth > NESTED or (isinstance(value, dict) and len(value) > most):
        return None
    if issubclass(kind, enum.Enum):
        how = "value" if value.name is None or isinstance(value, enum.Flag) else "name"
        inner: Any = value.value if how == "value" else value.name
    elif kind is set or kind is frozenset:
        how, inner = "set", sorted((_told(each, depth) for each in entries_of(value)), key=shown)
    elif how := words.how_told(kind):
        inner = words.tell(value, how)
    elif kind in DICTS or kind is dict:
        how, inner = "dict", [[_told(each, depth) for each in pair] for pair in items_of(value)]
    elif _is_named_tuple(kind):
        how, inner = "tuple", [_told(each, depth) for each in entries_of(value)]
    else:
        names = [one.name for one in dataclasses.fields(value)]
        how, inner = "fields", [[name, _told(getattr(value, name, None), depth)] for name in names]
    if inner is None and how in words.HOW:
        return None
    if isinstance(inner, list) and (len(inner) > most or not all(map(_is_value, inner))):
        return None
    return [_MARK, how, kind.__module__, kind.__qualname__, inner]


def _told(value: Any, depth: int) -> Any:
    """A value within another one: one of these classes is told, all else is what it is."""
    if is_result(value):
        return [RESULT, value.detach()]
    return tell(value, WIDTH, depth + 1) if type(value) not in PLAIN and is_made(value) else value


RESULT = "torchrelay result"  # begins what is told of one


def is_result(value: Any) -> bool:
    """Whether it is a small tensor that was computed in a graph, such as a loss that is kept to be printed."""
    small = type(value) is torch.Tensor and value.grad_fn is not None and value.numel() <= WIDTH
    return small and memory.is_near(value) and value.layout == torch.strided


def result_of(told: torch.Tensor, path: str) -> torch.Tensor:
    """The same to whoever reads it. Its graph is not here: a backward pass through it is refused."""
    with torch.enable_grad():
        found = told.detach().requires_grad_().clone()
    cast(Any, found).register_hook(_Refusing(path))
    return found


class _Refusing:
    """A hook of a tensor."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, _: torch.Tensor) -> None:
        raise absent.refuse(self._path)


def _is_value(told: Any, depth: int = 0) -> bool:
    """Whether it is plain but for small tensors and arrays in it."""
    if isinstance(told, ARRAYS):
        return is_small_array(told, 4 * LONGEST)
    if type(told) in (list, tuple, dict) and len(told) <= WIDTH and depth <= 2 * NESTED + 1:
        return all(_is_value(entry, depth + 1) for entry in entries_of(told))
    return is_plain(told)


def is_small_array(value: Any, most: int = LONGEST) -> bool:
    """Whether it is a tensor of at most so many numbers, or an array, that is not of a graph."""
    if type(value) is torch.Tensor:
        held = not value.requires_grad and memory.is_dense(value) and not value.is_inference()
        return held and memory.is_near(value) and value.numel() <= most
    return isinstance(value, (np.ndarray, np.generic)) and value.size <= most and not value.dtype.hasobject


def arrays_in(value: Any) -> Iterator[Any]:
    """The tensors and arrays in a value: its entries, its fields, its attributes, as far as it is looked into."""
    waiting = [value]
    for _ in range(NODES):
        if not waiting:
            return
        one = waiting.pop()
        if isinstance(one, ARRAYS):
            yield one
        elif type(one) not in PLAIN and not isinstance(one, _NO_ENTRIES):
            held = _field(one, "__dict__")
            waiting += entries_within(one) + (entries_of(held, WIDTH) if type(held) is dict else [])


def holds_arrays(value: Any) -> bool:
    return next(arrays_in(value), None) is not None


def entries_within(value: Any) -> list[Any]:
    """The entries of a container, or the fields of a record; of many the first."""
    if isinstance(value, CONTAINERS):
        return entries_of(value, WIDTH)
    return [_field(value, name) for name in getattr(type(value), "__dataclass_fields__", {})]


def _field(value: Any, name: str) -> Any:
    """An attribute, without a method of the script's; None if there is none."""
    try:
        return object.__getattribute__(value, name)
    except (AttributeError, TypeError):
        return None


def shown(told: Any) -> str:
    """What tells whether something else was told."""
    if isinstance(told, ARRAYS):
        return f"{tuple(told.shape)} {digest(told).hex()}"
    if isinstance(told, (list, tuple)):
        return f"[{', '.join(map(shown, told))}]"
    return f"{{{', '.join(f'{key!r}: {shown(told[key])}' for key in told)}}}" if type(told) is dict else repr(told)


def digest(value: Any) -> bytes:
    """Of a tensor, wherever its values are, or of an array."""
    return arguments.digest(memory.near(value) if isinstance(value, torch.Tensor) else value)


def _again(told: Any) -> Any:
    if isinstance(told, ARRAYS):
        return told.clone() if isinstance(told, torch.Tensor) else told.copy()
    if type(told) is dict:
        return {key: _again(entry) for key, entry in told.items()}
    if is_told(told):
        return make(told, None)
    if type(told) is list and len(told) == 2 and told[0] == RESULT:
        return result_of(told[1], "a result of a step")
    return type(told)(map(_again, told)) if type(told) in (list, tuple) else told


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
    if how in words.HOW:
        return words.make(kind, how, inner)
    if how == "set":
        return _filled_set(kind, inner, live)
    if how == "dict":
        return _filled(kind, inner, live)
    if how == "tuple":
        return tuple.__new__(kind, [_again(each) for each in inner])
    if how == "container":
        return _filled_container(inner, _base_of(kind).__new__(kind)) if issubclass(kind, OWN) else MISSING
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
        refill(here, entries)
        return True


def _filled_container(told: list[Any], live: Any) -> Any:
    """One of a class of the script's with these attributes and entries; no method of its class is called."""
    fields, rows, more = told
    if isinstance(live, deque) and live.maxlen != more:
        deque.__init__(live, (), more)
    present = {key: entry for key, entry in pairs(live) if type(key) in PLAIN}
    entries = [(key, make_entry(one, present.get(key))) for key, one in rows]
    if any(entry is MISSING for _, entry in entries):
        return MISSING
    refill(live, entries)
    if more is True:
        object.__setattr__(live, "__dict__", live)
    for name, value in fields:
        object.__setattr__(live, name, make_entry(value, _field(live, name)))
    return live


def refill(container: Any, entries: list[tuple[Any, Any]]) -> None:
    """A class of the script's may do more than that in methods of its own."""
    kind = _base_of(type(container))
    kind.clear(container)
    if issubclass(kind, dict):
        kind.update(container, dict(entries))
    elif kind is set:
        kind.update(container, [entry for _, entry in entries])
    else:
        kind.extend(container, [entry for _, entry in entries])


def _base_of(kind: type) -> Any:
    return next(each for each in (*DICTS, dict, list, deque, set) if issubclass(kind, each))


def pairs(container: Any) -> Iterable[tuple[Any, Any]]:
    """Keys and entries, or numbers and entries, whatever its class makes of it."""
    return items_of(container) if isinstance(container, dict) else enumerate(entries_of(container))


def holds_objects(container: Any) -> bool:
    """Whether an object of the script's classes is in it."""
    return any(_is_object(type(entry)) for entry in entries_of(container, WIDTH))


OWN = (list, dict, deque)  # of a class that is made from one of these, the entries are told


def is_own(kind: type) -> bool:
    """Whether it is a class of lists or dicts of the script's, or of a library that is not torch's or Python's."""
    if kind in OWN or kind in DICTS or not issubclass(kind, OWN):
        return False
    top = str(kind.__module__).partition(".")[0]
    return top == "__main__" or (top != "torch" and top not in sys.stdlib_module_names)


def _is_object(kind: type) -> bool:
    return kind not in PLAIN and kind not in CONTAINERS and is_of_the_script(kind) and not issubclass(kind, _NO_ENTRIES)


MAX_NESTED = 8  # objects within one another
_SLOT = types.MemberDescriptorType


def tell_entry(entry: Any, depth: int = 0) -> Any:
    """An entry of a container, as plain values and small tensors; `MISSING` if there is something else in it."""
    kind = type(entry)
    if is_plain(entry) or is_made(entry):
        return entry if not is_made(entry) else _or_missing(tell(entry, WIDTH))
    if is_result(entry):
        return [RESULT, entry.detach().clone()]
    if isinstance(entry, torch.Tensor):
        fits = entry.numel() <= WIDTH and memory.is_near(entry) and not entry.requires_grad
        return entry.detach().clone() if fits else MISSING
    if not (_is_object(kind) or is_own(kind)) or "<locals>" in kind.__qualname__ or depth > MAX_NESTED:
        return MISSING
    fields, how, rows = _field(entry, "__dict__"), "object", list[Any]()
    if not _is_told_by_attributes(kind):
        if not is_own(kind) or issubclass(kind, collections.defaultdict):
            return MISSING  # there is more to it than attributes
        how, rows = "container", [[key, tell_entry(one, depth + 1)] for key, one in pairs(entry)]
        fields = {} if fields is entry else fields  # a dict whose entries are its attributes
    if type(fields) is not dict:
        return MISSING
    inner: list[Any] = [[name, tell_entry(value, depth + 1)] for name, value in items_of(fields)]
    if any(told is MISSING for _, told in (*inner, *rows)) or not all(type(key) in PLAIN for key, _ in rows):
        return MISSING
    if how == "container":
        more = entry.maxlen if isinstance(entry, deque) else _field(entry, "__dict__") is entry
        inner = [inner, rows, more]
    return [_MARK, how, kind.__module__, kind.__qualname__, inner]


def _is_told_by_attributes(kind: type) -> bool:
    """Whether its objects are what their attributes are: no list, no number, nothing in slots or in C."""
    heap = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement
    made_here = all(each is object or each.__flags__ & heap for each in kind.__mro__)
    return made_here and not any(type(one) is _SLOT for each in kind.__mro__ for one in vars(each).values())


def make_entry(told: Any, live: Any) -> Any:
    if not is_told(told):
        return _again(told)
    if told[1] not in ("object", "container"):
        return make(told, live)
    if (type(live).__module__, type(live).__qualname__) != tuple(told[2:4]):
        return make(told, live)
    if told[1] == "container":
        return _filled_container(told[4], live)
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


def _filled_set(kind: Any, inner: list[Any], live: Any) -> Any:
    entries = list(map(_again, inner))
    if type(live) is not set:
        return kind(entries)
    live.clear()
    live.update(entries)
    return live


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


# ---------------------------------------------------------------- what comes with the state


def holds_state_alone(value: Any) -> bool:
    """Whether all entries of a container are tensors of the state."""
    if type(value) not in CONTAINERS and type(value) not in DICTS:
        return False
    entries = entries_of(value)
    if not entries or not all(isinstance(each, torch.Tensor) for each in entries):
        return False
    return is_all_of_state(entries)


def are_same(one: Any, other: Any) -> bool:
    if one is MISSING or one[0] != other[0]:
        return False
    first, second = one[1], other[1]
    if one[0] == "value":
        if type(first) is not type(second):
            return False
        return bool(first == second) or bool(first != first and second != second)
    return bool(first == second)


def only_grew(before: Any, now: Any) -> bool:
    """A container that has more entries than before, as caches and histories have."""
    if before is MISSING or before[0] != "container" or now[0] != "container" or now[1][0] is not before[1][0]:
        return False
    return now[1][1] > before[1][1] and now[1][0] is not tuple
