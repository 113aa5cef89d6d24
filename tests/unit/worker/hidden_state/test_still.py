"""What has never moved is asked for in every call, and put back when it is redone; what the call has made goes."""

from __future__ import annotations

import array
import copy
import os
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchrelay.worker.hidden_state.graph import MISSING, Leaf
from torchrelay.worker.hidden_state.hidden import Hidden
from torchrelay.worker.hidden_state.still import GLANCES, RESTLESS, Still, is_glanced_at


class Slotted:
    """No dict, but a place."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1


class Kept:
    """Of a class."""

    value = 1


def leaf_of(holder: Any, name: Any) -> Leaf:
    leaf = Leaf(str(name), holder, name, MISSING)
    leaf.value = leaf.read()
    return leaf


@pytest.fixture
def variable(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("STILL", "1")
    return "STILL"


def of_kind(kind: str) -> tuple[Leaf, Any]:
    """A leaf, and a value that it may get."""
    if kind == "environment":
        return leaf_of(os.environ, "STILL"), "2"
    if kind == "class":
        return Leaf("value", Kept, "value", 1), 2
    if kind == "list":
        return leaf_of([0, 1], 1), 2
    return leaf_of({"dict": {"value": 1}, "slots": Slotted()}[kind], "value"), 2


KINDS = ["dict", "list", "slots", "class", "environment"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("variable")
def test_a_value_that_moves_is_noticed_and_put_back(kind: str) -> None:
    leaf, other = of_kind(kind)
    before = Kept.value if kind == "class" else leaf.read()
    still = Still([leaf])
    still.enter()
    assert not still.has_stirred()
    leaf.put(other)
    assert still.has_stirred()
    still.rewind()
    assert not still.has_stirred()
    assert (Kept.value if kind == "class" else leaf.read()) == before
    still.rewind()
    assert not still.has_stirred()


@pytest.mark.usefixtures("variable")
def test_what_has_moved_before_the_call_stays() -> None:
    for kind in KINDS:
        leaf, other = of_kind(kind)
        still = Still([leaf])
        leaf.put(other)
        still.enter()
        still.rewind()
        assert still.has_stirred(), kind
    Kept.value = 1


def test_a_value_of_another_type_is_another_one_when_it_is_put_back() -> None:
    holder: dict[str, Any] = {"value": 1}
    still = Still([leaf_of(holder, "value")])
    still.enter()
    holder["value"] = True
    still.rewind()
    assert holder["value"] is not True


def test_a_number_that_is_none_stands_still() -> None:
    still = Still([leaf_of({"value": float("nan")}, "value")])
    assert not still.has_stirred()


def test_a_name_that_is_gone_is_noticed() -> None:
    holder = {"value": 1, "other": 2}
    still = Still([leaf_of(holder, "value"), leaf_of(holder, "other")], holders=[holder])
    del holder["other"]
    assert still.has_stirred()
    still.enter()
    holder["other"] = 3
    still.rewind()
    assert holder == {"value": 1}


@pytest.mark.parametrize("kind", ["attributes", "class", "environment"])
def test_a_new_name_is_noticed_and_taken_away(kind: str) -> None:
    thing = SimpleNamespace(old=1)
    holder: Any = {"attributes": vars(thing), "class": Kept, "environment": os.environ}[kind]
    still = Still(holders=[holder])
    still.enter()
    assert not still.has_stirred()
    leaf_of(holder, "STILL_NEW").put("x")
    assert still.has_stirred()
    still.rewind()
    assert not still.has_stirred()
    assert "STILL_NEW" not in (vars(Kept) if kind == "class" else holder)
    assert thing.old == 1


def test_of_a_module_only_values_are_taken_away() -> None:
    module = torch.nn.Linear(2, 2)
    still = Still(holders=[vars(module)])
    still.enter()
    vars(module).update(seen=1, mask=[torch.zeros(2)], handle=SimpleNamespace())
    still.rewind()
    assert not hasattr(module, "seen")
    assert not hasattr(module, "mask")
    assert hasattr(module, "handle"), "a library may have hung it there"


def test_ours_is_left() -> None:
    holder: dict[str, Any] = {}
    still = Still(holders=[holder])
    still.enter()
    holder["_torchrelay_mark"] = 1
    still.rewind()
    assert holder == {"_torchrelay_mark": 1}


def test_a_global_that_is_made_is_noticed_and_taken_away() -> None:
    here: dict[str, Any] = {"other": 0}
    still = Still(absent=[Leaf("late", here, "late", MISSING)])
    still.enter()
    assert not still.has_stirred()
    here["late"] = 1
    assert still.has_stirred()
    still.rewind()
    assert here == {"other": 0}
    here["late"] = 1
    still.enter()
    still.rewind()
    assert here["late"] == 1, "it was there"


def test_what_was_added_is_cut_off() -> None:
    history, cache, others = [1, 2], {"a": 1}, {1, 2}
    still = Still(containers=[history, cache, others])
    still.enter()
    history.append(3)
    cache["b"] = 2
    cache["c"] = 3
    others.add(3)
    assert not still.has_stirred(), "histories grow in every step"
    still.rewind()
    assert (history, cache, others) == ([1, 2], {"a": 1}, {1, 2, 3})


def test_who_gets_names_in_each_call_is_looked_at_for_it_no_more() -> None:
    holder: dict[str, Any] = {}
    restless: dict[int, int] = {}
    looks = 0
    for at in range(3 * RESTLESS):
        still = Still(holders=[holder], restless=restless)
        still.enter()
        holder[f"x{at}"] = 1
        if still.has_stirred():
            looks += 1
            still.note_names()
    assert looks == RESTLESS
    still.rewind()
    assert len(holder) == 3 * RESTLESS - 1, "but it is put right"


def test_what_torch_s_modules_were_made_with_is_asked_in_turn() -> None:
    holders = [{"p": 0.1} for _ in range(3 * GLANCES)]
    still = Still([leaf_of(holder, "p") for holder in holders], seldom=lambda _: True)
    assert not any(still.has_stirred() for _ in range(7))
    holders[-1]["p"] = 0.2
    assert sum(still.has_stirred() for _ in range(6)) == 2


class Odd(dict[str, int]):
    """Of a script that means something else by it."""

    def copy(self) -> Any:
        raise RuntimeError("not that way")


@pytest.mark.parametrize("thing", [[1], {"a": 1}, {1}, deque([1]), bytearray(2), array.array("i", [1]), Odd(a=1)])
def test_what_is_changed_where_it_lies_is_noticed(thing: Any) -> None:
    assert is_glanced_at(thing)
    still = Still(things=[(Leaf("", None, None, thing), thing)])
    assert not still.has_changed()
    if isinstance(thing, dict):
        thing["a"] = 2
    elif isinstance(thing, set):
        thing.add(2)
    else:
        thing[0] = 2
    assert still.has_changed()


@pytest.mark.parametrize("thing", [[1], {"a": 1}, {1}, deque([1]), bytearray(2), torch.zeros(1)])
def test_a_place_that_another_thing_takes_is_noticed_and_put_right(thing: Any) -> None:
    holder = {"thing": thing}
    still = Still(things=[(leaf_of(holder, "thing"), thing)])
    still.enter()
    assert not still.has_changed()
    holder["thing"] = copy.copy(thing)
    assert still.has_changed()
    still.rewind()
    assert holder["thing"] is thing
    del holder["thing"]
    assert still.has_changed()


@pytest.mark.parametrize("thing", [[1], {"a": 1}, {1}, deque([1]), bytearray(2)])
def test_what_a_call_changes_for_the_first_time_is_put_right_when_it_is_made_again(thing: Any) -> None:
    before = copy.copy(thing)
    still = Still(things=[(leaf_of({"thing": thing}, "thing"), thing)])
    still.enter()
    if isinstance(thing, dict):
        thing.update(a=2, b=3)
    elif isinstance(thing, set):
        thing.clear()
    else:
        thing[0] = 2
    still.rewind()
    assert thing == before


def test_what_was_filled_since_the_step_was_made_is_there_after_a_rehearsal() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.hooks: list[Any] = []
            self.rates: dict[str, float] = {}
            self.sums = torch.zeros(2)
            self.names: set[str] = set()

        def step(self) -> int:
            self.hooks.append(1)
            self.rates["more"] = 2.0
            self.sums.add_(1)
            self.names.add("more")
            return len(self.hooks)

    trainer = Trainer()
    hidden = Hidden(quiet=True)
    hidden.add(trainer.step)
    trainer.hooks += [object(), 3]
    trainer.rates["first"] = 1.0
    trainer.sums.add_(5)
    trainer.names.add("first")
    before = list(trainer.hooks)
    hidden.mark()
    hidden.remember()
    trainer.step()
    hidden.rewind()
    assert trainer.hooks == before
    assert (trainer.rates, trainer.sums.tolist(), trainer.names) == ({"first": 1.0}, [5.0, 5.0], {"first"})
