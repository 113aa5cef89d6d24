"""What steps change before their update and after it; and what begins to change in the very step that is cut."""

from __future__ import annotations

import ctypes
import multiprocessing
from collections import deque
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import pytest
import torch

from tests.support.trainer_life import CALLS, Life, Trainer
from torchrelay.errors import UnprovedError
from torchrelay.worker.state.lent import parted

pytestmark = pytest.mark.slow  # many walks


TWICE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "number": (lambda: 0, lambda kept: kept + 1),
    "list": (lambda: [], lambda kept: kept.append(1.0)),
    "list anew": (lambda: [0.0], lambda kept: [*kept[-3:], kept[-1] + 1]),
    "window": (lambda: deque([0.0], maxlen=3), lambda kept: kept.append(kept[-1] + 1)),
    "dict": (lambda: {"a": 0}, lambda kept: kept.update(a=kept["a"] + 1)),
    "tensor": (lambda: torch.zeros(2), lambda kept: kept.add_(1)),
    "tensors": (lambda: [torch.zeros(2)], lambda kept: kept.__setitem__(0, kept[0].add_(1))),
    "bytes": (lambda: bytearray(2), lambda kept: kept.__setitem__(0, kept[0] + 1)),
}


@pytest.mark.parametrize("since", [0, CALLS])
@pytest.mark.parametrize("kind", TWICE)
def test_what_changes_before_and_after_a_gate_is_told_of_both(kind: str, since: int) -> None:
    make, change = TWICE[kind]
    trainer = Trainer(make(), change)
    life = Life(trainer)
    life.call(since)
    trainer.after = change
    life.call(2)
    assert life.hidden.late_paths
    at_gate = life.hidden.late
    life.call()
    assert parted(life.hidden.late).keys() == parted(at_gate).keys()
    assert life.hidden.late != at_gate


def test_what_changes_before_it_only_is_told_at_the_gate_only() -> None:
    life = Life(Trainer(0, lambda kept: kept + 1))
    life.call(CALLS)
    assert not life.hidden.late_paths


def plus_one(kept: torch.Tensor) -> None:
    with torch.no_grad():
        kept += 1


LATE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tensor": (lambda: torch.zeros(2), lambda kept: kept.add_(1), torch.Tensor.tolist),
    "expanded": (lambda: torch.zeros(1).expand(3), lambda kept: kept[:1].add_(1), torch.Tensor.tolist),
    "trained": (lambda: torch.zeros(2, requires_grad=True), lambda kept: plus_one(kept), torch.Tensor.tolist),
    "array": (lambda: torch.zeros(2).numpy().copy(), lambda kept: kept.__iadd__(1), lambda kept: kept.tolist()),
    "bytes": (lambda: bytearray(2), lambda kept: kept.__setitem__(0, 1), bytes),
    "number": (lambda: ctypes.c_int(0), lambda kept: setattr(kept, "value", 1), lambda kept: kept.value),
}


@pytest.mark.parametrize("kind", LATE)
def test_what_a_cut_step_is_the_first_to_change_is_put_back(kind: str) -> None:
    make, change, shown = LATE[kind]
    trainer = Trainer(make(), lambda _: None)
    life = Life(trainer)
    life.call(CALLS)
    before = shown(trainer.kept)
    life.enter()
    change(trainer.kept)
    assert shown(trainer.kept) != before
    life.hidden.rewind()
    assert shown(trainer.kept) == before


def test_a_large_tensor_is_not_and_so_refused() -> None:
    trainer = Trainer(torch.zeros(8192), lambda _: None)
    life = Life(trainer)
    life.call(CALLS)
    life.enter()
    trainer.kept.add_(1)
    with pytest.raises(UnprovedError, match="kept is changed where it lies"):
        life.hidden.rewind()


def test_nor_is_what_another_process_may_have_written() -> None:
    stop = multiprocessing.Value("b", 0)
    life = Life(Trainer(stop, lambda _: None))
    life.call(CALLS)
    life.enter()
    stop.value = 1
    with pytest.raises(UnprovedError, match="kept is changed where it lies"):
        life.hidden.rewind()
    assert stop.value == 1


def test_memory_that_is_given_back_in_a_step_ends_nothing() -> None:
    view = memoryview(bytearray(8))
    life = Life(Trainer(view, lambda _: None))
    life.call(CALLS)
    life.enter()
    view.release()
    life.pass_gate()
    life.leave()
    life.call()


def test_but_a_step_that_has_done_so_is_not_made_again() -> None:
    view = memoryview(bytearray(8))
    life = Life(Trainer(view, lambda _: None))
    life.call(CALLS)
    life.enter()
    view.release()
    with pytest.raises(UnprovedError, match="kept is changed where it lies"):
        life.hidden.rewind()


def test_nor_does_a_block_with_a_name() -> None:
    block = SharedMemory(create=True, size=16)
    try:
        life = Life(Trainer(block, lambda _: None))
        life.call(CALLS)
        life.enter()
    finally:
        block.close()
        block.unlink()
    life.pass_gate()
    life.leave()
    life.call()


ODD: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(2).to_sparse(),
    "csr": lambda: torch.eye(2).to_sparse_csr(),
    "meta": lambda: torch.zeros(2, device="meta"),
    "conjugated": lambda: torch.zeros(2, dtype=torch.complex64).conj(),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
def test_a_small_tensor_of_another_kind_that_is_made_anew_ends_nothing_without_a_fault(kind: str) -> None:
    life = Life(Trainer(ODD[kind](), lambda _: ODD[kind]()))
    life.call(CALLS)
