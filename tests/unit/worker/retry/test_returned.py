"""A replacement is told values of the state as they were when a call returned, whatever has become of them since."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from torchrelay.worker.retry import returned
from torchrelay.worker.retry.returned import Returned
from torchrelay.worker.state.state import State


class Meter:
    """An object of the script, with a state."""

    def __init__(self) -> None:
        self.best = 0.0
        self.shown = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "shown": self.shown}

    def load_state_dict(self, told: dict[str, Any]) -> None:
        self.best, self.shown = told["best"], told["shown"]


class Rank:
    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=torch.tensor(1.0))
        self.plain = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.plain, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.scaler.scale(torch.ones(1))
        self.kept: dict[str, Any] = {"count": 0, "sums": torch.zeros(2)}
        self.meter = Meter()
        self.average = AveragedModel(self.model)
        extra = {
            "schedule": self.schedule, "scaler": self.scaler, "kept": self.kept, "meter": self.meter,
            "average": self.average,
        }  # fmt: skip
        self.plain.step()  # before its schedule, as in training
        self.state = State(self.model, [self.optimizer, self.plain], extra)

    def go_on(self) -> None:
        """What a script does between two calls."""
        self.schedule.step()
        self.kept["count"] += 1
        self.meter.best += 1.5


def test_a_replacement_gets_them_as_they_were_and_goes_on_to_what_the_others_have() -> None:
    rank, other = Rank(), Rank()
    rank.go_on()
    told = Returned(rank.state)
    told.mark()
    rank.go_on()
    data = told.encoded()
    assert (rank.schedule.last_epoch, rank.kept["count"], rank.meter.best) == (2, 2, 3.0), "nothing has changed here"
    sums, shown, rate = other.kept["sums"], other.meter.shown, other.optimizer.param_groups[0]["lr"]
    assert returned.take(other.state, data) == frozenset()
    assert (other.schedule.last_epoch, other.kept["count"], other.meter.best) == (1, 1, 1.5)
    assert other.plain.param_groups[0]["lr"] == 0.5
    other.go_on()
    assert other.plain.param_groups[0]["lr"] == rank.plain.param_groups[0]["lr"] == 0.25
    assert other.schedule.state_dict() == rank.schedule.state_dict()
    same = (other.kept["sums"] is sums, other.meter.shown is shown, other.optimizer.param_groups[0]["lr"] is rate)
    assert same == (True, True, True), "others may hold these tensors, too"


def test_the_scale_of_a_replacement_is_that_of_the_others() -> None:
    rank, other = Rank(), Rank()
    rank.scaler.update(2.0)
    told = Returned(rank.state)
    returned.take(other.state, told.encoded())
    assert other.scaler.get_scale() == 2.0


def test_tensors_that_have_moved_since_are_named() -> None:
    rank = Rank()
    told = Returned(rank.state)
    rank.average.update_parameters(rank.model)
    assert returned.take(Rank().state, told.encoded()) == {"state['average']"}
    told.mark()
    assert returned.take(Rank().state, told.encoded()) == frozenset()


def test_a_small_tensor_is_told_as_it_was_and_what_a_replacement_has_made_of_it_stays() -> None:
    def rank() -> tuple[torch.Tensor, State]:
        kept, model = torch.zeros(2), nn.Linear(2, 2)
        return kept, State(model, torch.optim.SGD(model.parameters(), lr=1.0), {"kept": kept})

    (ours, state), (theirs, other) = rank(), rank()
    ours += 1.0
    told = Returned(state)
    told.mark()
    ours += 1.0
    data = told.encoded()
    assert ours.tolist() == [2.0, 2.0], "nothing has changed here"
    assert returned.take(other, data) == frozenset(), "it has come as it was"
    assert theirs.tolist() == [1.0, 1.0]
    theirs += 1.0
    here = returned.now(other, tensors=True)
    theirs.fill_(9.0)  # the state comes, for another part that is read
    returned.take(other, here, returned.told_of(data))
    assert theirs.tolist() == [2.0, 2.0]


def test_what_a_call_that_was_cut_has_written_and_put_back_has_not_moved() -> None:
    rank = Rank()
    told = Returned(rank.state)
    told.mark()
    assert told.enter(section=False) is None
    with torch.no_grad():
        for parameter in rank.average.parameters():
            before = parameter.clone()
            parameter.add_(1.0).copy_(before)
    assert returned.take(Rank().state, told.encoded()) == frozenset()


def test_a_buffer_that_a_step_binds_anew_has_not_moved_since_that_step() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.center: torch.Tensor
            self.register_buffer("center", torch.zeros(8))

    def rank() -> tuple[Centred, State]:
        centred, model = Centred(), nn.Linear(2, 2)
        return centred, State(model, torch.optim.SGD(model.parameters(), lr=1.0), {"loss": centred})

    centred, state = rank()
    told = Returned(state)
    for _ in range(3):
        centred.center = centred.center * 0.9 + 1.0
        state.private.refresh()
        told.mark()
        assert returned.take(rank()[1], told.encoded()) == frozenset()
    centred.center = centred.center * 0.9
    state.private.refresh()
    assert returned.take(rank()[1], told.encoded()) == {"state['loss']"}


def test_what_is_large_or_cannot_be_told_alone_is_left_to_the_state() -> None:
    rank = Rank()
    rank.kept["large"] = torch.zeros(returned.LIMIT)
    told = Returned(rank.state).encoded()
    assert len(told) < returned.LIMIT
    other = Rank()
    rank.kept["count"] = 9
    returned.take(other.state, told)
    assert other.kept["count"] == 0


# ---------------------------------------------------------------- sections


def test_what_a_section_finds_is_told_as_it_was_at_the_return_before() -> None:
    rank, other = Rank(), Rank()
    told = Returned(rank.state)
    entered = told.enter(section=True)
    assert entered is not None
    assert not entered.moved
    rank.schedule.step()
    entered = told.enter(section=True)
    assert entered is not None
    assert entered.moved
    other.schedule.step()
    returned.take(other.state, entered.before)
    assert other.plain.param_groups[0]["lr"] == 1.0
    assert rank.plain.param_groups[0]["lr"] == 0.5, "ours are as they were"


@pytest.mark.parametrize("change", [
    lambda rank: rank.model.weight.data.mul_(2),
    lambda rank: rank.large.data.mul_(0.5).add_(1),
    lambda rank: rank.large.detach()[1, 7].add_(1),
    lambda rank: setattr(rank.large, "data", rank.large.detach().clone()),
    lambda rank: rank.kept["sums"].add_(1),
    lambda rank: rank.average.update_parameters(rank.model),
    lambda rank: rank.momentum.add_(1),
])  # fmt: skip
def test_a_section_that_changes_a_tensor_is_not_still(change: Callable[[Any], Any]) -> None:
    rank: Any = SimpleNamespace(**vars(Rank()))
    rank.large = nn.Parameter(torch.zeros(2000, 500))
    rank.model.large = rank.large
    optimizer = torch.optim.SGD(rank.model.parameters(), lr=0.1, momentum=0.9)
    rank.model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    rank.momentum = optimizer.state[rank.model.weight]["momentum_buffer"]
    told = Returned(State(rank.model, optimizer, {"kept": rank.kept, "average": rank.average}))
    entered = told.enter(section=True)
    assert entered is not None
    rank.model(torch.ones(1, 2)).sum().backward()
    rank.model.eval()
    assert told.is_still(entered), "an evaluation changes nothing"
    change(rank)
    assert not told.is_still(entered)


def test_sections_in_every_step_are_not_looked_at() -> None:
    told = Returned(Rank().state)
    seen = []
    for _ in range(20):
        seen.append(told.enter(section=True) is not None)
        told.mark()
    assert seen[:4] == [True] * 4
    assert not any(seen[6:])
    for _ in range(200):
        told.mark()
    assert told.enter(section=True) is not None, "it has become rare"
