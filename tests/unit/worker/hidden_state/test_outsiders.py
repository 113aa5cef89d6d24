"""Copies of a model that a script keeps, and of which protect() was not told, are refused when they move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, LRScheduler, SequentialLR

from torchrelay.errors import RefusedError
from torchrelay.worker.hidden_state import around
from torchrelay.worker.hidden_state.hidden import Hidden


def outsider(make: Any, change: Any, known: list[Any]) -> Hidden:
    thing = make()

    def step() -> Any:
        return thing

    hidden = Hidden(known=lambda: known)
    hidden.add(step)
    for _ in range(3):
        hidden.mark()
        hidden.look_entry()
        hidden.look_gate()
        hidden.look_return()
    change(thing)
    return hidden


def shadow() -> dict[str, torch.Tensor]:
    return {"weight": torch.zeros(80, 80), "bias": torch.zeros(80)}


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: nn.Linear(3, 3), lambda net: nn.init.zeros_(net.weight)),
        (shadow, lambda kept: kept["weight"].mul_(0.9)),
        (shadow, lambda kept: kept.update(weight=torch.ones(80, 80))),
    ],
)
def test_a_copy_of_the_model_that_moves_is_refused(make: Any, change: Any) -> None:
    hidden = outsider(make, change, [*nn.Linear(80, 80).parameters()] * 2)  # told twice, as a state does
    with pytest.raises(RefusedError, match=r"thing of .* protect\(\) was not given it"):
        hidden._look()


def test_what_is_in_the_state_or_is_no_copy_of_it_may_move() -> None:
    known = nn.Linear(80, 80)
    outsider(lambda: known, lambda net: nn.init.zeros_(net.weight), list(known.parameters()))._look()
    batches = [torch.zeros(80, 80), torch.zeros(81)]
    outsider(lambda: batches, lambda kept: kept[0].add_(1), list(known.parameters()))._look()


def optimizer() -> torch.optim.Optimizer:
    made = torch.optim.SGD(known.parameters(), lr=0.1)
    made.step()
    return made


def schedule() -> LRScheduler:
    made = ConstantLR(optimizer())
    made.optimizer.step()
    return made


def scaler() -> torch.amp.GradScaler:
    made = torch.amp.GradScaler("cpu")
    made.scale(torch.ones(()))
    return made


known = nn.Linear(80, 80)


@pytest.mark.parametrize(
    ("make", "change"),
    [(schedule, lambda one: one.step()), (scaler, lambda one: one.update(2.0))],
)
def test_a_schedule_or_scaler_that_join_was_not_given_is_refused_when_it_moves(make: Any, change: Any) -> None:
    hidden = outsider(make, change, list(known.parameters()))
    assert hidden._outsiders is not None
    assert hidden._outsiders.stirred
    with pytest.raises(RefusedError, match=r"thing of .* protect\(\) was not given it"):
        hidden._look()


def test_schedules_within_one_that_was_given_may_move() -> None:
    one = optimizer()
    inner: list[LRScheduler] = [ConstantLR(one) for _ in range(2)]
    given = SequentialLR(one, inner, milestones=[3])
    one.step()
    first = given._schedulers[0]
    hidden = outsider(lambda: first, lambda _: given.step(), [*known.parameters(), given])
    hidden._look()


def test_a_list_that_grows_costs_no_more_than_a_short_one() -> None:
    asked = []

    class Entry(dict[str, Any]):
        def values(self) -> Any:
            asked.append(self)
            return super().values()

    assert not around._may_hold([Entry(loss=1.0) for _ in range(10_000)], 2)
    assert len(asked) <= around.SAMPLED
