"""Arguments: a digest of what a call is made with. A replacement shows by it that its data is its predecessor's.

A call's record carries eight bytes for each argument. Whoever replays the call computes its own: unequal ones mean
another order of data, other random numbers, other code, or a counter that began anew, and nothing is trained on that.

    numbers, texts, containers    all of it
    tensors and arrays            all of it up to 1 MiB; of larger ones 256 pieces of 4 KiB, evenly spaced
    generators                    their state
    other objects                 what they hold, if that is data; else only their type

Two different values have the same digest only by chance, or if they are large and differ between the pieces alone.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import random
import struct
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, cast

import numpy as np
import torch
import xxhash

from torchrelay.worker.parallel import shards
from torchrelay.worker.tensors import memory, sums, words
from torchrelay.worker.tensors.entries import entries_of

SIZE = 8  # bytes of a digest
WHOLE = 1 << 20  # bytes of a tensor up to which all of it counts
PIECES, PIECE = 256, 4096  # of a larger one
MAX_ENTRIES = 32  # arguments that are told apart; of more, the last stands for the rest
MAX_NODES = 4096  # in one value
MAX_DEPTH = 16
MAX_FIELDS = 64  # of an object that is looked into

NUMPY = {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool}
_heads: dict[tuple[torch.dtype, torch.Size], bytes] = {}  # what a tensor looks like, encoded once
_SCALAR = 1  # a bit of an entry's first byte
_number = struct.Struct("=d")
_mix = struct.Struct("=q")


class NotData(Exception):
    """An object holds something that is no data: of such an object only the type counts."""


def digest(value: Any) -> bytes:
    """Eight bytes over this value. Raises nothing, whatever it is."""
    return _maker(value).finish()


def digests(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Of a call: eight bytes for the function's name, and for each argument, keyword arguments by name."""
    return begin(name, args, kwargs)()


def begin(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], bytes]:
    """Begin with `digests`, of the values as they are now; what is returned gives them, and waits for devices."""
    makers = [_maker(value) for value in args]
    makers += [_maker(kwargs[key]) for key in sorted(kwargs)] if kwargs else ()

    def finish() -> bytes:
        made = [_named(name), *(maker.finish() for maker in makers)]
        if len(made) > MAX_ENTRIES:
            made[MAX_ENTRIES - 1 :] = [xxhash.xxh3_64_digest(b"".join(made[MAX_ENTRIES - 1 :]))]
        return b"".join(made)

    return finish


def _named(name: str) -> bytes:
    maker = _Maker()
    maker.add(name, 0)
    return maker.finish()


def names_of(args: Sequence[Any], kwargs: Mapping[str, Any], parameters: Sequence[str] = ()) -> list[str]:
    """What each entry of `digests` is about, in words. `parameters`: the names of positional ones, if known."""
    named = [f"argument {parameters[at]!r}" if at < len(parameters) else f"argument {at}" for at in range(len(args))]
    found = ["the function", *named, *(f"argument {key!r}" for key in sorted(kwargs))]
    return [*found[: MAX_ENTRIES - 1], "the last arguments"] if len(found) > MAX_ENTRIES else found


def is_scalar(made: bytes, at: int) -> bool:
    """Whether this entry is about numbers and texts only."""
    cut = made[at * SIZE : (at + 1) * SIZE]
    return bool(cut) and bool(cut[0] & _SCALAR)


def differing(recorded: bytes, own: bytes) -> list[int]:
    """The entries in which two calls differ; an entry that one of them lacks differs, too."""
    count = max(len(recorded), len(own)) // SIZE
    cuts = [slice(at * SIZE, (at + 1) * SIZE) for at in range(count)]
    return [at for at, cut in enumerate(cuts) if recorded[cut] != own[cut]]


# ---------------------------------------------------------------- one value


def _maker(value: Any) -> _Maker:
    maker = _Maker()
    maker.add(value, 0)
    return maker


def _head_of(tensor: torch.Tensor) -> bytes:
    key = (tensor.dtype, tensor.shape)
    head = _heads.get(key)
    if head is None:
        if len(_heads) > MAX_NODES:
            _heads.clear()
        head = _heads[key] = f"T{tensor.dtype}{tuple(tensor.shape)}".encode()
    return head


class _Maker:
    """The digest of one value in the making."""

    __slots__ = ("_away", "_hash", "_nodes", "_scalar")

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()
        self._nodes = 0
        self._scalar = True  # so far there was nothing but numbers and texts
        self._away: list[torch.Tensor] = []  # sums under way on devices

    def finish(self) -> bytes:
        """May be asked for again, as of a call that is made again."""
        away, self._away = self._away, []
        for total in away:
            self._hash.update(_mix.pack(int(total.item())))
        found: bytes = self._hash.digest()
        # One bit of 64 tells numbers from data: what a step is called with is told apart by it.
        first = found[0] | _SCALAR if self._scalar else found[0] & ~_SCALAR
        return bytes((first,)) + found[1:]

    def add(self, value: Any, depth: int) -> None:
        self._nodes += 1
        kind = type(value)
        plain = _PLAIN.get(kind)
        if plain is not None:
            self._hash.update(plain(value))
        elif isinstance(value, torch.Tensor):
            self._scalar = False
            if value.is_nested:  # its shape is not the same in every process, if it has one
                self.add(value.unbind(), depth + 1)
            else:
                self._tensor(value)
        elif isinstance(value, np.ndarray):
            self._scalar = False
            self._array(value)
        elif depth > MAX_DEPTH or self._nodes > MAX_NODES:
            self._hash.update(b"...")
        elif isinstance(value, Mapping):
            self._hash.update(b"{%d" % len(value))
            for key in value:
                self.add(key, depth + 1)
                self.add(value[key], depth + 1)
        elif isinstance(value, (list, tuple)):
            self._hash.update(b"[%d" % len(value))
            for item in value:
                self.add(item, depth + 1)
        else:
            self._other(value, depth)

    def _tensor(self, value: torch.Tensor) -> None:
        self._hash.update(_head_of(value))
        plain = (
            type(value) is torch.Tensor
            and value.layout == torch.strided
            and value.is_cpu
            and value.dtype in NUMPY
            and not value.is_neg()
        )
        if plain and value.is_contiguous():
            flat = value.detach().numpy()  # nearly all there is: one call for it
            if flat.nbytes <= WHOLE:
                if flat.size:
                    self._hash.update(cast(Any, flat))
                return
        if shards.is_shard(value):
            value = shards.local(value)
        value = value.detach()
        if value.is_meta or value.numel() == 0:
            return
        if value.layout != torch.strided or value.is_quantized or value.is_conj() or value.is_neg():
            self._odd(value)
        elif value.device.type != "cpu":
            self._away.append(sums.on_device(_sampled(value)))
        elif value.numel() * value.element_size() <= WHOLE:
            for view in memory.outgoing(value):
                self._hash.update(view)
        else:
            self._large(value)

    def _odd(self, value: torch.Tensor) -> None:
        """A tensor whose bytes do not lie as its elements do."""
        if value.layout == torch.sparse_coo:
            self._tensor(value._indices())
            self._tensor(value._values())
        elif value.layout in (torch.sparse_csr, torch.sparse_bsr):
            for part in (value.crow_indices(), value.col_indices(), value.values()):
                self._tensor(part)
        elif value.layout in (torch.sparse_csc, torch.sparse_bsc):
            for part in (value.ccol_indices(), value.row_indices(), value.values()):
                self._tensor(part)
        elif value.is_conj() or value.is_neg():
            self._tensor(value.resolve_conj().resolve_neg())
        elif value.is_quantized:
            self._tensor(value.int_repr())

    def _large(self, value: torch.Tensor) -> None:
        if value.is_contiguous():
            flat = memoryview(cast(Any, value.view(-1).view(torch.uint8).numpy()))
            last = len(flat) - PIECE
            for at in range(PIECES):
                start = last * at // (PIECES - 1)
                self._hash.update(flat[start : start + PIECE])
        else:
            for view in memory.outgoing(_sampled(value).contiguous()):
                self._hash.update(view)

    def _array(self, value: np.ndarray[Any, Any]) -> None:
        self._hash.update(f"A{value.dtype}{value.shape}".encode())
        if value.dtype.hasobject:
            for item in value.reshape(-1)[:MAX_NODES].tolist():
                self.add(item, MAX_DEPTH)
        elif value.nbytes <= WHOLE:
            self._hash.update(np.ascontiguousarray(value).view(np.uint8).reshape(-1).data if value.size else b"")
        else:
            flat = value.reshape(-1) if value.flags.c_contiguous else value.ravel(order="K")[:WHOLE]
            step = max(1, PIECE // value.itemsize)
            last = len(flat) - step
            for at in range(PIECES):
                start = last * at // (PIECES - 1)
                self._hash.update(np.ascontiguousarray(flat[start : start + step]).view(np.uint8).data)

    def _other(self, value: Any, depth: int) -> None:
        kind = type(value)
        if isinstance(value, np.generic):
            self._hash.update(f"n{value.dtype}".encode() + value.tobytes())
        elif isinstance(value, _TOLD):
            self._hash.update(_name_of(value) + _told(value))
        elif isinstance(value, (bytearray, memoryview)):
            self._hash.update(b"y%d" % len(value) + bytes(value))
        elif isinstance(value, Set) or kind.__module__ == "collections":
            self._hash.update(_unordered(value, depth) if isinstance(value, Set) else b"(")
            if not isinstance(value, Set):
                for item in value:
                    self.add(item, depth + 1)
        elif kind in GENERATORS:
            self._scalar = False
            self._hash.update(GENERATORS[kind](value))
        else:
            self._object(value, depth)

    def _object(self, value: Any, depth: int) -> None:
        """An object of the script's: what it holds, if all of that is data."""
        self._hash.update(_name_of(value))
        fields = None if depth > MAX_DEPTH // 2 else fields_of(value)
        if fields is None:
            return
        inner = _Maker()
        inner._nodes = self._nodes
        for key in sorted(fields):
            inner.add(key, depth + 1)
            inner.add(fields[key], depth + 1)
        self._nodes = inner._nodes
        self._scalar = self._scalar and inner._scalar
        self._hash.update(inner.finish())


def fields_of(value: Any) -> dict[str, Any] | None:
    """What an object holds, if it is data and nothing else; None for whatever does something, such as a model."""
    fields = _fields(value)
    if fields is None or len(fields) > MAX_FIELDS or not all(is_data(entry) for entry in entries_of(fields)):
        return None
    return fields


def is_data(value: Any, depth: int = 0) -> bool:
    """Whether a value says something by what it is: a number, a text, a tensor, a container or record of such."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, (torch.Tensor, np.ndarray, np.generic, *_TOLD)) or kind in GENERATORS:
        return True
    if depth > 4:
        return False
    if isinstance(value, Mapping):
        inner = entries_of(value) if isinstance(value, dict) else list(value.values())
        return len(value) <= MAX_FIELDS and all(is_data(entry, depth + 1) for entry in inner)
    if isinstance(value, (list, tuple)) or kind in (set, frozenset):
        return len(value) <= MAX_NODES and all(is_data(entry, depth + 1) for entry in entries_of(value, MAX_FIELDS))
    fields = _fields(value)
    return (
        fields is not None and len(fields) <= MAX_FIELDS and all(is_data(one, depth + 1) for one in entries_of(fields))
    )


def _fields(value: Any) -> dict[str, Any] | None:
    if isinstance(value, _DOERS) or callable(value):
        return None
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name, None) for name in names}
    held = getattr(value, "__dict__", None)
    return dict(held) if type(held) is dict and held else None


def _unordered(value: Set[Any], depth: int) -> bytes:
    """The order of a set changes from process to process and means nothing."""
    made = []
    for item in value:
        inner = _Maker()
        inner.add(item, depth + 1)
        made.append(inner.finish())
    return b"(" + b"".join(sorted(made))


def _sampled(value: torch.Tensor) -> torch.Tensor:
    """All of a tensor, or, of a large one, as much as counts of it; nothing here waits for a device."""
    if value.numel() * value.element_size() <= WHOLE:
        return value
    flat = value.reshape(-1) if value.is_contiguous() else value.flatten()
    wanted = PIECE // value.element_size()
    rows = flat[: len(flat) // PIECES * PIECES].view(PIECES, -1)
    return rows[:, :wanted]


def _name_of(value: Any) -> bytes:
    if isinstance(value, functools.partial):
        value = value.func
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"O{getattr(named, '__module__', '')}.{named.__qualname__}".encode("utf-8", "replace")


def _numpy_state(state: Any) -> bytes:
    """Of a generator of NumPy: nested dicts of names, numbers and, in an old one, a long array."""
    if isinstance(state, dict):
        return b"".join(key.encode() + _numpy_state(state[key]) for key in sorted(state))
    return state.tobytes() if isinstance(state, np.ndarray) else repr(state).encode()


def _python_state(state: tuple[Any, ...]) -> bytes:
    version, words, left = state
    return struct.pack(f"={len(words)}Q", *words) + repr((version, left)).encode()


def _told(value: Any) -> bytes:
    """Of a value whose kind is made from numbers or texts, or that says all in words. No method of a script's runs."""
    if isinstance(value, enum.Enum):
        return _text(str(value.name))
    for base in (int, float, complex, str, bytes):
        if isinstance(value, base):
            return _PLAIN[base](base(*cast(Any, base).__getnewargs__(value)))
    return repr(value).encode("utf-8", "surrogatepass")


def _text(value: str) -> bytes:
    return b"s" + value.encode("utf-8", "surrogatepass")


_PLAIN: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda _: b"N",
    bool: lambda value: b"b1" if value else b"b0",
    int: lambda value: b"i%x" % value,  # decimal digits are limited
    float: lambda value: b"f" + _number.pack(value),
    complex: lambda value: b"c" + _number.pack(value.real) + _number.pack(value.imag),
    str: _text,
    bytes: lambda value: b"y" + value,
    torch.dtype: lambda value: str(value).encode(),
    torch.device: lambda value: value.type.encode(),  # a replacement may have another number
    torch.Size: lambda value: repr(tuple(value)).encode(),
}
GENERATORS: dict[type, Callable[[Any], bytes]] = {
    torch.Generator: lambda value: value.get_state().numpy().tobytes(),
    np.random.Generator: lambda value: _numpy_state(value.bit_generator.state),
    np.random.RandomState: lambda value: _numpy_state(value.get_state(legacy=False)),
    random.Random: lambda value: _python_state(value.getstate()),
}
# Whose kind is none of those above.
_WORDS = (
    range,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    *words.BY_WORD,
)
_TOLD = (enum.Enum, int, float, complex, str, bytes, *_WORDS)
_DOERS = (torch.nn.Module, torch.optim.Optimizer, torch.utils.data.DataLoader, torch.utils.data.Dataset, type)
