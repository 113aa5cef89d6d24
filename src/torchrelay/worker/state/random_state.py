"""Random state: the global generators of torch, Python and NumPy as one short record, exact to the bit.

It is taken at every gate, so it must cost microseconds. Python and NumPy need 10 and 30 us to tell their state, and a
step rarely draws from them; so we look at the generator's own memory first and ask only if that has changed. Whether
this memory tells the truth is checked once on a generator made for it; if not, we ask every time.

With it goes whether DTensor's tracker is there, for which ranks must agree.

    head (below), torch's CPU state, Python's 625 words, NumPy's 624 words, then length and state of each CUDA device
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from array import array
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from torchrelay.errors import RefusedError

# Else there is nothing of it to look at, at every gate.
_CUDA = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
_MAGIC = b"RNG1"
# magic, bytes of torch's state, CUDA devices, Python has a gauss, NumPy is there, NumPy has a gauss, DTensor's tracker
# is there, NumPy's position, and the two kept gauss values.
_HEAD = struct.Struct("<4sIHBBBBxxidd")
_LENGTH = struct.Struct("<I")
_PYTHON_VERSION = 3  # of random.getstate(), since Python 3.2
_PYTHON_BYTES = 625 * 4
_NUMPY_BYTES = 624 * 4
_NUMPY_WORDS = struct.Struct(f"@{_NUMPY_BYTES}si")  # mt19937_state of NumPy: the words, and the position in them
_OBJECT_HEAD = object.__basicsize__  # reference count and type: they change without meaning anything

_PythonState = tuple[bytes, float | None]  # the words, the kept gauss
_NumpyState = tuple[bytes, int, bool, float]  # the key, the position in it, whether a gauss is kept, and which
Seen = tuple[torch.Tensor, _PythonState, _NumpyState | None, list[bytes], bool]


def capture() -> bytes:
    """The state of all global generators of this process: torch (CPU, and CUDA once it is initialised), Python, NumPy.

    NumPy's legacy global generator is taken once `numpy.random` is imported. About 10 KB. Raises `RefusedError` if it
    was replaced by one that is not MT19937.
    """
    return pack(look())


def look() -> Seen:
    """The same, not put together yet: `pack` makes the record of it, now or later."""
    numpy_random = sys.modules.get("numpy.random.mtrand")
    watch = _numpy
    if numpy_random is None:
        watch = None
    elif watch is None or watch.generator is not numpy_random._rand:
        watch = _numpy_watch(numpy_random)
    numpy_state = None if watch is None else watch.state()
    devices = _cuda_states() if _CUDA else []
    return torch.default_generator.get_state(), _python.state(), numpy_state, devices, tracker_is_there()


def pack(seen: Seen) -> bytes:
    """The record of what `look` has seen."""
    return b"".join(parts(seen))


def parts(seen: Seen) -> tuple[bytes | memoryview, ...]:
    """The same in parts, which need not be put together to be written one after the other."""
    torch_tensor, (words, python_gauss), numpy_state, devices, tracked = seen
    torch_state = torch_tensor.numpy().data
    key, position, has_gauss, gauss = (b"", 0, False, 0.0) if numpy_state is None else numpy_state
    head = _HEAD.pack(
        _MAGIC,
        len(torch_state),
        len(devices),
        python_gauss is not None,
        numpy_state is not None,
        has_gauss,
        tracked,
        position,
        python_gauss or 0.0,
        gauss,
    )
    return head, torch_state, words, key, *devices


def restore(data: bytes) -> None:
    """Put all global generators where `capture` found them. Raises `ValueError` if `data` is not whole.

    NumPy is imported if the record has it; a generator that the record does not have is left alone.
    """
    head, torch_state, words, key, devices = _parse(data)
    _, _, _, python_has, numpy_has, has_gauss, tracked, position, python_gauss, gauss = head
    generators = torch.cuda.default_generators if devices else ()
    if len(generators) < len(devices):
        raise ValueError(f"random state of {len(devices)} CUDA devices, but only {len(generators)} are here")
    torch.default_generator.set_state(_as_tensor(torch_state))
    random.setstate((_PYTHON_VERSION, tuple(array("I", words)), python_gauss if python_has else None))
    if numpy_has:
        import numpy

        numpy.random.set_state(("MT19937", numpy.frombuffer(key, numpy.uint32), position, int(has_gauss), gauss))
    for generator, state in zip(generators, devices, strict=False):
        generator.set_state(_as_tensor(state))
    put_tracker(bool(tracked))


def draw() -> None:
    """A number from each global generator that `restore` puts back."""
    torch.rand(())
    random.random()
    if (numpy_random := sys.modules.get("numpy.random.mtrand")) is not None:
        numpy_random.random()
    for generator in torch.cuda.default_generators:  # none, before CUDA is used
        generator.seed()


def of_torch(data: bytes) -> bytes:
    """Of a record, the state of torch's generator of the CPU."""
    return _parse(data)[1]


def equal(a: bytes, b: bytes) -> bool:
    """Whether two records are of the same state: every generator would draw the same numbers for ever."""
    return a == b


# ---------------------------------------------------------------- the record


def _parse(data: bytes) -> tuple[tuple[Any, ...], bytes, bytes, bytes, list[bytes]]:
    if len(data) < _HEAD.size or data[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"{len(data)} bytes that are no random state")
    head = _HEAD.unpack_from(data)
    sizes = [head[1], _PYTHON_BYTES, _NUMPY_BYTES if head[4] else 0]
    at, parts = _HEAD.size, []
    for size in sizes:
        parts.append(data[at : at + size])
        at += size
    devices = []
    for _ in range(head[2]):
        if at + _LENGTH.size > len(data):
            raise ValueError("a random state that ends too early")
        (size,) = _LENGTH.unpack_from(data, at)
        devices.append(data[at + _LENGTH.size : at + _LENGTH.size + size])
        at += _LENGTH.size + size
    if at != len(data):
        raise ValueError(f"a random state of {len(data)} bytes that should have {at}")
    return head, parts[0], parts[1], parts[2], devices


def _as_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _cuda_states() -> list[bytes]:
    """Length and state of each CUDA device's generator; nothing before CUDA is initialised, and it never does that."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    states = [generator.get_state().numpy().tobytes() for generator in torch.cuda.default_generators]
    return [_LENGTH.pack(len(state)) + state for state in states]


# ---------------------------------------------------------------- Python's generator


def _body(thing: object, size: int) -> bytes:
    """The memory of an object of CPython behind its head: for comparing with itself only, never to be interpreted."""
    return bytes(_window(id(thing) + _OBJECT_HEAD, size - _OBJECT_HEAD).raw)


def _window(address: int, size: int) -> Any:
    """Memory whose `raw` is a copy of it as it is then."""
    return (ctypes.c_char * size).from_address(address)


class _PythonWatch:
    """State of one `random.Random`, asked for only if its memory has changed since the last time."""

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator
        self._size = random.Random.__base__.__basicsize__  # type: ignore[union-attr]  # _random.Random: the words
        self._body = _window(id(generator) + _OBJECT_HEAD, self._size - _OBJECT_HEAD) if _python_body_tells else None
        self._seen = b""
        self._state: _PythonState = (b"", None)

    def state(self) -> _PythonState:
        seen: bytes = self._body.raw if self._body is not None and _python_body_tells else b""
        # The kept gauss is an attribute beside the words, and may change without them.
        if not seen or seen != self._seen or self._generator.gauss_next is not self._state[1]:  # type: ignore[attr-defined]
            _, words, gauss = self._generator.getstate()
            self._state = (array("I", words).tobytes(), gauss)
            self._seen = seen
        return self._state


def _check_python_body() -> bool:
    """Whether a `random.Random` keeps its words inside the object, so that its memory tells of every draw."""
    size = random.Random.__base__.__basicsize__  # type: ignore[union-attr]
    if sys.implementation.name != "cpython" or size < _PYTHON_BYTES:
        return False
    generator = random.Random(1)
    start, before = generator.getstate(), _body(generator, size)
    generator.random()
    after = _body(generator, size)
    generator.setstate(start)
    return before != after and _body(generator, size) == before


# ---------------------------------------------------------------- NumPy's generator


class _NumpyWatch:
    """State of NumPy's legacy global generator, without asking it unless its kept gauss may have changed.

    The words and the position belong to the bit generator, which tells where they are (`BitGenerator.ctypes`); the
    kept gauss lies somewhere inside the `RandomState` object, which we only compare with what it was.
    """

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        self._body = _window(id(generator) + _OBJECT_HEAD, type(generator).__basicsize__ - _OBJECT_HEAD)
        self._seen = b""
        self._gauss = (False, 0.0)
        self._words = _window(_words_at(generator), _NUMPY_WORDS.size)
        self._words_seen = b""
        self._state: _NumpyState = (b"", 0, False, 0.0)
        self._memory_tells = _check_numpy_memory(type(generator))

    def state(self) -> _NumpyState:
        if not self._memory_tells:
            return _asked(self.generator)
        body: bytes = self._body.raw
        if body != self._seen:
            # The bit generator may be another one by now.
            self._words = _window(_words_at(self.generator), _NUMPY_WORDS.size)
            self._gauss = _asked(self.generator)[2:]
            self._seen, self._words_seen = body, b""
        words: bytes = self._words.raw
        if words != self._words_seen:
            self._state = *_NUMPY_WORDS.unpack(words), *self._gauss
            self._words_seen = words
        return self._state


def _asked(generator: Any) -> _NumpyState:
    _, key, position, has_gauss, gauss = generator.get_state()
    return key.tobytes(), position, bool(has_gauss), gauss


def _words_at(generator: Any) -> int:
    """Where the words of a `RandomState` lie. Raises `RefusedError` if its generator is another kind than MT19937."""
    bits = generator._bit_generator
    if type(bits).__name__ != "MT19937":
        raise RefusedError(
            f"NumPy's global generator is a {type(bits).__name__}, whose state torchrelay does not carry",
            "leave the global one as it is, and draw from a numpy.random.Generator of your own in step functions",
        )
    address: int = bits.ctypes.state_address
    return address


def _split_words(memory: bytes) -> tuple[bytes, int]:
    key, position = _NUMPY_WORDS.unpack(memory)
    return key, position


def _check_numpy_memory(kind: Callable[[int], Any]) -> bool:
    """Whether a `RandomState`'s memory tells what `get_state` tells, and every use of its kept gauss."""
    if sys.implementation.name != "cpython":
        return False
    generator = kind(1)
    bodies = []
    for _ in range(3):
        words = _split_words(ctypes.string_at(_words_at(generator), _NUMPY_WORDS.size))
        if words != _asked(generator)[:2]:
            return False
        bodies.append(_body(generator, type(generator).__basicsize__))
        generator.standard_normal()  # every second one is the kept gauss, and touches no word
    return bodies[0] != bodies[1] != bodies[2]


_python_body_tells = _check_python_body()
_python = _PythonWatch(random._inst)  # whose methods random.random() and so on are
_numpy: _NumpyWatch | None = None


def _numpy_watch(numpy_random: ModuleType) -> _NumpyWatch:
    global _numpy
    if _numpy is None or _numpy.generator is not numpy_random._rand:
        _numpy = _NumpyWatch(numpy_random._rand)
    return _numpy


# ---------------------------------------------------------------- DTensor's tracker

# It tracks random numbers, and all ranks make together or none.
#
# torch makes it at the first random operation on a DTensor (dropout in a sharded region) on CUDA, and then sends the
# random state of rank 0 to all: a broadcast over the default group, in the middle of a step. A replacement that made it
# alone would wait for ever, or take the gate's all-reduce of the others for its broadcast. A step that is redone must
# find it as it was at the entry: whoever had it already would not take part in the broadcast of the others.
#
# It holds no numbers of its own: these are in the generators of the devices, which `random_state` carries. What must be
# carried besides is whether it is there. So that is a part of the random state. Nothing of it exists on CPU.

_MODULE = "torch.distributed.tensor._random"


def tracker_is_there() -> bool:
    """Whether this process has it."""
    module = sys.modules.get(_MODULE)
    return getattr(module, "_rng_tracker", None) is not None


def put_tracker(there: bool) -> None:
    """Make it, by ourselves and without a word to others, or take it away; one that is there already stays."""
    if there == tracker_is_there():
        return
    import torch.distributed.tensor._random as module

    tracker: Any = module
    tracker._rng_tracker = tracker.OffsetBasedRNGTracker(_Here(), run_state_sync=False) if there else None


class _Here:
    """All that the tracker asks of a mesh: it finds our device by these."""

    device_type = "cuda"

    def get_rank(self) -> int:
        """Torch takes the device of this number, modulo how many there are. After a move it is not that of our rank."""
        return torch.cuda.current_device()
