"""What takes the place of a tensor, of a buffer, of a number: it is carried, absent on a replacement, or put back."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.trainer_life import CALLS, Life, Trainer, after
from torchrelay.errors import UnprovedError
from torchrelay.worker.tensors import absent

pytestmark = pytest.mark.slow  # many walks
LARGE = 6000


def test_a_large_one_that_the_script_makes_again_between_steps_is_let_be() -> None:
    life = Life(Trainer(torch.zeros(LARGE), lambda _: None))
    life.call(5)
    life.trainer.kept = torch.ones(LARGE)
    life.call(5)
    assert after(life, torch.ones(LARGE)).trainer.kept.tolist() == life.trainer.kept.tolist()


REPLACED: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]] = {
    "by a sparse one": (lambda: torch.eye(2), lambda: torch.eye(2).to_sparse()),
    "by one that overlaps": (lambda: torch.eye(2), lambda: torch.arange(4.0).unfold(0, 2, 1)),
}


@pytest.mark.parametrize("between", [True, False])
@pytest.mark.parametrize("kind", REPLACED)
@pytest.mark.parametrize("calls", [2, CALLS])
def test_what_gives_way_to_that_is_absent_on_a_replacement(kind: str, calls: int, between: bool) -> None:
    first, then = REPLACED[kind]
    life = Life(Trainer(first(), lambda _: None))
    life.call(calls)
    if not between:
        life.enter()
    life.trainer.kept = then()
    if not between:
        life.pass_gate()
        life.leave()
    life.call(3)
    assert absent.is_absent(after(life, first()).trainer.kept)


@pytest.mark.parametrize("between", [True, False])
def test_a_parameter_that_gives_way_to_another_is_one_on_a_replacement(between: bool) -> None:
    life = Life(Trainer(torch.nn.Parameter(torch.zeros(2)), lambda _: None))
    life.call(CALLS)
    if not between:
        life.enter()
    life.trainer.kept = torch.nn.Parameter(torch.ones(2))
    if not between:
        life.pass_gate()
        life.leave()
    life.call(3)
    kept = after(life, torch.nn.Parameter(torch.zeros(2))).trainer.kept
    assert (type(kept), kept.tolist(), kept.requires_grad) == (torch.nn.Parameter, [1.0, 1.0], True)


def test_a_buffer_that_gives_way_in_a_cut_call_stands_there_again() -> None:
    for calls in (2, CALLS):
        buffer = bytearray(b"abcd")
        life = Life(Trainer(buffer, lambda _: None))
        life.call(calls)
        life.enter()
        life.trainer.kept = bytearray(b"efgh")
        life.hidden.rewind()
        assert life.trainer.kept is buffer
        assert buffer == b"abcd"


@pytest.mark.parametrize("calls", [3, CALLS])
def test_what_another_process_has_said_is_not_taken_back(calls: int) -> None:
    stop = multiprocessing.Value("b", 0)
    life = Life(Trainer(stop, lambda _: None))
    life.call(calls)
    life.enter()
    stop.value = 1
    with pytest.raises(UnprovedError, match="kept is changed where it lies"):
        life.hidden.rewind()
    assert stop.value == 1


@pytest.mark.parametrize(("before", "behind"), [(1, 1.0), (0, False), (0.0, -0.0)])
def test_equal_is_not_the_same(before: Any, behind: Any) -> None:
    life = Life(Trainer(5.5, lambda _: before))
    life.call(CALLS)
    life.trainer.after = lambda _: behind
    life.call(1)
    assert list(life.hidden.late_paths)
