"""Places where steps keep what is hard to see: iterators, large state, caches of functions, functions of one name."""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from torchrelay.errors import RefusedError, StateMismatchError, UnprovedError
from torchrelay.worker.hidden_state.hidden import Hidden
from torchrelay.worker.hidden_state.signatures import FIRST
from torchrelay.worker.retry.redo import Redo
from torchrelay.worker.state.state import State

pytestmark = pytest.mark.slow  # many walks


def called(function: Callable[[], Any], times: int = 3) -> Hidden:
    """After some calls of a step."""
    hidden = Hidden(quiet=True)
    hidden.add(function)
    for _ in range(times):
        hidden.mark()
        hidden.look_entry()
        function()
        hidden.look_gate()
        hidden.look_return()
    return hidden


def replaced(hidden: Hidden, function: Callable[[], Any]) -> None:
    """Another process that has made the same step takes what was told."""
    after = Hidden(quiet=True)
    after.add(function)
    after.load(hidden.record())


def growing() -> Iterator[int]:
    number = 1
    while True:
        yield number
        number *= 3


@pytest.mark.parametrize("make", [lambda: iter(range(99)), lambda: itertools.cycle([1, 2, 3]), growing])
def test_an_iterator_that_steps_go_on_with_is_refused(make: Callable[[], Iterator[int]]) -> None:
    numbers = make()

    def step() -> int:
        return next(numbers)

    with pytest.raises(RefusedError, match=r"numbers of .*step is an iterator that is gone on with from step to step"):
        called(step)


class Center:
    def __init__(self) -> None:
        self.value = torch.zeros(5_000)

    def update(self) -> None:
        self.value.mul_(0.9).add_(0.1)


def test_large_state_that_changes_where_it_lies_is_neither_put_back_nor_carried() -> None:
    center = Center()
    hidden = called(lambda: center.update())
    with pytest.raises(UnprovedError, match=r"center of .*\.value changes .* too large to be carried"):
        hidden.rewind()
    with pytest.raises(UnprovedError, match="too large to be carried"):
        replaced(hidden, lambda: center.update())


def counted(function: Callable[[], int]) -> Callable[[], int]:
    def wrapper() -> int:
        wrapper.__dict__["calls"] = wrapper.__dict__.get("calls", 0) + 1
        return function() * int(wrapper.__dict__["calls"])

    return wrapper


def test_what_functions_of_one_name_keep_is_told_apart() -> None:
    def made() -> tuple[Callable[[], int], Callable[[], int], Callable[[], int]]:
        one, other = counted(lambda: 2), counted(lambda: 5)
        return one, other, lambda: one() + other()

    one, _, step = made()
    hidden = called(step)
    one()
    hidden.state.look()
    new_one, new_other, new_step = made()
    replaced(hidden, new_step)
    assert [vars(new_one)["calls"], vars(new_other)["calls"]] == [4, 3]


def test_a_generator_that_a_cached_function_has_made_is_put_back_and_carried() -> None:
    def made(*, at_once: bool) -> Callable[[], float]:
        @functools.lru_cache
        def source() -> np.random.Generator:
            return np.random.default_rng(3)

        if at_once:
            source()
        return lambda: float(source().random())

    step = made(at_once=True)
    hidden = called(step)
    hidden.mark()
    first = step()
    hidden.rewind()
    assert step() == first
    hidden.rewind()
    later = made(at_once=True)
    replaced(hidden, later)
    assert later() == first
    del step, later  # what other functions hold is looked at, too
    with pytest.raises(StateMismatchError, match=r"result 0 of source of .* has changed"):
        replaced(hidden, made(at_once=False))


def seldom_looked_at(step: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> tuple[Hidden, Callable[[int], None]]:
    """A function in so many calls of which none is looked at after the first."""
    monkeypatch.setattr(Redo, "_due", lambda _: False)
    model = torch.nn.Linear(2, 2)
    state = State(model, torch.optim.SGD(model.parameters(), lr=0.1))
    redo, hidden = Redo(state), state.private.hidden
    hidden.add(step)

    def calls(number: int) -> None:
        for _ in range(number):
            redo.mark()
            redo.probe_entry()
            step()
            redo.probe_gate()
            hidden.look_return()

    return hidden, calls


def test_what_begins_to_move_late_is_noticed_though_few_calls_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    own, begun = SimpleNamespace(steps=0), False

    def step() -> None:
        own.steps += begun

    hidden, calls = seldom_looked_at(step, monkeypatch)
    calls(2 * FIRST)
    assert b"own" not in hidden.record()
    begun = True
    calls(5)
    assert b"own of" in hidden.record()


def test_what_is_too_large_to_tell_and_moves_late_is_known_to_move_in_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """That it moved at all is seen at the gate. Whether the call itself has done it only a look at its entry tells."""
    own, begun = SimpleNamespace(table=np.zeros(1 << 20)), False

    def step() -> None:
        if begun:
            own.table = own.table + 1

    hidden, calls = seldom_looked_at(step, monkeypatch)
    calls(2 * FIRST)
    assert not [*hidden.state.untold.all(), *hidden.state.lacking]
    begun = True
    calls(5)
    assert [path for path in (*hidden.state.untold.all(), *hidden.state.lacking) if "table" in path]


class Meter:
    """Made when its name comes up."""

    def __init__(self, window: int = 3) -> None:
        self.last: deque[float] = deque(maxlen=window)
        self.total, self.mean = 0.0, torch.zeros(2)

    def update(self, value: float) -> None:
        self.last.append(value)
        self.total += value
        self.mean += value


def content(meter: Meter) -> tuple[list[float], int | None, float, list[float]]:
    return list(meter.last), meter.last.maxlen, meter.total, meter.mean.tolist()


@pytest.mark.parametrize("kind", [dict, partial(defaultdict, Meter), OrderedDict])
def test_objects_that_come_up_in_a_dict_are_made_and_filled(kind: Callable[[], dict[str, Meter]]) -> None:
    def made(window: int) -> tuple[dict[str, Meter], Callable[[], None]]:
        meters = kind()
        return meters, lambda: meters.setdefault("loss", Meter(window)).update(1.5)

    meters, step = made(2)
    new, other = made(7)
    replaced(called(step), other)
    assert content(new["loss"]) == content(meters["loss"])
    assert content(new["loss"])[1] == 2, "what never moves comes along"


def test_objects_that_come_up_in_a_list_are_made_and_those_that_are_there_stay_the_same() -> None:
    def made() -> tuple[list[Meter], Callable[[], None]]:
        meters = [Meter()]

        def step() -> None:
            meters.append(Meter(5))
            for meter in meters:
                meter.update(1.0)

        return meters, step

    meters, step = made()
    new, other = made()
    first = new[0]
    replaced(called(step), other)
    assert [content(meter) for meter in new] == [content(meter) for meter in meters]
    assert new[0] is first


def test_one_that_a_call_has_made_goes_when_it_is_made_again() -> None:
    meters: dict[str, Meter] = {}
    number = 0

    def step() -> None:
        if number:
            meters.setdefault(f"m{number}", Meter()).update(1.0)

    hidden = called(step)
    number = 1
    hidden.mark()
    hidden.look_entry(only_if_stirred=True)
    step()
    hidden.rewind()
    assert meters == {}


@pytest.mark.parametrize("holds", ["closure", "attribute"])
def test_what_is_told_as_objects_in_a_container_may_be_taken_where_it_has_none(holds: str) -> None:
    def made() -> tuple[Any, Callable[[], None]]:
        kept: dict[str, Any] = {"loss": 0.5}
        number = itertools.count()
        told = SimpleNamespace(kept=kept)

        def step() -> None:
            here = kept if holds == "closure" else told.kept
            here["loss"] = Meter() if next(number) < 3 else 0.25

        return kept, step

    (kept, step), (new, other) = made(), made()
    replaced(called(step, 6), other)
    assert new == kept == {"loss": 0.25}


def as_numbers(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: as_numbers(each) for key, each in value.items()}
    return (
        [type(value).__name__, getattr(value, "maxlen", 0), *map(as_numbers, value)]
        if isinstance(value, (list, tuple, deque))
        else value
    )


def hidden_state(before: Any) -> Any:
    first, second = (torch.zeros(2), torch.zeros(2)) if before is None else before
    return first + 1, second * 2 - 1


START = torch.zeros(1)
GROWING: dict[str, Callable[[Any], Any]] = {
    "a tuple": hidden_state,
    "a list": lambda before: [*(before or [torch.zeros(2)]), torch.ones(2)][-4:],
    "a deque": lambda before: deque([*(before or []), torch.ones(2) * len(before or [])], maxlen=3),
    "a dict": lambda before: {"h": hidden_state(before and before["h"]), "n": before["n"] + 1 if before else START},
    "a tuple of tuples": lambda before: ((before[0][0] + 1, 7), "x") if before else ((torch.zeros(1), 3), "y"),
}


@pytest.mark.parametrize("grow", GROWING.values(), ids=GROWING)
@pytest.mark.parametrize("begun", [False, True], ids=["None at first", "there at first"])
@pytest.mark.parametrize("where", ["attribute", "entry", "below"])
def test_tensors_in_containers_that_come_up_or_are_replaced_by_others(
    grow: Callable[[Any], Any], begun: bool, where: str
) -> None:
    """Such as the hidden state of an LSTM, which is another tuple after each step."""

    def made() -> tuple[Any, Callable[[], None]]:
        def first() -> Any:
            return grow(None) if begun else None

        kept = SimpleNamespace(value=first(), entries={"value": first()}, below=SimpleNamespace(value=first()))

        def step() -> None:
            kept.value, kept.entries["value"] = grow(kept.value), grow(kept.entries["value"])
            if where == "below":
                kept.below.value = grow(kept.below.value)

        return kept, step

    (kept, step), (new, other) = made(), made()
    hidden = called(step, 5)
    replaced(hidden, other)
    assert as_numbers(vars(new.below)) == as_numbers(vars(kept.below))
    assert (as_numbers(new.value), as_numbers(new.entries)) == (as_numbers(kept.value), as_numbers(kept.entries))


def test_a_tuple_that_another_replaces_is_put_back_as_it_was_and_the_other_left_alone() -> None:
    kept = SimpleNamespace(hidden=(torch.zeros(2), torch.zeros(2)))

    def step() -> None:
        kept.hidden = hidden_state(kept.hidden)

    hidden = called(step)
    before = as_numbers(kept.hidden)
    hidden.mark()
    hidden.look_entry()
    step()
    after, told = kept.hidden, as_numbers(kept.hidden)
    hidden.rewind()
    assert as_numbers(kept.hidden) == before
    assert as_numbers(after) == told


def table_of_rows() -> tuple[Any, Callable[[], None]]:
    kept = SimpleNamespace(table=torch.arange(12.0).view(6, 2), rows=[torch.ones(1) * at for at in range(6)], at=0)
    kept.row, kept.one, kept.twice = kept.table[0], kept.rows[0], None

    def step() -> None:
        kept.at += 1
        kept.row, kept.one = kept.table[kept.at % 6], kept.rows[kept.at % 6]
        kept.twice = kept.newest = torch.ones(2) * kept.at

    return kept, step


def test_a_tensor_whose_place_another_takes_is_not_written_to() -> None:
    (kept, step), (new, other) = table_of_rows(), table_of_rows()
    replaced(called(step, 4), other)
    assert (new.row.tolist(), new.one.tolist()) == (kept.row.tolist(), kept.one.tolist()) == ([8.0, 9.0], [4.0])
    assert new.twice is new.newest
    assert new.twice.tolist() == kept.twice.tolist()
    assert (as_numbers(new.rows), new.table.tolist()) == (as_numbers(kept.rows), kept.table.tolist())


def test_nor_when_a_call_is_made_again() -> None:
    kept, step = table_of_rows()
    hidden = called(step, 4)
    before, rows = as_numbers(vars(kept)), list(kept.rows)
    hidden.mark()
    hidden.look_entry()
    step()
    hidden.rewind()
    assert as_numbers(vars(kept)) == before
    assert kept.one is rows[4], "the very tensor"


@pytest.mark.parametrize("count", [3, 64, 65, 300])
@pytest.mark.parametrize("kind", [list, deque, partial(deque, maxlen=100)])
def test_a_row_of_tensors_is_told_to_its_end(count: int, kind: Any) -> None:
    def made() -> tuple[Any, Callable[[], None]]:
        kept = SimpleNamespace(losses=kind())
        return kept, lambda: kept.losses.append(torch.tensor(0.5 + len(kept.losses)))

    (kept, step), (new, other) = made(), made()
    replaced(called(step, count), other)
    assert as_numbers(new.losses) == as_numbers(kept.losses)
    assert getattr(new.losses, "maxlen", None) == getattr(kept.losses, "maxlen", None)


@pytest.mark.parametrize("count", [5, 70])
def test_a_replacement_tells_the_row_to_its_own_at_once(count: int) -> None:
    def made() -> tuple[Any, Callable[[], None]]:
        kept = SimpleNamespace(losses=[])
        return kept, lambda: kept.losses.append(torch.tensor(0.5 + len(kept.losses)))

    (kept, step), (_, other), (last, another) = made(), made(), made()
    after = Hidden(quiet=True)
    after.add(other)
    after.load(called(step, count).record())
    replaced(after, another)
    assert as_numbers(last.losses) == as_numbers(kept.losses)


def test_a_row_for_which_there_is_no_room_ends_no_step_but_a_fault_ends_the_job() -> None:
    kept = SimpleNamespace(rows=[])

    def step() -> None:
        kept.rows.append(torch.ones(1000) * len(kept.rows))

    hidden = called(step, 40)
    hidden.record()
    assert len(kept.rows) == 40
    with pytest.raises(UnprovedError, match=r"kept of .*step.rows grows in the course of the training"):
        replaced(hidden, step)


def test_objects_that_hold_more_than_values_are_refused_by_their_place() -> None:
    kept: dict[str, SimpleNamespace] = {}

    def step() -> None:
        kept[f"k{len(kept)}"] = SimpleNamespace(count=1, thing=object())

    with pytest.raises(UnprovedError, match=r"kept of .* entries come up"):
        replaced(called(step), step)
