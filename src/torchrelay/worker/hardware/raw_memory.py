"""Raw memory that objects of Python keep numbers in: byte arrays, ctypes, and what processes share.

    seen = multiprocessing.Value("i", 0)      a script counts in it, and its loader workers read it

What is small is carried as bytes, and put back where it lies. Not so structures: they may hold pointers.
"""

from __future__ import annotations

import array
import ctypes
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import numpy as np
import xxhash

SMALL = 16 << 10  # bytes of memory of a fixed size that are carried
_WHOLE = 64 << 10  # bytes up to which all of them are looked at
_SAMPLES = 256  # of a larger one
Block = SharedMemory
GROWING = (bytearray, array.array)
_NUMBER: Any = ctypes.c_int.__base__  # the class of all simple ones
# What may be memory of a fixed size.
FIXED: tuple[Any, ...] = (memoryview, ctypes.Array, _NUMBER, SynchronizedBase)
_DEEP = 8  # views of views
_may_be: dict[type, bool] = {}
_OF_NUMBERS = "cbBhHiIlLqQfd?"  # not of pointers, nor of objects of Python, nor with bytes that mean nothing


def is_carried(value: Any) -> bool:
    """Whether it is such memory, which can be told as bytes and filled again."""
    kind = type(value)
    may_be = _may_be.get(kind)
    if may_be is None:
        may_be = _may_be[kind] = kind in GROWING or issubclass(kind, FIXED)
    if not may_be or kind in GROWING:
        return may_be
    inner = _buffer_in(value)
    if not is_shared(value) and not _is_own(inner):
        return False
    if not isinstance(inner, memoryview) and not _is_of_numbers(type(inner)):
        return False
    return inner is not None and (flat := _flat(inner)) is not None and flat.flags.writeable and flat.nbytes <= SMALL


def bytes_of(value: Any) -> bytes:
    """What is in it."""
    flat = None if type(value) in GROWING else _flat(_buffer_in(value))
    return (bytes(value) if type(value) in GROWING else b"") if flat is None else flat.tobytes()


def size_of(value: Any) -> int:
    """Bytes."""
    return memoryview(value).nbytes if type(value) in GROWING else len(bytes_of(value))


def fill(value: Any, told: bytes) -> bool:
    """Put these bytes there; returns whether they have room in it. What has their size stays where it lies."""
    if size_of(value) == len(told):
        if told:
            _flat(_buffer_in(value))[:] = np.frombuffer(told, np.uint8)
        return True
    if type(value) not in GROWING:
        return False
    try:
        del value[:]
    except BufferError:  # somebody has a view of it
        return False
    (value.extend if type(value) is bytearray else value.frombytes)(told)
    return True


def digest(value: Any) -> str:
    """Of any memory. Of a large one a part is looked at, from all over it; at no large block with a name."""
    if isinstance(value, Block):
        value = value._buf  # type: ignore[attr-defined]  # `buf` may be the script's own
        return "" if value is None or value.nbytes > SMALL else xxhash.xxh3_64_hexdigest(bytes(value))
    view = memoryview(value)
    if view.readonly or not view.contiguous or not view.nbytes:
        return str(view.nbytes)
    flat = np.frombuffer(view, np.uint8)
    part = flat if flat.size <= _WHOLE else flat[:: flat.size // _SAMPLES]
    return f"{flat.size} {xxhash.xxh3_64_hexdigest(np.ascontiguousarray(part).data)}"


def is_shared(value: Any) -> bool:
    """Whether other processes may write to it."""
    by_hand = isinstance(value, (ctypes.Array, _NUMBER)) and hasattr(value, "_wrapper")  # multiprocessing's, unlocked
    return by_hand or isinstance(value, SynchronizedBase)


def _buffer_in(value: Any) -> Any:
    return value._obj if isinstance(value, SynchronizedBase) else value  # type: ignore[attr-defined]  # of the script?


def _is_own(value: Any) -> bool:
    """Whether the memory is Python's own, and no piece of what somebody else has, such as a parameter."""
    for _ in range(_DEEP):
        if isinstance(value, memoryview):
            try:
                value = value.obj
            except ValueError:  # it was given back
                return False
        elif isinstance(value, np.ndarray) and value.base is not None:
            value = value.base
        else:
            break
    if isinstance(value, (ctypes.Array, _NUMBER)):
        return bool(value._b_needsfree_)
    return type(value) in GROWING or isinstance(value, np.ndarray)


def _is_of_numbers(kind: Any) -> bool:
    """Not so structures, which may hold pointers."""
    while issubclass(kind, ctypes.Array):
        kind = kind._type_
    return issubclass(kind, _NUMBER) and kind._type_ in _OF_NUMBERS


def _flat(buffer: Any) -> Any:
    try:
        return np.frombuffer(buffer, np.uint8)
    except (BufferError, ValueError):  # it is empty, in pieces, or was given back
        return None
