"""Holdings: a digest of the data that a loader's objects hold. A replacement shows by it that it has the same rows.

The batch in progress may be equal by chance where other rows are not: a subset that was drawn without a seed, a query
that gives more rows by now. So the record of a loop has the digests of all tensors, arrays, tables and long containers
that its loader's objects had when it began, and a replacement compares its own before its first item.

What the script changes, such as a cache or a curriculum, is seen at the beginning of later loops and no longer told.
Short containers and single values are not compared: they may name this process, its files or its time.

    tensors and arrays     all of it up to 1 GiB in all, 64 MiB of files that are mapped; of what is larger 1,024 pieces
                           of 4 KiB, evenly spaced
    lists of paths         without the folder that all of them have in common: it may be one of this machine
    tables                 of pandas and of Arrow, as arrays
    files                  not opened: what a path names may differ
"""

from __future__ import annotations

import os
import sys
import time
import types
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, Dataset

from torchrelay.errors import UnprovedError
from torchrelay.worker.hidden_state import arguments, graph, moving, variables
from torchrelay.worker.hidden_state.around import around

DATA = "data"  # the path of what is gone through itself
LEAST = 8  # values in a container that is told
LEAST_BYTES = 1 << 20  # of an array in a variable
LEAST_TEXT = 256  # bytes of a text that is
MOST = 32  # that are told of one loader: the longest
WHOLE, MAPPED = 1 << 30, 64 << 20  # bytes of arrays of one loader that count as a whole: in memory, and in files
PIECES, PIECE = 1024, 4096  # of a further one
MAX_ENTRIES = 1 << 20  # of a container: evenly spaced ones of a longer one
MAX_DEPTH = 8
MAX_OBJECTS = 4096  # that are looked into
SHARE = 500  # all is read anew only if so many times as long has passed as it takes
REMEDY = (
    "Seed whatever chooses rows, and read them from a place that does not change while the job runs; "
    'or let the job begin with one choice for all of its life: rows = torchrelay.once("rows", choose)'
)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque, array)
_BLOBS = (str, bytes, bytearray)
_DOERS = (torch.nn.Module, torch.optim.Optimizer, type, types.ModuleType, types.FunctionType, types.MethodType)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[str, bytes]]).decode


class Holdings:
    """What the objects of one loader hold."""

    def __init__(self, leaves: Callable[[], list[tuple[str, Any]]], name: str) -> None:
        """`leaves`: all there is, by its path. `name`: of what has it."""
        self._leaves = leaves
        self._name = name
        self._steady: dict[str, tuple[Any, bytes]] | None = None  # by path: a glance at it, and its digest
        self._read_at = self._cost = 0.0

    def told(self) -> bytes:
        """As a loop begins, and now and then in it: the digests of what has never changed, by its path."""
        leaves = dict(self._leaves())
        if self._steady is None:
            self._begin(leaves)
        elif self._steady:
            self._compare(leaves)
        assert self._steady is not None
        return _encode([(path, found) for path, (_, found) in self._steady.items()]) if self._steady else b""

    def see(self) -> None:
        """Just before a loop begins of which nothing is told: what is seen here first is what later looks compare."""
        if self._steady is None:
            self._begin(dict(self._leaves()))

    def check(self, recorded: bytes) -> None:
        """A replacement is about to enter a loop. Raises `UnprovedError` if it does not hold its predecessor's data."""
        leaves = dict(self._leaves())
        told = dict(_decode(recorded)) if recorded else {}
        own = self._read(leaves, told)
        for path, digest in told.items():
            if own.get(path) == digest or _is_unfilled(leaves.get(path)):
                continue
            raise UnprovedError(
                f"{path} of {self._name} is not what it was in the worker that was lost, though nothing has changed it "
                f"there since its first loop: later items would differ, even if the one in progress does not. {REMEDY}"
            )
        if self._steady is None:  # what was told by its predecessor no longer has changed there
            self._steady = {path: (_glance(leaves[path]), found) for path, found in own.items()}

    def _begin(self, leaves: dict[str, Any]) -> None:
        data = [(_size(value), path) for path, value in leaves.items() if path == DATA or _counts(value)]
        largest = [path for _, path in sorted(data, reverse=True)]
        made = self._read(leaves, largest[:MOST])
        self._steady = {path: (_glance(leaves[path]), found) for path, found in made.items()}

    def _compare(self, leaves: dict[str, Any]) -> None:
        """Let go of what has changed."""
        assert self._steady is not None
        glances = {path: _glance(leaves.get(path)) for path in self._steady}
        doubtful = [path for path, (glance, _) in self._steady.items() if glances[path] != glance]
        if time.perf_counter() - self._read_at > SHARE * self._cost:
            doubtful = list(self._steady)
        now = self._read(leaves, doubtful)
        for path in doubtful:
            if now.get(path) != self._steady[path][1]:
                del self._steady[path]
            else:
                self._steady[path] = glances[path], now[path]

    def _read(self, leaves: dict[str, Any], paths: Iterable[str]) -> dict[str, bytes]:
        begin = time.perf_counter()
        found = _digests({path: leaves[path] for path in paths if path in leaves})
        self._read_at = time.perf_counter()
        self._cost = max(self._cost, self._read_at - begin)
        return found


_known: dict[int, tuple[Any, Holdings]] = {}  # by the loader's id, with a weak reference
_of_functions: dict[tuple[CodeType, str], Holdings] = {}


def of(loader: Any) -> Holdings:
    """Of this loader, from its first loop to its last."""
    number, name = id(loader), f"a {type(loader).__module__}.{type(loader).__qualname__}"
    found = _known.get(number)
    if found is not None and found[0]() is loader:
        return found[1]
    try:
        reference = weakref.ref(loader, lambda _: _known.pop(number, None))
    except TypeError:  # a list: of it as it is now, and no longer
        return Holdings(lambda: _leaves(loader), name)
    holdings = Holdings(lambda: _leaves(reference()), name)
    _known[number] = reference, holdings
    return holdings


def of_functions(frame: FrameType, kind: str) -> Holdings:
    """Of a loop without a loader: arrays and data sets that the functions around it use, such as a text in tokens.

    `frame`: of the function in which the loop is.
    """
    return _of_functions.setdefault((frame.f_code, kind), Holdings(_used, "the functions around a loop"))


# ---------------------------------------------------------------- what there is


def _roots(loader: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(loader, DataLoader):
        inner = vars(loader) if graph.attributes(loader) is not None else {}
        base = inner.get("base_dataloader", inner.get("_dataloader"))
        yield from _roots(base) if isinstance(base, DataLoader) else [(DATA, loader)]
        return
    fields = vars(loader)
    yield from ((name, fields.get(name)) for name in ("dataset", "sampler", "batch_sampler", "collate_fn"))
    if not type(loader).__module__.startswith("torch."):
        yield "loader", loader


class _Walk:
    """Data by its path, in the objects of a loader."""

    def __init__(self) -> None:
        self.found: list[tuple[str, Any]] = []
        self._seen: set[int] = set()

    def visit(self, path: str, value: Any, depth: int) -> None:
        if value is None or isinstance(value, _DOERS) or id(value) in self._seen or len(self._seen) > MAX_OBJECTS:
            return
        if isinstance(value, (torch.Tensor, np.ndarray, *_BLOBS)) or _is_table(value):
            self.found.append((path, value))
        elif isinstance(value, _CONTAINERS):
            self._seen.add(id(value))
            inner = list(_inner(value)) if depth < MAX_DEPTH else []
            if not inner:
                self.found.append((path, value))
            for key, entry in inner:
                self.visit(f"{path}[{key!r}]", entry, depth + 1)
        elif depth < MAX_DEPTH and not graph.is_generator(value):
            self._seen.add(id(value))
            fields = graph.attributes(value) or {}
            for name, entry in list(fields.items()):
                if type(name) is str and not name.startswith("_torchrelay"):
                    self.visit(f"{path}.{name}", entry, depth + 1)


def _leaves(loader: Any) -> list[tuple[str, Any]]:
    walk = _Walk()
    for name, root in _roots(loader):
        if name == "loader":
            for at, entry in list(vars(root).items()):
                if at not in graph.OF_LOADERS:
                    walk.visit(f"loader.{at}", entry, 1)
        else:
            walk.visit(name, root, 0)
    return walk.found


def _used() -> list[tuple[str, Any]]:
    """What functions of the script that are under way use, and functions that these call."""
    walk = _Walk()
    for frame in variables.outside():
        local, around_it, where = frame.f_locals, frame.f_globals, f"of {frame.f_code.co_qualname}"
        named = {name: around_it[name] for name in graph.names_used(frame.f_code) if name in around_it} | dict(local)
        functions = [value for value in named.values() if type(value) is types.FunctionType]
        for name, value in named.items():
            _take(walk, f"{name} {where}", value)
        for leaf in around(functions):
            _take(walk, leaf.path, leaf.value)
    return walk.found


def _take(walk: _Walk, path: str, value: Any) -> None:
    """Of all there is in variables, what can only be data: others may be this process's own, such as a fixed noise."""
    large = isinstance(value, (np.ndarray, torch.Tensor)) and value.nbytes >= LEAST_BYTES
    of_model = isinstance(value, torch.Tensor) and value.requires_grad
    if (large and not of_model) or isinstance(value, (Dataset, np.memmap)) or _is_table(value):
        walk.visit(path, value, 0)


def _inner(value: Any) -> Iterator[tuple[Any, Any]]:
    """Entries of a short container that holds objects, such as data sets that are put together."""
    if len(value) > MOST or isinstance(value, (set, frozenset, array)):
        return
    pairs = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    if any(_is_opened(entry) for _, entry in pairs):
        yield from ((key, entry) for key, entry in pairs if type(key) in (int, str))


def _is_opened(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, np.ndarray, *_DOERS)) or type(value).__module__ == "builtins":
        return False
    return graph.attributes(value) is not None or _is_table(value)


def _counts(value: Any) -> bool:
    """Whether it is data, and not what tells of this process."""
    if isinstance(value, torch.Tensor):
        return value.numel() > 1 and not value.is_meta
    if isinstance(value, np.ndarray):
        return value.size > 1
    if isinstance(value, _BLOBS):
        return len(value) >= LEAST_TEXT
    if isinstance(value, _CONTAINERS):
        return len(value) >= LEAST or any(_counts(entry) for entry in _entries(value))
    return _is_table(value) or (graph.attributes(value) is not None and not isinstance(value, _DOERS))


def _entries(value: Any) -> Iterable[Any]:
    return list(value.values()) if isinstance(value, dict) else list(value)


def _is_unfilled(value: Any) -> bool:
    """Whether it is a cache that nothing has come into yet."""
    if value is None:
        return True
    if not isinstance(value, _CONTAINERS):
        return False
    return len(value) == 0 or (isinstance(value, (list, dict)) and all(entry is None for entry in _entries(value)))


def _glance(value: Any) -> Any:
    """What tells in next to no time whether something has changed, but for a part of what is large."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.shape, arguments.digest(value)
    return moving.signature(value)


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    return 8 * len(value)


# ---------------------------------------------------------------- digests


def _digests(leaves: dict[str, Any]) -> dict[str, bytes]:
    maker = _Maker()
    return {path: maker.digest(value) for path, value in leaves.items()}


class _Maker:
    """Digests of eight bytes. What counts as a whole is counted over all of them."""

    def __init__(self) -> None:
        self._left, self._left_mapped = WHOLE, MAPPED

    def digest(self, value: Any) -> bytes:
        hashed = xxhash.xxh3_64()
        self._add(hashed, value, 0)
        found: bytes = hashed.digest()
        return found

    def _add(self, hashed: Any, value: Any, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(hashed, value)
        elif isinstance(value, np.ndarray):
            self._array(hashed, value)
        elif _is_table(value):
            hashed.update(f"table {len(value)}".encode())
            for part in _arrays_of(value):
                if isinstance(part, np.ndarray):
                    self._array(hashed, part, mapped=True)
                else:
                    self._add(hashed, part, depth + 1)
        elif isinstance(value, _CONTAINERS):
            self._container(hashed, value, depth)
        elif depth < MAX_DEPTH and arguments.fields_of(value) is None and graph.attributes(value):
            hashed.update(type(value).__qualname__.encode())
            for name, entry in list((graph.attributes(value) or {}).items()):
                if isinstance(entry, (torch.Tensor, np.ndarray, *_CONTAINERS, *_BLOBS)):
                    hashed.update(name.encode())
                    self._add(hashed, entry, depth + 1)
        else:
            hashed.update(arguments.digest(value))

    def _tensor(self, hashed: Any, value: torch.Tensor) -> None:
        plain = type(value) is torch.Tensor and value.is_cpu and value.dtype in arguments.NUMPY
        if not plain or value.is_conj() or value.is_neg() or value.layout != torch.strided:
            hashed.update(arguments.digest(value))
        else:
            self._array(hashed, value.detach().numpy())

    def _array(self, hashed: Any, value: np.ndarray[Any, Any], *, mapped: bool = False) -> None:
        hashed.update(f"{value.dtype}{value.shape}".encode())
        if value.dtype.hasobject:
            self._container(hashed, value.reshape(-1).tolist(), 1)
        elif value.nbytes <= arguments.WHOLE or self._has_room(value.nbytes, mapped or isinstance(value, np.memmap)):
            if value.size:
                hashed.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        elif not value.flags.c_contiguous:
            hashed.update(arguments.digest(value))
        else:
            flat = value.reshape(-1)
            step = max(1, PIECE // value.itemsize)
            last = len(flat) - step
            for at in range(PIECES):
                start = last * at // (PIECES - 1)
                hashed.update(np.ascontiguousarray(flat[start : start + step]).view(np.uint8).data)

    def _has_room(self, size: int, mapped: bool) -> bool:
        if mapped:
            self._left_mapped -= size
            return self._left_mapped >= 0
        self._left -= size
        return self._left >= 0

    def _container(self, hashed: Any, value: Any, depth: int) -> None:
        hashed.update(f"{type(value).__name__} {len(value)}".encode())
        if isinstance(value, array):
            hashed.update(memoryview(value))
            return
        entries = list(value.items()) if isinstance(value, dict) else list(value)
        if isinstance(value, (set, frozenset)):
            entries = sorted(entries, key=repr)
        if len(entries) > MAX_ENTRIES:
            last = len(entries) - 1
            entries = [entries[last * at // (MAX_ENTRIES - 1)] for at in range(MAX_ENTRIES)]
        try:
            hashed.update(_encode(_without_folder(entries)))
        except (TypeError, ValueError, OverflowError, RecursionError):  # there are others than plain values in it
            for entry in entries:
                if depth < MAX_DEPTH and not isinstance(entry, _DOERS):
                    self._add(hashed, entry, depth + 1)


def _without_folder(entries: list[Any]) -> list[Any]:
    """Paths without the folder that is common to all: two machines may have the same files in different places."""
    if not entries or not all(type(entry) is str for entry in entries) or os.sep not in entries[0]:
        return entries
    common = os.path.commonprefix([min(entries), max(entries)])  # noqa: RUF071  its last part is cut off below
    cut = common.rfind(os.sep) + 1
    return [entry[cut:] for entry in entries]


def _is_table(value: Any) -> bool:
    return _module_of(value) in ("pandas", "pyarrow") and hasattr(value, "__len__") and bool(_kind_of_table(value))


def _module_of(value: Any) -> str:
    return str(type(value).__module__).split(".", 1)[0]


def _kind_of_table(value: Any) -> str:
    pandas, arrow = sys.modules.get("pandas"), sys.modules.get("pyarrow")
    if pandas is not None and isinstance(value, (pandas.DataFrame, pandas.Series, pandas.Index)):
        return "pandas"
    if arrow is not None and isinstance(value, (arrow.Table, arrow.RecordBatch, arrow.ChunkedArray, arrow.Array)):
        return "arrow"
    return ""


def _arrays_of(table: Any) -> Iterator[Any]:
    """What makes up a table, as arrays."""
    if _kind_of_table(table) == "pandas":
        pandas = sys.modules["pandas"]
        for part in (table, *([] if isinstance(table, pandas.Index) else [table.index])):
            try:
                yield pandas.util.hash_pandas_object(part, index=False).to_numpy()
            except TypeError:  # lists or other objects in it
                yield np.asarray(part, dtype=object)
        return
    arrow = sys.modules["pyarrow"]
    if isinstance(table, (arrow.Table, arrow.RecordBatch)):
        yield str(table.schema.remove_metadata())
        for column in table.columns:
            yield from _arrays_of(column)
    elif isinstance(table, arrow.ChunkedArray):
        for chunk in table.chunks:
            yield from _arrays_of(chunk)
    else:
        yield [table.offset, len(table)]
        for buffer in table.buffers():
            if buffer is not None and buffer.size:
                yield np.frombuffer(buffer, dtype=np.uint8)
