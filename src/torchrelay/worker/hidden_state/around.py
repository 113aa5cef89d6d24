"""Around: what a step function uses from around it, and copies of a model that a script keeps there.

It uses variables of outer functions, globals, its own `self`.
Functions of the script that it calls are gone through, too, as far as they are found by their names; so are hooks of
modules, how they compute, and what classes keep in attributes of their own. Libraries are not.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from torchrelay.worker.hidden_state import graph, made, variables
from torchrelay.worker.hidden_state.doers import is_function
from torchrelay.worker.hidden_state.graph import (
    STANDS,
    VARIABLE,
    Leaf,
    of_attributes,
    of_class,
    of_module,
    told_apart,
    variables_of,
)
from torchrelay.worker.hidden_state.leaves import NamedLeaf, is_value
from torchrelay.worker.parallel.shards import is_shard
from torchrelay.worker.source.lines import is_library, is_of_the_script
from torchrelay.worker.source.names import asked_for, attributes_set, functions_in
from torchrelay.worker.tensors import memory
from torchrelay.worker.tensors.entries import entries_of, items_of

MAX_FUNCTIONS = 4096
MAX_OBJECTS = 256  # that are gone through for their classes
RESULTS = 8  # of a cached function that are looked at
_CACHED = type(functools.lru_cache(lambda: None))
_ROWS = (list, tuple, dict)
_OF_LIBRARIES = (types.ModuleType, type, types.FunctionType)
_ELSEWHERE = (types.ModuleType, type)  # looked at in another way, or not at all


def variables_around(functions: Iterable[Any]) -> Iterator[Leaf]:
    """The variables, each once; a variable that has no value yet has `MISSING`."""
    roots, waiting = deque(functions), deque[Any]()
    known: set[tuple[int, ...]] = set()
    classes: set[type] = set()
    selves: dict[str, list[int]] = {}
    made = Counter[str]()  # functions of each name: a decorator makes many
    named: dict[str, list[tuple[int, Any]]] = {}
    elsewhere = _Elsewhere()
    while (roots or waiting) and len(known) < MAX_FUNCTIONS:
        # All that a step calls comes before what is under way: that is not the same in every process at any time, and
        # those of one name are numbered.
        one = (waiting or roots).popleft()
        if isinstance(one, functools.partial):
            yield from _of_partial(one, made)
            waiting.append(one.func)
            continue
        if isinstance(one, types.MethodType):
            path = f"self of {one.__func__.__qualname__}"
            others = selves.setdefault(path, [])
            others += [] if id(one.__self__) in others else [id(one.__self__)]
            number = others.index(id(one.__self__))
            yield Leaf(f"{path} ({number + 1})" if number else path, None, None, one.__self__)
            waiting += _classes_in(one.__self__)
            one = one.__func__
        if isinstance(one, type):
            if one not in classes and is_of_the_script(one):
                classes.add(one)
                yield from of_class(one)
                waiting += [*functions_in(one), *(each for each in list(vars(one).values()) if isinstance(each, type))]
            continue
        if not isinstance(one, types.FunctionType) or is_library(one.__code__.co_filename):
            continue
        which = (id(one.__code__), *map(id, one.__closure__ or ()))
        if which in known:
            continue
        known.add(which)
        yield from of_attributes(one, f"{one.__qualname__}()", made[one.__qualname__])
        made[one.__qualname__] += 1
        elsewhere.add(one)
        for leaf in variables_of(one):
            yield from _doer(leaf, named)
            if isinstance(leaf.value, (types.FunctionType, types.MethodType, functools.partial, type)):
                waiting.append(leaf.value)
            elif isinstance(leaf.value, _CACHED):
                yield from _of_cache(leaf, named)
            else:
                for found in _asked_of(leaf.value, one) if isinstance(leaf.value, types.ModuleType) else [leaf]:
                    yield from _of_variable(found, named, waiting)
    yield from elsewhere.leaves()


def _of_partial(one: functools.partial[Any], made: Counter[str]) -> Iterator[Leaf]:
    path = f"arguments of {getattr(one.func, '__qualname__', '')}"
    yield Leaf(path, None, None, [*one.args, one.keywords])
    yield from of_attributes(one, path, made[path])
    made[path] += 1


class _Elsewhere:
    """What functions set on modules, classes and functions of libraries: `torch.seen = 1`, `F.relu = mine`."""

    def __init__(self) -> None:
        self._things: dict[int, tuple[Any, set[str]]] = {}  # by id, with the names that are set

    def add(self, function: types.FunctionType) -> None:
        """What this one sets, on what it names: by attributes of one another, too, and what it imports itself."""
        names = attributes_set(function.__code__)
        if not names:
            return
        asked, imported = asked_for(function.__code__)
        values = [leaf.value for leaf in variables_of(function)]
        rows = (entries_of(value, made.WIDTH) for value in values if type(value) in _ROWS)
        waiting = [*values, *(each for row in rows for each in row)]
        waiting += [sys.modules[name] for name in imported if name in sys.modules]
        seen = set[int]()
        while waiting and len(seen) < MAX_OBJECTS:
            thing = waiting.pop()
            if id(thing) in seen or not issubclass(type(thing), _OF_LIBRARIES) or _is_own(thing):
                continue
            seen.add(id(thing))
            self._things.setdefault(id(thing), (thing, set()))[1].update(names)
            here = graph.names_of(thing)
            waiting += [value for name in sorted(asked & here.keys()) if (value := here[name]) is not thing]

    def leaves(self) -> Iterator[Leaf]:
        """Each once, with what is there of these names."""
        for thing, names in self._things.values():
            here = graph.names_of(thing)
            path = here.get("__name__") if isinstance(thing, types.ModuleType) else f"{thing.__module__}.{_name(thing)}"
            holder = thing if isinstance(thing, type) else here
            if type(path) is not str:
                continue
            yield Leaf(path, holder, graph.HOLDER, graph.MISSING)
            for name in sorted(names & here.keys()):
                value = here[name]
                if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
                    yield NamedLeaf(f"{path}.{name}{STANDS}", holder, name, value)
                elif is_value(value) or is_of_the_script(type(value)):
                    yield Leaf(f"{path}.{name}", holder, name, value)


def _name(thing: Any) -> str:
    return str(type.__getattribute__(thing, "__name__") if isinstance(thing, type) else thing.__qualname__)


def _is_own(thing: Any) -> bool:
    if isinstance(thing, types.ModuleType):
        return graph.is_own_module(thing)
    return is_of_the_script(thing) if isinstance(thing, type) else not is_library(thing.__code__.co_filename)


def _of_variable(leaf: Leaf, named: dict[str, list[tuple[int, Any]]], waiting: deque[Any]) -> Iterator[Leaf]:
    """One that is no function; what its class does is waiting from now on."""
    if is_function(leaf.value):
        waiting.append(leaf.value)
        yield from _doer(leaf, named)
    elif not issubclass(type(leaf.value), _ELSEWHERE) and not is_own_loader(type(leaf.value)):
        yield leaf if leaf.name is graph.HOLDER else told_apart(leaf, named)
        waiting.extend(_classes_in(leaf.value))


def is_own_loader(kind: type) -> bool:
    """Whether a DataLoader is of a class of the script's, which is looked at in another way."""
    return issubclass(kind, DataLoader) and is_of_the_script(kind)


def _asked_of(module: types.ModuleType, function: types.FunctionType) -> Iterator[Leaf]:
    """What a module of the script has of values, and what a function asks it for by name, or modules within it."""
    waiting, seen = [module], set[int]()
    while waiting:
        here = waiting.pop()
        if id(here) in seen or not graph.is_own_module(here):
            continue
        seen.add(id(here))
        yield from (
            leaf for leaf in of_module(here) if leaf.name is graph.HOLDER or leaf.name not in function.__code__.co_names
        )
        for name in function.__code__.co_names:
            value = vars(here).get(name, graph.MISSING)
            if isinstance(value, types.ModuleType):
                waiting.append(value)
            elif value is not graph.MISSING:
                yield Leaf(f"{name} of {here.__name__}", vars(here), name, value)


def _classes_in(thing: Any) -> list[type]:
    """The classes of an object of the script, and of those that it holds: their methods use what is around them."""
    waiting, found = deque([(thing, 0)]), dict[type, None]()
    seen: set[int] = set()
    while waiting and len(seen) < MAX_OBJECTS:
        one, depth = waiting.popleft()
        kind = type(one)
        if id(one) in seen or depth > DEPTH:
            continue
        seen.add(id(one))
        if kind in (list, tuple, dict):
            waiting.extend((each, depth + 1) for each in entries_of(one, made.WIDTH))
        elif is_of_the_script(kind) and not issubclass(kind, (type, torch.nn.Module)):
            found[kind] = None
            waiting.extend((each, depth + 1) for each in entries_of(graph.attributes_of(one) or {}))
    return list(found)


def _doer(leaf: Leaf, named: dict[str, list[tuple[int, Any]]]) -> Iterator[Leaf]:
    """A function in a variable, as one that may give way to another."""
    if leaf.holder is not None and is_function(leaf.value):
        path = f"{told_apart(leaf, named).path}{STANDS}"
        yield NamedLeaf(path, leaf.holder, leaf.name, leaf.value)


def _of_cache(leaf: Leaf, named: dict[str, list[tuple[int, Any]]]) -> Iterator[Leaf]:
    """What `lru_cache` keeps for a function and may be gone on with: it is made once."""
    few = leaf.value.cache_info().currsize <= RESULTS
    held = gc.get_referents(leaf.value)
    held += [result for one in held if few and type(one) is dict for result in entries_of(one)]
    kept = (one for one in held if few and type(one) is not dict)
    filled = [one for one in kept if graph.is_fillable(one) or is_of_the_script(type(one))]
    found = [*filter(graph.is_generator, held), *filled]
    for at, generator in enumerate(found):
        path = f"result {at} of {leaf.path}"
        places = named.setdefault(path, [])
        places += [(id(generator), path)] if (id(generator), path) not in places else []
        number = places.index((id(generator), path))
        yield Leaf(f"{path} ({number + 1})" if number else path, None, None, generator)


def of_modules(modules: Iterable[torch.nn.Module]) -> Iterator[Any]:
    """Functions of the script that these modules call: hooks, and how they compute."""
    seen: set[type] = set()
    for module in modules:
        fields = vars(module)
        for hooks in graph.OF_HOOKS:
            yield from list((fields.get(hooks) or {}).values())
        for parameter in entries_of(fields.get("_parameters", {})):
            for hooks in graph.OF_TENSORS:
                yield from list((getattr(parameter, hooks, None) or {}).values())
        kind = type(module)
        if kind not in seen and is_of_the_script(kind):
            seen.add(kind)
            yield kind


# ---------------------------------------------------------------- copies of a model

# protect() was not told of them:
#
#     average = copy.deepcopy(model)            a teacher, a target network, a moving average, the best weights so far:
#     for batch in run.batches(loader):         it is taken from the model in each turn or now and then, and nobody
#         step(batch)                           but the script knows
#         update(average, model)
#
# A replacement would begin it anew, as it is too large to be carried with what is found by looking. So modules, and
# lists, dicts and objects with a tensor for each that is trained, are watched where the functions under way or a step
# can reach them, and the script is refused when one moves, or comes up; so it is for schedules and gradient scalers.

LARGE = 16 << 10  # bytes of such tensors up to which they are carried (see `moving`)
DEPTH = 3
ENTRIES = 4096
SAMPLED = 8  # of the entries of a container, where it is only asked whether a look is worth it
_CLOCKS = (LRScheduler, GradScaler)
_HOLDING = (torch.nn.Module, dict, list, tuple)
_holders: dict[type, bool] = {}  # by class, whether it is one of these
_Mark = tuple[tuple[int, int], ...]  # of each tensor, which it is and how often it was written to


class Outsiders:
    """Of one rank."""

    def __init__(self, places: Callable[[], Iterable[graph.Leaf]], known: Callable[[], Iterable[Any]]) -> None:
        """`places`: where to look. `known`: modules, tensors and other things that protect() was given."""
        self._places = places
        self._known = known
        self._seen: set[_Mark] | None = None
        self._first: list[tuple[weakref.ref[torch.Tensor], int]] = []  # one tensor of each, and its version
        self._clocks: list[tuple[weakref.ref[Any], _Mark]] = []  # schedules and scalers
        self._passed: set[int] = set()  # ids of what stood in variables
        self._count = 1  # tensors that are trained

    @property
    def stirred(self) -> bool:
        """Whether there may be something new since the last look: asked in every call."""
        if any((live := reference()) is None or live._version != version for reference, version in self._first):
            return True
        if any((live := reference()) is not None and _clock(live) != mark for reference, mark in self._clocks):
            return True
        return self._has_come_up()

    def _has_come_up(self) -> bool:
        """Whether there is something new in a variable. In the path of every step, where most values are numbers."""
        passed, known = self._passed, _holders
        for frame in variables.outside():
            for value in list(frame.f_locals.values()):
                kind = type(value)
                holds = known.get(kind)
                if holds is None:
                    holds = known[kind] = issubclass(kind, _HOLDING)
                if holds and id(value) not in passed and _may_hold(value, self._count):
                    return True
        return False

    def look(self) -> list[str]:
        """Paths of those that have moved, or come up, since the last look."""
        before, self._seen = self._seen, set()
        moved = []
        self._first, self._clocks = [], []
        for path, tensors in self._find(list(self._known())):
            if isinstance(tensors, list):
                mark = tuple((id(each), each._version) for each in tensors)
                self._first.append((weakref.ref(tensors[0]), tensors[0]._version))
            else:
                mark = _clock(tensors)
                self._clocks.append((weakref.ref(tensors), mark))
            self._seen.add(mark)
            if before is not None and mark not in before:
                moved.append(path.removeprefix(VARIABLE))
        self._passed = {id(value) for value in variables.contents() if _may_hold(value, self._count)}
        return moved

    def _find(self, known: list[Any]) -> Iterator[tuple[str, Any]]:
        """Paths, with the tensors of each; or with itself, if it is a schedule or a scaler."""
        ours = [each for each in known if isinstance(each, torch.Tensor)]
        for each in known:
            ours += [one for one in entries_of(each) if isinstance(one, torch.Tensor)] if isinstance(each, dict) else []
        trained = Counter(each.shape for each in {id(each): each for each in ours}.values() if each.requires_grad)
        if not trained or any(map(is_shard, ours)):
            return  # FSDP2 puts other tensors in the place of its parameters while it computes
        self._count = trained.total()
        places = set(map(memory.place, ours))
        seen = {id(one) for each in known for one in (each, *_parts(each))}
        # With each, whether it is carried if it is small: not what a variable holds in no object of the script.
        waiting = [(leaf.path, leaf.value, 0, not leaf.path.startswith(VARIABLE)) for leaf in self._places()]
        while waiting and len(seen) < ENTRIES:
            path, value, depth, small = waiting.pop()
            if id(value) in seen or value is graph.MISSING:
                continue
            seen.add(id(value))
            if isinstance(value, _CLOCKS):
                yield path, value
            elif isinstance(value, torch.nn.Module):
                tensors = [*value.parameters(), *value.buffers()]
                if tensors and places.isdisjoint(map(memory.place, tensors)):
                    yield path, tensors
            elif depth < DEPTH:
                inner = _inside(value)
                held = [one for _, one in inner if isinstance(one, torch.Tensor) and memory.place(one) not in places]
                small = is_of_the_script(type(value)) or (small and type(value) in (dict, list))
                carried = small and sum(map(memory.bytes_in, held)) <= LARGE
                if held and not carried and trained <= Counter(each.shape for each in held if memory.is_dense(each)):
                    yield path, held
                others = [(at, one) for at, one in inner if not isinstance(one, torch.Tensor)]
                waiting += [(f"{path}{at}", one, depth + 1, small) for at, one in others]


def _clock(value: Any) -> _Mark:
    """What tells that a schedule or a scaler has moved."""
    # One that is switched off, or whose class does not call that of torch, may have none of these.
    if isinstance(value, GradScaler):
        found = (getattr(value, "_scale", None), getattr(value, "_growth_tracker", None))
        return tuple((id(value), each._version if isinstance(each, torch.Tensor) else -1) for each in found)
    return tuple((id(value), getattr(value, name, 0)) for name in ("last_epoch", "_step_count"))


def _parts(given: Any) -> Iterator[Any]:
    """What something that protect() was given holds: a chain of schedules, say."""
    if isinstance(given, (torch.Tensor, torch.nn.Module)):
        return
    for value in list((graph.attributes_of(given) or {}).values()):
        yield value
        if type(value) in (list, tuple):
            yield from value


def _may_hold(value: Any, count: int, depth: int = 0) -> bool:
    """Whether there may be so many tensors in it, by its first entries; a batch has fewer. Asked in every call."""
    if isinstance(value, torch.nn.Module):
        return True
    if not isinstance(value, (dict, list, tuple)) or not value or depth == DEPTH:
        return False
    some = entries_of(value, SAMPLED)
    if len(value) >= count and any(isinstance(one, torch.Tensor) for one in some):
        return True
    return any(_may_hold(one, count, depth + 1) for one in some)


def _inside(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]", one) for key, one in items_of(value, ENTRIES)]
    if type(value) in (list, tuple):
        return [(f"[{at}]", one) for at, one in enumerate(value[:ENTRIES])]
    if is_of_the_script(type(value)):
        return [(f".{name}", one) for name, one in list((graph.attributes_of(value) or {}).items())]
    return []
