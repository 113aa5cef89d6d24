"""Signatures: what tells whether a leaf of the graph has changed since the last look, and how large it is."""

from __future__ import annotations

import decimal
import io
import itertools
import queue
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch.nn.parameter import is_lazy

from torchrelay.worker.hardware import raw_memory
from torchrelay.worker.hidden_state import doers, generators, graph, made
from torchrelay.worker.hidden_state.graph import MISSING
from torchrelay.worker.hidden_state.leaves import (
    NEVER_OPENED,
    OF_MEMORY,
    Named,
    attributes_of,
    fields_of,
    is_of_library,
)
from torchrelay.worker.hidden_state.made import Filled, entries_within
from torchrelay.worker.parallel.of_state import is_free, is_of_state
from torchrelay.worker.source.lines import is_of_the_script
from torchrelay.worker.tensors import absent, arguments
from torchrelay.worker.tensors.entries import entries_of, is_drained, items_of
from torchrelay.worker.tensors.memory import is_held, version_of

EACH = 16 << 10  # bytes of one attribute that are carried
SAMPLES = 256  # entries of a large container that are looked at
SMALL = 64  # entries up to which all of them are
WHOLE = 64 << 10  # bytes of an array that is looked at as a whole each time
WHOLE_SELDOM = 64 << 20  # and now and then
LARGEST = 1024  # entries of a Counter and its like that are carried


def signature_of(value: Any) -> tuple[str, Any]:
    """What tells whether a leaf has changed: its kind, and something to compare."""
    kind = type(value)
    if kind in graph.PLAIN:
        return "value", value
    if kind in _TOLD or absent.is_absent(value):
        return _TOLD[kind](value) if kind in _TOLD else ("absent", value.path)
    if raw_memory.is_carried(value):
        return "buffer", xxhash.xxh3_64_digest(raw_memory.bytes_of(value))
    if graph.is_generator(value):
        return "generator", xxhash.xxh3_64_digest(generators.bytes_of(value))
    if made.is_made(value):
        told = made.tell(value, LARGEST)
        return ("object", (kind, id(value), _glance_within(value))) if told is None else ("made", made.shown(told))
    if kind in graph.CONTAINERS and graph.is_plain(value):
        return "container", (kind, len(value), _shown(value))
    if kind in (torch.Tensor, torch.nn.Parameter) and (found := _of_tensor(value)) is not None:
        return "tensor", found
    if kind is np.ndarray and value.flags.owndata and value.flags.writeable and not value.dtype.hasobject:
        return "tensor", (value.shape, arguments.digest(value))
    if issubclass(kind, np.generic) and not value.dtype.hasobject:
        return "number", (kind, value.tobytes())
    if kind in graph.ITERATORS or kind is itertools.cycle:
        return "iterator", (id(value), generators.place_of(value))
    if isinstance(value, (set, frozenset)):  # of a class of its own
        return "object", (kind, id(value), len(value), repr(sorted(map(repr, entries_within(value)))))
    return "object", (kind, id(value), contents(value)) if is_of_library(kind) else (kind, id(value))


def _of_tensor(value: torch.Tensor) -> tuple[Any, ...] | None:
    if type(value) is torch.Tensor and (is_held(value) or made.is_result(value)):
        return value.shape, made.digest(value)
    moved_by_hand = is_free(value) if value.requires_grad else type(value) is torch.Tensor
    if not moved_by_hand:
        return None
    near = value.requires_grad and is_held(value.detach())  # torch does not count what is written by `.data`
    within = made.digest(value.detach()) if near else b""
    return id(value), version_of(value), within


def glance(value: Any, place: object, *, entries_by_ids: bool = False) -> str:
    """What tells whether a value is another one, in next to no time. `place`: where it is, one and the same each time.

    Of a large array a few pieces are looked at, and the whole when it is seen for the 1st, 2nd, 4th, 8th ... time.
    `entries_by_ids`: what is written into the tensors of a container is no matter.
    """
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        return f"{id(value)} {version_of(value)}"
    if issubclass(kind, np.generic) or (issubclass(kind, np.ndarray) and value.dtype.hasobject):
        return f"{id(value)} {value.flat[0] if value.size else None} {value.flat[-1] if value.size else None}"
    if issubclass(kind, np.ndarray):
        return f"{id(value)} {_glance_at_array(value, place) if value.flags.writeable else ''}"
    if kind in graph.CONTAINERS or kind in made.DICTS:
        entries = [*itertools.islice(value, SMALL)]
        if isinstance(value, dict):  # what is written into a key is no matter
            entries = [key if graph.is_plain(key) else id(key) for key in entries] + [value[key] for key in entries]
        elif kind in (list, tuple, deque) and len(value) > SMALL:
            entries += [value[-1], value[-2]]
        return repr((len(value), [_glance_at_entry(entry, by_id=entries_by_ids) for entry in entries]))
    return repr(value) if kind in graph.PLAIN else made.shown(made.tell(value, LARGEST)) if made.is_made(value) else ""


def _glance_at_entry(entry: Any, *, by_id: bool) -> Any:
    if graph.is_plain(entry):
        return entry
    if by_id:
        return id(entry)
    if issubclass(type(entry), torch.Tensor):
        return id(entry), version_of(entry)
    if type(entry) is np.ndarray and entry.nbytes <= WHOLE and not entry.dtype.hasobject:
        return id(entry), _digest_of(entry)
    return id(entry)


def _glance_within(value: Any, depth: int = 0) -> str:
    """What tells whether something has been put in another one's place in a container that cannot be told."""
    if graph.is_plain(value):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"{id(value)} {version_of(value)}"
    if depth > graph.NESTED or not (made.is_made(value) or isinstance(value, (list, tuple, dict, deque))):
        return str(id(value))
    return f"{id(value)}[{', '.join(_glance_within(entry, depth + 1) for entry in made.entries_within(value))}]"


_wholes: dict[object, tuple[int, str]] = {}  # of large arrays: how often they were seen, and the last look at the whole


def _glance_at_array(value: np.ndarray[Any, Any], place: object) -> str:
    if value.nbytes <= WHOLE:
        return _digest_of(value)
    times, whole = _wholes.get(place, (0, ""))
    if times & (times - 1) == 0 and value.nbytes <= WHOLE_SELDOM:
        whole = _digest_of(value)
    _wholes[place] = times + 1, whole
    return whole + _digest_of(value.flat[:: max(1, value.size // SAMPLES)])


def _digest_of(value: np.ndarray[Any, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(value).view(np.uint8).data) if value.nbytes else ""


def _entries(value: Filled) -> tuple[str, Any]:
    here = value.container
    if graph.is_own(here):
        told = value.tell()
        return "entries", (type(here), len(here), _glance_within(here) if told is None else made.shown(told))
    keys = here if isinstance(here, dict) else ()  # what moves in it is looked at by itself
    return "entries", (type(here), len(here), tuple(itertools.islice(map(repr, keys), SMALL)))


_TOLD: dict[type, Callable[[Any], tuple[str, Any]]] = {
    itertools.count: lambda value: ("count", repr(value)),
    Filled: _entries,
    Named: lambda value: ("doer", doers.name_of(value.value)),
}


def _shown(value: Any) -> str:
    """A small container whole; of a large one a part, from all over it."""
    count = len(value)
    if count <= SMALL:
        return repr(sorted(value, key=repr) if type(value) in (set, frozenset) else value)
    if type(value) in (list, tuple):
        return repr([value[at * (count - 1) // (SAMPLES - 1)] for at in range(SAMPLES)])
    if type(value) is deque:
        return repr([value[0], value[1], value[-2], value[-1]])
    if type(value) is dict:
        return repr(items_of(value, SMALL))
    return ""


def is_small(value: Any) -> bool:
    """Whether it may be copied to be put back."""
    kind = type(value)
    if kind is torch.Tensor:
        return is_held(value) and value.nbytes <= EACH
    if kind in graph.CONTAINERS:
        return len(value) <= SMALL and graph.is_plain(value)
    if raw_memory.is_carried(value):
        return raw_memory.size_of(value) <= EACH
    return kind in graph.PLAIN or kind is itertools.count or graph.is_generator(value) or _is_told(value)


def _is_told(value: Any) -> bool:
    return made.is_made(value) and made.tell(value, LARGEST) is not None


def size_of(value: Any) -> int:
    """Bytes that it takes to carry it, roughly."""
    if graph.is_generator(value):
        return 0
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter) or kind is np.ndarray:
        return int(value.size * value.itemsize if kind is np.ndarray else value.numel() * value.element_size())
    if raw_memory.is_carried(value):
        return raw_memory.size_of(value)
    if made.is_made(value):
        return sum(int(each.nbytes) for each in made.arrays_in(value))
    if kind in graph.CONTAINERS:
        return len(repr(value)) if len(value) <= 8 * SMALL else max(EACH + 1, 8 * len(value))
    return len(value) if kind in (str, bytes) else 8


# ---------------------------------------------------------------- objects of libraries

# An environment that is stepped, a scaler that is fitted, a sorted list: what is in them is not carried, being their
# library's own business. Whether it changes can be seen: of attributes, slots and entries, as far as they are values.

NODES = 2048  # that are looked at in one object
SELDOM = 64  # gates after which it is asked again for what the script has not come to
FIRST = 12  # looks in which objects make themselves ready
GLANCED = 4096  # bytes of an array
GLANCES = 8  # of them at which is glanced at a time


class Inside:
    """Objects of libraries that are seen to change: once, as they make themselves ready, or again.

    Whether one made itself ready with what a replacement makes it ready with, too, or was fitted to the data of that
    step, nobody can see. So a replacement has to come to the same contents in its first call.
    """

    def __init__(self) -> None:
        self._here: dict[str, Callable[[], Any]] = {}  # what gives the object that was at a path at the last look
        self._once: dict[str, Callable[[], Any]] = {}
        self._looks = self._gates = self._turn = 0
        self.ready: dict[str, bytes] = {}  # those that changed once, in the first looks: what is in them
        self._expected: dict[str, bytes] = {}  # of the last holder of this rank
        # What was in all of them, at the last look, and when the call began.
        self._last: dict[str, tuple[Callable[[], Any], bytes]] = {}
        self._entry = self._last
        self._found: list[str] = []  # that the last look has seen to change
        self._after_gate: list[str] = []  # the last update has changed them: the record of its gate lacks that
        self._passed: set[str] = set()  # paths of which it is known that they change: no more looks for them
        self._watched: list[Callable[[], Any]] = []
        self._glances: list[Any] = []

    def note(
        self, before: dict[str, Any], now: dict[str, Any], leaves: Mapping[str, graph.Leaf], lacking: dict[str, str]
    ) -> tuple[set[str], set[str]]:
        """Those that have changed between two looks, which are signatures; and those that a replacement will not have.

        What cannot be carried, and nothing can stand for, is put into `lacking`, and said.
        """
        here = _of_libraries(now, leaves)
        known = {path for path in here if path in before and _is_same(before[path], now[path])}
        same = {path for path in known if path not in self._here or self._here[path]() is here[path]}
        found = {path for path in same if before[path] != now[path]}
        self._found = sorted(found)
        again = {path for path in found if path in self._once and self._once[path]() is here[path]}
        late = found - again if self._looks >= FIRST else set()
        self._passed = (self._passed | again | late) & here.keys()
        self._keep(here, now)
        self._once.update((path, self._here[path]) for path in found)
        self._looks += 1
        self.ready.update((path, contents(here[path], whole=True)) for path in found - again - late)
        kept = (same | self._expected.keys()) - again - late
        self.ready = {path: told for path, told in self.ready.items() if path in kept}
        nowhere = {path for path in late if path.startswith(graph.VARIABLE)}
        for path in [path for path, what in lacking.items() if what == absent.LIBRARY and path not in now]:
            del lacking[path]
        for path in (again | nowhere) - lacking.keys():
            lacking[path] = absent.say(path, absent.LIBRARY)
        return found, late - nowhere

    def begin(self, now: dict[str, Any], leaves: Mapping[str, graph.Leaf]) -> None:
        """What has changed up to now means nothing."""
        self._keep(_of_libraries(now, leaves), now)

    def _keep(self, here: dict[str, Any], now: dict[str, Any]) -> None:
        self._here = {path: _reference(thing) for path, thing in here.items()}
        self._last = {path: (self._here[path], now[path][1][2]) for path in here}
        watched = [path for path in here if path not in self._passed]
        self._watched = [self._here[path] for path in watched]
        self._glances = [glance_into(here[path]) for path in watched]

    def has_stirred(self) -> bool:
        """Whether it is time for a look. Asked several times in each call, and so of a few of them in turn."""
        count = len(self._watched)
        begin, self._turn = self._turn, (self._turn + GLANCES) % count if count > GLANCES else 0
        for at in range(begin, min(begin + GLANCES, count)):
            thing = self._watched[at]()
            if thing is not None and glance_into(thing) != self._glances[at]:
                return True
        return False

    def enter(self) -> None:
        """A call begins."""
        self._entry = self._last

    def pass_gate(self) -> None:
        """The record that is made now has all that was seen."""
        self._after_gate = []

    def leave(self) -> list[str]:
        """A call has returned, and was looked at. What is `lacking` is refused in any case.

        Returns what a replacement cannot have made ready at its first gate, as it was made ready behind one.
        """
        self._after_gate = self._found
        behind = [path for path in self._found if path in self.ready and not path.startswith(graph.VARIABLE)]
        for path in behind:
            del self.ready[path]
        return behind

    def rewind(self, leaves: Mapping[str, graph.Leaf]) -> None:
        """The call is made again. Raises `UnprovedError` if it has changed one of them, as far as that can be seen.

        Or if the update before has: whoever takes over has the record of its gate.
        """
        for path in self._after_gate:
            absent.note_lost([path])
            raise absent.refusal(path)
        for path, (reference, told) in self._entry.items():
            thing = reference()
            if thing is not None and path in leaves and leaves[path].value is thing and contents(thing) != told:
                raise absent.in_place(path)

    def expect(self, told: dict[str, bytes]) -> None:
        """What was in those of the last holder of this rank."""
        self.ready, self._expected = dict(told), dict(told)

    def prove(self, find: Callable[[], Mapping[str, graph.Leaf]]) -> None:
        """On a replacement, at a gate. Raises `UnprovedError` if one is otherwise here.

        What the script has not come to yet is asked for again.
        """
        self._gates += 1
        asks = self._expected and (self._gates <= FIRST or self._gates % SELDOM == 0)
        leaves = find() if asks else {}
        for path, told in list(self._expected.items()):
            if path in leaves:
                del self._expected[path]
                if contents(leaves[path].value, whole=True) != told:
                    raise absent.not_ready(path)


def _of_libraries(now: dict[str, Any], leaves: Mapping[str, graph.Leaf]) -> dict[str, Any]:
    signs = ((path, sign[1]) for path, sign in now.items() if sign[0] == "object" and len(sign[1]) == 3)
    here = {path: leaves[path].value for path, (*_, told) in signs if type(told) is bytes}
    return {path: thing for path, thing in here.items() if is_of_library(type(thing))}


def _is_same(before: Any, now: Any) -> bool:
    """Whether the ids tell of one object."""
    return bool(before is not MISSING and before[0] == now[0] and before[1][:2] == now[1][:2])


def _reference(thing: Any) -> Callable[[], Any]:
    """What gives it as long as it is there. Another object may get its id when it is gone."""
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: thing


def contents(thing: Any, *, whole: bool = False) -> bytes:
    """A digest of what is in it: equal as long as no value in it changes. No method of it is called.

    `whole`: one that is equal in another process, too; large tensors are read for it.
    """
    sums = xxhash.xxh3_128()
    known: set[int] = set()
    waiting: deque[Any] = deque([thing])
    for _ in range(NODES):
        if not waiting:
            break
        value = waiting.popleft()
        if id(value) in known:
            continue
        try:
            told, inside = (_shown_plain(value), ()) if type(value) in graph.PLAIN else _opened(value, whole)
        except _ODD:  # no more is known of it
            continue
        if type(value) not in graph.PLAIN:
            known.add(id(value))
        sums.update(f"{type(value).__qualname__} {told}".encode(errors="replace"))
        waiting.extend(itertools.islice(inside, NODES))
    return sums.digest()


def glance_into(thing: Any, depth: int = 0) -> Any:
    """What tells in some microseconds that it has changed, in most cases: nothing is held by it."""
    fields = attributes_of(thing)
    if not fields:
        return contents(thing) if is_of_library(type(thing)) else id(thing)
    found: list[Any] = [_count(thing)]
    for _, value in items_of(fields, SMALL):
        kind = type(value)
        if issubclass(kind, np.generic):
            found.append(None if value.dtype.hasobject else value.tobytes())
        elif kind in graph.PLAIN:
            found.append(value)
        elif issubclass(kind, torch.Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                found += [id(value), 0 if is_lazy(value) else version_of(value)]
        elif kind is np.ndarray:
            found += [id(value), b"" if value.dtype.hasobject or value.nbytes > GLANCED else value.tobytes()]
        elif depth < 2 and is_of_library(kind):
            found.append(glance_into(value, depth + 1))
        else:
            found += [id(value), _count(value)]
    return found


def _count(value: Any) -> int:
    base = next((each for each in graph.CONTAINERS if issubclass(type(value), each)), None)
    return 0 if base is None else base.__len__(value)


_ODD = (ArithmeticError, AttributeError, BufferError, LookupError, RuntimeError, TypeError, ValueError)
_walked: set[int] = set()  # ids of objects at which the walk has looked itself


def walked(objects: Iterable[Any]) -> None:
    """What is looked at by itself is no part of what refers to it, such as the trainer that has a callback."""
    _walked.clear()
    _walked.update(map(id, objects))


def _shown_plain(value: Any) -> str:
    if type(value) in (str, bytes):
        return repr(value[:WHOLE])
    return hex(value) if type(value) is int else repr(value)  # decimal digits of a huge one are refused


def _opened(value: Any, whole: bool) -> tuple[str, Iterable[Any]]:
    """What tells of it alone, and what is in it."""
    kind = type(value)
    if issubclass(kind, (torch.Tensor, np.ndarray)):
        with torch._C.DisableTorchFunctionSubclass():  # a class of the script's may have one
            return _of_array(value, whole)
    if graph.is_generator(value):
        return xxhash.xxh3_64_hexdigest(generators.bytes_of(value)), ()
    if kind in graph.ITERATORS:
        return generators.place_of(value), ()
    base = next((each for each in graph.CONTAINERS if issubclass(kind, each)), None)
    if base is None:
        return _of_python(value)
    count = str(base.__len__(value))
    if base in (set, frozenset):
        return count + repr(sorted(map(repr, filter(graph.is_plain, entries_of(value, SMALL))))), ()
    if base is dict:
        return count, [each for pair in items_of(value, SMALL) for each in pair] + fields_of(value, NODES)
    return count, entries_of(value, NODES) + fields_of(value, NODES)


def _of_array(value: Any, whole: bool) -> tuple[str, Iterable[Any]]:
    if isinstance(value, np.ndarray):
        plain = np.asarray(value)
        if plain.dtype.hasobject:
            return str(plain.shape), [*itertools.islice(plain.flat, NODES), *fields_of(value, NODES)]
        if plain.base is not None and _is_view_of_state(plain):
            return "of the state", ()
        piece = plain if plain.nbytes <= WHOLE else plain.flat[:: max(1, plain.size // SAMPLES)]
        return f"{plain.shape} {_digest_of(piece)}", fields_of(value, NODES)
    if value.requires_grad or (value.layout == torch.strided and is_of_state(value)):
        return "of the state", ()
    if whole:
        return f"{value.shape} {xxhash.xxh3_64_hexdigest(arguments.digest(value))}", ()
    small = is_held(value) and value.nbytes <= WHOLE
    told = xxhash.xxh3_64_hexdigest(made.digest(value)) if small else str(id(value))
    return f"{value.shape} {version_of(value)} {told}", ()


def _is_view_of_state(array: np.ndarray[Any, Any]) -> bool:
    try:
        return is_of_state(torch.from_numpy(array))
    except (TypeError, ValueError):  # of a kind that torch does not have
        return False


def _of_python(value: Any) -> tuple[str, Iterable[Any]]:
    kind = type(value)
    if isinstance(value, io.BytesIO):
        data = io.BytesIO.getvalue(value)
        return str((io.BytesIO.tell(value), len(data), data[-WHOLE:])), ()
    if isinstance(value, queue.Queue):
        return "", () if is_drained(value) else entries_of(value.queue, NODES)
    if isinstance(value, np.random.SeedSequence):
        return str(value.state), ()
    if isinstance(value, (raw_memory.Block, *OF_MEMORY)):
        return raw_memory.digest(value), ()
    if isinstance(value, decimal.Context):  # not its flags, which say what it was used for
        return str((value.prec, value.rounding, value.Emin, value.Emax)), ()
    if kind in raw_memory.GROWING:
        return xxhash.xxh3_64_hexdigest(bytes(value[:WHOLE])), ()
    counts = is_of_library(kind) or (
        is_of_the_script(kind) and id(value) not in _walked and not isinstance(value, NEVER_OPENED)
    )
    return "", fields_of(value, NODES) if counts else ()
