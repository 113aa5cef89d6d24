"""Held: what the objects of a loader hold, and what functions around a loop use, as far as it can be data.

Each part has a path for people, and a place: the object that holds it, and its name there. A place is one and the same
for all loops, loaders and functions that come to it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from torchrelay.worker.data.rows import CONTAINERS, DOERS, is_table
from torchrelay.worker.hidden_state import graph, variables
from torchrelay.worker.hidden_state.around import variables_around
from torchrelay.worker.source.lines import is_of_the_script
from torchrelay.worker.source.names import names_used
from torchrelay.worker.tensors.entries import entries_of, items_of, keys_of

DATA = "data"  # the path of what is gone through itself
LEAST = 8  # values in a container that is told
LEAST_BYTES = 1 << 20  # of an array in a variable
LEAST_TEXT = 256  # bytes of a text that is
SETTINGS = 256  # entries of a dict that may be settings
MOST = 32  # entries of a container that is looked into for data sets
MAX_DEPTH = 8
MAX_OBJECTS = 4096  # that are looked into
_BLOBS = (str, bytes, bytearray)


class Part(NamedTuple):
    """Something that may be data."""

    path: str
    owner: Any  # the object that holds it; itself if that is not known
    name: str  # in the owner
    value: Any


def of_loader(loader: Any) -> list[Part]:
    """What a loader's objects hold."""
    walk = _Walk()
    for name, root in _roots(loader):
        if name == "loader":
            for at, entry in list(vars(root).items()):
                if at not in graph.OF_LOADERS:
                    walk.visit(Part(f"loader.{at}", root, at, entry), 1)
        else:
            walk.visit(Part(name, root, "", root), 0)
    return walk.found


def of_functions() -> list[Part]:
    """What functions of the script that are under way use, and functions that these call."""
    walk = _Walk()
    for frame in variables.outside():
        local, around_it, where = frame.f_locals, frame.f_globals, f"of {frame.f_code.co_qualname}"
        named = {name: around_it[name] for name in names_used(frame.f_code) if name in around_it} | dict(local)
        functions = [value for value in named.values() if type(value) is types.FunctionType]
        for name, value in named.items():
            walk.take(f"{name} {where}", value)
        for leaf in variables_around(functions):
            walk.take(leaf.path, leaf.value)
    return walk.found


def counts(value: Any) -> bool:
    """Whether it is data, and not what tells of this process."""
    if isinstance(value, torch.Tensor):
        return not value.is_meta and (value.layout != torch.strided or value.numel() > 1)
    if isinstance(value, np.ndarray):
        return value.size > 1
    if isinstance(value, _BLOBS):
        return len(value) >= LEAST_TEXT
    if isinstance(value, CONTAINERS):
        long = len(value) >= LEAST and not _is_settings(value)
        return long or any(counts(entry) for entry in entries_of(value, MOST))
    return is_table(value) or (graph.attributes_of(value) is not None and not isinstance(value, DOERS))


def is_unfilled(value: Any) -> bool:
    """Whether it is a cache that nothing has come into yet."""
    if value is None:
        return True
    if not isinstance(value, CONTAINERS):
        return False
    return len(value) == 0 or (isinstance(value, (list, dict)) and all(entry is None for entry in entries_of(value)))


def _is_settings(value: Any) -> bool:
    """Names with values of several kinds, or with texts: settings, or an environment. They may name this process."""
    if not isinstance(value, dict) or len(value) > SETTINGS or not all(type(key) is str for key in keys_of(value)):
        return False
    kinds = {type(entry) for entry in entries_of(value)}
    return kinds <= graph.PLAIN and (len(kinds) > 1 or kinds == {str})


def _roots(loader: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(loader, DataLoader):
        inner = graph.attributes_of(loader) or {}
        base = inner.get("base_dataloader", inner.get("_dataloader"))
        yield from _roots(base) if isinstance(base, DataLoader) else [(DATA, loader)]
        return
    fields = vars(loader)
    yield from ((name, fields.get(name)) for name in ("dataset", "sampler", "batch_sampler", "collate_fn"))
    if not type(loader).__module__.startswith("torch."):
        yield "loader", loader


class _Walk:
    """Parts, each once. What raises when it is looked at is no part."""

    def __init__(self) -> None:
        self.found: list[Part] = []
        self._seen: set[int] = set()

    def visit(self, part: Part, depth: int) -> None:
        try:
            self._visit(part, depth)
        except Exception:  # noqa: BLE001  objects of a script's own: whatever they raise, the script goes on
            return

    def take(self, path: str, value: Any, depth: int = 0) -> None:
        """Of all there is in variables, what can only be data: others may be this process's own, as a fixed noise."""
        try:
            if _is_large(value) or isinstance(value, (Dataset, np.memmap)) or is_table(value):
                self.visit(Part(path, value, "", value), 0)
            elif depth < 2 and (type(value) in (dict, list, tuple) or is_of_the_script(type(value))):
                self._take_inside(path, value, depth)
        except Exception:  # noqa: BLE001  as above
            return

    def _take_inside(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, DOERS) or len(self._seen) > MAX_OBJECTS:
            return
        if type(value) in (list, tuple):
            pairs: list[tuple[Any, Any]] = list(enumerate(value[:MOST]))
        else:
            pairs = list((value if type(value) is dict else graph.attributes_of(value) or {}).items())[:MOST]
        for at, entry in pairs:
            self.take(f"{path}[{at!r}]" if type(value) in (dict, list, tuple) else f"{path}.{at}", entry, depth + 1)

    def _visit(self, part: Part, depth: int) -> None:
        value = part.value
        if isinstance(value, type) or len(self._seen) > MAX_OBJECTS or id(value) in self._seen:
            return
        if value is None:  # a replacement has nothing there yet
            self._found(part)
            return
        if isinstance(value, (functools.partial, types.MethodType, types.FunctionType)):
            self._seen.add(id(value))
            self._visit_function(part, depth)
        elif isinstance(value, DOERS):
            return
        elif isinstance(value, (torch.Tensor, np.ndarray, *_BLOBS)) or is_table(value):
            self._found(part)
        elif isinstance(value, CONTAINERS):
            self._seen.add(id(value))
            inner = list(_inner(value)) if depth < MAX_DEPTH else []
            if not inner:
                self._found(part)
            for key, entry in inner:
                self.visit(Part(f"{part.path}[{key!r}]", entry, "", entry), depth + 1)
        elif depth < MAX_DEPTH and not graph.is_generator(value) and _is_open(type(value)):
            self._seen.add(id(value))
            fields = graph.attributes_of(value) or {}
            for name, entry in list(fields.items()):
                if type(name) is str and not name.startswith("_torchrelay"):
                    self.visit(Part(f"{part.path}.{name}", value, name, entry), depth + 1)

    def _visit_function(self, part: Part, depth: int) -> None:
        """What a function that makes items was given."""
        value = part.value
        if depth >= MAX_DEPTH:
            return
        if isinstance(value, functools.partial):
            inner = {"args": list(value.args), **value.keywords, "func": value.func}
        elif isinstance(value, types.MethodType):
            inner = {"self": value.__self__}
        else:
            names = value.__code__.co_freevars
            inner = {name: cell.cell_contents for name, cell in zip(names, value.__closure__ or (), strict=False)}
        for name, entry in inner.items():
            self.visit(Part(f"{part.path}.{name}", value, name, entry), depth + 1)

    def _found(self, part: Part) -> None:
        self.found.append(part)


def _is_open(kind: type) -> bool:
    return issubclass(kind, (Dataset, Sampler)) or not graph.is_closed(kind)


def _is_large(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.nbytes >= LEAST_BYTES
    if not isinstance(value, torch.Tensor) or value.requires_grad:
        return False
    return value.layout == torch.strided and not value.is_nested and value.nbytes >= LEAST_BYTES


def _inner(value: Any) -> Iterator[tuple[Any, Any]]:
    """Entries of a container that holds objects, such as data sets that are put together."""
    if isinstance(value, (set, frozenset)) or type(value).__name__ == "array":
        return
    pairs = items_of(value) if isinstance(value, dict) else list(enumerate(entries_of(value)))
    sets = [(key, entry) for key, entry in pairs if isinstance(entry, Dataset)]
    if len(pairs) > MOST:
        yield from sets
    elif any(_is_opened(entry) for _, entry in pairs):
        yield from ((key, entry) for key, entry in pairs if type(key) in (int, str))


def _is_opened(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, np.ndarray, *DOERS)) or type(value).__module__ == "builtins":
        return False
    return graph.attributes_of(value) is not None or is_table(value)
