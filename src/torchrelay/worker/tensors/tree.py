"""Tree: state as plain values with tensors at its leaves, and its encoding. Nothing is pickled, nothing is guessed.

`encode` gives the tree as msgpack and its tensors beside it, each one once, however often it is referred to; `decode`
gives the tree back with a `Leaf` in place of each tensor. In msgpack, a scalar is itself and all else is a list with a
tag in front (below). What is of no type named there is refused, with the path to it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import Struct

from torchrelay.errors import RefusedError
from torchrelay.worker.parallel import shards
from torchrelay.worker.parallel.shards import Described
from torchrelay.worker.tensors import memory
from torchrelay.worker.tensors.entries import entries_of, items_of

_DEPTH = 100  # containers within one another; deeper is a tree that contains itself
_INT64 = range(-(1 << 63), 1 << 63)
_SCALARS = (type(None), bool, float, str, bytes)

REMEDY = (
    "give its class state_dict() and load_state_dict(), or pass its values as numbers, strings, tensors, "
    "and lists or dicts of them"
)


class NotCarriedError(RefusedError, TypeError):
    """A value within the state, or within a result, is of a type that is not carried. Names the path to it."""

    def __init__(self, message: str) -> None:
        TypeError.__init__(self, message)
        self.reason, self.remedy = message, REMEDY

    def __reduce__(self) -> tuple[type[NotCarriedError], tuple[str]]:  # type: ignore[override]
        return type(self), (self.reason,)


class Leaf(Struct, frozen=True):
    """Where a tensor stands in a decoded tree, and what it must be."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements, see memory.strides
    device: str  # "cpu" or "cuda": the kind, as the replacement's own device may have another number
    index: int  # of the tensor among those sent


class ShardLeaf(Struct, frozen=True):
    """Where a DTensor stands in a decoded tree: what travels is its local part."""

    described: Described
    leaf: Leaf


class ArrayLeaf(Struct, frozen=True):
    """Where a NumPy array stands in a decoded tree; its bytes, in C order, travel as a tensor of uint8."""

    dtype: str
    shape: tuple[int, ...]
    index: int


class Fields(dict[str, Any]):
    """A dict of our own making: its keys mean nothing to the script and do not show in paths."""


class Named(dict[str, Any]):
    """A dict of our own making whose keys are the paths of what it holds."""


def encode(
    tree: Any, path: str = "state", *, canonical: bool = False, whole: bool = False
) -> tuple[bytes, list[torch.Tensor]]:
    """The tree as msgpack, and its tensors in order of first sight; nothing is copied.

    `whole`: DTensors are refused. `canonical`: dicts sorted by key, so that equal trees give equal bytes (for
    digests). Raises `TypeError`, naming the path, for what cannot be carried.
    """
    encoder = _Encoder(canonical, whole)
    node = encoder.node(tree, path, 0)
    return msgspec.msgpack.encode(node), encoder.tensors


def decode(data: bytes | bytearray | memoryview) -> Any:
    """The tree again, with `Leaf` and `ArrayLeaf` for tensors and arrays. Raises `ValueError` if `data` is no tree."""
    try:
        return _decode(msgspec.msgpack.decode(data))
    except _NO_TREE as error:
        raise ValueError(f"these {len(data)} bytes are no state tree: {error}") from error


_NO_TREE = (
    msgspec.DecodeError, TypeError, ValueError, KeyError, IndexError, AttributeError, RecursionError, OverflowError,
)  # fmt: skip


# ---------------------------------------------------------------- encoding


class _Encoder:
    def __init__(self, canonical: bool, whole: bool) -> None:
        self._canonical = canonical
        self._whole = whole
        self._indices: dict[memory.Place, int] = {}
        self._without_tensors = 0  # sets and keys around the value: nothing could land inside them
        self.tensors: list[torch.Tensor] = []

    def node(self, value: Any, path: str, depth: int) -> Any:
        """What msgpack is given for this value."""
        kind = type(value)
        if kind in _SCALARS:
            return self._scalar(value, path)
        if kind is int:
            return value if value in _INT64 else ["i", str(value)]
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if depth > _DEPTH:
            raise NotCarriedError(f"{path} is nested more than {_DEPTH} deep: does it contain itself?")
        if kind in _CONTAINERS:
            return _CONTAINERS[kind](self, value, path, depth)
        if kind in _VALUES:
            return _VALUES[kind](value)
        if isinstance(value, np.ndarray):
            return self._array(value, path)
        if isinstance(value, np.generic) and not value.dtype.hasobject:
            return ["n", value.dtype.str, value.tobytes()]
        raise NotCarriedError(f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be carried: {REMEDY}")

    def _scalar(self, value: Any, path: str) -> Any:
        if type(value) is str and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise NotCarriedError(f"{path} is no valid text: {error}") from error
        return value

    def _tensor(self, value: torch.Tensor, path: str) -> list[Any]:
        self._check_landable(path)
        if shards.is_shard(value):
            return self._shard(value, path)
        why = memory.refusal(value)
        if why is not None:
            raise NotCarriedError(f"{path} {why}")
        index = self._index(value.detach())
        dtype = str(value.dtype).removeprefix("torch.")
        return ["T", dtype, list(value.shape), list(memory.strides(value)), value.device.type, index]

    def _shard(self, value: torch.Tensor, path: str) -> list[Any]:
        if self._whole:
            raise NotCarriedError(f"{path} is a DTensor: take its full_tensor(), or its to_local()")
        why = shards.refusal(value)
        if why is not None:
            raise NotCarriedError(f"{path} {why}")
        return ["P", msgspec.to_builtins(shards.describe(value)), self._tensor(shards.local(value), path)]

    def _index(self, tensor: torch.Tensor) -> int:
        place = memory.place(tensor)
        if place is not None and place in self._indices:
            return self._indices[place]
        index = len(self.tensors)
        if place is not None:
            self._indices[place] = index
        self.tensors.append(tensor)
        return index

    def _array(self, value: np.ndarray[Any, Any], path: str) -> list[Any]:
        if type(value) is not np.ndarray or value.dtype.hasobject or value.dtype.fields:
            raise NotCarriedError(f"{path} is a NumPy array of {value.dtype}, which cannot be carried: {REMEDY}")
        self._check_landable(path)
        return ["N", value.dtype.str, list(value.shape), self._index(array_bytes(np.ascontiguousarray(value)))]

    def _check_landable(self, path: str) -> None:
        if self._without_tensors:
            raise NotCarriedError(f"{path} is a tensor in a set or in the key of a dict: use a list, or another key")

    def items(self, values: Iterable[Any], path: str, depth: int) -> list[Any]:
        return [self.node(value, f"{path}[{at}]", depth + 1) for at, value in enumerate(entries_of(values))]

    def pairs(self, values: dict[Any, Any], path: str, depth: int) -> list[Any]:
        self._without_tensors += 1
        keys = [(self.node(key, f"{path} key {key!r}", depth + 1), key, value) for key, value in items_of(values)]
        self._without_tensors -= 1
        if self._canonical:
            keys.sort(key=lambda pair: msgspec.msgpack.encode(pair[0]))
        pairs = ((node, self.node(value, _path(values, path, key), depth + 1)) for node, key, value in keys)
        return [part for pair in pairs for part in pair]

    def unordered(self, values: Iterable[Any], path: str, depth: int) -> list[Any]:
        # Always sorted: the order of a set of strings changes from process to process and means nothing.
        self._without_tensors += 1
        nodes = self.items(values, path, depth)
        self._without_tensors -= 1
        return sorted(nodes, key=msgspec.msgpack.encode)

    def ordered(self, values: OrderedDict[Any, Any], path: str, depth: int) -> list[Any]:
        # Module.state_dict() keeps the versions of its modules in an attribute of the dict it returns.
        versions = getattr(values, "_metadata", None)
        return ["o", self.pairs(values, path, depth), self.node(versions, f"{path}._metadata", depth + 1)]


def _path(values: dict[Any, Any], path: str, key: Any) -> str:
    if type(values) is Fields:
        return path
    return str(key) if type(values) is Named else f"{path}[{key!r}]"


_CONTAINERS: dict[type, Callable[[_Encoder, Any, str, int], list[Any]]] = {
    list: lambda encoder, value, path, depth: ["l", *encoder.items(value, path, depth)],
    tuple: lambda encoder, value, path, depth: ["t", *encoder.items(value, path, depth)],
    dict: lambda encoder, value, path, depth: ["d", *encoder.pairs(value, path, depth)],
    Fields: lambda encoder, value, path, depth: ["d", *encoder.pairs(value, path, depth)],
    Named: lambda encoder, value, path, depth: ["d", *encoder.pairs(value, path, depth)],
    OrderedDict: lambda encoder, value, path, depth: encoder.ordered(value, path, depth),
    Counter: lambda encoder, value, path, depth: ["C", *encoder.pairs(value, path, depth)],
    deque: lambda encoder, value, path, depth: ["q", value.maxlen, *encoder.items(value, path, depth)],
    set: lambda encoder, value, path, depth: ["s", *encoder.unordered(value, path, depth)],
    frozenset: lambda encoder, value, path, depth: ["f", *encoder.unordered(value, path, depth)],
}
_VALUES: dict[type, Callable[[Any], list[Any]]] = {
    bytearray: lambda value: ["b", bytes(value)],
    complex: lambda value: ["x", value.real, value.imag],
    range: lambda value: ["r", value.start, value.stop, value.step],
    torch.Size: lambda value: ["S", *value],
    torch.dtype: lambda value: ["D", str(value).removeprefix("torch.")],
    torch.device: lambda value: ["V", str(value)],
}


def array_bytes(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """The bytes of a contiguous array as a tensor that shares its memory."""
    # A read-only array is only ever read through this tensor; torch warns of it unless we take the flag's copy away.
    flat = array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)
    return torch.frombuffer(bytearray(flat), dtype=torch.uint8) if not flat.flags.writeable else torch.from_numpy(flat)


# ---------------------------------------------------------------- decoding


def _decode(node: Any) -> Any:
    if not isinstance(node, list):
        if isinstance(node, dict) or (node is not None and not isinstance(node, (bool, int, float, str, bytes))):
            raise ValueError(f"a {type(node).__name__} without a tag")
        return node
    build = _BUILD.get(node[0]) if node and isinstance(node[0], str) else None
    if build is None:
        raise ValueError("a list without a known tag")
    return build(node)


def _decode_pairs(nodes: list[Any]) -> list[tuple[Any, Any]]:
    if len(nodes) % 2:
        raise ValueError("a dict with a key and no value")
    return [(_decode(key), _decode(value)) for key, value in zip(nodes[::2], nodes[1::2], strict=True)]


def _decode_ordered(node: list[Any]) -> OrderedDict[Any, Any]:
    _, pairs, versions = node
    ordered: OrderedDict[Any, Any] = OrderedDict(_decode_pairs(pairs))
    if versions is not None:
        ordered._metadata = _decode(versions)  # type: ignore[attr-defined]
    return ordered


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found


def _device(name: Any) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{name!r} is no device") from error


def _naturals(values: Any) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError("a shape that is none")
    return tuple(values)


def _decode_leaf(node: list[Any]) -> Leaf:
    _, dtype, shape, strides, device, index = node
    (at,) = _naturals([index])
    if type(device) is not str or len(shape) != len(strides):
        raise ValueError("a tensor that is none")
    return Leaf(_dtype(dtype), _naturals(shape), _naturals(strides), device, at)


def _decode_shard(node: list[Any]) -> ShardLeaf:
    _, described, part = node
    leaf = _decode(part)
    if not isinstance(leaf, Leaf):
        raise ValueError("a shard that is no tensor")
    return ShardLeaf(msgspec.convert(described, Described), leaf)


def _decode_array(node: list[Any]) -> ArrayLeaf:
    _, dtype, shape, index = node
    (at,) = _naturals([index])
    if np.dtype(dtype).hasobject:
        raise ValueError("an array of objects")
    return ArrayLeaf(dtype, _naturals(shape), at)


def _decode_scalar(node: list[Any]) -> Any:
    _, dtype, data = node
    if np.dtype(dtype).hasobject:
        raise ValueError("a NumPy scalar that is an object")
    return np.frombuffer(data, np.dtype(dtype), 1)[0]


_BUILD: dict[str, Callable[[list[Any]], Any]] = {
    "l": lambda node: [_decode(part) for part in node[1:]],
    "t": lambda node: tuple(_decode(part) for part in node[1:]),
    "d": lambda node: dict(_decode_pairs(node[1:])),
    "o": _decode_ordered,
    "C": lambda node: Counter(dict(_decode_pairs(node[1:]))),
    "q": lambda node: deque((_decode(part) for part in node[2:]), node[1]),
    "s": lambda node: {_decode(part) for part in node[1:]},
    "f": lambda node: frozenset(_decode(part) for part in node[1:]),
    "b": lambda node: bytearray(node[1]),
    "x": lambda node: complex(node[1], node[2]),
    "r": lambda node: range(node[1], node[2], node[3]),
    "i": lambda node: int(node[1]),
    "S": lambda node: torch.Size(_naturals(node[1:])),
    "D": lambda node: _dtype(node[1]),
    "V": lambda node: _device(node[1]),
    "T": _decode_leaf,
    "P": _decode_shard,
    "N": _decode_array,
    "n": _decode_scalar,
}
