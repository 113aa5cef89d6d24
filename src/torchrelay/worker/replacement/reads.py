"""Reads: data that a step reads from outside (globals, closures, attributes), and what it rebinds there.

A step without arguments still works on data: a batch that was fetched ahead into a global variable, a counter of the
script's own, a generator. What of it is data counts like an argument (see `arguments`): a replacement on which it is
another one is found out before anything is trained on it. What the step rebinds is put back when it is made again.

Left out: what is only added to (`seen += 1`, `seen.append()`), texts, lists of numbers (they are mostly records of
losses), clock readings, and what belongs to the state, which a replacement does not have yet.

What is carried (`hidden`) is right on a replacement if only calls change it. What changes between them comes from
somewhere that may begin anew there, such as `batch = next(items)`: that counts, though it is carried.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import textwrap
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from torch.optim import Optimizer

from torchrelay.worker.source.lines import found_in_class, is_library, is_of_the_script
from torchrelay.worker.tensors import arguments
from torchrelay.worker.tensors.entries import entries_of

MAX_FUNCTIONS = 64  # that a step calls, and whose reads count as its own
MAX_NAMES = arguments.MAX_ENTRIES  # that are told apart
LARGE = 64 << 10  # bytes of a tensor or array from which on its digest is kept as long as it stays the same
PROBES = 256  # of its entries that are looked at for that
SAMPLED = 32  # entries of a longer list that count
AGE_S = 400 * 86400.0  # a number so close to the clock is a reading of it
_NUMBERS = (bool, int, float, complex, np.bool_, np.integer, np.floating)
NOTHING = bytes(arguments.SIZE)  # is told of what is no data, or comes to a replacement in another way
_MISSING = object()
_ADDS = ("append", "appendleft", "extend")
_LOADS = ("LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")  # and, with a newer Python, those that load two

# Whether a replacement gets in another way what stands in a holder (a dict, or a closure's cell) under a name.
Elsewhere = Callable[[Any, str, Any], bool]


def never(*_: Any) -> bool:
    """Nothing is."""
    return False


class _Names(Struct):
    """What one function reads and rebinds outside of itself."""

    reads: frozenset[str]
    rebinds: frozenset[str]


class _Place(Struct):
    """Where a value is kept: in a mapping under a name, or in a cell of a closure."""

    label: str
    name: str
    mapping: Any = None
    cell: CellType | None = None
    known: tuple[weakref.ref[Any], object, bytes] | None = None  # a large value, its version, and its digest
    returned: bytes = b""  # the digest of what is carried, when the last call returned
    between: bool = False  # it was seen to change between two calls

    def get(self) -> Any:
        if self.cell is None:
            return self.mapping.get(self.name, _MISSING)
        try:
            return self.cell.cell_contents
        except ValueError:
            return _MISSING  # not bound yet

    def at(self) -> tuple[Any, str]:
        """What holds the value, and under which name."""
        return (self.mapping, self.name) if self.cell is None else (self.cell, "cell_contents")

    def put(self, value: Any) -> None:
        if self.cell is not None:
            self.cell.cell_contents = value
        elif value is not _MISSING:
            self.mapping[self.name] = value


class Reads:
    """What one step function reads from outside."""

    def __init__(self, function: Callable[..., Any], elsewhere: Elsewhere, carried: Elsewhere = never) -> None:
        """`elsewhere`: what comes with the state; `carried`: with the private record."""
        self._elsewhere = elsewhere
        self._carried = carried
        reads, rebinds = _places_of(function, elsewhere)
        self._reads = [place for place in reads if not _is_fixed(place.get())]
        self._rebinds = rebinds
        self.names = [place.label for place in self._reads]
        self._kept: list[tuple[_Place, Any]] = []

    def digests(self) -> bytes:
        """Eight bytes for each name: `NOTHING` for what is no data now."""
        return b"".join(map(self._digest, self._reads)) if self._reads else b""

    def mark(self) -> None:
        """At the entry of a call: keep what it may rebind."""
        if self._rebinds:
            self._kept = [(place, place.get()) for place in self._rebinds]

    def rewind(self) -> None:
        """Bind again what was bound at the last mark. What was changed in place is as the call has left it."""
        for place, value in self._kept:
            place.put(value)

    def returned(self) -> None:
        """A call, of whichever function, has returned: what is carried should be so when the next one begins."""
        for place in self._reads:
            value = place.get()
            place.returned = self._of(place, value) if self._counts(value) and self._is_carried(place, value) else b""

    def counted(self, recorded: bytes) -> None:
        """A replacement's predecessor has told this: what counted there counts here."""
        for at, place in enumerate(self._reads):
            place.between |= recorded[at * arguments.SIZE : (at + 1) * arguments.SIZE] not in (NOTHING, b"")

    def _is_carried(self, place: _Place, value: Any) -> bool:
        return self._carried(*place.at(), value)

    def _digest(self, place: _Place) -> bytes:
        value = place.get()
        if not self._counts(value) or self._elsewhere(*place.at(), value):
            return NOTHING
        found = self._of(place, value)
        if not self._is_carried(place, value):
            return found
        if type(value) in arguments.GENERATORS:
            return NOTHING  # whoever draws from it goes on where it was
        place.between |= bool(place.returned) and place.returned != found
        return found if place.between else NOTHING

    def _of(self, place: _Place, value: Any) -> bytes:
        if isinstance(value, (list, deque)) and len(value) > SAMPLED:
            some = [value[at * (len(value) - 1) // (SAMPLED - 1)] for at in range(SAMPLED)]
            return arguments.digest((len(value), some))
        if not isinstance(value, (torch.Tensor, np.ndarray)) or value.itemsize * _count(value) < LARGE:
            return arguments.digest(value)
        # A data set stays what it is; a batch is another object each time, or its version has moved.
        version = _version_of(value)
        if place.known is None or place.known[0]() is not value or place.known[1] != version:
            place.known = weakref.ref(value), version, arguments.digest(value)
        return place.known[2]

    def _counts(self, value: Any) -> bool:
        kind = type(value)
        if isinstance(value, _NUMBERS):
            return not (kind is float and abs(value - time.time()) < AGE_S)
        if isinstance(value, torch.Tensor):
            return not value.requires_grad
        if isinstance(value, np.ndarray):
            return type(value) is np.ndarray and not value.dtype.hasobject
        if kind in arguments.GENERATORS:
            return True
        if kind is list or kind is deque:
            return bool(value) and (_is_of_tensors(value[-1]) or _is_of_tensors(value[0]))
        if kind is tuple or kind is dict:
            return 0 < len(value) <= arguments.MAX_FIELDS and all(map(self._counts, entries_of(value)))
        return False


def _count(value: torch.Tensor | np.ndarray[Any, Any]) -> int:
    """How many numbers there are; a sparse tensor has no `nbytes`."""
    return value.numel() if isinstance(value, torch.Tensor) else int(value.size)


def _version_of(value: torch.Tensor | np.ndarray[Any, Any]) -> object:
    """What is another one after a change in place. NumPy counts none, also not in a tensor whose memory it shares."""
    if isinstance(value, np.ndarray):
        return _probe(value)
    plain = type(value) is torch.Tensor and value.is_cpu and value.dtype in arguments.NUMPY and value.is_contiguous()
    return value._version, _probe(value.detach().numpy()) if plain and not value.is_neg() else b""


def _probe(value: np.ndarray[Any, Any]) -> bytes:
    flat = value.reshape(-1) if value.flags.c_contiguous else value.flat
    return bytes(flat[:: max(1, value.size // PROBES)].tobytes())


# ---------------------------------------------------------------- which names


def _places_of(function: Callable[..., Any], elsewhere: Elsewhere) -> tuple[list[_Place], list[_Place]]:
    """Where the function, and those of the script that it calls, read and rebind, in a fixed order."""
    reads: dict[tuple[int, str], _Place] = {}
    rebinds: dict[tuple[int, str], _Place] = {}
    waiting = list(_plain(function))
    seen: set[CodeType] = set()
    while waiting and len(seen) < MAX_FUNCTIONS:
        inner = waiting.pop(0)
        if inner.__code__ in seen:
            continue
        seen.add(inner.__code__)
        names = names_in(inner)
        for place in _bound(inner, sorted(names.reads | names.rebinds)):
            key = (id(place.mapping) if place.cell is None else id(place.cell), place.name)
            if place.name in names.reads:
                reads.setdefault(key, place)
                waiting += _plain(place.get())
                for inside in () if elsewhere(*place.at(), place.get()) else _inside(place, inner):
                    reads.setdefault((id(inside.mapping), inside.name), inside)
            if place.name in names.rebinds:
                rebinds.setdefault(key, place)
    if isinstance(function, MethodType):
        own = _of_object(function)
        reads |= own
        rebinds |= {key: place for key, place in own.items() if place.get() is not _MISSING}
    return list(reads.values())[:MAX_NAMES], list(rebinds.values())


def _plain(value: Any) -> Iterator[FunctionType]:
    """The function of the script behind this, if it is one."""
    value = inspect.unwrap(value) if callable(value) and not isinstance(value, type) else value
    inner = value.__func__ if isinstance(value, MethodType) else value
    if isinstance(inner, FunctionType):
        name = inner.__code__.co_filename
        if not is_library(name) or (name.startswith("<") and not name.startswith("<frozen")):
            yield inner


def _bound(function: FunctionType, names: list[str]) -> Iterator[_Place]:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for name in names:
        label = f"{name!r}, which {function.__name__}() reads"
        if name in cells:
            yield _Place(label, name, cell=cells[name])
        elif name in function.__globals__ or not hasattr(builtins, name):
            yield _Place(label, name, mapping=function.__globals__)


def _of_object(method: MethodType) -> dict[tuple[int, str], _Place]:
    """Attributes of the object whose method the step is, as far as the method names them."""
    held = getattr(method.__self__, "__dict__", None)
    if type(held) is not dict or isinstance(method.__self__, torch.nn.Module | torch.optim.Optimizer):
        return {}
    named = {one.argval for one in dis.get_instructions(method.__func__) if one.opname in ("LOAD_ATTR", "STORE_ATTR")}
    found = sorted(named & held.keys() | _unbound(type(method.__self__), _asked_of("self", method.__func__.__code__)))
    return {(id(held), name): _Place(f"'self.{name}'", name, mapping=held) for name in found}


def _unbound(kind: type, names: Iterable[str]) -> set[str]:
    """Those that are no methods or properties: attributes of an object of it, whether they are bound by now or not.

    What another call of the same turn binds is not there where a replacement leaves that call out.
    """
    return {name for name in names if not hasattr(type(found_in_class(kind, name)), "__get__")}


def _asked_of(holder: str, code: CodeType) -> Iterator[str]:
    """The attributes that are loaded of a variable of this name."""
    loaded = ""
    for one in dis.get_instructions(code):
        if one.opname in ("LOAD_ATTR", "LOAD_METHOD") and loaded == holder:
            yield one.argval
        if one.opname != "COPY":  # `self.x += 1` loads and stores
            last = one.argval[-1] if isinstance(one.argval, tuple) and one.argval else one.argval
            loaded = last if one.opname.startswith(_LOADS) and isinstance(last, str) else ""


def _inside(place: _Place, function: FunctionType) -> Iterator[_Place]:
    """Attributes of an object of the script's, as far as the function, or a method that it names, asks for them."""
    thing = place.get()
    held = getattr(thing, "__dict__", None)
    kind: Any = type(thing)
    if type(held) is not dict or isinstance(thing, torch.nn.Module) or not is_of_the_script(kind):
        return
    named = set(_attributes_in(function))
    for name in sorted(named):
        method = found_in_class(kind, name)
        if isinstance(method, FunctionType):
            named.update(_attributes_in(method))
    asked = {name for inner in _codes(function.__code__) for name in _asked_of(place.name, inner)}
    for name in sorted(named & held.keys() | _unbound(kind, asked)):
        yield _Place(f"'{place.name}.{name}', which {function.__name__}() reads", name, mapping=held)


def _attributes_in(function: FunctionType) -> Iterator[str]:
    for inner in _codes(function.__code__):
        yield from (one.argval for one in dis.get_instructions(inner) if one.opname in ("LOAD_ATTR", "LOAD_METHOD"))


def names_in(function: FunctionType) -> _Names:
    """What it reads and rebinds outside of itself: by its source, or if there is none, by its code."""
    outside = frozenset(function.__code__.co_freevars) | _globals_in(function.__code__)
    rebinds = frozenset(_rebound_in(function.__code__))
    loaded = _loaded_in_source(function)
    reads = outside if loaded is None else outside & loaded
    return _Names(reads, rebinds)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _globals_in(code: CodeType) -> frozenset[str]:
    loads = ("LOAD_GLOBAL", "LOAD_NAME")
    return frozenset(one.argval for inner in _codes(code) for one in dis.get_instructions(inner) if one.opname in loads)


def _rebound_in(code: CodeType) -> Iterator[str]:
    for inner in _codes(code):
        for one in dis.get_instructions(inner):
            if one.opname == "STORE_GLOBAL" or (one.opname == "STORE_DEREF" and one.argval in code.co_freevars):
                yield one.argval


def _loaded_in_source(function: FunctionType) -> frozenset[str] | None:
    """Names whose value is used, and not only added to; None if there is no source to tell."""
    try:
        parsed = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError, ValueError):
        return None
    added = {
        id(node.func.value)
        for node in ast.walk(parsed)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADDS
    }
    return frozenset(
        node.id
        for node in ast.walk(parsed)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in added
    )


def _is_of_tensors(entry: Any, depth: int = 0) -> bool:
    """Whether this entry of a list is of data, as in a buffer for replay; a loss is a tensor of one number."""
    if isinstance(entry, torch.Tensor):
        return entry.numel() > 1 and not entry.requires_grad
    if isinstance(entry, np.ndarray):
        return entry.size > 1
    inner = entry.values() if type(entry) is dict else entry if isinstance(entry, (tuple, list)) else ()
    return depth < 3 and any(_is_of_tensors(one, depth + 1) for one in list(inner)[: arguments.MAX_FIELDS])


def _is_fixed(value: Any) -> bool:
    """Code, texts and optimizers: no data will stand in their place."""
    return inspect.ismodule(value) or callable(value) or isinstance(value, (str, bytes, Optimizer))
