"""Leaves: one value each, and where it is kept, so that it can be read and set again later."""

from __future__ import annotations

import contextvars
import csv
import ctypes
import decimal
import functools
import io
import itertools
import os
import queue
import random
import threading
import types
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from torchrelay.worker.hardware import raw_memory
from torchrelay.worker.hardware.settings import Settings
from torchrelay.worker.hidden_state import made
from torchrelay.worker.hidden_state.made import MISSING
from torchrelay.worker.source.lines import is_library, is_of_the_script
from torchrelay.worker.tensors.entries import entries_of, items_of

FILLABLE = (dict, list, deque, *made.DICTS)
ENTRIES = " entries"  # ends the path of the objects in a container
HOLDER = ""  # the name of a leaf that stands for all attributes of something, those that are not there yet as well
STANDS = " is"  # ends the path of a function or an object, as one that may give way to another one
MAX_DEPTH = 8
_KEYED = (dict, *made.DICTS, Settings)
_COUNTED: tuple[Any, ...] = (
    iter([]), iter(()), iter(range(0)), iter({}), iter({}.values()), iter({}.items()), iter(set()), iter(""),
    reversed([]), reversed({}), iter(deque()), iter(b""), iter(bytearray()), iter("\u20ac"),
    reversed({}.values()), reversed({}.items()), reversed(()),
)  # fmt: skip
# Which go through others, whose places we see.
_THROUGH = (
    enumerate, zip, map, filter, itertools.chain, itertools.islice, itertools.accumulate, itertools.starmap,
    itertools.takewhile, itertools.dropwhile, itertools.filterfalse, itertools.compress, itertools.pairwise,
    itertools.zip_longest, itertools.groupby,
)  # fmt: skip
THROUGH = frozenset(_THROUGH)


class _Indexed:
    def __getitem__(self, _: int) -> int:
        raise IndexError


# Which tell where they are if they are to be copied.
_COPIED: tuple[Any, ...] = (
    itertools.product(), itertools.permutations(()), itertools.combinations((), 0),
    itertools.combinations_with_replacement((), 0), itertools.tee(())[0], reversed(deque()), iter(array("b")),
    iter(_Indexed()), iter(range(1 << 70)),
)  # fmt: skip
COPIED = frozenset(map(type, _COPIED))
# Which have a number of their own for it, or another one in what they call.
NUMBERED = {type(np.empty(1).flat): "index", np.nditer: "iterindex", type(csv.reader(())): "line_num"}
CALLING = type(iter(int, 1))
# Of which we can see the place.
SELDOM = COPIED | frozenset({*NUMBERED, CALLING, itertools.repeat})
ITERATORS = frozenset({types.GeneratorType, itertools.count, *map(type, _COUNTED), *THROUGH}) | SELDOM


class Within(NamedTuple):
    """The name of an entry of a tuple or deque: the script puts another tuple there, as `hidden` of an LSTM."""

    name: Any  # of the tuple, in its holder
    at: int

    def of(self, whole: Any) -> Any:
        """The entry in the tuple that is there now."""
        return whole[self.at] if type(whole) in (tuple, deque) and self.at < len(whole) else MISSING


class Leaf:
    """A value at a path: a number, a text, a container of such, a tensor, an array, a generator, or unknown."""

    __slots__ = ("_anchor", "_begin", "_names", "holder", "name", "path", "value")

    def __init__(self, path: str, holder: Any, name: Any, value: Any) -> None:
        self.path = path
        self.holder = holder  # a dict (also of attributes), a list, or an object with slots; None: cannot be set
        self.name = name
        self.value = value
        self._anchor: Any = None  # the way to the holder, see `remember_way`
        self._begin: Callable[[], Any] | None = None
        self._names: list[Any] = []

    def remember_way(self, parents: dict[int, tuple[Any, Any]], begin: Callable[[], Any] | None = None) -> None:
        """How the holder is found again if a script puts another object in place of one on the way.

        `begin`: what gives the object with which the way begins, if that may be another one, too.
        """
        holder, names = self.holder, list[Any]()
        while id(holder) in parents and len(names) <= MAX_DEPTH:
            holder, name = parents[id(holder)]
            names.append(name)
        self._anchor, self._begin, self._names = holder, begin, names[::-1]

    def find(self) -> None:
        """Go that way again."""
        if self._begin is not None:
            self.value = self._begin()
            if self.holder is None:
                self.value = _descend(self.value, self.name)
                return
            holder = inside(self.value)
        elif self._names:
            holder = self._anchor
        else:
            return
        for name in self._names:
            holder = inside(Leaf("", holder, name, None).read()) if holder is not None else None
        self.holder = {} if holder is None else holder

    def read(self) -> Any:
        """The value now, or `MISSING`."""
        holder = self.holder
        if type(self.name) is Within:
            return self.value if holder is None else self.name.of(self.whole().read())
        if type(holder) in _KEYED:
            return holder.get(self.name, MISSING)
        if type(holder) is list:  # perhaps in the place of an object that had attributes
            return holder[self.name] if type(self.name) is int and self.name < len(holder) else MISSING
        if type(holder) is contextvars.ContextVar:
            return value_in_context(holder)
        if holder is os.environ:
            return holder.get(self.name, MISSING)
        return self.value if holder is None else slot_value(holder, self.name)

    def whole(self) -> Leaf:
        """The tuple in which this is an entry."""
        return Leaf("", self.holder, self.name.name, None)

    def put(self, value: Any) -> bool:
        """Set it; returns whether that is possible here."""
        if type(self.name) is Within:
            whole, at = self.whole().read(), self.name.at
            if self.name.of(whole) is MISSING:
                return False
            if type(whole) is tuple:
                return self.whole().put((*whole[:at], value, *whole[at + 1 :]))
            whole[at] = value
            return True
        if type(self.holder) is list and (type(self.name) is not int or self.name >= len(self.holder)):
            return False
        if type(self.holder) in (list, *_KEYED) or self.holder is os.environ:
            self.holder[self.name] = value
        elif self.holder is None:
            return False
        elif type(self.holder) is contextvars.ContextVar:
            self.holder.set(value)
        elif isinstance(self.holder, type):
            setattr(self.holder, self.name, value)
        else:
            object.__setattr__(self.holder, self.name, value)
        return True


def _descend(value: Any, name: Any) -> Any:
    """From what a variable has to what is meant: itself, or an entry of a tuple."""
    return name.of(_descend(value, name.name)) if type(name) is Within else value


class Entries(Leaf):
    """The objects that a container has; it is the container that is found at the place."""

    __slots__ = ()

    def find(self) -> None:
        super().find()
        self.value = made.Filled(self.value) if is_fillable(self.value) else self.value

    def read(self) -> Any:
        found = super().read()
        if isinstance(found, made.Filled):
            return found
        return made.Filled(found) if is_fillable(found) else MISSING


class Named:
    """What stands in a place and is no value: a function, a method, a class, a module, an object."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class NamedLeaf(Leaf):
    """A place of which it counts by what name the thing goes that stands there, see `doers`."""

    __slots__ = ()

    def __init__(self, path: str, holder: Any, name: Any, value: Any) -> None:
        super().__init__(path, holder, name, Named(value))

    def read(self) -> Any:
        """`MISSING` if it is a value that stands there now."""
        found = self.thing()
        return MISSING if found is MISSING or is_value(found) else Named(found)

    def thing(self) -> Any:
        """What stands there, as it is."""
        return super().read()


HOOKS = " hooks"
OF_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _of_the_script(hooks: list[Any]) -> tuple[types.FunctionType, ...]:
    functions = (each for each in hooks if type(each) is types.FunctionType)
    return tuple(each for each in functions if not is_library(each.__code__.co_filename))


class Hooks(NamedLeaf):
    """The functions of the script that a module calls by the way."""

    __slots__ = ()

    def __init__(self, path: str, fields: dict[str, Any]) -> None:
        Leaf.__init__(self, path, fields, "", None)
        self.value = self.read()

    def read(self) -> Any:
        """All of them, as one."""
        return Named(self.thing())

    def thing(self) -> Any:
        """A row of them; it cannot be set."""
        found = [each for name in OF_HOOKS for each in entries_of(self.holder.get(name) or {})]
        for parameter in entries_of(self.holder.get("_parameters") or {}):
            found += [each for name in OF_TENSORS for each in entries_of(getattr(parameter, name, None) or {})]
        return _of_the_script(found)

    def put(self, value: Any) -> bool:
        """It cannot be set."""
        del value
        return False


class GlobalHooks(Hooks):
    """The functions of the script that all modules call by the way."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(f"torch{HOOKS}{STANDS}", vars(torch.nn.modules.module))

    def held(self) -> list[Any]:
        """What torch keeps them in."""
        return [self.holder[f"_global{name}"] for name in OF_HOOKS if f"_global{name}" in self.holder]

    def thing(self) -> Any:
        """A row of them; it cannot be set."""
        found = [each for held in self.held() for each in entries_of(held)]
        return _of_the_script(found)


def is_value(thing: Any) -> bool:
    """Whether it is a number or text, a tensor, or a container: but for rows of functions and modules."""
    if type(thing) in (list, deque):
        return not thing or not callable(thing[0])
    return made.is_made(thing) or type(thing) in (*made.PLAIN, *made.CONTAINERS) or isinstance(thing, made.ARRAYS)


def told_apart(leaf: Leaf, named: dict[str, list[tuple[int, Any]]]) -> Leaf:
    """The same function made twice has other variables of the same names."""
    places = named.setdefault(leaf.path, [])
    place = id(leaf.holder), leaf.name
    if leaf.holder is not None and place not in places:
        places.append(place)
    if len(places) > 1:
        leaf.path = f"{leaf.path} ({places.index(place) + 1})"
    return leaf


def is_of_a_module(leaf: Leaf) -> bool:
    """Whether it is a parameter, a buffer or a layer: an attribute of that name would stand before it."""
    fields = leaf.holder if type(leaf.holder) is dict else {}
    parts = [fields.get(name) for name in ("_parameters", "_buffers", "_modules")]
    return any(type(part) is dict and leaf.name in part for part in parts)


def is_fillable(value: Any) -> bool:
    """Whether it is a list or dict, or of a class that is made from one."""
    return type(value) in FILLABLE or is_own(value)


def is_own(value: Any) -> bool:
    """Whether it is a list or dict of a class of the script's, or of a library's."""
    return made.is_own(type(value))


def value_in_context(variable: contextvars.ContextVar[Any]) -> Any:
    """Its value now, or the one that it begins with."""
    try:
        return variable.get()
    except LookupError:
        return MISSING


def inside(value: Any) -> Any:
    """Where the entries or attributes of a value are; None if it has none."""
    if type(value) in (list, *_KEYED):
        return value
    fields = attributes_of(value)
    return fields if fields is not None else value if slot_names(type(value)) else None


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The `__dict__` of an object, without asking the object."""
    asked = threading.local if issubclass(type(value), threading.local) else object  # one for each thread
    try:
        found = asked.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return found if type(found) is dict else None


_slots_of: dict[type, tuple[str, ...]] = {}


def slot_names(kind: type) -> tuple[str, ...]:
    found = _slots_of.get(kind)
    if found is None:
        found = _slots_of[kind] = _find_slots(kind)
    return found


def _find_slots(kind: type) -> tuple[str, ...]:
    if kind.__module__ == "builtins":
        return ()
    described = [(each, name, found) for each in kind.__mro__ for name, found in vars(each).items()]
    return tuple(name for each, name, found in described if _is_slot(each, name, found))


def _is_slot(kind: type, name: str, found: Any) -> bool:
    if type(found) is not types.MemberDescriptorType or name.startswith("__"):
        return False
    return kind.__module__ != "builtins" and bool(kind.__flags__ & (1 << 9))


def slot_value(value: Any, name: str) -> Any:
    try:
        return object.__getattribute__(value, name)
    except (AttributeError, TypeError, ValueError):  # the last of a variable without a value
        return MISSING


# Which torch and its schedules put there.
_OF_GROUPS = frozenset(
    ["params", "param_names", "initial_lr", "base_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"]
)


def added_to(group: dict[str, Any], defaults: dict[str, Any] | None) -> list[str]:
    """Names in a group of an optimizer that are none of its options; if it tells which are."""
    known = {*(defaults or ()), *_OF_GROUPS}
    return [name for name, _ in items_of(group) if name not in known] if defaults else []


OF_MODULES = frozenset(vars(torch.nn.Module())) | {"_version", "_is_fsdp_managed_module"}
# With what begins what torch itself hangs there: as it compiles, shards, wraps.
_OF_TORCH = ("__", "_torch", "_dynamo", "_is_torch", "_fsdp", "_ddp", "_opt_called", "_DataLoader__", "_compiled")
_HUNG = (*made.CONTAINERS, *made.ARRAYS, random.Random, torch.Generator)


def _is_machinery(name: str, value: Any) -> bool:
    """Whether it is not a script that hangs it on an object of torch's, but one that shards it, say."""
    mine = type(value) in made.PLAIN or isinstance(value, _HUNG)
    return name.startswith(_OF_TORCH) or (name[:1] == "_" and not mine and not is_of_the_script(type(value)))


def hung_on(path: str, kind: type, fields: dict[str, Any], depth: int) -> Iterator[tuple[str, Any, Any, Any, int]]:
    """What a script has hung on an object of torch's: under names that are not in the code of its class."""
    for at, value in items_of(fields):
        if type(at) is str and at not in OF_MODULES and at not in _names_in_code(kind) and not _is_machinery(at, value):
            yield f"{path}.{at}", fields, at, value, depth + 1


@functools.cache
def _names_in_code(kind: type) -> frozenset[str]:
    held = [value for each in kind.__mro__ for value in vars(each).values()]
    asked = [each for value in held if type(value) is property for each in (value.fget, value.fset)]
    codes = [value.__code__ for value in (*held, *asked) if type(value) is types.FunctionType]
    named = {name for each in kind.__mro__ for name in (*vars(each), *getattr(each, "__annotations__", {}))}
    return frozenset(named.union(*(code.co_names for code in codes)))


# ---------------------------------------------------------------- variables of the environment

ENVIRONMENT = "os.environ"
# What we, launchers, and communication libraries tell a process by variables.
_OF_PROCESSES = (
    "TORCH", "RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "PET_", "CUDA_", "NCCL_", "GLOO_", "OMP_",
    "MKL_", "KMP_", "SLURM_", "PYTHON", "PYTEST_", "PATH", "HOSTNAME", "PWD", "OLDPWD", "TMPDIR",
)  # fmt: skip


def of_environment() -> Iterator[Leaf]:
    """Variables of the environment that are not a process's own."""
    yield Leaf(ENVIRONMENT, os.environ, HOLDER, MISSING)
    for name, value in list(os.environ.items()):
        if not name.startswith(_OF_PROCESSES):
            yield Leaf(f"{ENVIRONMENT}.{name}", os.environ, name, value)


# ---------------------------------------------------------------- objects of libraries

_FOR_PEOPLE = """
    tqdm rich tensorboard tensorboardX wandb mlflow neptune comet_ml clearml aim loguru structlog prometheus_client
    psutil pynvml matplotlib codetiming line_profiler memory_profiler pyinstrument alive_progress fastprogress
    progressbar click halo yaspin enlighten codecarbon sentry_sdk opentelemetry statsd absl visdom dvclive
"""
_FRAMEWORKS = """
    accelerate lightning lightning_fabric pytorch_lightning deepspeed ignite composer megatron mmengine torchrelay
    ray dask
"""
_SETTINGS_AND_STORES = """
    omegaconf hydra ml_collections fsspec s3fs gcsfs boto3 botocore aiobotocore google azure requests urllib3 httpx
    aiohttp redis pymongo psycopg psycopg2 sqlalchemy smart_open huggingface_hub zmq grpc
"""
_OF_TRANSFORMERS = (
    "transformers.tokenization", "transformers.configuration", "transformers.generation.configuration",
    "transformers.image_processing", "transformers.feature_extraction", "transformers.processing",
)  # fmt: skip
_MACHINERY = """
    builtins threading _thread multiprocessing concurrent asyncio logging contextlib weakref socket ssl mmap ctypes
    subprocess zipfile tarfile pathlib inspect ast re enum typing abc types functools itertools operator importlib io
    _io queue decimal datetime http urllib sqlite3 selectors signal traceback tempfile cProfile profile unittest gzip
    csv torch
"""
# What no result depends on.
_PASSED = frozenset(_FOR_PEOPLE.split() + _FRAMEWORKS.split() + _SETTINGS_AND_STORES.split())
_CLOSED = frozenset(_MACHINERY.split())
OF_MEMORY: tuple[Any, ...] = (memoryview, ctypes.Array, ctypes.Structure, ctypes.c_int.__base__)
_OF_PYTHON = (
    io.BytesIO, decimal.Context, queue.Queue, np.random.SeedSequence, weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary, weakref.WeakSet, raw_memory.Block, *OF_MEMORY,
)  # fmt: skip
_OPEN = (*made.CONTAINERS, *made.DICTS)  # which are looked into by themselves
NEVER_OPENED = (
    type, torch.nn.Module, torch.optim.Optimizer, torch.utils.data.Dataset, torch.utils.data.Sampler,
    torch.utils.data.DataLoader,
)  # fmt: skip
MOST_FIELDS = 64
_of_libraries: dict[type, bool] = {}


def is_of_library(kind: type) -> bool:
    """Whether objects of this class are a library's, and their contents may count for the training."""
    found = _of_libraries.get(kind)
    if found is None:
        found = _of_libraries[kind] = _is_of_library(kind)
    return found


def _is_of_library(kind: type) -> bool:
    if issubclass(kind, _OF_PYTHON) or str(kind.__module__).startswith("torch.distributions"):
        return True
    if kind in _OPEN:
        return False
    tops = [str(each.__module__).partition(".")[0] for each in kind.__mro__]
    if any(str(each.__module__).startswith(_OF_TRANSFORMERS) for each in kind.__mro__):
        return False  # settings, and caches of what is the same for the same text
    closed = issubclass(kind, NEVER_OPENED) or tops[0] in _CLOSED or not _PASSED.isdisjoint(tops)
    return not closed and not is_of_the_script(kind)


def fields_of(thing: Any, most: int) -> list[Any]:
    """Names and values of the attributes of an object, one after the other."""
    slots = ((name, slot_value(thing, name)) for name in slot_names(type(thing)))
    return [each for pair in itertools.chain(items_of(attributes_of(thing) or {}, most), slots) for each in pair]


def keeps_more(container: Any) -> bool:
    """Whether it is a library's, and has more than its entries, which it keeps in step with them: a sorted dict."""
    if not isinstance(container, made.CONTAINERS) or not is_of_library(type(container)):
        return False
    fields = [each for each in fields_of(container, MOST_FIELDS) if type(each) not in made.PLAIN]
    more = [each for each in fields if each is not MISSING and each is not container and not callable(each)]
    held = {id(each) for each in entries_of(container)} if more else ()
    return any(id(each) not in held for each in more)
