"""Told: how a value that is kept in a place is told, copied, and put there again."""

from __future__ import annotations

import ast
import copy
import itertools
import re
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from torchrelay.errors import RefusedError
from torchrelay.worker.hardware import raw_memory
from torchrelay.worker.hidden_state import doers, generators, graph, made
from torchrelay.worker.hidden_state.graph import MISSING, STANDS, Leaf
from torchrelay.worker.hidden_state.leaves import ENTRIES, Named, NamedLeaf, Within, is_of_a_module, is_of_library
from torchrelay.worker.hidden_state.made import LONGEST, PLAIN, WIDTH, Filled, are_same, is_small_array
from torchrelay.worker.hidden_state.signatures import EACH, LARGEST, is_small, signature_of, size_of
from torchrelay.worker.parallel.of_state import is_free, is_of_state
from torchrelay.worker.source.names import declared_globals
from torchrelay.worker.tensors import absent, memory, values
from torchrelay.worker.tensors.entries import entries_of, items_of, keys_of
from torchrelay.worker.tensors.memory import version_of

_COUNT = "itertools.count"
# In the place of what was there at first: a tensor, one that requires a gradient, a parameter.
_REPLACED, _TRAINED, _PARAMETER = "torchrelay replaced", "torchrelay trained", "torchrelay parameter"
_TRAINS = "torchrelay trains"  # it is the tensor of the start, and requires a gradient
SAME = "torchrelay same"  # as the tensor at another path
_ENTRIES, _BUFFER = "torchrelay entries", "torchrelay buffer"


# Path, value, whether it is encoded, whether it was seen to move.
decode = msgspec.msgpack.Decoder(list[tuple[str, Any, bool, bool]]).decode
_parted = msgspec.msgpack.Decoder(list[tuple[str, msgspec.Raw, bool, bool]]).decode


def put_back(remembered: list[tuple[Leaf, Any, Any]]) -> None:
    """Put back what `moving.Moving.remember` has told."""
    for leaf, told, reference in remembered:
        restored = bring_back(leaf, reference)
        live = leaf.read()
        if type(told) is not list:
            if live is not told:
                leaf.put(told)
        elif len(told) == 2 or not are_same(signature_of(live), signature_of(told[0])):
            taken = take(leaf, told, in_place=restored)
            if not taken and told[0] == _BUFFER:
                raise absent.in_place(leaf.path)


def remembered(leaves: Iterable[Leaf]) -> list[tuple[Leaf, Any, Any]]:
    """Copies of what is small, and references to what else steps may replace."""
    here = list(leaves)
    small = [leaf for leaf in here if is_small(leaf.value) and not raw_memory.is_shared(leaf.value)]
    found = [(leaf, copied(leaf.value), _way_back(leaf.value)) for leaf in small]
    large = [leaf for leaf in here if leaf.holder is not None and _may_be_replaced(leaf.value)]
    return [*found, *((leaf, leaf.value, None) for leaf in large)]


def reference(value: Any) -> Any:
    """What finds this very tensor again as long as there is one; None for anything else."""
    return weakref.ref(value) if type(value) in (torch.Tensor, np.ndarray) else None


def _way_back(value: Any) -> Any:
    """The same for a call; of memory that is carried, too."""
    return (lambda: value) if raw_memory.is_carried(value) else reference(value)


def bring_back(leaf: Leaf, to: Any) -> bool:
    """Let the tensor that was there before be there again; returns whether it is: it may be nowhere any more."""
    before = None if to is None else to()
    return before is not None and (leaf.read() is before or leaf.put(before))


def is_copied(value: Any) -> bool:
    """Whether it is a container of values, and nothing else."""
    if made.is_made(value):
        return made.tell(value, LARGEST) is not None
    return type(value) in graph.CONTAINERS and graph.is_plain(value)


def copied(value: Any) -> Any:
    """What of it is kept to be put back."""
    if graph.is_generator(value):
        return [generators.kind_of(value), generators.state_of(value)]
    if type(value) is itertools.count:
        return [_COUNT, generators.place_of_count(value)]
    if type(value) is torch.Tensor:
        memory.settle(value)
        return [value.clone()]
    if raw_memory.is_carried(value):
        return [_BUFFER, raw_memory.bytes_of(value)]
    # Anything else in a container is no copy: a layer, a lock, a file.
    return [copy.deepcopy(value)] if is_copied(value) else value


def is_large(leaf: Leaf) -> bool:
    """Whether there is more in it than is carried."""
    return size_of(leaf.value) > EACH


def can_be_told(value: Any) -> bool:
    """Whether a value of a kind that is told is one still: it may have grown, or have got something else in it."""
    if type(value) is Filled:
        return value.tell() is not None
    if isinstance(value, torch.Tensor):
        return memory.refusal(value) is None
    return not made.is_made(value) or made.tell(value, LARGEST) is not None


def tell(path: str, value: Any, *, replaced: bool = False) -> bytes:
    """`replaced`: it is not the tensor that was there at first, and a replacement must not write into that one."""
    generator = graph.is_generator(value)
    if type(value) is itertools.count:
        return values.encode([_COUNT, generators.place_of_count(value)], path)
    if type(value) is Filled:
        return values.encode([_ENTRIES, value.tell()], path)
    if raw_memory.is_carried(value):
        return values.encode([_BUFFER, raw_memory.bytes_of(value)], path)
    try:
        if isinstance(value, torch.Tensor):
            memory.settle(value)
        trained = isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf
        if replaced or trained:
            kind = (_PARAMETER if isinstance(value, torch.nn.Parameter) else _TRAINED) if trained else _REPLACED
            return values.encode([kind if replaced else _TRAINS, value], path)
        found = made.tell(value, LARGEST) if made.is_made(value) else value
        return values.encode([generators.kind_of(value), generators.state_of(value)] if generator else [found], path)
    except TypeError as error:
        raise RefusedError(
            str(error), "keep numbers, texts, tensors, and lists or dicts of them in attributes"
        ) from error


def before(seen: dict[str, Any], path: str) -> Any:
    """What was there at the last look; in the place of a function it may have been a value."""
    return seen.get(path, seen.get(path.removesuffix(STANDS), MISSING))


def _may_be_replaced(value: Any) -> bool:
    """Whether it is no small value, and none that is found anew for each call, and holds tensors or arrays."""
    kind = type(value)
    if kind is Filled or kind is Named or kind is list or is_small(value) or isinstance(value, torch.nn.Module):
        return False
    return made.holds_arrays(value)


def is_nothing(before: Any) -> bool:
    """Whether there was nothing at the last look."""
    return before is MISSING or bool(before == ("value", None))


def may_count(doer: Any, before: Any, *, ready: bool) -> bool:
    """Whether one that has come into a place is to be told. `ready`: the script has made some calls."""
    none_yet = before is MISSING or before[0] != "doer"
    if none_yet and isinstance(doer, torch.nn.Module):
        return False
    # What cannot be had may be made by a library, or by the script as it gets ready: a replacement does so, too.
    is_function = doers.is_function(doer) or doers.is_row(doer) or type(doer) is tuple
    return doers.can_be_had(doer) or (before is not MISSING and ready and (is_function or not none_yet))


def tell_doer(path: str, doer: Any, first: str) -> bytes:
    """`first`: where it was told first; functions are found by their names each time."""
    same = first != path and not doers.is_function(doer)
    return values.encode([SAME, first] if same else [doers.tell(doer)], path)


def take_doer(leaf: Leaf, told: Any, objects: list[Any]) -> bool:
    """Let it stand in this place; returns whether it can be had."""
    live = leaf.thing() if type(leaf) is NamedLeaf else leaf.read()
    found = doers.make(told, live, objects)
    return found is not MISSING and (found is live or leaf.put(found))


def is_global(absent: Leaf) -> bool:
    """Whether it is a variable of a module that functions of it assign."""
    return type(absent.holder) is dict and absent.name in declared_globals(absent.holder)


def places_of(known: Iterable[Any]) -> set[Any]:
    """Where these tensors lie, and those in dicts."""
    found = [each for one in known for each in (entries_of(one) if isinstance(one, dict) else [one])]
    return {memory.place(each) for each in found if isinstance(each, torch.Tensor)}


def differing(*records: bytes, kept: Collection[str]) -> set[str]:
    """Paths of what is kept, of which two records tell different things; of a row all its entries."""
    before, after = ({path: bytes(value) for path, value, *_ in _parted(one)} if one else {} for one in records)
    found = {path for path in before.keys() | after.keys() if before.get(path, MISSING) != after.get(path, MISSING)}
    others = [path.removesuffix(FRAME) for path in found if path not in kept]
    rows = tuple(f"{path.rpartition('[')[0] if path.endswith(']') else path}[" for path in others)
    return {path for path in kept if path in found or path.startswith(rows)}


def _take_kind(leaf: Leaf, live: Any, kind: Any, told: Any) -> bool:
    if kind == _ENTRIES:
        return type(live) is Filled and live.fill(told)
    if kind == made.RESULT:
        return leaf.put(made.result_of(told, leaf.path))
    if kind == _BUFFER:
        return raw_memory.is_carried(live) and raw_memory.fill(live, told)
    if kind == _COUNT:
        return type(live) is itertools.count and generators.count_on(leaf, live, *told)
    if not graph.is_generator(live) or generators.kind_of(live) != kind:
        return False
    generators.put_state(live, told)
    return True


def take(leaf: Leaf, told: Any, *, in_place: bool | None = None) -> bool:
    """Give the leaf this value; returns whether that is possible.

    `in_place`: whether the tensor that is there is the one of which it was told, and is written to. Any other may be
    known elsewhere as something else: a row of a table. None: it is if the tensor of the start was never replaced.
    """
    kind = told[0] if type(told) is list and len(told) == 2 and type(told[0]) is str else ""
    replaced = kind in (_REPLACED, _TRAINED, _PARAMETER)
    if replaced or kind == _TRAINS:
        value = told[1] if kind == _REPLACED else told[1].requires_grad_()
        told = [torch.nn.Parameter(value) if kind == _PARAMETER else value]
    is_tensor = type(told) is list and len(told) == 1 and isinstance(told[0], (torch.Tensor, np.ndarray))
    if is_tensor and (replaced if in_place is None else not in_place) and leaf.put(told[0]):
        return True
    live = leaf.read()
    if type(told) is list and len(told) == 2:
        return _take_kind(leaf, live, *told)
    value = told[0] if type(told) is list else told
    is_tensor = isinstance(value, torch.Tensor) and type(live) in (torch.Tensor, torch.nn.Parameter)
    if is_tensor and memory.fill(live, value):
        if live.is_leaf and live.requires_grad != value.requires_grad and (value.requires_grad or is_free(live)):
            live.requires_grad_(value.requires_grad)
        return True
    if isinstance(value, np.ndarray) and type(live) is np.ndarray and live.shape == value.shape:
        np.copyto(live, value)
        return True
    if made.is_told(value):
        value = made.make(value, live)
        return value is not MISSING and (value is live or leaf.put(value))
    if type(live) is type(value) and type(value) in made.DICTS:
        live.clear()
        for key, entry in value.items():
            live[key] = entry
        return True
    if type(live) is type(value) and type(value) in (list, dict, set, deque):
        # In place: it may be known elsewhere, too.
        live.clear()
        (live.extend if type(value) in (list, deque) else live.update)(value)
        return True
    return leaf.put(value)


# ---------------------------------------------------------------- frames

# Which entries a container has of which some are told, so that a replacement has those places, too. A list may have
# grown, and an attribute that was None may hold a tuple of tensors, as the hidden state of an LSTM. What is put into
# such a place is told by itself; but a long row of small tensors, such as losses, as one.

FRAME = " holds"  # ends the path of what is told here
_last = re.compile(r"(.+?)(\.\w+|\[[^\[\]]*\])")
_entry = re.compile(r"(.+)\[(\d+|'[^']*')\]$")
_KEYS = frozenset({str, int})
_KINDS: dict[str, type] = {kind.__name__: kind for kind in (list, tuple, deque, dict)}


def of_entries(leaves: Iterable[Leaf]) -> tuple[dict[str, list[Any]], dict[str, Leaf]]:
    """By the path of each container that has one of these, its class and its keys; and the rest of its small entries.

    An entry may have come since the last look at all of them.
    """
    found: dict[str, list[Any]] = {}
    more: dict[str, Leaf] = {}
    for leaf in leaves:
        within = type(leaf.name) is Within
        container = leaf.whole().read() if within else leaf.holder
        end = f"[{(leaf.name.at if within else leaf.name)!r}]"
        path = leaf.path.removesuffix(end)
        if path + FRAME in found or type(container) not in _KINDS.values() or not leaf.path.endswith(end):
            continue
        keys = keys_of(container) if type(container) is dict else list(range(len(container)))
        if len(keys) > WIDTH and (row := _stacked(container)) is not None:
            found[path + FRAME] = [*_kind_of(container), len(keys), values.encode(row, path)]
        elif len(keys) <= WIDTH and _KEYS.issuperset(map(type, keys)):
            found[path + FRAME] = [*_kind_of(container), keys, b""]
            more.update((each.path, each) for each in _row(path, leaf, container))
    return found, more


def is_told(row: Any) -> bool:
    """Whether all entries of a row are."""
    values = entries_of(row)
    few = len(values) <= WIDTH and all(type(one) in PLAIN or is_small_array(one) for one in values)
    return few or _stacked(row) is not None


def _kind_of(container: Any) -> tuple[str, int | None]:
    return type(container).__name__, getattr(container, "maxlen", None)


def _row(path: str, one: Leaf, container: Any) -> Iterator[Leaf]:
    row = items_of(container) if type(container) is dict else enumerate(entries_of(container))
    for at, value in row:
        is_told = type(value) in PLAIN or is_small_array(value) or made.is_result(value)
        if is_told or (made.is_made(value) and can_be_told(value)):
            within = type(one.name) is Within
            yield Leaf(f"{path}[{at!r}]", one.holder, Within(one.name.name, at) if within else at, value)


def _stacked(container: Any) -> torch.Tensor | None:
    """All entries as one tensor, if they are small tensors of one kind."""
    row = entries_of(container)
    first = row[0]
    alike = len(row) <= LONGEST and all(
        type(each) is torch.Tensor and is_small_array(each) and (each.shape, each.dtype) == (first.shape, first.dtype)
        for each in row
    )
    return torch.stack(row) if alike and first.numel() <= WIDTH else None


def entry(path: str, find: Callable[[str], Leaf | None]) -> Leaf | None:
    """The entry of a container that is a value as a whole, or has just been put there."""
    match = _entry.match(path)
    above = find(match[1]) if match is not None else None
    if match is None or above is None:
        return None
    container, key = above.read(), ast.literal_eval(match[2])
    if type(container) not in _KINDS.values() or key not in _entries(container):
        return None
    if isinstance(container, (tuple, deque)):
        return Leaf(path, above.holder, Within(above.name, key), container[key])
    return Leaf(path, container, key, container[key])


def make(entries: list[Any], find: Callable[[str], Leaf | None]) -> list[Any]:
    """Make the places in containers, as `find` finds these; returns the entries that are to be put there."""
    told = {path: value for path, value, *_ in entries}
    places = {path.removesuffix(FRAME) for path in told}
    for path in sorted((path for path in told if path.endswith(FRAME)), key=len):  # outer ones first
        leaf = find(path.removesuffix(FRAME))
        if leaf is not None and told[path][3]:
            _fill(leaf, told[path], list(values.decode(told[path][3]).unbind()))
        elif leaf is not None:
            _put(leaf, told[path], places)
    return [one for one in entries if not one[0].endswith(FRAME)]


def _put(leaf: Leaf, told: Any, paths: Collection[str]) -> None:
    """Make the places there if all that are missing are among the `paths` that are told; else leave all as it is."""
    kind, path, keys = _KINDS[told[0]], leaf.path.removesuffix(FRAME), told[2]
    live = leaf.read()
    there = _entries(live) if type(live) is kind else {}
    if list(there) == keys or not all(key in there or f"{path}[{key!r}]" in paths for key in keys):
        return
    # Something is put in each of these places at once.
    wanted = {key: there.get(key, object()) for key in keys}
    if type(live) is dict and kind is dict:
        live.clear()
        live.update(wanted)
    elif kind is dict:
        leaf.put(wanted)
    else:
        _fill(leaf, told, list(wanted.values()))


def _fill(leaf: Leaf, told: Any, row: list[Any]) -> None:
    live, kind = leaf.read(), _KINDS[told[0]]
    if type(live) is kind and isinstance(live, (list, deque)):
        live.clear()
        live.extend(row)
    else:
        leaf.put(deque(row, told[1]) if kind is deque else kind(row))


def _entries(container: Any) -> dict[Any, Any]:
    return dict(container) if type(container) is dict else dict(enumerate(container))


# ---------------------------------------------------------------- what cannot be told

# What steps put in the place of what was there, and what is not carried: too large, or holds what a graph or a device
# has. A replacement has an `Absent` there, and a call that is made again finds what it found.


MOST = 256  # places that a record names


class Untold:
    """The places of such values."""

    def __init__(self) -> None:
        self.paths: dict[str, None] = {}
        self.young: dict[str, int] = {}  # came up in the last call that was looked at: a cache, or the first of many
        self._calls = 0
        self._places: list[Leaf] = []

    def __len__(self) -> int:
        return len(self.paths) + len(self.young)

    def all(self) -> list[str]:
        """Those of which it is not known that they are caches; at most `MOST`."""
        return [*self.paths, *self.young][:MOST]

    def enter(self) -> None:
        """A call begins that is looked at."""
        self._calls += 1

    def settle(self) -> None:
        """Such a call is looked at: what came up in the one before is a cache if it is still the same."""
        self.young = {path: call for path, call in self.young.items() if call == self._calls}

    def note(self, path: str, value: Any, *, is_first: bool, is_another: bool) -> None:
        """A call has changed what is there, and it is not kept. `is_another`: it is not the object that was there."""
        if path.startswith(graph.VARIABLE) or type(value) is Named or path in self.paths:
            return
        value = value.container if type(value) is Filled else value
        arrays = list(itertools.islice(made.arrays_in(value), WIDTH))
        kind = type(value)
        fixed = issubclass(kind, (tuple, set, frozenset, types.MappingProxyType))
        rest = not is_first and ((kind in graph.CONTAINERS and is_another) or (fixed and kind not in graph.CONTAINERS))
        tensors = [each for each in arrays if isinstance(each, torch.Tensor) and each.grad_fn is None]
        is_known = any(is_of_state(each) and not is_free(each) for each in tensors)
        if (arrays or rest or is_of_library(kind)) and not is_known:
            self.young.pop(path, None)
            if is_first:
                self.young[path] = self._calls
            else:
                self.paths[path] = None

    def find(self, leaves: Mapping[str, Leaf], *new: str) -> None:
        """Where they are: each, and whatever it is in, as that may be another one after a call. `new`: more paths."""
        self.paths.update(dict.fromkeys(new))
        found: dict[tuple[int, str], Leaf] = {}
        for path in (*self.paths, *self.young):
            for place in _ways(path):
                leaf = leaves.get(place) or leaves.get(place + STANDS) or leaves.get(place + ENTRIES)
                if leaf is not None and leaf.holder is not None and type(leaf.name) is not Within:
                    key = id(leaf.holder), repr(leaf.name)
                    found.setdefault(key, Leaf(place, leaf.holder, leaf.name, None))
        self._places = sorted(found.values(), key=lambda leaf: len(leaf.path))

    def here(self) -> list[There]:
        """What is there now, to be put back."""
        return [There(leaf, value) for leaf in self._places if (value := leaf.read()) is not MISSING]


class There:
    """What stood in a place."""

    __slots__ = ("_arrays", "_entries", "_leaf", "_value")

    def __init__(self, leaf: Leaf, value: Any) -> None:
        self._leaf, self._value = leaf, value
        is_own = made.is_own(type(value)) or isinstance(value, set)
        self._entries = list(made.pairs(value)) if is_own else None
        arrays = made.arrays_in(value) if made.is_made(value) or self._entries is not None else ()
        self._arrays = [(one, version_of(one)) for one in arrays if isinstance(one, torch.Tensor)]

    def put_back(self) -> None:
        """Let it stand there again. Raises `UnprovedError` if it was changed where it lies."""
        if self._leaf.read() is not self._value:
            self._leaf.put(self._value)
        if self._entries is not None:
            made.refill(self._value, self._entries)
        if any(version_of(one) != version for one, version in self._arrays):
            raise absent.in_place(self._leaf.path)


def _ways(path: str) -> Iterator[str]:
    """It, and what it is in, outwards."""
    place = path.removesuffix(ENTRIES).removesuffix(STANDS)
    while place:
        yield place
        match = _last.fullmatch(place)
        place = "" if match is None else match[1]


def put_absent(path: str, find: Callable[[str], Leaf | None]) -> bool:
    """Let nothing be in this place, or in the innermost one around it that there is; returns whether there is one."""
    nothing = absent.Absent(path.removesuffix(ENTRIES))
    for place in _ways(path):
        leaf = find(place)
        if leaf is not None and type(leaf) is not NamedLeaf and not is_of_a_module(leaf) and leaf.put(nothing):
            return True
        match = _entry.match(place)
        above = find(match[1]) if match is not None else None
        if match is not None and above is not None and type(above.read()) is dict:
            above.read()[ast.literal_eval(match[2])] = nothing
            return True
    return False
