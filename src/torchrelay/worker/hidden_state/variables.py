"""Variables: what functions of the script that are under way keep in their variables while they go through a loop.

    count = best = 0                          neither is an attribute of anything, nor does a step use it, and yet
    for batch in run.batches(loader):         they decide: a learning rate at the 500th turn, an end without progress
        count += 1

A replacement enters the loop in the middle. So each item of a tracked loop is recorded with the variables that the
functions around it assign within loops, and containers that change, as they were when the item was fetched; a
replacement gets them where it enters, and what the script does with the item changes them as it did before. Globals
that functions of the same module declare and assign count, too. Objects of the script's classes are looked at instead,
see `hidden`. Nothing is told of a function that goes on with an iterator of its own.

Numbers, texts, small containers of such, and tensors of a few numbers; whatever else there is, is left alone. A flag is
each process's own: mostly it says that something was set up here (a thread, a hook, a writer), which a replacement has
still to do. One that decides about numbers is found out as other decisions are.
"""

from __future__ import annotations

import ctypes
import dis
import itertools
import operator
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from types import CodeType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import Struct

from torchrelay.worker.hidden_state import graph
from torchrelay.worker.source.lines import Place, is_library, is_of_the_script, place_of
from torchrelay.worker.tensors import values

LIMIT = 16 << 10  # bytes of all variables of all functions
TEXT = 512  # characters or bytes of one that is carried
ENTRIES = 64  # of a container, and numbers in a tensor
_DIRECT = frozenset({int, float, bool, type(None), str, bytes})
_FLAT = (list, dict, deque)
_FILLED = (list, dict, set, deque)  # what is filled in place, as others may hold it, too
_STORES = ("STORE_FAST", "STORE_DEREF", "STORE_NAME")
_NO_OBJECTS: tuple[type, ...] = (
    int, float, complex, str, bytes, type(None), type, FunctionType, MethodType, ModuleType, torch.Tensor, np.ndarray,
    np.generic, torch.utils.data.DataLoader, torch.utils.data.Dataset, torch.utils.data.Sampler,
)  # fmt: skip
_STEPPING = graph.ITERATORS - {itertools.count} | {zip, map, filter, enumerate}
_PLAIN_MODULES = ("builtins", "torch", "numpy")
VARIABLE = "variable "  # begins the path of what is found in a variable
_path = re.compile(rf"{VARIABLE}(\w+) of (.*?)\(\)")
_MAX_INT = 1 << 63
MOVED = "moved"  # no container looks like that
_DECLARED = " "  # behind the name of a global: no variable has such a name


class _Told(Struct, array_like=True):
    """What is told of one function, outermost first."""

    name: str
    plain: dict[str, Any] = {}
    flat: dict[str, Any] = {}  # lists, and dicts by texts, of such; a deque is told as a list
    packed: dict[str, bytes] = {}


_decode = msgspec.msgpack.Decoder(list[_Told]).decode
# Of each function by the id of its code, which is held so that no other one gets it: what it assigns in loops; None: a
# library's. By ids, as to hash a code is to hash all of its constants, for each frame of each step; and codes of
# different files may be equal.
_names_of: dict[int, tuple[CodeType, frozenset[str] | None]] = {}
_MOST_CODES = 4096  # a script that makes functions anew in each step does not fill the memory
_first: dict[tuple[Place, str], str | None] = {}  # containers as they were at the first item, or `MOVED`
_may_go: dict[type, _Goes] = {}  # by class
_declared_in: dict[int, tuple[int, frozenset[str]]] = {}  # by the id of a module's globals, with their number


def told(frame: FrameType | None) -> bytes:
    """The variables of all functions of the script from this frame outwards; empty if there are none."""
    found = [_tell(each, names) for each, names in _of_script(frame)][::-1]
    if not any(one.plain or one.flat or one.packed for one in found):
        return b""
    try:
        data = msgspec.msgpack.encode(found)
    except OverflowError:  # a number that is too long for it, in a container
        data = b""
    return data if 0 < len(data) <= LIMIT else msgspec.msgpack.encode([_Told(one.name, one.plain) for one in found])


def put(frame: FrameType | None, data: bytes) -> None:
    """Make it so in these functions, as far as they are the same."""
    if not data:
        return
    frames = [each for each, _ in _of_script(frame)][::-1]
    for each, one in zip(frames, _decode(data), strict=False):
        if each.f_code.co_qualname != one.name:
            return
        packed = {name: values.decode(kept)[0] for name, kept in one.packed.items()}
        _first.update(dict.fromkeys(((place_of(each.f_code), name) for name in (*one.flat, *packed)), MOVED))
        _fill(each, one.plain | one.flat | packed)


def objects() -> Iterator[graph.Leaf]:
    """Objects in variables of functions of the script that are under way, outside of the call that is."""
    return (leaf for leaf in held() if type(leaf.value) not in graph.CONTAINERS)


def held() -> Iterator[graph.Leaf]:
    """The same, and containers."""
    for each in outside():
        for name, value in list(each.f_locals.items()):
            if not issubclass(type(value), _NO_OBJECTS):
                yield graph.Leaf(f"{VARIABLE}{name} of {each.f_code.co_qualname}()", None, None, value)


def contents() -> Iterator[Any]:
    """The values of all of these variables."""
    for each in outside():
        yield from each.f_locals.values()


def finder(path: str) -> Callable[[], Any] | None:
    """What finds the value of a variable again, of which `objects` has told; None if the path is of no variable."""
    match = _path.match(path)
    if match is None:
        return None
    name, function = match.groups()

    def find() -> Any:
        frames = (each for each in outside() if each.f_code.co_qualname == function)
        return next((each.f_locals.get(name, graph.MISSING) for each in frames), graph.MISSING)

    return find


def outside() -> list[FrameType]:
    """Functions of the script that are under way, outermost first, without those of the call that is."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    known = _names_of
    while frame is not None:  # in the path of every step
        code = frame.f_code
        if code is _call:
            frames.clear()
        elif (known.get(id(code)) or _names(code))[1] is not None:
            frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def call_is(code: CodeType) -> None:
    """What runs the calls of a script: functions that are called in it are another matter."""
    global _call
    _call = code


# ---------------------------------------------------------------- frames

_call: CodeType | None = None
_lengths: dict[int, int] = {}  # of iterators, by id, how much was to come when they were seen first
_MOST_LENGTHS = 4096


def _names(code: CodeType) -> tuple[CodeType, frozenset[str] | None]:
    """What a function of the script assigns in loops, with its code; None for those of libraries."""
    if len(_names_of) >= _MOST_CODES:
        _names_of.clear()
    found = code, None if is_library(code.co_filename) else frozenset(_assigned_in_loops(code))
    _names_of[id(code)] = found
    return found


def _of_script(frame: FrameType | None) -> Iterator[tuple[FrameType, frozenset[str]]]:
    known = _names_of
    while frame is not None:
        code = frame.f_code
        _, names = known.get(id(code)) or _names(code)
        if names is not None:
            yield frame, names
        frame = frame.f_back


def _assigned_in_loops(code: CodeType) -> Iterator[str]:
    instructions = list(dis.get_instructions(code))
    loops = [(int(one.argval), one.offset) for one in instructions if "JUMP_BACKWARD" in one.opname]
    for one in instructions:
        if one.opname in _STORES and any(begin <= one.offset <= end for begin, end in loops):
            yield one.argval


def _declared(around: dict[str, Any]) -> frozenset[str]:
    """Globals that functions of this module declare and assign."""
    known = _declared_in.get(id(around))
    if known is None or known[0] != len(around):
        functions = [value for value in list(around.values()) if type(value) is FunctionType]
        own = [each.__code__ for each in functions if each.__globals__ is around]
        found = (one.argval for code in own for one in dis.get_instructions(code) if one.opname == "STORE_GLOBAL")
        known = _declared_in[id(around)] = len(around), frozenset(found)
    return known[1]


def _tell(frame: FrameType, names: frozenset[str]) -> _Told:
    one = _Told(frame.f_code.co_qualname)
    local, around = frame.f_locals, frame.f_globals
    if _goes_on(local.values()):
        return one
    if local is not around and _goes_on([around.get(name) for name in frame.f_code.co_names]):
        return one
    for name, value in list(local.items()):
        if name in names or (type(value) in _FILLED and _has_moved(frame.f_code, name, value)):
            _keep(one, name, value)
    for name in _declared(around):
        if name in around:
            _keep(one, name + _DECLARED, around[name])
    return one


def _has_moved(code: CodeType, name: str, value: Any) -> bool:
    """Whether a container has changed since the first item: one that stays may tell of this process, such as paths."""
    place = place_of(code), name
    first = _first.get(place)
    if first == MOVED:
        return True
    now = repr(value) if len(value) <= ENTRIES and graph.is_plain(value) else None
    if first is None:
        _first[place] = now
    elif first != now:
        _first[place] = MOVED
        return True
    return False


def _goes_on(found: Iterable[Any]) -> bool:
    """Whether there is an iterator of the script's own, which a replacement would begin anew.

    What was taken from it looks right on a replacement if it is carried, and what is taken next is not. If nothing of
    this function is carried, the next call is made with something else, and that is found out (see `given`).
    """
    known = _may_go
    for value in found:  # in the path of every step: most of what there is, is a number
        kind = type(value)
        way = known.get(kind)
        if way is None:
            way = known[kind] = _way_of(kind)
        if way is not _Goes.NEVER and _goes(value, way):
            return True
    return False


class _Goes(Enum):
    """How a value of some class may be gone on with."""

    NEVER = 0
    ITSELF = 1
    INSIDE = 2  # by an iterator in an attribute


def _way_of(kind: type) -> _Goes:
    if kind in _STEPPING or kind.__module__ == "itertools":
        return _Goes.NEVER if kind is itertools.count else _Goes.ITSELF
    return _Goes.NEVER if kind.__module__ in _PLAIN_MODULES or not is_of_the_script(kind) else _Goes.INSIDE


def _goes(value: Any, way: _Goes) -> bool:
    if way is _Goes.ITSELF:
        return _is_under_way(value)
    inner = (graph.attributes(value) or {}).values()
    return any(type(each) in _STEPPING and _is_under_way(each) for each in inner)


def _is_under_way(iterator: Any) -> bool:
    """Whether it is gone on with. What is running is what a tracked loop lies in, such as a progress bar.

    Of those that do not show where they are it is taken for granted, as long as they have not come to their end.
    """
    if type(iterator) is GeneratorType:
        return iterator.gi_frame is not None and not iterator.gi_running
    left = operator.length_hint(iterator, -1)
    if left < 0:
        return True
    if len(_lengths) > _MOST_LENGTHS:
        _lengths.clear()
    return 0 < left != _lengths.setdefault(id(iterator), left)


def _keep(one: _Told, name: str, value: Any) -> None:
    kind = type(value)
    if kind is bool:
        return  # see above
    if kind not in _DIRECT:
        if kind in _FLAT and _is_flat(value):
            one.flat[name] = list(value) if kind is deque else value
        elif packed := _packed(name, value):
            one.packed[name] = packed
    elif kind is int:
        if -_MAX_INT <= value < _MAX_INT:
            one.plain[name] = value
    elif kind not in (str, bytes) or len(value) <= TEXT:
        one.plain[name] = value


def _is_flat(value: Any) -> bool:
    if len(value) > ENTRIES:
        return False
    if type(value) is dict:
        return _DIRECT.issuperset(map(type, value.values())) and {str}.issuperset(map(type, value))
    return _DIRECT.issuperset(map(type, value))


def _packed(name: str, value: Any) -> bytes:
    """A value that is no plain number or text; empty if it is not carried."""
    kind = type(value)
    if kind in graph.CONTAINERS:
        fits = len(value) <= ENTRIES and graph.is_plain(value)
    elif kind is torch.Tensor:
        fits = value.is_cpu and not value.requires_grad and value.numel() <= ENTRIES and value.layout is torch.strided
    elif kind is np.ndarray:
        fits = value.size <= ENTRIES and not value.dtype.hasobject
    else:
        fits = isinstance(value, np.generic)
    if not fits:
        return b""
    try:
        return values.encode([value], name)
    except (TypeError, ValueError, RuntimeError):
        return b""


def _fill(frame: FrameType, known: dict[str, Any]) -> None:
    local, around = frame.f_locals, frame.f_globals
    for name, value in known.items():
        holder, key = (around, name[:-1]) if name.endswith(_DECLARED) else (local, name)
        live: Any = holder.get(key)
        if type(live) in _FILLED and type(value) in (type(live), list):
            live.clear()
            (live.extend if type(value) in (list, deque) else live.update)(value)
        else:
            holder[key] = value
    if local is not around:
        _store(frame)


def _store(frame: FrameType) -> None:
    """Before Python 3.13 a function's variables are a copy."""
    if sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
