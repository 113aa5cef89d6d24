"""What modules, extras and step functions keep in attributes is put back with a call, and goes to a replacement."""

from __future__ import annotations

import contextvars
import gc
import os
import random
import sys
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from torchrelay.worker.hidden_state import graph
from torchrelay.worker.hidden_state.hidden import Budget, Hidden
from torchrelay.worker.hidden_state.signatures import FIRST
from torchrelay.worker.retry.redo import Redo
from torchrelay.worker.state.lent import Lent
from torchrelay.worker.state.state import State


class Counting(nn.Module):
    """A module as scripts write them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.calls = 0
        self.rng = np.random.default_rng(3)
        self.history: list[float] = []
        self.kept = torch.zeros(2)
        self.auxiliary: torch.Tensor | None = None
        self.lock = threading.Lock()
        self.itself = [self]
        self.config = {"rates": [0.1, 0.2], "kind": "plain"}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.inner(inputs) * self.rng.random() + self.kept
        self.kept = out.detach().mean(0)
        self.auxiliary = out.sum()
        self.history.append(0.0)
        return out


class Averaged:
    """An object of the script, whose state_dict() tells one of its two numbers."""

    def __init__(self) -> None:
        self.value, self.updates = 0.0, 0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class Life:
    """A rank that trains without others."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model, self.extra, self.closed = Counting(), Averaged(), random.Random(2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = State(self.model, self.optimizer, {"average": self.extra})
        self.hidden = self.state.private.hidden
        self.redo = Redo(self.state)
        closed = self.closed

        def step() -> list[float]:
            self.optimizer.zero_grad()
            loss = self.model(torch.ones(2, 3)).square().mean() * closed.random()
            loss.backward()
            return [loss.item()]

        self.step = step
        self.hidden.add(step)

    def attempt(self) -> list[float]:
        self.redo.mark()
        self.redo.probe_entry()
        return self.step()

    def finish(self, late: Callable[[], Any] = lambda: None) -> bytes:
        self.redo.probe_gate(self.optimizer)
        record = self.state.private.record()
        self.optimizer.step()
        late()
        self.state.private.note_return()
        return record

    def call(self) -> list[float]:
        found = self.attempt()
        self.finish()
        self.extra.updates += 1
        return found

    @property
    def told(self) -> tuple[Any, ...]:
        return (
            self.model.calls,
            self.model.rng.random(),
            self.closed.random(),
            self.extra.updates,
            self.model.kept.tolist(),
        )


@pytest.mark.parametrize("calls", [0, 1, 5])
def test_a_call_that_is_redone_sees_what_it_saw_before(calls: int) -> None:
    life = Life()
    for _ in range(calls):
        life.call()
    first = life.attempt()
    life.redo.rewind()
    assert life.attempt() == first
    life.redo.rewind()
    life.redo.rewind()
    assert life.attempt() == first


@pytest.mark.parametrize("calls", [2, 6])
def test_a_replacement_has_what_was_kept_in_attributes(calls: int) -> None:
    before = Life()
    for _ in range(calls):
        before.call()
    before.attempt()
    before.finish()
    after = Life()
    after.state.private.load(before.state.private.record())
    assert after.state.private.record() == before.state.private.record()
    assert after.told == before.told
    assert after.model.history == before.model.history


def test_nothing_is_told_of_a_model_that_keeps_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 3), nn.MultiheadAttention(4, 2))
    state = State(model, torch.optim.SGD(model.parameters(), lr=0.1))
    redo = Redo(state)
    for _ in range(3):
        redo.mark()
        redo.probe_entry()
        model.eval(), model.train()
        redo.probe_gate()
    assert state.private.hidden.record() == b""


def test_what_a_step_has_computed_is_not_held() -> None:
    life = Life()
    for _ in range(3):
        life.call()
    assert life.model.auxiliary is not None
    computed = weakref.ref(life.model.auxiliary)
    life.model.auxiliary = None
    gc.collect()
    assert computed() is None


def test_what_a_state_dict_tells_may_change_in_the_update() -> None:
    before = Life()
    for _ in range(2):
        before.attempt()
        before.finish(late=lambda: setattr(before.extra, "value", before.extra.value + 1))
    after = Life()
    after.state.private.load(before.state.private.record())
    after.state.private.borrow([Lent()])
    assert not after.state.private.hidden.late_paths


class Cached(nn.Module):
    """A table that is made again when it is too short: its length goes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 0
        self.table: torch.Tensor | None = None

    def forward(self, length: int) -> torch.Tensor:
        if length > self.longest:
            self.longest, self.table = length, torch.arange(float(length * 10_000)).cos()
        assert self.table is not None, "its length says that it is there"
        return self.table[:length]


def test_an_attribute_that_goes_with_one_that_is_not_carried_is_not_carried_either() -> None:
    made = []
    for _ in range(2):
        model = nn.ModuleList([Cached(), nn.Linear(1, 1)])
        state = State(model, torch.optim.SGD(model.parameters(), lr=0.1))
        made.append((model, state, Redo(state)))
    model, state, redo = made[0]
    redo.mark()
    redo.probe_entry()
    model[0](5)
    redo.probe_gate()
    made[1][1].private.load(state.private.record())
    made[1][0][0](5)


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.numbers = {f"a rather long name of a number, {at}": at for at in range(60)}
        self.more = [self.numbers.copy() for _ in range(20)]
        self.large = list(range(50_000))

    def move(self) -> None:
        for numbers in self.more:
            numbers.update({name: value + 1 for name, value in numbers.items()})
        self.large.reverse()


def test_too_much_that_moves_is_said_and_carried_in_part(capsys: pytest.CaptureFixture[str]) -> None:
    model = Many()
    state = State(model, torch.optim.SGD(model.parameters(), lr=0.1))
    hidden = state.private.hidden
    for _ in range(3):
        model.move()
        hidden.state.look()
        assert len(hidden.record()) < 60_000
    said = capsys.readouterr().err
    assert said.count("model.large changes") == 1
    assert said.count("and others change") <= 1


class Board:
    """What a logger, or a prefetcher, fills in its thread."""

    seen: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.containers: list[Any] = [{}, set(), deque(maxlen=30), OrderedDict(), defaultdict(list), Counter(), []]
        self.inner = {"deep": {"deeper": self.containers[0]}}
        self.fields = SimpleNamespace()
        self.objects: dict[str, Any] = {}

    def change(self, at: int) -> None:
        key = f"{at % 50}"
        for one in (*self.containers, self.seen):
            if isinstance(one, dict):
                one[key] = at if isinstance(one, Counter) else [at] * (at % 3)
            elif isinstance(one, set):
                one.symmetric_difference_update({at % 50, at * 7 % 50})
            else:
                one.append(at)
        self.objects[key] = Averaged()
        vars(self.fields)[key] = at
        if at % 50 == 0:
            for one in (*self.containers, self.seen, self.objects, vars(self.fields)):
                one.clear()


@pytest.fixture
def _threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_threads_take_turns_often")
def test_a_thread_that_changes_what_is_looked_at_does_no_harm() -> None:
    life, board, stop = Life(), Board(), threading.Event()
    life.model.board = board  # type: ignore[assignment]
    life.hidden.add(lambda: (board, Board.seen))
    life.call()

    def change() -> None:
        at = 0
        while not stop.is_set():
            at += 1
            board.change(at)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(20):
            life.hidden.state.look()
            life.attempt()
            life.finish()
            life.hidden.state.remember()
    finally:
        stop.set()
        thread.join()


# ---------------------------------------------------------------- what a step function uses from around it

GLOBAL = 0


class Trainer:
    def __init__(self) -> None:
        self.meters: Any = SimpleNamespace(steps=0)
        self.epoch = 0
        self.rng = np.random.default_rng(2)

    def step(self) -> float:
        self.meters.steps += 1
        return float(self.meters.steps + self.rng.random())


def of_module() -> int:
    global GLOBAL
    GLOBAL += 1
    return GLOBAL


def made() -> tuple[dict[str, Callable[[], float]], list[Trainer]]:
    """Step functions that count out of sight."""
    global GLOBAL
    GLOBAL = 0
    count = 0
    rng = torch.Generator().manual_seed(3)
    own = SimpleNamespace(steps=0)
    trainer = Trainer()

    def closure() -> int:
        nonlocal count
        count += 1
        return count

    def of_object() -> int:
        own.steps += 1
        return int(own.steps)

    def drawn() -> float:
        return float(torch.rand((), generator=rng))

    functions: dict[str, Callable[[], float]] = {
        "closure": lambda: closure(),
        "object": lambda: of_object(),
        "global": lambda: of_module(),
        "generator": lambda: drawn(),
        "method": trainer.step,
    }
    return functions, [trainer]


class Total:
    seen = 0


def elsewhere() -> dict[str, Callable[[], float]]:
    """More of them, that count where no object of the script's has it."""
    Total.seen = 0
    os.environ["SEEN"] = "0"
    local, context = threading.local(), contextvars.ContextVar("context", default=0)
    local.seen = 0
    counts, sums = Counter[str](), defaultdict[str, float](float)

    def of_thread() -> int:
        local.seen += 1
        return int(local.seen)

    def of_context() -> int:
        context.set(context.get() + 1)
        return context.get()

    def of_dicts() -> float:
        counts["seen"] += 1
        sums["seen"] += 0.5
        return counts["seen"] + sums["seen"]

    def of_class() -> int:
        Total.seen += 1
        return Total.seen

    def of_environment() -> int:
        os.environ["SEEN"] = str(int(os.environ["SEEN"]) + 1)
        return int(os.environ["SEEN"])

    def of_function() -> int:
        own = vars(of_function)
        own["seen"] = own.get("seen", 0) + 1
        return int(own["seen"])

    return {
        "thread": of_thread,
        "context": of_context,
        "dicts": of_dicts,
        "class": of_class,
        "environment": of_environment,
        "function": of_function,
    }


def looked_at(function: Callable[[], float]) -> Hidden:
    hidden = Hidden()
    hidden.add(function)
    return hidden


@pytest.mark.parametrize("name", ["closure", "object", "global", "generator", "method"])
@pytest.mark.parametrize("calls", [1, 5])
def test_what_a_step_function_counts_out_of_sight_is_carried_and_put_back(name: str, calls: int) -> None:
    counts_on(made()[0][name], lambda: made()[0][name], calls)


@pytest.mark.parametrize("name", ["thread", "context", "dicts", "class", "environment", "function"])
def test_so_is_what_it_counts_in_no_object_of_the_scripts(name: str) -> None:
    counts_on(elsewhere()[name], lambda: elsewhere()[name], 3)


def counts_on(function: Callable[[], float], anew: Callable[[], Callable[[], float]], calls: int) -> None:
    """A call that is redone comes to the same, and so does one in another process that has made it `anew`."""
    hidden = looked_at(function)
    for _ in range(calls):
        hidden.mark()
        hidden.look_entry()
        function()
        hidden.look_gate()
        hidden.look_return()
    left = hidden.record()
    hidden.mark()
    first = function()
    hidden.rewind()
    assert function() == first
    theirs = anew()
    after = looked_at(theirs)
    after.load(left)
    assert not after.late_paths
    assert theirs() == first


def test_what_others_carry_is_not_carried_twice(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 2)
    average = {name: torch.zeros(100_000) for name in "ab"}
    count = torch.zeros(1)
    state = State(model, torch.optim.SGD(model.parameters(), lr=0.1), {"average": average, "count": count})

    def step() -> None:
        for tensor in (*average.values(), count):
            tensor += 1

    hidden = state.private.hidden
    hidden.add(step)
    for _ in range(3):
        step()
        hidden.state.look()
    assert hidden.record() == b""
    assert capsys.readouterr().err == ""


def test_what_begins_to_move_late_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks are made seldom by then, as each goes through all that there is."""
    monkeypatch.setattr(Budget, "due", lambda budget, *_: budget._made < FIRST)
    own = SimpleNamespace(steps=0)
    others = [SimpleNamespace(number=at) for at in range(100)]
    begun = False

    def step() -> int:
        if begun:
            own.steps += 1
        return int(own.steps + sum(each.number for each in others))

    hidden = looked_at(step)

    def calls(count: int) -> None:
        for _ in range(count):
            hidden.mark()
            hidden.look_entry()
            step()
            hidden.look_gate()
            hidden.look_return()

    calls(FIRST + 9)
    assert b"own" not in hidden.record()
    begun = True
    calls(5)
    assert b"own of" in hidden.record()


def test_torchs_own_wrappers_are_not_the_scripts() -> None:
    """DDP is an `abc.ABC`, too: what it keeps for itself was told of, as if the script could do anything about it."""
    assert not graph._is_of_the_script(nn.parallel.DistributedDataParallel)
    assert not graph._is_of_the_script(nn.Linear)
    assert graph._is_of_the_script(Life)
