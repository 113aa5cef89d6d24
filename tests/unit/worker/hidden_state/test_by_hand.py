"""Tensors that a script trains by hand, their gradients, and what takes the place of a tensor."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.trainer_life import CALLS, Life, Trainer, after
from torchrelay.errors import UnprovedError
from torchrelay.worker.tensors import absent

pytestmark = pytest.mark.slow  # many walks


# ---------------------------------------------------------------- tensors trained by hand


def trained(kept: torch.Tensor) -> None:
    torch.autograd.backward(kept.sum())
    with torch.no_grad():
        assert kept.grad is not None
        kept += kept.grad


def cleared(kept: torch.Tensor) -> None:
    trained(kept)
    kept.grad = None


def zeroed(kept: torch.Tensor) -> None:
    trained(kept)
    assert kept.grad is not None
    kept.grad.zero_()


def anew(kept: torch.Tensor) -> torch.Tensor:
    return (kept + torch.autograd.grad(kept.sum(), kept)[0]).detach().requires_grad_()


@pytest.mark.parametrize("step", [cleared, zeroed, anew])
def test_a_tensor_trained_by_hand_is_carried_where_no_gradient_stays(step: Callable[[Any], Any]) -> None:
    trainer = Trainer(torch.zeros(2, requires_grad=True), step)
    life = Life(trainer)
    life.call(5)
    assert trainer.kept.tolist() == [5.0, 5.0]
    other = Trainer(torch.zeros(2, requires_grad=True), step)
    after = Life(other)
    after.hidden.load(life.hidden.record())
    assert other.kept.tolist() == [5.0, 5.0]
    assert other.kept.requires_grad
    assert other.kept.is_leaf
    life.enter()
    torch.autograd.backward(trainer.kept.sum())
    life.hidden.rewind()
    life.pass_gate()
    life.leave()
    assert trainer.kept.tolist() == [6.0, 6.0]


def add(kept: torch.Tensor) -> None:
    """As a script that accumulates: what is added is that of all steps so far."""
    trained(kept)


def made_anew(kept: torch.Tensor) -> torch.Tensor:
    """What the next one is made of."""
    assert kept.grad is not None
    new = (kept + kept.grad).detach().requires_grad_()
    torch.autograd.backward(new.sum())
    return new


def with_gradient(kept: torch.Tensor) -> torch.Tensor:
    torch.autograd.backward(kept.sum())
    return kept


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
@pytest.mark.parametrize("step", [add, made_anew])
@pytest.mark.parametrize("calls", [1, 2, 5, CALLS + 3])
def test_a_gradient_that_stays_is_carried(step: Callable[[Any], Any], kind: Any, calls: int) -> None:
    def new() -> torch.Tensor:
        kept = torch.nn.Parameter(torch.zeros(2)) if kind is torch.nn.Parameter else torch.zeros(2, requires_grad=True)
        return with_gradient(kept)

    life = Life(Trainer(new(), step))
    life.call(calls)
    other = after(life, new())
    life.call(2)
    other.call(2)
    assert other.trainer.kept.tolist() == life.trainer.kept.tolist()
    assert other.trainer.kept.grad.tolist() == life.trainer.kept.grad.tolist()


@pytest.mark.parametrize("calls", [0, 1, 5, CALLS])
def test_and_put_back(calls: int) -> None:
    life = Life(Trainer(with_gradient(torch.zeros(2, requires_grad=True)), add))
    life.call(calls)
    kept = life.trainer.kept
    value, gradient = kept.tolist(), kept.grad.tolist()
    life.enter()
    add(kept)
    life.hidden.rewind()
    assert (kept.tolist(), kept.grad.tolist()) == (value, gradient)


LARGE = 6000


def test_a_large_one_that_nobody_reads_is_no_matter() -> None:
    def step(kept: torch.Tensor) -> None:
        torch.autograd.backward(kept.square().sum())

    life = Life(Trainer(torch.ones(LARGE, requires_grad=True), step))
    life.call(CALLS)
    assert not life.hidden.state.lacking
    other = after(life, torch.ones(LARGE, requires_grad=True))
    other.call(3)
    life.enter()
    step(life.trainer.kept)
    life.hidden.rewind()
    life.pass_gate()
    life.leave()


@pytest.mark.parametrize("read", [
    lambda gradient: gradient + 1, lambda gradient: gradient.sum().item(), lambda gradient: gradient.tolist(),
    lambda gradient: torch.zeros(LARGE).add_(gradient), lambda gradient: torch.stack([gradient, gradient]),
    lambda gradient: gradient[0], lambda gradient: gradient.data, lambda gradient: gradient.norm(),
    lambda gradient: torch._foreach_mul([gradient], 2.0), lambda gradient: gradient.numpy(),
])  # fmt: skip
def test_a_large_one_that_is_read_on_a_replacement_is_refused(read: Callable[[Any], Any]) -> None:
    def step(kept: torch.Tensor) -> None:
        torch.autograd.backward(kept.square().sum())
        read(kept.grad)

    life = Life(Trainer(torch.ones(LARGE, requires_grad=True), step))
    life.call(CALLS)
    other = after(life, torch.ones(LARGE, requires_grad=True))
    other.enter()
    with pytest.raises(UnprovedError, match=r"kept\.grad was kept"):
        step(other.trainer.kept)
    with pytest.raises(UnprovedError, match=r"kept\.grad was kept"):
        other.pass_gate()


@pytest.mark.parametrize("clear", [
    lambda kept: setattr(kept, "grad", None), lambda kept: kept.grad.zero_(), lambda kept: kept.grad.detach_().zero_(),
    lambda kept: torch._foreach_zero_([kept.grad]), lambda kept: kept.grad.requires_grad_(False).zero_(),
])  # fmt: skip
def test_one_that_is_cleared_before_is_not(clear: Callable[[Any], Any]) -> None:
    def step(kept: torch.Tensor) -> None:
        if kept.grad is not None and kept.grad.shape == kept.shape:
            clear(kept)
        trained(kept)

    # The tensor itself is told by an object that protect() was given.
    life = Life(Trainer(torch.zeros(3000, requires_grad=True), step))
    life.call(CALLS)
    other = after(life, torch.zeros(3000, requires_grad=True))
    life.call(2)
    other.call(2)
    assert other.trainer.kept.grad.tolist() == life.trainer.kept.grad.tolist()
    assert other.trainer.kept.tolist() == life.trainer.kept.tolist()


@pytest.mark.parametrize("step", [cleared, zeroed])
def test_at_a_gate_it_is_known_that_it_is_cleared_after_it(step: Callable[[Any], Any]) -> None:
    def before(kept: torch.Tensor) -> None:
        torch.autograd.backward(kept.sum())

    def behind(kept: torch.Tensor) -> None:
        assert kept.grad is not None
        with torch.no_grad():
            kept += kept.grad
        if step is cleared:
            kept.grad = None
        else:
            kept.grad.zero_()

    life = Life(Trainer(torch.zeros(2, requires_grad=True), before, behind))
    life.call(CALLS)
    life.enter()
    life.pass_gate()
    other = after(life, torch.zeros(2, requires_grad=True))
    gradient = other.trainer.kept.grad
    assert gradient is None if step is cleared else gradient.tolist() == [0.0, 0.0]


def given(kept: torch.Tensor) -> None:
    """Where the gradient of an equation is trained with: it is of a graph itself."""
    torch.autograd.backward(kept.square().sum(), create_graph=True)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_what_is_added_by_another_way_to_a_gradient_that_is_absent_is_absent() -> None:
    life = Life(Trainer(torch.ones(LARGE, requires_grad=True), given))
    life.call(CALLS)
    other = after(life, torch.ones(LARGE, requires_grad=True))
    other.enter()
    for _ in range(2):
        given(other.trainer.kept)
        with pytest.raises(UnprovedError, match=r"kept\.grad was kept"):
            other.trainer.kept.grad.sum()
    other.trainer.kept.grad = None
    given(other.trainer.kept)
    assert other.trainer.kept.grad[0] == 2


def test_a_replacement_has_no_gradient_where_its_predecessor_had_none() -> None:
    life = Life(Trainer(with_gradient(torch.zeros(2, requires_grad=True)), cleared))
    life.trainer.kept.grad = None
    life.call(CALLS)
    assert after(life, with_gradient(torch.zeros(2, requires_grad=True))).trainer.kept.grad is None


def test_a_gradient_that_is_known_elsewhere_stays_the_same_tensor() -> None:
    def step(kept: torch.Tensor) -> None:
        assert kept.grad is not None
        kept.grad.zero_()
        torch.autograd.backward(kept.sum())

    for size in (4, LARGE):
        kept = with_gradient(torch.zeros(size, requires_grad=True))
        life = Life(Trainer(kept, step))
        life.call(5)
        new = with_gradient(torch.zeros(size, requires_grad=True))
        alias = new.grad
        assert alias is not None
        other = after(life, new)
        assert new.grad is alias
        if size == LARGE:
            with pytest.raises(UnprovedError, match=r"kept\.grad was kept"):
                alias.sum()
            absent._refused.clear()
        other.call(1)
        assert alias.tolist() == [1.0] * size


def test_writing_that_torch_does_not_count_is_put_back_and_told() -> None:
    def step(kept: torch.Tensor) -> None:
        torch.autograd.backward(kept.sum())
        assert kept.grad is not None
        kept.data -= 0.5 * kept.grad.data
        kept.grad.data.mul_(0.5)

    life = Life(Trainer(torch.zeros(2, requires_grad=True), step))
    life.call(5)
    kept = life.trainer.kept
    value, gradient = kept.tolist(), kept.grad.tolist()
    other = after(life, torch.zeros(2, requires_grad=True))
    assert (other.trainer.kept.tolist(), other.trainer.kept.grad.tolist()) == (value, gradient)
    life.enter()
    kept.grad.data.mul_(0.5)
    life.hidden.rewind()
    assert kept.grad.tolist() == gradient


@pytest.mark.parametrize("calls", [3, 5, CALLS])
def test_a_gradient_goes_with_the_tensor_that_the_cut_step_had_replaced(calls: int) -> None:
    def step(kept: torch.Tensor) -> torch.Tensor:
        torch.autograd.backward(kept.sum())
        assert kept.grad is not None
        new = (kept - 0.1 * kept.grad).detach().requires_grad_()
        new.grad = 0.5 * kept.grad
        return new

    life = Life(Trainer(torch.zeros(2, requires_grad=True), step))
    life.call(calls)
    gradient = life.trainer.kept.grad.tolist()
    life.enter()
    life.trainer.change(step)
    life.hidden.rewind()
    assert life.trainer.kept.grad.tolist() == gradient


def test_a_conjugated_gradient_ends_nothing() -> None:
    weight = torch.ones(3, dtype=torch.complex64)

    def step(kept: torch.Tensor) -> None:
        kept.grad = None
        torch.autograd.backward((kept.conj() * weight).real.sum())

    life = Life(Trainer(torch.zeros(3, dtype=torch.complex64, requires_grad=True), step))
    life.call(5)
    after(life, torch.zeros(3, dtype=torch.complex64, requires_grad=True)).call(2)


def test_many_gradients_are_not_told_beyond_what_there_is_room_for() -> None:
    def step(kept: list[torch.Tensor]) -> None:
        for each in kept:
            each.grad = None
            torch.autograd.backward(each.sum())

    life = Life(Trainer([torch.zeros(3000, requires_grad=True) for _ in range(20)], step))
    life.call(5)
    assert len(life.hidden.record()) < 100_000


def test_one_that_was_cleared_can_be_copied() -> None:
    def step(kept: torch.Tensor) -> None:
        if kept.grad is not None:
            kept.grad.zero_()
        torch.autograd.backward(kept.square().sum())

    life = Life(Trainer(torch.ones(LARGE, requires_grad=True), step))
    life.call(CALLS)
    other = after(life, torch.ones(LARGE, requires_grad=True))
    other.call(1)
    assert type(other.trainer.kept.grad) is torch.Tensor
    assert copy.deepcopy(other.trainer.kept).grad[0] == 2


def before_gate(kept: torch.Tensor) -> None:
    torch.autograd.backward(kept.sum())


class Now:
    """Whether something is done after the gate of this call."""

    on = False


@pytest.mark.parametrize("clears", [False, True])
def test_at_a_gate_no_gradient_is_taken_to_stay(clears: bool) -> None:
    """That of a script that accumulates and clears now and then, or with `.data`."""
    now = Now()

    def behind(kept: torch.Tensor) -> None:
        if clears and kept.grad is not None:
            kept.grad.data.zero_()
        elif now.on:
            kept.grad = None

    life = Life(Trainer(torch.zeros(2, requires_grad=True), before_gate, behind))
    life.call(CALLS)
    life.enter()
    life.pass_gate()
    gradient = after(life, torch.zeros(2, requires_grad=True)).trainer.kept.grad
    if clears:
        assert gradient.tolist() == [0.0, 0.0]
    else:
        with pytest.raises(UnprovedError, match=r"kept\.grad was kept"):
            gradient.sum()


def test_nor_is_one_that_is_there_for_the_first_time_taken_to_be_cleared() -> None:
    now = Now()

    def before(kept: torch.Tensor) -> None:
        if now.on:
            torch.autograd.backward(kept.sum())

    life = Life(Trainer(torch.zeros(2, requires_grad=True), before))
    life.call(CALLS)
    now.on = True
    life.enter()
    life.pass_gate()
    with pytest.raises(UnprovedError, match=r"kept\.grad was kept"):
        after(life, torch.zeros(2, requires_grad=True)).trainer.kept.grad.sum()


def test_at_a_gate_one_that_is_cleared_now_and_then_is_not_known() -> None:
    counted = itertools.count()

    def before(kept: torch.Tensor) -> None:
        torch.autograd.backward(kept.sum())

    def behind(kept: torch.Tensor) -> None:
        if next(counted) % 2:
            kept.grad = None

    life = Life(Trainer(torch.zeros(2, requires_grad=True), before, behind))
    life.call(CALLS)
    life.enter()
    life.pass_gate()
    other = after(life, torch.zeros(2, requires_grad=True))
    with pytest.raises(UnprovedError, match=r"kept\.grad was kept"):
        other.trainer.kept.grad.sum()


@pytest.mark.parametrize("calls", [0, CALLS])
def test_a_large_gradient_that_the_cut_step_has_changed_is_absent_in_the_next(calls: int) -> None:
    life = Life(Trainer(with_gradient(torch.ones(LARGE, requires_grad=True)), lambda _: None))
    life.call(calls)
    life.enter()
    with_gradient(life.trainer.kept)
    life.hidden.rewind()
    with pytest.raises(UnprovedError, match=r"kept\.grad was kept"):
        life.trainer.kept.grad.sum()


def test_a_gradient_that_a_step_lets_go_is_not_held() -> None:
    life = Life(Trainer(with_gradient(torch.ones(LARGE, requires_grad=True)), lambda _: None))
    life.call(2)
    life.enter()
    reference = weakref.ref(life.trainer.kept.grad)
    life.trainer.kept.grad = None
    assert reference() is None


@pytest.mark.parametrize("first", [True, False])
def test_whether_it_requires_a_gradient_is_carried(first: bool) -> None:
    def step(kept: torch.Tensor) -> None:
        with torch.no_grad():
            kept += 1

    life = Life(Trainer(torch.zeros(2, requires_grad=first), step))
    life.call(3)
    life.trainer.kept.requires_grad_(not first)
    life.call(2)
    assert after(life, torch.zeros(2, requires_grad=first)).trainer.kept.requires_grad is not first


def test_one_that_the_cut_step_has_frozen_is_trained_again() -> None:
    life = Life(Trainer(torch.zeros(2, requires_grad=True), cleared))
    life.call(5)
    life.enter()
    life.trainer.kept.requires_grad_(False)
    life.hidden.rewind()
    assert life.trainer.kept.requires_grad


@pytest.mark.parametrize("calls", [0, CALLS])
def test_a_parameter_that_begins_to_change_in_the_cut_step_is_put_back(calls: int) -> None:
    life = Life(Trainer(torch.nn.Parameter(torch.zeros(2)), lambda _: None))
    life.call(calls)
    life.enter()
    with torch.no_grad():
        life.trainer.kept.add_(1)
    life.hidden.rewind()
    assert life.trainer.kept.tolist() == [0.0, 0.0]


def test_a_parameter_that_begins_to_change_late_is_told_at_once() -> None:
    def moved(kept: torch.Tensor) -> None:
        with torch.no_grad():
            kept.add_(1)

    life = Life(Trainer(torch.nn.Parameter(torch.zeros(2)), lambda _: None))
    life.call(CALLS)
    life.trainer.before = moved
    life.call(1)
    assert after(life, torch.nn.Parameter(torch.zeros(2))).trainer.kept.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("size", [2, 2048, 4000])
@pytest.mark.parametrize("calls", [0, 3, CALLS])
def test_a_tensor_that_is_small_enough_to_be_carried_is_put_back(size: int, calls: int) -> None:
    life = Life(Trainer(torch.zeros(size), lambda _: None))
    life.call(calls)
    life.enter()
    life.trainer.kept.add_(1)
    life.hidden.rewind()
    assert not life.trainer.kept.any()


def test_so_it_is_in_the_first_call_of_a_replacement() -> None:
    def step(kept: torch.Tensor) -> None:
        kept.add_(1)

    life = Life(Trainer(torch.zeros(2048), step))
    life.call(5)
    other = after(life, torch.zeros(2048))
    other.enter()
    step(other.trainer.kept)
    other.hidden.rewind()
    assert other.trainer.kept[0] == 5
