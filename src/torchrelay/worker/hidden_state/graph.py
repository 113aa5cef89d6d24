"""Graph: what can be reached from an object of the script by its attributes, as leaves that can be read and put back.

Only what lies in `__dict__`, in slots and in containers is looked at: no property, no method of the script is called.
The walk is bounded in depth and in number, passes over modules, types, files, locks and torch's own machinery, and
comes to the same paths in every process that has built the same.
"""

from __future__ import annotations

import builtins
import contextvars
import enum
import functools
import itertools
import random
import re
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager
from torch.quasirandom import SobolEngine

from torchrelay.worker.hardware import raw_memory
from torchrelay.worker.hidden_state import doers, made
from torchrelay.worker.hidden_state.leaves import ENTRIES as ENTRIES
from torchrelay.worker.hidden_state.leaves import FILLABLE as FILLABLE
from torchrelay.worker.hidden_state.leaves import HOLDER as HOLDER
from torchrelay.worker.hidden_state.leaves import (
    HOOKS,
    MAX_DEPTH,
    OF_MEMORY,
    OF_MODULES,
    GlobalHooks,
    Hooks,
    NamedLeaf,
    Within,
    added_to,
    hung_on,
    keeps_more,
    slot_names,
    slot_value,
    value_in_context,
)
from torchrelay.worker.hidden_state.leaves import ITERATORS as ITERATORS
from torchrelay.worker.hidden_state.leaves import OF_HOOKS as OF_HOOKS
from torchrelay.worker.hidden_state.leaves import OF_TENSORS as OF_TENSORS
from torchrelay.worker.hidden_state.leaves import STANDS as STANDS
from torchrelay.worker.hidden_state.leaves import Entries as Entries
from torchrelay.worker.hidden_state.leaves import Leaf as Leaf
from torchrelay.worker.hidden_state.leaves import attributes_of as attributes_of
from torchrelay.worker.hidden_state.leaves import is_fillable as is_fillable
from torchrelay.worker.hidden_state.leaves import is_own as is_own
from torchrelay.worker.hidden_state.leaves import told_apart as told_apart
from torchrelay.worker.hidden_state.made import CONTAINERS as CONTAINERS
from torchrelay.worker.hidden_state.made import MISSING as MISSING
from torchrelay.worker.hidden_state.made import NESTED as NESTED
from torchrelay.worker.hidden_state.made import PLAIN as PLAIN
from torchrelay.worker.hidden_state.made import WIDTH as WIDTH
from torchrelay.worker.hidden_state.made import is_plain as is_plain
from torchrelay.worker.source.lines import found_in_class, is_library, is_of_the_script
from torchrelay.worker.source.names import assigned_outside, names_used
from torchrelay.worker.tensors.absent import is_absent
from torchrelay.worker.tensors.entries import entries_of, items_of

VARIABLE = "variable "  # begins the path of what is found in a variable
MAX_LEAVES = 4096
VISITS = 4  # objects that are visited for each leaf that there may be

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)

# Of what comes from there only the identity counts.
_CLOSED_MODULES = """
    threading _thread multiprocessing concurrent asyncio queue logging contextlib weakref tqdm pyarrow h5py lmdb
    io _io socket ssl mmap ctypes subprocess zipfile tarfile pathlib inspect ast re datetime decimal enum typing abc
"""
_CLOSED = frozenset(_CLOSED_MODULES.split())
OF_LOADERS = frozenset(vars(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(1)))))
_numbered = re.compile(r" \(\d+\)$")
DATA = (torch.utils.data.Sampler, torch.utils.data.Dataset)
_OF_DATA = ("dataset", "sampler", "batch_sampler")  # of a loader
_OPENED = (SobolEngine, ModelAverager)  # torch's own that are looked into as a script's are: they hold counts
_FIXED = (tuple, set, frozenset)  # of a class of its own
_CALLED = ("__iter__", "__getitem__", "__getitems__", "__call__", "__next__", "forward")


class Walk:
    """One walk: the leaves by their paths, and the attributes of each object by its path."""

    def __init__(
        self,
        roots: Iterable[tuple[str, Any]],
        *,
        passed: Iterable[Any] = (),
        variables: Iterable[Leaf] = (),
        looks_into: Callable[[type], bool] | None = None,
        limit: int = MAX_LEAVES,
    ) -> None:
        """`passed`: objects that are another walk's. `variables`: further roots. `looks_into`: classes of objects that
        are looked at, beside roots and modules; None: all."""
        self.leaves: dict[str, Leaf] = {}
        self.holders: dict[str, Any] = {}
        self.containers: list[Any] = []
        self.opened: dict[str, Leaf] = {}  # containers that are no values, by their paths
        self.objects: list[Any] = []
        self.hooks: list[Any] = []  # what modules keep them in
        self.of_torch: set[int] = set()  # ids of the attributes of torch's own modules
        self.of_data: list[str] = []  # paths of data sets and samplers, if they are not all that is looked at
        self._named: dict[str, list[tuple[int, Any]]] = {}
        self._passed = {id(thing) for thing in passed}
        self._seen = set(self._passed)
        self.absent: dict[str, Leaf] = {}  # variables without a value
        self.parents: dict[int, tuple[Any, Any]] = {}  # by the id of a holder, that in which it is, and its name
        self._looks_into = looks_into
        self._waiting: deque[tuple[str, Any, Any, Any, int]] = deque(
            (path, None, None, value, 0) for path, value in roots
        )
        loose: deque[tuple[str, Any, Any, Any, int]] = deque()
        for leaf in variables:
            if leaf.value is MISSING and leaf.name is HOLDER:
                self.holders[leaf.path] = leaf.holder
                continue
            if isinstance(leaf, NamedLeaf):
                self.leaves[leaf.path] = leaf
                self.hooks += leaf.held() if type(leaf) is GlobalHooks else []
                continue
            if leaf.value is MISSING:
                self.absent[leaf.path] = leaf
            if leaf.holder is not None:
                self._named.setdefault(_numbered.sub("", leaf.path), []).append((id(leaf.holder), leaf.name))
            # A variable of a loop is in another place before the loop has come there: what lies in a container, or in
            # an attribute, is known by that.
            later = leaf.path.startswith(VARIABLE) and type(leaf.value) not in FILLABLE
            (loose if later else self._waiting).append((leaf.path, leaf.holder, leaf.name, leaf.value, 1))
        visits = 0
        while (self._waiting or loose) and len(self.leaves) < limit and visits < VISITS * limit:
            self._visit(*(self._waiting or loose).popleft())
            visits += 1

    def _visit(self, path: str, holder: Any, name: Any, value: Any, depth: int) -> None:
        kind = type(value)
        if value is MISSING:
            return
        if is_absent(value) or kind in PLAIN or _is_record(value):
            self.leaves[path] = Leaf(path, holder, name, value)
            return
        self._doer(path, holder, name, value)
        # A tensor may be kept in several places, each of which may get another one.
        if id(value) in (self._seen if kind not in (torch.Tensor, np.ndarray) else self._passed):
            return
        if not issubclass(kind, CONTAINERS):
            self._seen.add(id(value))
        if is_whole(value):
            self.leaves[path] = Leaf(path, holder, name, value)
        elif kind in CONTAINERS or kind in made.DICTS:
            self._container(path, holder, name, value, depth)
        elif depth >= MAX_DEPTH or is_closed(kind):
            self._closed(path, holder, name, value, depth)
        elif issubclass(kind, functools.partial):
            self._later(hung_on(path, kind, attributes_of(value) or {}, depth))
            self._later(
                (f"{path}.{at}", None, at, getattr(value, at), depth + 1) for at in ("func", "args", "keywords")
            )
        elif issubclass(kind, types.MethodType):
            self._later([(path, None, None, value.__self__, depth + 1)])
            self._function(value.__func__)
        elif issubclass(kind, types.FunctionType):
            self._function(value)
        elif kind is contextvars.ContextVar:
            self._context(path, value, depth)
        else:
            self._object(path, holder, name, value, depth)

    def _closed(self, path: str, holder: Any, name: Any, value: Any, depth: int) -> None:
        """One that is not looked into: but for what a script has hung on it, if it is torch's."""
        kind = type(value)
        if not issubclass(kind, torch.utils.data.DataLoader):
            self.leaves[path] = Leaf(path, holder, name, value)
        fields = attributes_of(value)
        if fields and str(kind.__module__).startswith(("torch.", "logging", "threading", "functools")):
            self.parents.update({id(fields): (holder, name)} if holder is not None else {})
            self.holders[path] = fields
            self.of_torch.update([id(fields)] if str(kind.__module__).startswith("torch.") else [])
            self._later(hung_on(path, kind, fields, depth))
            if issubclass(kind, torch.utils.data.DataLoader):
                named = ((at, fields[at]) for at in _OF_DATA if at in fields)
                self._later((f"{path}.{at}", None, at, one, depth + 1) for at, one in named)

    def _doer(self, path: str, holder: Any, name: Any, value: Any) -> None:
        if holder is not None and (doers.is_function(value) or _is_object(type(value), name)):
            self.leaves[path + STANDS] = NamedLeaf(path + STANDS, holder, name, value)

    def _context(self, path: str, variable: contextvars.ContextVar[Any], depth: int) -> None:
        found = value_in_context(variable)
        if found is MISSING:
            self.absent[path] = Leaf(path, variable, "value", MISSING)
        self._later([(path, variable, "value", found, depth + 1)])

    def _later(self, entries: Iterable[tuple[str, Any, Any, Any, int]]) -> None:
        self._waiting.extend(entries)

    def _container(self, path: str, holder: Any, name: Any, value: Any, depth: int) -> None:
        if type(value) in (list, dict, *made.DICTS):
            self.containers.append(value)
        is_told = type(value) in made.DICTS and made.tell(value, MAX_LEAVES) is not None
        if is_told or is_plain(value):
            if value or holder is not None:  # an empty one in a variable may be filled with anything
                self.leaves[path] = Leaf(path, holder, name, value)
            self._entries(path, holder, name, value)
            return
        if id(value) in self._seen or depth >= MAX_DEPTH:
            return
        self._seen.add(id(value))
        if holder is not None and doers.is_row(value):
            self.leaves[path + STANDS] = NamedLeaf(path + STANDS, holder, name, value)
        self.opened[path] = Leaf(path, holder, name, value)
        inner = value if type(value) in (dict, list, *made.DICTS) else None
        if inner is not None and holder is not None:
            self.parents[id(inner)] = holder, name
        self._entries(path, holder, name, value)
        pairs = [] if type(value) in (set, frozenset) else list(enumerate(entries_of(value, WIDTH)))
        if isinstance(value, dict):
            pairs = items_of(value, WIDTH)
        for key, entry in pairs:
            if type(key) in PLAIN or is_plain(key) or isinstance(key, enum.Enum):
                place = (holder, Within(name, key)) if type(value) in (tuple, deque) else (inner, key)
                if path + STANDS in self.leaves and doers.is_function(entry):
                    place = None, key  # the row is told as a whole
                self._waiting.append((f"{path}[{key!r}]", *place, entry, depth + 1))

    def _entries(self, path: str, holder: Any, name: Any, value: Any) -> None:
        """Objects that may come up in a container; of one of the script's classes all that is in it."""
        if self._looks_into is not None and keeps_more(value):
            return  # its attributes would no longer go with its entries
        if is_fillable(value) and (is_own(value) or not value or made.holds_objects(value)):
            self.leaves[f"{path}{ENTRIES}"] = Entries(f"{path}{ENTRIES}", holder, name, made.Filled(value))

    def _function(self, function: Any) -> None:
        """What a function has from around it and may change: generators, what it assigns, small containers, classes."""
        if type(function) is not types.FunctionType:
            return
        assigned = assigned_outside(function.__code__)
        for leaf in variables_of(function):
            value, kind = leaf.value, type(leaf.value)
            if is_generator(value):
                if id(value) not in self._seen:
                    self._seen.add(id(value))
                    self.leaves[leaf.path] = Leaf(leaf.path, None, None, value)
            elif is_library(function.__code__.co_filename):
                continue
            elif issubclass(kind, type):
                for one in of_class(value):
                    if one.name is not HOLDER and id(one.value) not in self._passed:
                        self._waiting.append((one.path, one.holder, one.name, one.value, 1))
            elif issubclass(kind, types.ModuleType):
                self.leaves.update((one.path, one) for one in of_module(value) if one.name is not HOLDER)
            elif (kind in PLAIN and leaf.path.split(" of ")[0] in assigned) or _is_filled(value):
                told_apart(leaf, self._named)
                self.leaves[leaf.path] = leaf
                self.containers += [value] if kind in (list, dict) else []

    def _object(self, path: str, holder: Any, name: Any, value: Any, depth: int) -> None:
        kind = type(value)
        module = issubclass(kind, torch.nn.Module)
        fields = attributes_of(value)
        data = issubclass(kind, DATA)
        opened = module or issubclass(kind, _OPENED) or self._looks_into is None or self._looks_into(kind)
        opened = opened or (data and str(kind.__module__).startswith("torch."))
        self.of_data += [f"{path}."] if data and self._looks_into is not None else []
        narrow = depth and not opened
        self._entries(path, holder, name, value)
        closed = narrow or (fields is None and not slot_names(kind))
        if issubclass(kind, _FIXED) or (closed and path + ENTRIES not in self.leaves):
            self.leaves[path] = Leaf(path, holder, name, value)
        if closed:
            return
        self.holders[path] = value if fields is None else fields
        self.objects.append(value)
        if holder is not None:
            self.parents[id(self.holders[path])] = holder, name
        for method in _CALLED:
            function = found_in_class(kind, method)
            if type(function) is types.FunctionType and not str(function.__module__).startswith("torch."):
                self._function(function)
        if module:
            self._module(path, fields or {}, depth)
            if not _is_of_the_script(kind):
                self.of_torch.add(id(fields))
                self._later(hung_on(path, kind, fields or {}, depth))
                if str(kind.__module__).startswith("torch.nn.modules."):
                    self._later(_settings(path, fields or {}, depth))
                return
        if issubclass(kind, torch.optim.Optimizer) and self._is_whole_optimizer(path, kind, fields or {}, depth):
            return
        skipped = _skipped(kind)
        for at, inner in list((fields or {}).items()):
            if type(at) is str and at not in skipped and not at.startswith("_torchrelay"):
                self._waiting.append((f"{path}.{at}", fields, at, inner, depth + 1))
        self._later((f"{path}.{at}", value, at, slot_value(value, at), depth + 1) for at in slot_names(kind))

    def _is_whole_optimizer(self, path: str, kind: type, fields: dict[str, Any], depth: int) -> bool:
        """What a script keeps in the options, under names that are none; returns whether all else of it is torch's."""
        groups = fields.get("param_groups")
        for at, group in enumerate(groups if type(groups) is list else ()):
            self.parents[id(group)] = groups, at
            added = ((name, group[name]) for name in added_to(group, fields.get("defaults")))
            self._later((f"{path}.param_groups[{at}][{name!r}]", group, name, one, depth + 1) for name, one in added)
        if not is_of_the_script(kind):
            self._later(hung_on(path, kind, fields, depth))
        return not is_of_the_script(kind)

    def _module(self, path: str, fields: dict[str, Any], depth: int) -> None:
        """The modules in it, the script's hooks that it calls, and what a script has hung on its parameters."""
        inside = fields.get("_modules") or {}
        modules = [(at, inner) for at, inner in items_of(inside) if inner is not None]
        self._later((f"{path}.{at}", inside, at, inner, depth) for at, inner in modules)
        self.leaves[path + HOOKS + STANDS] = Hooks(path + HOOKS + STANDS, fields)
        self.hooks += [fields[name] for name in OF_HOOKS if name in fields]
        for name, parameter in items_of(fields.get("_parameters") or {}):
            hung = getattr(parameter, "__dict__", {})
            self.holders[f"{path}.{name}"] = hung
            self._later(hung_on(f"{path}.{name}", type(parameter), hung, depth))


def _skipped(kind: type) -> frozenset[str]:
    """What torch's own classes keep."""
    if issubclass(kind, torch.utils.data.DataLoader):
        return OF_LOADERS
    if issubclass(kind, torch.optim.Optimizer):
        return _of_optimizers()
    return OF_MODULES if issubclass(kind, torch.nn.Module) else frozenset[str]()


def _settings(path: str, fields: dict[str, Any], depth: int) -> Iterator[tuple[str, Any, Any, Any, int]]:
    """Numbers and texts of a module of torch's: a script may change how much is dropped, or a loss is smoothed."""
    for at, value in list(fields.items()):
        if at not in OF_MODULES and type(value) in PLAIN:
            yield f"{path}.{at}", fields, at, value, depth + 1


def _is_object(kind: type, name: Any) -> bool:
    """Whether it may give way to an object of another class; in a container those of the script are told with it."""
    if issubclass(kind, torch.nn.Module):
        return True
    return is_of_the_script(kind) and type(name) is str and not issubclass(kind, (*CONTAINERS, torch.Tensor))


@functools.cache
def _of_optimizers() -> frozenset[str]:
    """What torch's optimizers keep. Asked when there is one: the first that is made takes a second of imports."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1, requires_grad=True)])))


def _is_record(value: Any) -> bool:
    """Whether it is one value that is made anew, and no container."""
    return made.is_made(value) and type(value) not in made.DICTS and not _holds_more(value)


def _holds_more(value: Any) -> bool:
    """Whether a dict by members of an enumeration holds more than values."""
    return type(value) is dict and made.tell(value, MAX_LEAVES) is None


def is_whole(value: Any) -> bool:
    """Whether it is one value, in which nothing is looked at."""
    arrays = (torch.Tensor, np.ndarray, np.generic, *raw_memory.GROWING, *raw_memory.FIXED, *OF_MEMORY)
    return isinstance(value, (itertools.count, *arrays)) or is_generator(value)


def is_generator(value: Any) -> bool:
    """Whether it is a generator of random numbers whose state can be told."""
    return issubclass(type(value), GENERATORS) and not issubclass(type(value), random.SystemRandom)


def _is_filled(value: Any) -> bool:
    """Whether it is something that a function may go on with in its next call."""
    kind = type(value)
    if kind in made.DICTS:
        return bool(value) and made.tell(value, WIDTH) is not None
    return kind is itertools.count or (kind in (list, dict, set, deque) and bool(value) and is_plain(value))


def variables_of(function: types.FunctionType) -> Iterator[Leaf]:
    """What a function has from around it, as leaves; `MISSING` for what has no value yet."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        leaf = Leaf(f"{name} of {function.__qualname__}", cell, "cell_contents", MISSING)
        leaf.value = leaf.read()
        yield leaf
    here = function.__globals__
    for name in dict.fromkeys(names_used(code)):
        if name in here or not hasattr(builtins, name):
            yield Leaf(f"{name} of {function.__module__}", here, name, here.get(name, MISSING))
    defaults = [*enumerate(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    for at, value in defaults:
        yield Leaf(f"default {at} of {function.__qualname__}", None, None, value)


def of_class(kind: type) -> Iterator[Leaf]:
    """What classes of the script keep in attributes of their own."""
    for each in kind.__mro__:
        if not is_of_the_script(each):
            continue
        yield Leaf(each.__qualname__, each, HOLDER, MISSING)
        for name, value in list(vars(each).items()):
            if not name.startswith("__") and (_is_value(value) or _is_kept_in_class(value)):
                yield Leaf(f"{each.__qualname__}.{name}", each, name, value)


def _is_value(value: Any) -> bool:
    return is_plain(value) or is_generator(value) or made.is_made(value)


def _is_kept_in_class(value: Any) -> bool:
    """Whether it is an object, such as the only one of a class, or a container of such."""
    kind = type(value)
    return type(value) in CONTAINERS or (is_of_the_script(kind) and not issubclass(kind, type))


def of_module(module: types.ModuleType) -> Iterator[Leaf]:
    """What a module of the script has of values, as another one may set them."""
    if not is_own_module(module):
        return
    here = vars(module)
    yield Leaf(module.__name__, here, HOLDER, MISSING)
    for name, value in list(here.items()):
        if not name.startswith("__") and _is_value(value):
            yield Leaf(f"{module.__name__}.{name}", here, name, value)


def is_own_module(module: types.ModuleType) -> bool:
    """Whether it is the script's."""
    here = names_of(module)
    file = here.get("__file__")
    if type(file) is not str:
        return sys.modules.get(str(here.get("__name__"))) is not module  # types.ModuleType("settings")
    return not is_library(file)


def names_of(thing: Any) -> Mapping[str, Any]:
    """What a module, class or function has, without asking it: some are imported, or made, when they are asked."""
    if isinstance(thing, types.ModuleType):
        found: dict[str, Any] = types.ModuleType.__getattribute__(thing, "__dict__")
        return found
    of_class: Mapping[str, Any] = type.__getattribute__(thing, "__dict__") if isinstance(thing, type) else vars(thing)
    return of_class


def of_attributes(function: Any, path: str, number: int) -> Iterator[Leaf]:
    """What a function keeps in attributes of its own. `number`: of those that have the same path, from 0."""
    here, path = vars(function), path + (f" ({number + 1})" if number else "")
    yield Leaf(path, here, HOLDER, MISSING)
    for name, value in list(here.items()):
        if not name.startswith(("__", "_torchrelay")):
            yield Leaf(f"{path}.{name}", here, name, value)


def is_closed(kind: type) -> bool:
    if kind is threading.local:
        return False  # what the main thread has in it
    if kind in ITERATORS or issubclass(kind, (type, types.ModuleType, BaseException)):
        return True
    if issubclass(kind, torch.optim.Optimizer):
        return False
    top = str(kind.__module__).split(".", 1)[0]
    if top in _CLOSED:
        return True
    return top == "torch" and not issubclass(kind, (torch.nn.Module, *DATA, *_OPENED))


def _is_of_the_script(kind: type) -> bool:
    """Whether a module's class, or one that it is made from, is neither torch's nor Python's own, as `abc.ABC` is."""
    tops = (str(each.__module__).partition(".")[0] for each in kind.__mro__[:-1])
    return any(top != "torch" and (top not in sys.stdlib_module_names or top == "__main__") for top in tops)
