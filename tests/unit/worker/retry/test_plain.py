"""What a script reads of the state without a trace is told for one moment, and put where a replacement stands."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from torchrelay.worker.retry import plain
from torchrelay.worker.retry.returned import Returned, parted
from torchrelay.worker.state.state import State

SCHEDULES: dict[str, Any] = {
    "step": lambda one: torch.optim.lr_scheduler.StepLR(one, 2),
    "milestones": lambda one: torch.optim.lr_scheduler.MultiStepLR(one, [2, 4]),
    "lambda": lambda one: torch.optim.lr_scheduler.LambdaLR(one, lambda step: 0.5**step),
    "cosine": lambda one: torch.optim.lr_scheduler.CosineAnnealingLR(one, 10),
    "one cycle": lambda one: torch.optim.lr_scheduler.OneCycleLR(one, 0.5, total_steps=20),
    "warm restarts": lambda one: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(one, 3),
    "chained": lambda one: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(one), torch.optim.lr_scheduler.ExponentialLR(one, 0.5)]
    ),
    "one after the other": lambda one: torch.optim.lr_scheduler.SequentialLR(
        one,
        [torch.optim.lr_scheduler.LinearLR(one), torch.optim.lr_scheduler.ExponentialLR(one, 0.5)],
        milestones=[3],
    ),
}


class Counter:
    """An object of the script, with a state."""

    def __init__(self) -> None:
        self.best, self.names, self.shape = 0.0, ["a"], (1, 2)

    def state_dict(self) -> dict[str, Any]:
        return vars(self).copy()

    def load_state_dict(self, told: dict[str, Any]) -> None:
        vars(self).update(told)


class Rank:
    """One that goes on by calling `go_on`."""

    def __init__(self, kind: str = "step", **besides: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1.0)
        self.schedule = SCHEDULES[kind](self.optimizer)
        self.optimizer.step()  # before its schedule, as in training
        self.counter = Counter()
        self.kept: dict[str, Any] = {"count": 0, "pair": (0, "x")}
        self.last, self.seen = deque([0], maxlen=3), {0}
        extra = {"schedule": self.schedule, "counter": self.counter, "kept": self.kept, "last": self.last}
        self.state = State(self.model, self.optimizer, {**extra, "seen": self.seen, **besides})
        self.returned = Returned(self.state)

    def go_on(self, times: int = 1) -> None:
        for _ in range(times):
            self.schedule.step()
            self.kept["count"] += 1
            self.kept["pair"] = (self.kept["count"], "y")
            self.counter.best += 0.5
            self.counter.names = [*self.counter.names, "b"]
            self.last.append(self.kept["count"])
            self.seen.add(self.kept["count"])
        self.model.eval()
        self.model[0].weight.requires_grad_(False)

    def readable(self) -> list[Any]:
        groups = [{key: value for key, value in one.items() if key != "params"} for one in self.optimizer.param_groups]
        flags = [self.model[1].training, self.model[0].weight.requires_grad]
        told = [repr(self.schedule.state_dict()), self.schedule.get_last_lr(), groups, flags]
        return [*told, vars(self.counter), self.kept, self.last, self.seen]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_replacement_reads_what_its_predecessor_read_there(kind: str) -> None:
    rank, other = Rank(kind), Rank(kind)
    rank.go_on(3)
    told, expected = rank.returned.place(), repr(rank.readable())
    rank.go_on(2)
    assert put(other.returned, told) is True
    assert repr(other.readable()) == expected
    other.go_on(2)
    assert repr(other.readable()) == repr(rank.readable()), "and goes on from there alike"


def put(there: Returned, place: bytes) -> bool:
    told, _ = parted(place)
    return plain.put(there.at_head, told)


def test_what_is_told_of_a_return_is_as_of_then() -> None:
    rank, other = Rank(), Rank()
    rank.go_on(1)
    rank.returned.mark()
    expected = repr(rank.readable())
    rank.go_on(2)
    _, told = rank.returned.since()
    assert put(other.returned, told) is True
    assert repr(other.readable()) == expected


@pytest.mark.parametrize(
    "besides",
    [
        {"scaler": torch.amp.GradScaler("cpu")},
        {"long": list(range(1000))},
        {"tensors": {"sum": torch.zeros(2)}},
        {"nested": {"a": [[1, 2]]}},
        {"large": {"number": 1 << 70}},
    ],
    ids=lambda value: next(iter(value)),
)
def test_it_says_if_there_is_more(besides: dict[str, Any]) -> None:
    rank, other = Rank(**besides), Rank(**besides)
    rank.go_on()
    assert put(other.returned, rank.returned.place()) is False


def test_a_learning_rate_that_is_a_tensor_is_not_told() -> None:
    model = nn.Linear(2, 2)
    told = Returned(State(model, torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5), capturable=False)))
    assert put(told, told.place()) is False


def test_what_the_scripts_functions_save_is_told_as_far_as_it_is_known() -> None:
    model = nn.Linear(2, 2)
    state = State(save=model.state_dict, load=model.load_state_dict)
    told = Returned(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state.watch(optimizer)
    told.mark()
    data = told.place()
    optimizer.param_groups[0]["lr"] = 0.1
    assert put(told, data) is False, "there may be more"
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_modules_that_were_added_here_are_let_be() -> None:
    rank, other = SimpleNamespace(model=nn.Sequential(nn.Linear(2, 2))), SimpleNamespace(model=nn.Sequential())
    told = Returned(State(rank.model)).place()
    put(Returned(State(other.model)), told)
    assert other.model.training


def test_other_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="3 bytes that tell of no place"):
        put(Rank().returned, b"abc")
