"""What a step will return is known at its gate, as far as it lies in variables; what is not, nobody makes up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchrelay.errors import RefusedError, UnprovedError
from torchrelay.worker.replacement import foresight
from torchrelay.worker.replacement.foresight import CALLS, Foresight, complete
from torchrelay.worker.tensors import values

Gate = Callable[[], None]
Step = Callable[[int, Gate], Any]


class Life:
    """Calls of one function; what was known at the gate of the last one."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._foresight = Foresight()
        self._known = b""

    def call(self, number: int) -> tuple[bytes, Any]:
        """What was known at its gate, and what it has returned."""
        value = self._step(number, self._gate)
        self._foresight.returned(value, values.encode(value, "result"))
        return self._known, value

    def _gate(self) -> None:
        self._known = self._foresight.at_gate(Life.call.__code__)


def loss_of(number: int) -> torch.Tensor:
    return (torch.tensor([1.0 / (number + 1)], requires_grad=True) * 3).sum()


def detached(number: int, gate: Gate) -> Any:
    loss = loss_of(number)
    gate()
    return loss.detach()


def as_number(number: int, gate: Gate) -> Any:
    loss = loss_of(number)
    gate()
    return loss.item()


def nested(number: int, gate: Gate) -> Any:
    metrics = {"loss": loss_of(number).detach(), "seen": [number, number * 2]}
    gate()
    return metrics


def with_constants(number: int, gate: Gate) -> Any:
    loss = loss_of(number)
    gate()
    return loss.item(), "train", None, True


def in_a_caller(number: int, gate: Gate) -> Any:
    total = loss_of(number).item()

    def update() -> None:
        gate()

    update()
    return total


def nothing(_: int, gate: Gate) -> Any:
    gate()


def same(value: Any) -> Any:
    """Of which nobody can see that it computes and does no more."""
    return value


def through_a_function(number: int, gate: Gate) -> Any:
    loss = loss_of(number)
    gate()
    return same(loss.item())


def of_two_ends(number: int, gate: Gate) -> Any:
    loss = loss_of(number)
    gate()
    if number > 100:
        return None
    return loss.detach()


def by_chance(number: int, gate: Gate) -> Any:
    loss = 0.25 + number
    other = 0.25 if number == 0 else 9.0 + loss
    gate()
    return same(loss) if other else None


LEARNT: list[Step] = [through_a_function, of_two_ends, by_chance]
KNOWN: list[Step] = [detached, as_number, nested, with_constants, in_a_caller, nothing]


@pytest.mark.parametrize("step", [*KNOWN, *LEARNT])
def test_what_lies_in_variables_is_known_soon_and_never_another_one(step: Step) -> None:
    life = Life(step)
    for number in range(8):
        known, value = life.call(number)
        if known or number >= CALLS:
            assert complete(known, []) == values.encode(value, "result")
        else:
            with pytest.raises(UnprovedError, match="not known yet"):
                complete(known, [])


@pytest.mark.parametrize("step", [detached, as_number, nested, with_constants])
def test_what_the_last_line_computes_is_known_from_the_first_call_on(step: Step) -> None:
    known, value = Life(step).call(3)
    assert complete(known, []) == values.encode(value, "result")


def test_arithmetic_on_what_is_known_is_known() -> None:
    def step(number: int, gate: Gate) -> Any:
        loss, count = loss_of(number).detach(), 4
        gate()
        return {"loss": float(loss) * count, "mean": [loss.detach() / count, -1.5]}

    known, value = Life(step).call(2)
    assert complete(known, []) == values.encode(value, "result")


def test_what_is_assigned_after_the_gate_is_not_computed_before_it() -> None:
    def step(number: int, gate: Gate) -> Any:
        loss = loss_of(number)
        gate()
        loss = loss * 2
        return loss.detach()

    life = Life(step)
    known = [life.call(number)[0] for number in range(CALLS + 2)][-1]
    with pytest.raises(UnprovedError):
        complete(known, [])


def test_a_function_of_the_name_of_float_is_no_float(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "float", lambda _: 7.0)

    def step(number: int, gate: Gate) -> Any:
        loss = loss_of(number)
        gate()
        return float(loss)

    with pytest.raises(UnprovedError):
        complete(Life(step).call(0)[0], [])


@pytest.mark.parametrize("step", LEARNT)
def test_in_the_first_call_nothing_is(step: Step) -> None:
    known, _ = Life(step).call(0)
    with pytest.raises(UnprovedError, match="not known yet"):
        complete(known, [values.encode(1.5, "")])


def later(number: int, gate: Gate) -> Any:
    loss = loss_of(number)
    gate()
    return same(loss.item()) * 1.7


def in_part(number: int, gate: Gate) -> Any:
    loss = loss_of(number)
    gate()
    return {"loss": loss.item(), "rate": same(1.7) / (number + 2)}


def test_what_is_computed_afterwards_comes_from_several_others_or_from_nobody() -> None:
    life = Life(later)
    known = [life.call(number)[0] for number in range(CALLS + 2)][-1]
    one, other = values.encode(1.5, ""), values.encode(2.5, "")
    assert complete(known, [one, one]) == one
    for others in ([], [one], [one, other]):
        with pytest.raises(UnprovedError, match=r"all of what its step returns is computed after optimizer.step\(\)"):
            complete(known, others)


def test_of_a_part_of_it_only_that_comes_from_others() -> None:
    life = Life(in_part)
    known, value = [life.call(number) for number in range(CALLS + 2)][-1]
    others = [values.encode({"loss": loss, "rate": value["rate"]}, "") for loss in (7.0, 8.0)]
    assert complete(known, others) == values.encode(value, "")
    with pytest.raises(UnprovedError, match="entry rate of what its step returns"):
        complete(known, [others[0], values.encode({"loss": 7.0, "rate": 0.0}, "")])


def test_a_variable_that_held_it_by_chance_is_forgotten() -> None:
    def step(number: int, gate: Gate) -> Any:
        loss = number / 4
        gate()
        return number / 4 * (1.0 if number < 6 else 2.0) + 0 * loss

    life = Life(step)
    told = [life.call(number) for number in range(10)]
    assert complete(told[5][0], []) == values.encode(told[5][1], "")
    with pytest.raises(UnprovedError):
        complete(told[7][0], [])


def test_what_changes_after_the_gate_is_not_taken_as_it_was() -> None:
    def step(number: int, gate: Gate) -> Any:
        total = torch.zeros(1)
        gate()
        total += number + 1
        return total

    life = Life(step)
    known = [life.call(number)[0] for number in range(CALLS + 2)][-1]
    with pytest.raises(UnprovedError):
        complete(known, [])


def test_a_result_that_is_now_and_then_another_kind_is_foreseen_no_more() -> None:
    def step(number: int, gate: Gate) -> Any:
        loss = loss_of(number)
        gate()
        return loss.item() if number != 5 else {"loss": loss.item()}

    life = Life(step)
    told = [life.call(number)[0] for number in range(8)]
    assert complete(told[4], [])
    with pytest.raises(UnprovedError):
        complete(told[6], [])


def test_the_bits_of_zero_and_of_no_number_count() -> None:
    def step(number: int, gate: Gate) -> Any:
        loss = -0.0 if number % 2 else float("nan")
        gate()
        return loss

    life = Life(step)
    told = [life.call(number) for number in range(6)]
    assert complete(told[4][0], []) == values.encode(told[4][1], "")
    assert complete(told[5][0], []) == values.encode(-0.0, "") != values.encode(0.0, "")


def test_large_tensors_are_not_held() -> None:
    def step(_: int, gate: Gate) -> Any:
        large = torch.zeros(2000)
        gate()
        return large

    known = [Life(step).call(0)[0]]
    with pytest.raises(UnprovedError):
        complete(known[0], [])


@pytest.mark.parametrize("step", [detached, through_a_function])
def test_calls_without_an_update_show_nothing(step: Step) -> None:
    skips = True
    life = Life(lambda number, gate: step(number, (lambda: None) if skips else gate))
    for number in range(2 * CALLS):
        life.call(number)
    skips = False
    known, value = [life.call(number) for number in range(CALLS + 2)][-1]
    assert complete(known, []) == values.encode(value, "result")


def test_what_cannot_be_kept_is_refused() -> None:
    with pytest.raises(RefusedError, match="Return numbers"):
        foresight.encoded("step", object())
    with pytest.raises(RefusedError, match="Return a summary"):
        foresight.encoded("step", torch.zeros(1 << 20))
