"""Memory of fixed and of growing size: told as bytes, filled where it lies."""

from __future__ import annotations

import array
import ctypes
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import pytest
import torch

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


def test_a_block_that_others_write_to_is_not_carried_but_seen(block: SharedMemory) -> None:
    assert not raw_memory.is_carried(block)
    before = raw_memory.digest(block)
    assert block.buf is not None
    block.buf[3] = 7
    assert raw_memory.digest(block) != before


def test_what_was_given_back_holds_nothing(block: SharedMemory) -> None:
    view = memoryview(bytearray(8))
    assert raw_memory.is_carried(view)
    view.release()
    assert not raw_memory.is_carried(view)
    assert raw_memory.bytes_of(view) == b""
    other = SharedMemory(block.name)
    other.close()
    assert raw_memory.digest(other) == ""


@pytest.mark.parametrize("kind", ["view", "ctypes", "slice"])
def test_nor_is_a_piece_of_a_tensor(kind: str) -> None:
    array: Any = torch.zeros(8).numpy()
    of: dict[str, Callable[[], Any]] = {"view": lambda: memoryview(array), "slice": lambda: memoryview(array[2:4])}
    of["ctypes"] = lambda: (ctypes.c_float * 8).from_buffer(array)
    assert not raw_memory.is_carried(of[kind]())
    own: Any = np.zeros(8)
    assert raw_memory.is_carried(memoryview(own[2:4]))


@pytest.mark.parametrize(
    ("kind", "shared"), [("bytearray", False), ("numbers", False), ("value", True), ("unlocked", True)]
)
def test_which_other_processes_may_write_to(kind: str, shared: bool) -> None:
    assert raw_memory.is_shared(CARRIED[kind]) is shared


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
