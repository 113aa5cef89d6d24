"""What an update changes, and a rank that was lost in it: which of it is taken from another rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from torchrelay.errors import UnprovedError
from torchrelay.worker.hidden_state.told import FRAME
from torchrelay.worker.retry.redo import Redo
from torchrelay.worker.state.lent import ALL, MOST, RETURNS, Lent, Returns, unproved
from torchrelay.worker.state.state import State
from torchrelay.worker.tensors import absent


@pytest.fixture(autouse=True)
def _nothing_is_refused_later() -> Iterator[None]:
    yield
    absent._refused.clear()
    absent._lost.clear()


class Net(nn.Linear):
    """A module of the script's, of which attributes are looked at."""

    updates: Any = None


class Life:
    """A rank that trains without others."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = Net(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = State(self.model, self.optimizer)
        self.redo = Redo(self.state)

    def call(self, *, draws: bool = False, **kept: Any) -> bytes:
        """What it has told at the gate. When its update is done, `kept` is put into the model, or drawn from it."""
        self.redo.mark()
        self.redo.probe_entry()
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 3)).sum().backward()
        self.redo.probe_gate(self.optimizer)
        record = self.state.private.record()
        self.optimizer.step()
        vars(self.model).update(kept)
        if draws:
            torch.rand(1, generator=self.model.updates)
        self.state.private.note_return()
        return record


def life_of(kept: Callable[[int], Any], calls: int) -> tuple[bytes, Lent]:
    """What a rank has told at its last gate, and after it. `kept`: put into `model.updates` when an update is done."""
    life = Life()
    for call in range(calls):
        left = life.call(updates=kept(call))
    return left, life.state.private.lend()


def lost_in_update(kept: Callable[[int], Any], theirs: Callable[[int], Any], calls: int) -> tuple[Life, Lent]:
    """A replacement of a rank that was lost in the last of these calls, and what another rank lends."""
    left, _ = life_of(kept, calls)
    _, lent = life_of(theirs, calls)
    after = Life()
    after.state.private.load(left)
    return after, lent


def test_what_the_update_makes_alike_is_taken_from_another_rank() -> None:
    after, lent = lost_in_update(lambda call: call, lambda call: call, 4)
    after.state.private.borrow([lent])
    assert after.model.updates == 3
    assert after.state.private.lend() == lent, "it can lend it, too"


def test_and_is_taken_if_it_stays_the_same() -> None:
    after, lent = lost_in_update(lambda _: "warm", lambda _: "warm", 3)
    after.state.private.borrow([lent])
    assert after.model.updates == "warm"


@pytest.mark.parametrize(
    ("mine", "theirs", "calls"),
    [
        (lambda call: call, lambda call: -call, 4),  # each rank's own
        (lambda call: call > 1, lambda call: call > 0, 5),  # were unequal once
        (lambda _: 0, lambda call: int(call == 3), 4),  # has never changed before
        (lambda call: call, lambda call: call, 2),  # nor here
        (lambda call: call, lambda call: call, 1),
    ],
)
def test_what_a_lost_update_would_have_left_is_not_guessed(
    mine: Callable[[int], Any], theirs: Callable[[int], Any], calls: int
) -> None:
    after, lent = lost_in_update(mine, theirs, calls)
    after.state.private.borrow([lent])
    with pytest.raises(UnprovedError, match=r"model\.updates changes after optimizer\.step"):
        bool(after.model.updates)


def test_two_ranks_that_lend_other_values_show_that_they_are_not_alike() -> None:
    after, lent = lost_in_update(lambda call: call, lambda call: call, 4)
    _, other = lost_in_update(lambda call: call, lambda call: call if call < 3 else 7, 4)
    after.state.private.borrow([lent, other])
    with pytest.raises(UnprovedError, match=r"model\.updates"):
        bool(after.model.updates)


def test_what_is_put_there_since_counts() -> None:
    after, lent = lost_in_update(lambda call: call, lambda call: -call, 4)
    after.state.private.borrow([lent])
    assert "model.updates" in after.state.private.hidden.state.untold.all()
    for value in (5, 6):
        after.call(updates=value)
    third = Life()
    third.state.private.load(after.state.private.record())
    assert third.model.updates == 6, "and a third one gets it"


def test_a_row_is_lent_as_a_whole_or_not() -> None:
    after = Life()
    after.model.updates = [torch.zeros(2), torch.ones(2)]
    after.state.private.hidden.borrow(b"", ["model.updates[1]", f"model.updates{FRAME}"])
    with pytest.raises(UnprovedError, match=r"model\.updates changes"):
        after.model.updates[-1]


def drawing(seed: int) -> tuple[bytes, Lent]:
    """A rank with a generator of its own that draws when an update is done."""
    life = Life()
    life.model.updates = torch.Generator().manual_seed(seed)
    for _ in range(4):
        left = life.call(draws=True)
    return left, life.state.private.lend()


def test_a_generator_that_others_hold_too_is_not_lent() -> None:
    left, _ = drawing(1)
    _, lent = drawing(2)
    after = Life()
    after.model.updates = torch.Generator()
    after.state.private.load(left)
    before = after.model.updates.get_state().clone()
    with pytest.raises(UnprovedError, match=r"model\.updates changes"):
        after.state.private.borrow([lent])
    assert after.model.updates.get_state().equal(before), "nothing was put into it"


def test_what_is_not_told_any_more_is_not_alike() -> None:
    mine = returns_of({"kept": b"1"}, {"kept": b"2"}, {})
    theirs = returns_of({"kept": b"1"}, {"kept": b"2"}, {}, {})
    assert unproved(mine.history, [Lent(b"", theirs.history)], ["kept"]) == ["kept"]


def returns_of(*calls: dict[str, bytes]) -> Returns:
    found = Returns()
    for call in calls:
        found.note(call)
    return found


def test_few_returns_are_told() -> None:
    many = returns_of(*({"count": bytes([call])} for call in range(3 * RETURNS)))
    few = returns_of(*({"count": bytes([call])} for call in range(2 * RETURNS, 3 * RETURNS)))
    assert many.history == few.history


def test_of_many_paths_all_are_alike_or_none_is() -> None:
    def ranks(last: int) -> list[dict[str, bytes]]:
        paths = [f"counts[{path}]" for path in range(MOST + 1)]
        told = [dict.fromkeys(paths, bytes([call])) for call in range(4)]
        told[2][paths[-1]] = bytes([last])
        return told

    mine, alike, other = (returns_of(*ranks(last)).history for last in (2, 2, 9))
    assert list(mine) == [ALL]
    before = {ALL: mine[ALL][:-8]}
    assert unproved(before, [Lent(b"", alike)], ["counts[3]"]) == []
    assert unproved(before, [Lent(b"", other)], ["counts[3]"]) == ["counts[3]"]
