"""Rows: digests of the data that is held in arrays, tensors, tables and containers. Raises whatever a value raises.

arrays, tensors   all of it (`WHOLE`), or 1,024 pieces of 4 KiB, evenly spaced (`PIECES`)
lists of paths    without the folder that all of them have in common: it may be one of this machine
tables            of pandas and of Arrow, as arrays
long lists        a million plain values, 65,536 objects, evenly spaced
"""

from __future__ import annotations

import os
import sys
import types
from array import array
from collections import deque
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from torchrelay.worker.hidden_state import graph
from torchrelay.worker.tensors import arguments
from torchrelay.worker.tensors.entries import entries_of, items_of

CONTAINERS = (list, tuple, dict, set, frozenset, deque, array)
DOERS = (torch.nn.Module, torch.optim.Optimizer, type, types.ModuleType, types.FunctionType, types.MethodType)
WHOLE, PIECES = b"w", b"p"  # how much of large arrays counts
SMALL = 1 << 20  # bytes of an array of which all counts in any case
COUNT, SIZE = 1024, 4096  # pieces, and bytes of each
MAX_PLAIN, MAX_OBJECTS = 1 << 20, 1 << 16  # entries of a container that count
COMBINED = 64 << 20  # bytes of an Arrow column up to which its chunks are put together
MAX_DEPTH = 8
_encode = msgspec.msgpack.Encoder().encode


def digest(value: Any, mode: bytes) -> bytes:
    """The mode, and eight bytes."""
    hashed = xxhash.xxh3_64()
    _add(hashed, value, mode == WHOLE, 0)
    return mode + hashed.digest()


def is_table(value: Any) -> bool:
    return bool(_kind_of_table(value))


def size(value: Any) -> int:
    """Bytes, roughly."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    return 8 * len(value) if hasattr(value, "__len__") else 8


def _add(hashed: Any, value: Any, whole: bool, depth: int) -> None:
    if isinstance(value, torch.Tensor):
        _tensor(hashed, value, whole)
    elif isinstance(value, np.ndarray):
        _array(hashed, value, whole)
    elif is_table(value):
        hashed.update(f"table {len(value)}".encode())
        for part in _arrays_of(value):
            _add(hashed, part, whole, depth + 1)
    elif isinstance(value, CONTAINERS):
        _container(hashed, value, whole, depth)
    elif depth < MAX_DEPTH and arguments.fields_of(value) is None and graph.attributes_of(value):
        hashed.update(type(value).__qualname__.encode())
        for name, entry in list((graph.attributes_of(value) or {}).items()):
            if isinstance(entry, (torch.Tensor, np.ndarray, str, bytes, *CONTAINERS, int, float)):
                hashed.update(str(name).encode())
                _add(hashed, entry, whole, depth + 1)
    else:
        hashed.update(arguments.digest(value))


def _tensor(hashed: Any, value: torch.Tensor, whole: bool) -> None:
    odd = value.layout != torch.strided or value.is_nested or value.is_quantized or not value.is_cpu
    if odd or value.is_conj() or value.is_neg() or value.is_meta:
        hashed.update(arguments.digest(value))
        return
    hashed.update(f"{value.dtype}{tuple(value.shape)}".encode())
    plain = value.detach().as_subclass(torch.Tensor)
    if plain.is_contiguous():
        _bytes(hashed, plain.reshape(-1).view(torch.uint8).numpy(), whole)
    elif plain.nbytes <= SMALL or whole:
        _bytes(hashed, plain.contiguous().view(-1).view(torch.uint8).numpy(), whole=True)
    else:
        hashed.update(arguments.digest(plain))


def _array(hashed: Any, value: np.ndarray[Any, Any], whole: bool) -> None:
    hashed.update(f"{value.dtype if value.dtype.kind != 'U' else 'texts'}{value.shape}".encode())
    if value.dtype.hasobject or value.dtype.kind == "U":
        _container(hashed, value.reshape(-1).tolist(), whole, 1)
    elif value.dtype.names:  # with gaps between the fields, of which nobody knows what is in them
        for name in value.dtype.names:
            _array(hashed, value[name], whole)
    elif value.dtype in (np.longdouble, np.clongdouble):  # so is a part of each number
        hashed.update(repr(value.reshape(-1)[:SIZE].tolist()).encode())
    elif not value.size:
        return
    elif value.flags.c_contiguous:
        _bytes(hashed, value.reshape(-1).view(np.uint8), whole)
    elif value.nbytes <= SMALL or whole:
        _bytes(hashed, np.ascontiguousarray(value).reshape(-1).view(np.uint8), whole=True)
    else:
        hashed.update(arguments.digest(value))


def _bytes(hashed: Any, flat: np.ndarray[Any, Any], whole: bool) -> None:
    if whole or len(flat) <= SMALL:
        hashed.update(flat.data)
        return
    last = len(flat) - SIZE
    for at in range(COUNT):
        start = last * at // (COUNT - 1)
        hashed.update(flat[start : start + SIZE].data)


def _container(hashed: Any, value: Any, whole: bool, depth: int) -> None:
    hashed.update(f"{type(value).__name__} {len(value)}".encode())
    if isinstance(value, array):
        hashed.update(memoryview(value))
        return
    entries = items_of(value) if isinstance(value, dict) else entries_of(value)
    try:
        if isinstance(value, (set, frozenset)):
            entries = sorted(entries, key=lambda entry: (type(entry).__name__, _encode(entry)))
        hashed.update(_encode(_without_folder(_spread(entries, MAX_PLAIN))))
    except (TypeError, ValueError, OverflowError, RecursionError):  # there are others than plain values in it
        some = [entry for entry in _spread(entries, MAX_OBJECTS) if not isinstance(entry, DOERS)]
        if depth >= MAX_DEPTH:
            return
        if isinstance(value, (set, frozenset)):
            made = sorted(digest(entry, WHOLE if whole else PIECES) for entry in some)
            hashed.update(b"".join(made))
            return
        for entry in some:
            _add(hashed, entry, whole, depth + 1)


def _spread(entries: list[Any], most: int) -> list[Any]:
    """All of them, or so many, evenly spaced."""
    if len(entries) <= most:
        return entries
    last = len(entries) - 1
    return [entries[last * at // (most - 1)] for at in range(most)]


def _without_folder(entries: list[Any]) -> list[Any]:
    """Paths without the folder that all have in common, in rows by column: another machine may have it elsewhere."""
    if not entries:
        return entries
    first = entries[0]
    if isinstance(first, PurePath):
        return _without_folder([str(entry) if isinstance(entry, PurePath) else entry for entry in entries])
    if isinstance(first, str):
        return _cut(entries)
    kind = type(first)
    if kind not in (tuple, list, dict) or not all(
        type(entry) is kind and len(entry) == len(first) for entry in entries
    ):
        return entries
    if kind is dict:
        if not all(entry.keys() == first.keys() for entry in entries):
            return entries
        columns = [[entry[key] for entry in entries] for key in first]
        return [list(first), *map(_without_folder_flat, columns)]
    return [list(column) for column in map(_without_folder_flat, zip(*entries, strict=True))]


def _without_folder_flat(column: Any) -> list[Any]:
    column = list(column)
    if column and isinstance(column[0], PurePath):
        column = [str(entry) if isinstance(entry, PurePath) else entry for entry in column]
    return _cut(column) if column and isinstance(column[0], str) else column


def _cut(entries: list[Any]) -> list[Any]:
    if not all(type(entry) is str for entry in entries) or os.sep not in entries[0]:
        return entries
    common = os.path.commonprefix([min(entries), max(entries)])  # noqa: RUF071  its last part is cut off below
    cut = common.rfind(os.sep) + 1
    return [entry[cut:] for entry in entries]


# ---------------------------------------------------------------- tables


def _kind_of_table(value: Any) -> str:
    top = str(type(value).__module__).split(".", 1)[0]
    if top == "pandas":
        pandas = sys.modules["pandas"]
        return "pandas" if isinstance(value, (pandas.DataFrame, pandas.Series, pandas.Index)) else ""
    if top == "pyarrow":
        arrow = sys.modules["pyarrow"]
        kinds = (arrow.Table, arrow.RecordBatch, arrow.ChunkedArray, arrow.Array)
        return "arrow" if isinstance(value, kinds) else ""
    return ""


def _arrays_of(table: Any) -> Iterator[Any]:
    """What makes up a table, as arrays."""
    if _kind_of_table(table) == "arrow":
        yield from _of_arrow(table)
        return
    pandas = sys.modules["pandas"]
    if isinstance(table, pandas.DataFrame):
        yield [str(name) for name in table.columns]
        for at in range(len(table.columns)):
            yield from _arrays_of(table.iloc[:, at])
        yield from _arrays_of(table.index)
    elif table.dtype == object and not all(isinstance(entry, str) or entry is None for entry in table):
        yield list(table)
    else:
        yield pandas.util.hash_pandas_object(table, index=False).to_numpy()


def _of_arrow(table: Any) -> Iterator[Any]:
    arrow = sys.modules["pyarrow"]
    if isinstance(table, (arrow.Table, arrow.RecordBatch)):
        yield str(table.schema.remove_metadata())
        for column in table.columns:
            yield from _of_arrow(column)
    elif isinstance(table, arrow.ChunkedArray):
        whole = table.combine_chunks() if table.nbytes <= COMBINED else table
        chunks = whole.chunks if isinstance(whole, arrow.ChunkedArray) else [whole]
        for chunk in chunks:
            yield from _of_arrow(chunk)
    else:
        yield [table.offset, len(table)]
        for buffer in table.buffers():
            if buffer is not None and buffer.size:
                yield np.frombuffer(buffer, dtype=np.uint8)
        if isinstance(table, arrow.DictionaryArray):
            yield from _of_arrow(table.dictionary)
