"""What a step reads from outside counts like its arguments, and what it rebinds there is put back."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from types import CellType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchrelay.worker.replacement.reads import NOTHING, Reads, never
from torchrelay.worker.tensors import arguments
from torchrelay.worker.tensors.arguments import SIZE
from torchrelay.worker.tensors.arguments import digest as arguments_digest

COUNT = 0
BATCH = torch.zeros(3)
SEEN = 0
LOSSES: list[float] = []
CONFIG = {"lr": 0.1}
STARTED = time.time()
GENERATOR = random.Random(1)
MODEL = nn.Linear(2, 2)


def _fetch() -> torch.Tensor:
    return BATCH + GENERATOR.random()


def reads(function: Callable[..., Any], state: tuple[torch.Tensor, ...] = ()) -> Reads:
    return Reads(function, lambda *place: any(place[-1] is one for one in state))


def test_globals_that_are_data_count_and_those_of_functions_that_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> Any:
        return MODEL(_fetch()) * COUNT * CONFIG["lr"]

    found = reads(step)
    assert {name.split("'")[1] for name in found.names} >= {"COUNT", "CONFIG", "BATCH", "GENERATOR"}
    before = found.digests()
    assert before == found.digests()
    for name, value in (("COUNT", 1), ("BATCH", torch.ones(3)), ("CONFIG", {"lr": 0.2})):
        with monkeypatch.context() as patch:
            patch.setitem(globals(), name, value)
            assert found.digests() != before, name
    assert found.digests() == before
    GENERATOR.random()
    assert found.digests() != before, "a generator that the step draws from"


def test_a_counter_in_a_closure_counts() -> None:
    count = 0

    def step() -> int:
        return count * 2

    found = reads(step)
    before = found.digests()
    count = 1
    assert found.digests() != before
    assert ["count" in name and "step()" in name for name in found.names] == [True]


def test_what_is_only_added_to_texts_lists_and_clocks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "run-17"

    def step(loss: float) -> tuple[str, float]:
        global SEEN
        SEEN += 1
        LOSSES.append(loss)
        return name, time.time() - STARTED

    found = reads(step)
    before = found.digests()
    monkeypatch.setitem(globals(), "SEEN", 5)
    monkeypatch.setitem(globals(), "LOSSES", [1.0, 2.0])
    monkeypatch.setitem(globals(), "STARTED", STARTED - 100)
    name = "run-18"
    assert found.digests() == before


def test_lists_of_data_count_unless_they_are_only_added_to() -> None:
    buffer: list[tuple[torch.Tensor, int]] = []
    recent: deque[torch.Tensor] = deque(maxlen=100)
    shown: list[torch.Tensor] = []

    def step(batch: torch.Tensor) -> Any:
        shown.append(batch)
        return random.choice(buffer)[0] + recent[0]

    found = reads(step)
    names = [name.split("'")[1] for name in found.names]
    assert {"buffer", "recent"} <= set(names)
    assert "shown" not in names
    told = {found.digests()}
    for at in range(60):
        buffer.append((torch.full((3,), float(at)), at))
        recent.append(torch.full((3,), float(at)))
        shown.append(torch.ones(3))
        told.add(found.digests())
    assert len(told) == 61
    losses = [torch.ones(())]
    assert set(reads(lambda: losses[-1]).digests()) == {0}, "a record of losses"


def test_tensors_of_the_state_are_left_out_as_a_replacement_has_them_later() -> None:
    weight = torch.zeros(2, requires_grad=True)
    average = torch.zeros(2)
    batch = torch.zeros(2)

    def step() -> Any:
        return weight * average * batch

    found = reads(step, (average,))
    before = found.digests()
    with torch.no_grad():
        weight.add_(1)
        average.add_(1)
    assert found.digests() == before
    batch.add_(1)
    assert found.digests() != before


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.count = 0
        self.other = 0

    def step(self, batch: torch.Tensor) -> Any:
        self.count = self.count + 1
        return self.model(batch) * self.count


def test_attributes_of_the_object_whose_method_it_is() -> None:
    trainer = Trainer()
    found = reads(trainer.step)
    before = found.digests()
    trainer.other = 1
    assert found.digests() == before, "the method does not name it"
    found.mark()
    trainer.count = 7
    assert found.digests() != before
    found.rewind()
    assert trainer.count == 0
    assert found.digests() == before


def test_what_a_call_rebinds_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SEEN", 0)
    ahead = torch.zeros(2)

    def step() -> torch.Tensor:
        global SEEN
        nonlocal ahead
        SEEN += 1
        batch, ahead = ahead, torch.randn(2)
        return batch

    found = reads(step)
    found.mark()
    before, first = found.digests(), ahead
    step()
    assert SEEN == 1
    assert found.digests() != before
    found.rewind()
    assert ahead is first
    assert SEEN == 0
    assert found.digests() == before


def test_functions_that_cannot_be_read_have_no_names() -> None:
    assert reads(print).digests() == b""
    assert reads(np.sum).digests() == b""
    assert reads(MODEL).digests() == b""
    made: dict[str, Any] = {}
    exec("n = 3\ndef step():\n    return n", made)
    found = reads(made["step"])
    assert len(found.digests()) == SIZE, "without a source its code tells"


def test_a_name_that_is_not_bound_yet_counts_from_when_it_is() -> None:
    def step() -> Any:
        return later

    found = reads(step)
    before = found.digests()
    later = 1
    assert found.digests() != before


def test_a_large_tensor_is_read_again_only_if_it_is_another_one_or_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def digest(value: Any) -> bytes:
        made.append(value)
        return arguments_digest(value)

    monkeypatch.setattr(arguments, "digest", digest)
    big = torch.zeros(1 << 16)

    def step() -> Any:
        return big.sum()

    found = reads(step)
    before = found.digests()
    assert found.digests() == before
    assert len(made) == 1
    big[0] = 1
    assert found.digests() != before
    big = torch.zeros(1 << 16)
    assert found.digests() == before
    assert len(made) == 3


@pytest.mark.parametrize("kind", ["array", "turned", "tensor"])
def test_a_large_buffer_that_numpy_fills_anew_is_read_again(kind: str) -> None:
    memory = np.zeros((512, 256), np.float32)
    buffer: Any = {"array": memory, "turned": memory.T, "tensor": torch.from_numpy(memory)}[kind]

    def step() -> Any:
        return buffer.sum()

    found = reads(step)
    first = found.digests()
    memory[:] = 1
    second = found.digests()
    assert second != first, "NumPy counts no versions"
    assert second == reads(step).digests(), "a replacement reads it for the first time"


def carrying(function: Callable[..., Any], holders: list[Any]) -> Reads:
    """All of these holders' entries, and all cells, are carried to a replacement."""
    return Reads(function, never, lambda holder, *_: isinstance(holder, CellType) or any(holder is x for x in holders))


def test_what_is_carried_counts_if_it_changes_between_two_calls() -> None:
    batch = torch.zeros(2)

    def step() -> Any:
        return batch * 2

    found = carrying(step, [])
    assert found.digests() == NOTHING
    batch.add_(1)
    found.returned()
    assert found.digests() == NOTHING, "by the call itself"
    batch = torch.ones(2) * 5
    assert found.digests() == arguments_digest(batch)
    found.returned()
    assert found.digests() == arguments_digest(batch), "it has come from elsewhere once"
    another = carrying(step, [])
    another.counted(found.digests())
    assert another.digests() == arguments_digest(batch), "what its predecessor has seen"


def test_a_generator_that_is_carried_goes_on_wherever_it_is_drawn_from() -> None:
    chance = random.Random(1)

    def step() -> float:
        return chance.random()

    found = carrying(step, [])
    found.digests()
    found.returned()
    chance.random()
    assert found.digests() == NOTHING


def test_a_list_of_data_counts_and_one_of_losses_does_not() -> None:
    batch: list[Any] = [torch.zeros(2), torch.zeros(2)]
    losses = [torch.tensor(1.0), 2.0]
    seen = [torch.zeros(3)]

    def step() -> Any:
        return batch, losses, seen

    found = reads(step)

    def made() -> list[bytes]:
        told = found.digests()
        return [told[at : at + SIZE] for at in range(0, len(told), SIZE)]

    assert [name.split("'")[1] for name in found.names] == ["batch", "losses", "seen"]
    assert [one == NOTHING for one in made()] == [False, True, False]
    first = made()[0]
    batch = [torch.ones(2), torch.zeros(2), torch.zeros(2)]
    seen.append(torch.zeros(3))
    assert [one == NOTHING for one in made()] == [False, True, False]
    assert made()[0] != first


class Held:
    def __init__(self) -> None:
        self.batch, self.other, self.model = torch.zeros(2), torch.zeros(2), MODEL

    def loss(self) -> Any:
        return self.model(self.batch)


HELD = Held()


@pytest.mark.parametrize("step", [lambda: HELD.batch * 2, lambda: HELD.loss()])
def test_attributes_of_an_object_that_the_step_asks_for(
    step: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = reads(step)
    before = found.digests()
    monkeypatch.setattr(HELD, "other", torch.ones(2))
    assert found.digests() == before
    monkeypatch.setattr(HELD, "batch", torch.ones(2))
    assert found.digests() != before
    assert len(Reads(step, lambda *place: place[-1] is HELD).names) == 1, "not of one that protect() was given"
