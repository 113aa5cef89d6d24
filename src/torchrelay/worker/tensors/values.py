"""Values: results of calls, of once(), and positions of loaders, as bytes that another process can read again.

What a value may be is what a state may be: numbers, strings, None, tensors, arrays, and lists, tuples, dicts or sets of
them (see `tree`). Nothing is pickled.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import torch
from msgspec import Struct

from torchrelay.worker.tensors import memory, tree
from torchrelay.worker.tensors.landing import Landing

NOTHING = b""  # None, the commonest result


class _Packed(Struct, array_like=True):
    """A tree and the bytes of its tensors."""

    tree: bytes
    tensors: list[bytes]


_decoder = msgspec.msgpack.Decoder(_Packed | None)
# A tensor of one element on the CPU is a loss. Worth a shorter way, as every step returns one: b"n", the length of its
# kind, its kind, its bytes. Kinds are few, and are encoded once.
_Kind = tuple[str, tuple[int, ...]]  # dtype, shape
_kinds = msgspec.msgpack.Decoder(_Kind)
_heads: dict[tuple[torch.dtype, torch.Size], tuple[bytes, struct.Struct]] = {}
_encode = msgspec.msgpack.encode
_FORMATS = {torch.float32: "f", torch.float64: "d", torch.int64: "q", torch.bool: "?"}
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _FORMATS}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def encode(value: Any, path: str) -> bytes:
    """The value as bytes. Raises `TypeError`, naming the path within it, for what cannot be carried."""
    if value is None:
        return NOTHING
    if type(value) is torch.Tensor and value.numel() == 1 and value.dtype in _NAMES and value.is_cpu:
        key = (value.dtype, value.shape)
        found = _heads.get(key)
        if found is None:
            kind = _encode((_NAMES[value.dtype], tuple(value.shape)))
            head = b"n" + bytes((len(kind),)) + kind
            found = _heads[key] = head, struct.Struct(f"={_FORMATS[value.dtype]}")
        return found[0] + found[1].pack(value.item())
    node, tensors = tree.encode(value, path, whole=True)
    return b"t" + _encode(_Packed(node, [b"".join(memory.outgoing(tensor)) for tensor in tensors]))


def decode(data: bytes) -> Any:
    """The value again; tensors are new. Raises `ValueError` for bytes that are none."""
    if data == NOTHING:
        return None
    try:
        if data[:1] == b"n":
            dtype, shape = _kinds.decode(data[2 : 2 + data[1]])
            flat = torch.frombuffer(bytearray(data[2 + data[1] :]), dtype=_DTYPES[dtype])
            return flat.reshape(shape)
        packed = _decoder.decode(data[1:]) if data[:1] == b"t" else None
    except (msgspec.DecodeError, IndexError, KeyError, RuntimeError, ValueError) as error:
        raise ValueError(f"{len(data)} bytes that are no value: {error}") from error
    if packed is None:
        raise ValueError(f"{len(data)} bytes that are no value")
    landing = Landing()
    value = landing.anyhow(tree.decode(packed.tree), None, "value")
    places = landing.tensors()
    if len(places) != len(packed.tensors):
        raise ValueError("a value with other tensors than it names")
    for place, given in zip(places, packed.tensors, strict=True):
        _fill(place, given)
    landing.finish()
    return value


def filled_into(live: Any, arrived: Any) -> Any:
    """The values that arrived, with tensors put into those that stand at the same place, which others may hold, too."""
    if isinstance(arrived, torch.Tensor):
        fits = isinstance(live, torch.Tensor) and live.shape == arrived.shape and live.dtype == arrived.dtype
        if not fits:
            return arrived
        live.detach().copy_(arrived)
        return live
    if isinstance(arrived, dict) and isinstance(live, dict):
        for key, value in arrived.items():
            arrived[key] = filled_into(live.get(key), value)
    if isinstance(arrived, list) and isinstance(live, list) and len(arrived) == len(live):
        arrived[:] = map(filled_into, live, arrived)
    return arrived


def _fill(place: torch.Tensor, given: bytes) -> None:
    if memory.size(place) != len(given):
        raise ValueError("a value with a tensor that is cut off")
    at = 0
    for view, filled in memory.incoming(place):
        view[:] = given[at : at + len(view)]
        at += len(view)
        if filled is not None:
            filled()
