"""Memory of fixed and of growing size: told as bytes, filled where it lies."""

from __future__ import annotations

import array
import ctypes
import multiprocessing
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import pytest

from torchrelay.worker.hardware import raw_memory


class Pair(ctypes.Structure):
    """May hold pointers."""

    _fields_ = (("number", ctypes.c_int), ("text", ctypes.c_char_p))


@pytest.fixture
def block() -> Iterator[SharedMemory]:
    made = SharedMemory(create=True, size=16)
    yield made
    made.close()
    made.unlink()


CARRIED: dict[str, Any] = {
    "bytearray": bytearray(b"abc"), "array": array.array("d", [1.0, 2.0]), "number": ctypes.c_double(3.0),
    "numbers": (ctypes.c_int * 3)(1, 2, 3), "rows": ((ctypes.c_int * 2) * 2)(), "view": memoryview(bytearray(16)),
    "value": multiprocessing.Value("i", 5), "unlocked": multiprocessing.Value("i", 5, lock=False),
    "shared": multiprocessing.Array("d", 3),
}  # fmt: skip


@pytest.mark.parametrize("kind", CARRIED)
def test_bytes_go_there_and_back(kind: str) -> None:
    memory = CARRIED[kind]
    assert raw_memory.is_carried(memory)
    before = raw_memory.bytes_of(memory)
    assert raw_memory.size_of(memory) == len(before)
    other = bytes(each ^ 1 for each in before)
    assert raw_memory.fill(memory, other)
    assert raw_memory.bytes_of(memory) == other != before
    assert raw_memory.fill(memory, before)
    assert raw_memory.bytes_of(memory) == before


@pytest.mark.parametrize("memory", [bytearray(8), array.array("d", [0.0])], ids=["bytearray", "array"])
def test_one_on_which_somebody_has_a_view_is_filled_where_it_lies(memory: Any) -> None:
    view = memoryview(memory)  # as long as it is there the memory can't be resized
    assert raw_memory.fill(memory, b"12345678")
    assert view.cast("B").tobytes() == b"12345678"
    assert not raw_memory.fill(memory, b"1234567890123456")


def test_one_that_has_grown_is_cut() -> None:
    memory = bytearray(b"abcdef")
    assert raw_memory.fill(memory, b"abc")
    assert memory == b"abc"


def test_of_a_block_that_is_shared(block: SharedMemory) -> None:
    assert raw_memory.is_carried(block)
    assert raw_memory.fill(block, b"x" * 16)
    assert raw_memory.bytes_of(block)[:16] == b"x" * 16
    assert not raw_memory.fill(block, b"x" * 15)


@pytest.mark.parametrize(
    "thing",
    [
        memoryview(b"abc"), Pair(), ctypes.c_char_p(b"abc"), ctypes.c_void_p(3), (ctypes.c_char_p * 2)(), b"abc", [1],
        memoryview(bytearray(raw_memory.SMALL + 1)), multiprocessing.Array("d", raw_memory.SMALL),
    ],
    ids=lambda thing: type(thing).__name__,
)  # fmt: skip
def test_what_is_not_carried(thing: Any) -> None:
    assert not raw_memory.is_carried(thing)


def test_a_block_that_was_closed(block: SharedMemory) -> None:
    other = SharedMemory(block.name)
    other.close()
    assert not raw_memory.is_carried(other)
