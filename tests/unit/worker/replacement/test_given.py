"""A replacement makes the recorded calls of its place with what its predecessor made them with, or it is found out."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchrelay.errors import UnprovedError
from torchrelay.worker.replacement.given import NONE, Function

COUNT = 0


def nowhere(*_: Any) -> bool:
    return False


def step(batch: torch.Tensor, rate: float = 0.1) -> Any:
    return batch.sum() * rate


def section(epoch: int) -> int:
    return epoch


def as_step(function: Callable[..., Any], elsewhere: Any = nowhere) -> Function:
    return Function(function, "step", elsewhere)


def batch(seed: int) -> torch.Tensor:
    return torch.randn(4, generator=torch.Generator().manual_seed(seed))


def test_the_same_call_is_the_same() -> None:
    recorded = as_step(step).begin((batch(1),), {"rate": 0.2})()
    assert as_step(step).check_replayed(recorded, (batch(1),), {"rate": 0.2}, "the step of 7") is NONE


def test_other_data_is_refused_with_the_name_of_the_argument_and_the_call() -> None:
    recorded = as_step(step).begin((batch(1),), {})()
    with pytest.raises(
        UnprovedError, match=r"the step of 7 with other data .*: argument 'batch' of step\(\)\. .*Track loaders"
    ):
        as_step(step).check_replayed(recorded, (batch(2),), {}, "the step of 7")


def test_another_function_is_refused() -> None:
    recorded = as_step(step).begin((batch(1),), {})()
    with pytest.raises(UnprovedError, match="which function it is"):
        as_step(as_step).check_replayed(recorded, (batch(1),), {}, "the step of 7")


def test_other_numbers_of_a_step_are_a_doubt_that_the_next_step_settles() -> None:
    recorded = as_step(step).begin((batch(1), 0.1), {})()
    doubt = as_step(step).check_replayed(recorded, (batch(1), 0.2), {}, "the step of 7")
    assert doubt.entries == (2,)
    assert doubt.what == "argument 'rate' of step()"


def test_other_numbers_of_a_section_are_refused() -> None:
    recorded = Function(section, "section", nowhere).begin((3,), {})()
    with pytest.raises(UnprovedError, match="argument 'epoch'"):
        Function(section, "section", nowhere).check_replayed(recorded, (4,), {}, "the section of 7+1")


def test_a_record_that_says_nothing_proves_nothing_and_refuses_nothing() -> None:
    assert as_step(step).check_replayed(b"", (batch(1),), {}, "the step of 7") is NONE


def test_what_a_step_reads_from_outside_counts_unless_it_comes_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = batch(1)

    def reading() -> Any:
        return ahead * COUNT

    recorded = as_step(reading).begin((), {})()
    carried = as_step(reading, lambda *_: True).begin((), {})()
    ahead = batch(2)
    with pytest.raises(UnprovedError, match=r"'ahead', which reading\(\) reads"):
        as_step(reading).check_replayed(recorded, (), {}, "the step of 7")
    assert as_step(reading).check_replayed(carried, (), {}, "the step of 7") is NONE, "its predecessor tells it"
    ahead = batch(1)
    monkeypatch.setitem(globals(), "COUNT", 5)
    assert "'COUNT'" in as_step(reading).check_replayed(recorded, (), {}, "the step of 7").what


def test_a_call_that_is_made_again_is_made_with_the_same() -> None:
    made = as_step(step)
    given = batch(1)
    first = made.begin((given,), {})()
    made.mark()
    made.rewind()
    made.check_again(first, (given,), {}, "the step of 8")
    given.add_(1)
    with pytest.raises(UnprovedError, match=r"the step of 8 was cut by a fault .* it has changed argument 'batch'"):
        made.check_again(first, (given,), {}, "the step of 8")


def test_what_a_step_has_bound_anew_is_bound_as_before_when_it_is_made_again() -> None:
    ahead = batch(1)
    drawn = random.Random(1)

    def fetching() -> Any:
        nonlocal ahead
        now, ahead = ahead, batch(drawn.randrange(9))
        return now

    made = as_step(fetching, lambda *place: isinstance(place[-1], random.Random))
    first = made.begin((), {})()
    made.mark()
    fetching()
    made.rewind()
    made.check_again(first, (), {}, "the step of 8")
    assert torch.equal(ahead, batch(1))
