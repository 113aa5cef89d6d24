"""Doers: what a function, a class or a module is called, and what of it another process has again."""

from __future__ import annotations

import collections
import enum
import functools
import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchrelay.worker.hidden_state import doers
from torchrelay.worker.hidden_state.graph import Walk
from torchrelay.worker.hidden_state.made import MISSING
from torchrelay.worker.hidden_state.moving import Moving
from torchrelay.worker.hidden_state.told import copied
from torchrelay.worker.tensors import values


def first() -> int:
    return 1


def second() -> int:
    return 2


def scaled(by: float) -> Callable[[float], float]:
    return lambda value: by * value


class Plan:
    def __init__(self, rate: float = 0.1) -> None:
        self.rate = rate

    def warm(self) -> float:
        return self.rate

    def main(self) -> float:
        return 2 * self.rate


class Other(Plan):
    pass


class Third(Plan):
    pass


def told(value: Any) -> list[Any]:
    """Through the wire."""
    again: list[Any] = values.decode(values.encode([doers.tell(value)], "x"))[0]
    return again


FOUND = {
    "a function": second,
    "a class": Plan,
    "of torch's, in Python": F.l1_loss,
    "of torch's, built in": torch.relu,
    "of a module that is built in": math.sin,
    "built in": len,
    "with an argument": functools.partial(scaled, by=2.0),
    "a class of torch's": nn.Linear,
}


@pytest.mark.parametrize("value", FOUND.values(), ids=FOUND)
def test_what_has_a_name_is_found_by_it(value: Any) -> None:
    assert doers.can_be_had(value)
    again = doers.make(told(value), first, ())
    assert doers.name_of(again) == doers.name_of(value)
    if not isinstance(value, functools.partial):
        assert again is value


def test_a_method_is_found_by_the_object_that_has_it() -> None:
    here, there = Plan(), Plan()
    for live, objects in ((there.warm, ()), (None, (there, first))):
        again = doers.make(told(here.main), live, objects)
        assert again.__self__ is there
        assert again.__func__ is Plan.main
    assert doers.make(told(here.main), None, (there, here)) is MISSING, "it may be that of either"


def test_objects_and_modules_of_values_are_made_anew_and_no_others() -> None:
    again = doers.make(told(Other(0.5)), Plan(), ())
    assert (type(again), again.rate) == (Other, 0.5)
    loss = doers.make(told(nn.SmoothL1Loss(beta=0.25)), nn.MSELoss(), ())
    assert (type(loss), loss.beta, loss.training) == (nn.SmoothL1Loss, 0.25, True)
    assert torch.equal(loss(torch.ones(2), torch.zeros(2)), nn.SmoothL1Loss(beta=0.25)(torch.ones(2), torch.zeros(2)))
    for value in (nn.Linear(2, 2), nn.Sequential(nn.Tanh()), Plan(threading.Lock()), scaled(2.0)):  # type: ignore[arg-type]
        assert not doers.can_be_had(value)
        assert doers.make(told(value), first, ()) is MISSING


def test_what_cannot_be_had_may_stand_there_already() -> None:
    here = scaled(2.0)
    assert doers.make(told(scaled(2.0)), here, ()) is here
    assert doers.make(told(scaled(3.0)), here, ()) is MISSING, "another closure, of the same function"


def test_a_row_is_filled_anew_and_those_that_stay_are_the_same_ones() -> None:
    stays = scaled(1.0)
    row: list[Any] = [first]
    assert doers.is_row(row)
    assert doers.make(told([second, first]), row, ()) is row
    assert row == [second, first]
    assert doers.make(told([stays]), [stays], ()) == [stays]
    assert not doers.is_row([])
    assert not doers.is_row([first, 1])


class Pair(NamedTuple):
    step: int
    loss: float


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Trainer:
    def __init__(self) -> None:
        self.plan, self.phase = Plan(), first
        self.loss: Any = None
        self.by_name: dict[Any, Any] = {("a", 1): Third()}
        self.held = collections.OrderedDict(lock=threading.Lock())
        self.nested: dict[str, Any] = {"a": [0], "b": {"c": 1}}
        self.pair, self.colour, self.counted = Pair(1, 2.0), Colour.RED, collections.Counter(a=1)
        self.colours, self.array, self.long = [Colour.RED], np.zeros(3), list(range(500))


def one_that_looks() -> tuple[Trainer, Moving]:
    thing = Trainer()
    moving = Moving(lambda: [("it", thing)], functions=())
    for _ in range(5):
        moving.look()
    return thing, moving


CHANGES: dict[str, Callable[[Trainer], None]] = {
    "a function": lambda it: setattr(it, "phase", second),
    "a function in place of nothing": lambda it: setattr(it, "loss", second),
    "a method": lambda it: setattr(it, "phase", it.plan.main),
    "an object of another class": lambda it: setattr(it, "plan", Other(0.5)),
    "an object in place of nothing": lambda it: setattr(it, "loss", Other(0.5)),
    "another object of the class": lambda it: setattr(it, "plan", Plan(0.5)),
    "nothing in place of a function": lambda it: setattr(it, "phase", None),
    "an entry of an inner list": lambda it: it.nested["a"].__setitem__(0, 5),
    "an entry of an inner dict": lambda it: it.nested["b"].update(c=5),
    "a named tuple": lambda it: setattr(it, "pair", Pair(2, 2.0)),
    "a member": lambda it: setattr(it, "colour", Colour.BLUE),
    "a count": lambda it: it.counted.update(a=1),
    "a member in a list": lambda it: it.colours.__setitem__(0, Colour.BLUE),
    "an entry of an array": lambda it: it.array.__setitem__(1, 5.0),
    "an entry of a long list": lambda it: it.long.__setitem__(250, 5),
    "an object by a tuple": lambda it: setattr(it.by_name["a", 1], "rate", 0.7),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_call_sees_it_another_process_has_it_and_a_redo_puts_it_back(
    change: Callable[[Trainer], None],
) -> None:
    def shown(it: Trainer) -> list[Any]:
        things = (it.plan, it.phase, it.loss)
        names = [None if thing is None else doers.name_of(thing) for thing in things]
        kept = [repr(one) for one in (it.nested, it.pair, it.colour, it.counted, it.colours, it.array, it.long)]
        return [*names, it.plan.rate, it.by_name["a", 1].rate, getattr(it.loss, "rate", None), *kept]

    thing, moving = one_that_looks()
    moving.still.enter()
    assert not moving.still.has_changed()
    before = shown(thing)
    change(thing)
    assert moving.still.has_changed()
    moving.still.rewind()
    assert shown(thing) == before
    change(thing)
    moving.look()
    record = moving.record()
    other, there = one_that_looks()
    there.put(record)
    assert shown(other) == shown(thing)


def test_what_is_in_a_container_beside_a_lock_is_not_copied() -> None:
    thing, moving = one_that_looks()
    assert not any(leaf.path == "it.held" for leaf, _, _ in moving.remember())
    assert "it.held" in Walk([("it", thing)]).opened
    assert copied(thing.held) is thing.held


def test_a_place_may_have_a_function_now_and_a_value_then() -> None:
    thing, moving = one_that_looks()
    other, there = one_that_looks()
    for now in (second, first, None, Other(0.5), 3, second, [first], torch.ones(2), first, None):
        thing.loss = now
        moving.look()
        there.put(moving.record())
        if isinstance(now, torch.Tensor):
            assert torch.equal(other.loss, now)
        elif isinstance(now, Other):
            assert isinstance(other.loss, Other)
            assert other.loss.rate == 0.5
        else:
            assert other.loss == now
