"""Variables: what functions of the script that are under way keep in their variables while they go through a loop.

    count = best = 0        # no attributes of anything, and no step uses them; yet a learning rate goes by them

A replacement enters the loop in the middle. So each item of a tracked loop is recorded with the variables that the
functions around it assign within loops, and containers that change, as they were when the item was fetched; a
replacement gets them where it enters, and what the script does with the item changes them as it did before. Globals
that functions of the same module declare and assign count, too. Objects of the script's classes are looked at instead,
see `hidden`. Nothing is told of a function that goes on with an iterator of its own.

Numbers, texts, containers of such, tensors of a few numbers, and values of classes (see `made`). A flag that a function
sets where it has just been found not to be set is each process's own: it says that something was set up here (a thread,
a hook, a writer), which a replacement has still to do. What changes, may still be read, and cannot be told is named in
the record, and a replacement is refused for it.
"""

from __future__ import annotations

import ctypes
import itertools
import operator
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import partial
from inspect import CO_GENERATOR
from multiprocessing.pool import IMapIterator
from types import AsyncGeneratorType, CodeType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import Struct

from torchrelay.errors import UnprovedError
from torchrelay.worker.hardware.settings import NAMES, SETTINGS
from torchrelay.worker.hidden_state import generators, graph, leaves, made, signatures
from torchrelay.worker.hidden_state.leaves import SELDOM
from torchrelay.worker.parallel.of_state import is_of_state
from torchrelay.worker.source.lines import Place, is_library, is_of_the_script, place_of
from torchrelay.worker.source.names import Names, declared_globals, used_by_functions
from torchrelay.worker.tensors import memory, values
from torchrelay.worker.tensors.entries import entries_of, items_of, keys_of

LIMIT = 32 << 10  # bytes of all variables of all functions
TEXT = 4096  # characters or bytes of one that is carried
ENTRIES = 1024  # of a container, and numbers in a tensor
_DIRECT = frozenset({int, float, bool, type(None), str, bytes})
_FLAT = (list, dict, deque)
_FILLED = (list, dict, set, deque)  # what is filled in place
_FILLED_BY_PLACES = (torch.Tensor, np.ndarray)  # x[i] = y
_NO_OBJECTS: tuple[type, ...] = (
    int, float, complex, str, bytes, type(None), type, FunctionType, MethodType, ModuleType, torch.Tensor, np.ndarray,
    np.generic, torch.utils.data.DataLoader, torch.utils.data.Dataset, torch.utils.data.Sampler,
)  # fmt: skip
_STEPPING = graph.ITERATORS - {itertools.count, *SELDOM} | {
    zip,
    map,
    filter,
    enumerate,
    AsyncGeneratorType,
    IMapIterator,
}
_path = re.compile(rf"{graph.VARIABLE}(\w+) of (.*?)\(\)")
_inner = re.compile(r"\w+ of (.+)\.<locals>\.[^.]+$")
_MAX_INT = 1 << 63
MOVED = "moved"  # no container looks like that
_DECLARED = " "  # behind the name of a global: no variable has such a name


class _Told(Struct, array_like=True):
    """What is told of one function, outermost first."""

    name: str
    plain: dict[str, Any] = {}
    flat: dict[str, Any] = {}  # lists, and dicts by texts, of such; a deque is told as a list
    packed: dict[str, bytes] = {}
    lacking: list[str] = []  # what changes, may still be read, and is not told
    histories: list[str] = []  # of it, what is only added to as long as the loop goes on
    drawn: dict[str, bytes] = {}  # states of generators of random numbers: the item may be drawn from


_decode = msgspec.msgpack.Decoder(list[_Told]).decode
_encode = msgspec.msgpack.encode
_LACKING = (
    "{0} of {1}() changes in the course of the training, may decide what comes next, and cannot be carried: a worker "
    "that takes over this rank would go on with another one. Keep it in numbers, texts or small tensors, or give it to "
    "protect(state=...); an iterator of your own: begin it anew from the step's number"
)
_HISTORY = (
    "torchrelay: {0} of {1}() has more entries than are carried: in this replacement it begins anew. Write such a "
    "history to a file, or keep it in state=..."
)
_OF_LOOPS = "torchrelay.worker.data.loops"
_walking: dict[int, CodeType] = {}  # generators with tracked loops, by id
# Of each function by the id of its code, which is held: what it assigns in loops; None: a library's. By ids, as to hash
# a code is to hash all of its constants, for each frame of each step; and codes of different files may be equal.
_names_of: dict[int, tuple[CodeType, Names | None]] = {}
_MOST_CODES = 4096  # a script that makes functions anew in each step does not fill the memory
_of_parameters: set[tuple[Place, str]] = set()  # containers that hold tensors of the state, and nothing else
_first: dict[tuple[Place, str], str | None] = {}  # containers as they were at the first item, or `MOVED`
_may_go: dict[type, _Goes] = {}  # by class


def told(frame: FrameType | None) -> bytes:
    """The variables of all functions of the script from this frame outwards; empty if there are none."""
    found = [_tell(each, names) for each, names in _of_script(frame)][::-1]
    if not any(one.plain or one.flat or one.packed or one.lacking or one.histories or one.drawn for one in found):
        return b""
    try:
        data = _encode(found)
    except OverflowError:  # a number that is too long for it, in a container
        data = b""
    if 0 < len(data) <= LIMIT:
        return data
    for one in found:
        one.drawn.clear()  # what comes of it on a replacement is compared
    return _encode(_shortened(found))


def _shortened(found: list[_Told]) -> list[_Told]:
    """Without the largest, as far as there is no room for them: they are named instead."""
    sizes = []
    for one in found:
        for kind in (one.flat, one.packed):
            for name in kind:
                try:
                    sizes.append((len(_encode(kind[name])), name, one, kind))
                except OverflowError:
                    sizes.append((LIMIT + 1, name, one, kind))
    sizes.sort(key=operator.itemgetter(0), reverse=True)
    total = sum(size for size, *_ in sizes)
    for size, name, one, kind in sizes:
        if total <= LIMIT // 2:
            break
        total -= size
        del kind[name]
        one.lacking.append(name)
    return found


def put(frame: FrameType | None, data: bytes) -> None:
    """Make it so in these functions, as far as they are the same."""
    if not data:
        return
    frames = [*_of_script(frame)][::-1]
    for (each, names), one in zip(frames, _decode(data), strict=False):
        if each.f_code.co_qualname != one.name:
            return
        if one.lacking:
            raise UnprovedError(_LACKING.format(one.lacking[0].strip(), one.name))
        for name in one.histories:
            print(_HISTORY.format(name, one.name), file=sys.stderr, flush=True)
        packed = {name: values.decode(kept)[0] for name, kept in one.packed.items()}
        _first.update(dict.fromkeys(((place_of(each.f_code), name) for name in (*one.flat, *packed)), MOVED))
        _fill(each, one.plain | one.flat | packed, names)
        generators.put_in(each.f_locals, one.drawn)


def objects() -> Iterator[graph.Leaf]:
    """Objects in variables of functions that are under way outside of calls, and in globals and modules they use."""
    for leaf in held():
        if type(leaf.value) not in graph.CONTAINERS or not leaf.value or _holds_objects(leaf.value):
            yield leaf
    yield from leaves.of_environment()
    yield from (graph.Leaf(name, SETTINGS, name, SETTINGS[name]) for name in NAMES)
    yield leaves.GlobalHooks()
    yield graph.Leaf("sys.argv", vars(sys), "argv", sys.argv)
    for each in outside():
        around = each.f_globals
        for name in _names(each.f_code)[0].co_names:
            value = around.get(name)
            if isinstance(value, ModuleType):
                yield from graph.of_module(value)
            elif each.f_locals is not around and not issubclass(type(value), _NO_OBJECTS):
                yield graph.Leaf(f"{name} of {around.get('__name__')}", around, name, value)


def _holds_objects(value: Any) -> bool:
    """Whether there is more in a container than values, which are told with each item: iterators, or objects."""
    inside = entries_of(value, signatures.SMALL)
    return any(type(each) in _STEPPING or is_of_the_script(type(each)) for each in inside)


def called() -> Iterator[Any]:
    """Functions and classes of the script that functions under way use, outside of the call that is."""
    for each in outside():
        for value in [*each.f_locals.values(), *(each.f_globals.get(name) for name in each.f_code.co_names)]:
            if isinstance(value, (FunctionType, MethodType, partial)):
                yield value
            elif not isinstance(value, _NO_OBJECTS) or isinstance(value, type):
                kind = value if isinstance(value, type) else type(value)
                if is_of_the_script(kind):
                    yield kind


def held() -> Iterator[graph.Leaf]:
    """The same, and containers; of variables that may still be read."""
    for each in outside():
        names, local, around = _names(each.f_code)[1], each.f_locals, each.f_globals
        living = frozenset[str]() if names is None else names.living(each.f_lasti)
        used = used_by_functions(around) if local is around else frozenset[str]()
        for name, value in list(local.items()):
            if (name in living or name in used) and not issubclass(type(value), _NO_OBJECTS):
                yield graph.Leaf(f"{graph.VARIABLE}{name} of {each.f_code.co_qualname}()", None, None, value)


def contents() -> list[Any]:
    """The values of all variables of these functions."""
    return [value for each in outside() for value in list(each.f_locals.values())]


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


def is_yet_to_be_made(path: str) -> bool:
    """Whether it is of a function that one under way makes: what that has around it are variables told with items."""
    match = _inner.match(path)
    return match is not None and any(each.f_code.co_qualname == match[1] for each in outside())


def call_is(code: CodeType) -> None:
    """What runs the calls of a script: functions that are called in it are another matter."""
    global _call
    _call = code


_call: CodeType | None = None
_places: dict[int, int | str] = {}  # of iterators, by id, how much was to come when they were seen first
_MOST_PLACES = 4096


def _names(code: CodeType) -> tuple[CodeType, Names | None]:
    """What there is to know of the names of a function of the script, with its code; None for those of libraries."""
    found = _names_of.get(id(code))
    if found is None:
        if len(_names_of) >= _MOST_CODES:
            _names_of.clear()
        found = _names_of[id(code)] = code, None if is_library(code.co_filename) else Names(code)
    return found


def _of_script(frame: FrameType | None) -> Iterator[tuple[FrameType, Names]]:
    known = _names_of
    while frame is not None:
        code = frame.f_code
        _, names = known.get(id(code)) or _names(code)
        if names is not None:
            yield frame, names
        frame = frame.f_back


def _tell(frame: FrameType, names: Names) -> _Told:
    local, around = frame.f_locals, frame.f_globals
    one = _Told(frame.f_code.co_qualname, {}, {}, {}, [], [], generators.told_in(local))
    if frame.f_code.co_flags & CO_GENERATOR:
        _walking[id(frame.f_code)] = frame.f_code
    living = names.living(frame.f_lasti)
    used = used_by_functions(around) if local is around else frozenset[str]()
    for name, value in list(local.items()):
        lives = name in living or name in used
        if _is_settled(one, frame.f_code, names, name, value, lives) or not lives:
            continue
        if name not in names.assigned or _has_moved(frame.f_code, name, value):
            (one.histories if name in names.filled else one.lacking).append(name)
    if local is not around:
        one.lacking.extend(name for name in frame.f_code.co_names if _goes_on([around.get(name)]))
    for name in declared_globals(around):
        value = around.get(name)
        if name in around and not _keep(one, name + _DECLARED, value) and _has_moved(frame.f_code, name, value):
            one.lacking.append(name)
    return one


def _is_settled(one: _Told, code: CodeType, names: Names, name: str, value: Any, lives: bool) -> bool:
    """Whether a variable has been told, or need not be. `lives`: it may still be read."""
    kind = type(value)
    if name in names.assigned:
        return not lives or (kind is bool and name in names.flags) or _keep(one, name, value)
    if kind in _FILLED or kind in made.DICTS:
        return not _has_moved(code, name, value) or _keep(one, name, value) or is_of_state(value)
    if issubclass(kind, _FILLED_BY_PLACES):
        stays = not lives or not _has_moved(code, name, value)
        return stays or is_of_state(value) or _keep(one, name, value)
    return not _goes_on([value])


def _has_moved(code: CodeType, name: str, value: Any) -> bool:
    """Whether a value has changed since the first item: one that stays may tell of this process, such as paths."""
    place = place_of(code), name
    first = _first.get(place)
    if first == MOVED:
        return True
    now = signatures.glance(value, place, entries_by_ids=place in _of_parameters)
    if first is None:
        _first[place] = now
    elif first != now and place not in _of_parameters and made.holds_state_alone(value):
        _of_parameters.add(place)  # a list of parameters, say: they come with the state
        _first[place] = signatures.glance(value, place, entries_by_ids=True)
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
    return (
        _Goes.NEVER if kind.__module__ in ("builtins", "torch", "numpy") or not is_of_the_script(kind) else _Goes.INSIDE
    )


def _goes(value: Any, way: _Goes) -> bool:
    if way is _Goes.ITSELF:
        return _is_under_way(value)
    inner = list((graph.attributes_of(value) or {}).values())
    return any(type(each) in _STEPPING and _is_under_way(each) for each in inner)


def is_walked(iterator: Any) -> bool:
    """Whether it is a generator in which a tracked loop lies: a replacement comes to its place."""
    if type(iterator) is not GeneratorType:
        return type(iterator).__module__ == _OF_LOOPS
    if id(iterator.gi_code) in _walking or iterator.gi_frame is None:
        return True
    if iterator.gi_frame.f_globals.get("__name__") == _OF_LOOPS:
        return True
    # A progress bar is a generator of a library.
    return is_library(iterator.gi_code.co_filename) and any(map(is_walked, iterator.gi_frame.f_locals.values()))


def _is_under_way(iterator: Any) -> bool:
    """Whether it is gone on with. What runs is what a tracked loop lies in, such as a progress bar.

    Of those that do not show where they are it is taken for granted, as long as they have not come to their end.
    """
    if type(iterator) is GeneratorType:
        return iterator.gi_suspended and not is_walked(iterator)
    if len(_places) > _MOST_PLACES:
        _places.clear()
    if type(iterator) is itertools.cycle:
        place = generators.place_of(iterator)
        if place and place == _places.setdefault(id(iterator), place):
            return False
        _places[id(iterator)] = ""  # for good: it comes to the same place again
        return True
    left = operator.length_hint(iterator, -1)
    return left < 0 or 0 < left != _places.setdefault(id(iterator), left)


def _keep(one: _Told, name: str, value: Any) -> bool:
    """Tell it. False if it is a value that cannot be told; what is no value is nothing to tell."""
    kind = type(value)
    if kind not in _DIRECT:
        if kind in _FLAT and _is_flat(value):
            one.flat[name] = list(value) if kind is deque else value
        elif packed := _packed(name, value):
            one.packed[name] = packed
        else:
            return not (_is_values(value) or _goes_on([value]))
        return True
    if (kind is int and not -_MAX_INT <= value < _MAX_INT) or (kind in (str, bytes) and len(value) > TEXT):
        return False
    one.plain[name] = value
    return True


def _is_flat(value: Any) -> bool:
    if len(value) > ENTRIES:
        return False
    if type(value) is dict:
        return all(type(key) is str and type(entry) in _DIRECT for key, entry in items_of(value))
    return _DIRECT.issuperset(map(type, entries_of(value)))


def _is_values(value: Any, depth: int = 0) -> bool:
    """Whether it is made of values alone: objects are looked at elsewhere, or are each process's own."""
    kind = type(value)
    if kind in made.DICTS and made.holds_objects(value):
        return False
    if kind in graph.PLAIN or issubclass(kind, (torch.Tensor, np.ndarray, np.generic)) or made.is_made(value):
        return True
    if kind not in graph.CONTAINERS or depth >= graph.NESTED:
        return False
    return all(_is_values(entry, depth + 1) for entry in entries_of(value, signatures.SMALL))


def _numbers_in(value: Any, depth: int = 0) -> int:
    """How many numbers and texts a value holds; more than may be told if there is something else in it."""
    kind = type(value)
    if kind in _DIRECT:
        return 1
    if kind is torch.Tensor:
        fits = not value.requires_grad and memory.is_dense(value) and not value.is_inference()
        return value.numel() if fits else ENTRIES + 1
    if kind is np.ndarray or issubclass(kind, np.generic):
        return ENTRIES + 1 if value.dtype.hasobject else int(value.size)
    if kind not in graph.CONTAINERS or len(value) > ENTRIES or depth > graph.NESTED:
        return ENTRIES + 1
    if kind is dict and not all(type(key) in graph.PLAIN for key in keys_of(value)):
        return ENTRIES + 1
    return sum(_numbers_in(entry, depth + 1) for entry in entries_of(value))


def _packed(name: str, value: Any) -> bytes:
    """A value that is no plain number or text; empty if it is not carried."""
    told = made.tell(value, ENTRIES) if made.is_made(value) else value
    if told is None or (told is value and _numbers_in(value) > ENTRIES):
        return b""
    try:
        return values.encode([told], name)
    except (TypeError, ValueError, RuntimeError):
        return b""


def _fill(frame: FrameType, known: dict[str, Any], names: Names) -> None:
    local, around = frame.f_locals, frame.f_globals
    for name, value in known.items():
        holder, key = (around, name[:-1]) if name.endswith(_DECLARED) else (local, name)
        live: Any = holder.get(key)
        if made.is_told(value):
            value = made.make(value, live)
            if value is graph.MISSING:
                raise UnprovedError(_LACKING.format(key, frame.f_code.co_qualname))
        if value is live:  # filled anew
            continue
        if type(live) in _FILLED and type(value) in (type(live), list):
            live.clear()
            (live.extend if type(value) in (list, deque) else live.update)(value)
        elif name not in names.assigned and isinstance(live, _FILLED_BY_PLACES) and live.shape == value.shape:
            live[...] = value  # others may hold it, too
        else:
            holder[key] = value
    if local is not around:
        _store(frame)


def _store(frame: FrameType) -> None:
    """Before Python 3.13 a function's variables are a copy."""
    if sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
