"""What is rehearsed and what is not: the rules alone, on a session that is none."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from torchrelay.errors import StepInterrupted
from torchrelay.worker.bootstrap.run import WorkerRun
from torchrelay.worker.data import beside
from torchrelay.worker.replacement import dry_run
from torchrelay.worker.replacement.examples import Example, Told, example_of, name_of
from torchrelay.worker.state.state import State

X = torch.ones(2, 4)
Step = Callable[..., Any]


@pytest.fixture(autouse=True)
def _nothing_is_watched_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "_watch", None)


class Target:
    """The target of a move, as far as a rehearsal looks at it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[Any] = []
        self._tried = Mock()  # no object of the script's own: what such a one keeps is put back after a rehearsal
        model = torch.nn.Linear(4, 1)
        self.state = State(model, torch.optim.SGD(model.parameters(), lr=0.1))
        self.session: Any = SimpleNamespace(
            rehearsing=False,
            worker="w",
            agent=SimpleNamespace(say=self.said.append),
            position=SimpleNamespace(order=lambda _: None, poisoned=False, rest=lambda *_, **__: None),
            identity=SimpleNamespace(assigned_cpu_s=0.0),
        )
        self.told: list[Example] = []
        monkeypatch.setattr(dry_run, "_fetch", lambda _: Told(self.told))

    @property
    def tried(self) -> list[Any]:
        """The arguments of all steps that were rehearsed."""
        return [call.args for call in self._tried.call_args_list]

    def rehearse(self, *steps: Step, rehearse: bool | None = None) -> str:
        """Returns what was said of it."""
        dry_run.prepare(self.session, self.state, list(steps), self._go, rehearse)
        assert not self.session.rehearsing
        note: str = self.said[-1].note
        return note

    def show(self, step: Step, *args: Any, **kwargs: Any) -> None:
        """A rank that trains calls this step with these."""
        self.told.append(example_of(name_of(step), args, kwargs))

    def _go(self, function: Step, args: list[Any], kwargs: dict[str, Any]) -> None:
        self._tried(args, kwargs)
        function(*args, **kwargs)
        raise StepInterrupted  # at the gate


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    return Target(monkeypatch)


def step(*_: Any, **__: Any) -> None:
    """Does nothing."""


def another(*_: Any, **__: Any) -> None:
    """Does nothing either."""


@pytest.mark.parametrize(
    ("args", "where"),
    [
        ((3, X), "argument 0"),
        ((X, {"x": X, "n": [None, 4]}), "argument 1['n'][1]"),
        ((X, (X, "train")), "argument 1[1]"),
        ((X, 0.5), "argument 1"),
        ((X, b"key"), "argument 1"),
        (({7: X},), "argument 0"),
    ],
    ids=["first", "deep", "text", "fraction", "bytes", "key"],
)
def test_a_step_that_is_called_with_plain_values_is_not_rehearsed(
    args: tuple[Any, ...], where: str, target: Target
) -> None:
    target.show(step, *args)
    note = target.rehearse(step)
    assert note == (
        f"no rehearsal: {name_of(step)}: the step is called with plain values ({where}), on which side effects may "
        "depend; Options(rehearse=True) rehearses all the same"
    )
    assert target.tried == []


def test_so_it_is_for_arguments_by_name(target: Target) -> None:
    target.show(step, X, at=3)
    assert "(argument at)" in target.rehearse(step)
    assert target.tried == []


def test_a_script_may_ask_for_it_all_the_same(target: Target) -> None:
    target.show(step, 3, X)
    assert target.rehearse(step, rehearse=True).startswith("rehearsed a step in ")
    assert target.tried[0][0][0] == 3


def test_a_script_may_forbid_it(target: Target) -> None:
    target.show(step, X)
    assert target.rehearse(step, rehearse=False) == "no rehearsal: Options(rehearse=False)"
    assert target.tried == []


def test_tensors_flags_and_nothing_decide_nothing(target: Target) -> None:
    target.show(step, {"x": X, "rest": [None, (X, True)]}, mask=None, last=False)
    assert target.rehearse(step).startswith("rehearsed a step in ")


def test_one_step_is_rehearsed_beside_one_that_is_not(target: Target) -> None:
    target.show(step, X)
    target.show(another, 3)
    note = target.rehearse(step, another)
    assert note.startswith("rehearsed a step in ")
    assert "another: the step is called with plain values (argument 0)" in note


@pytest.mark.parametrize("rehearse", [None, True])
def test_who_asks_for_the_place_is_cut(rehearse: bool | None, target: Target) -> None:
    calls: Any = SimpleNamespace(arrive=lambda: None, committed=SimpleNamespace(step=0), inside=True)
    run = WorkerRun(target.session, calls, None)  # type: ignore[arg-type]
    seen = []

    def asking(_: Any) -> None:
        try:
            seen.append(run.global_step)
        except Exception:  # noqa: BLE001  as scripts do around their logging
            seen.append(-1)

    target.show(asking, X)
    assert target.rehearse(asking, rehearse=rehearse).endswith(": the step asks for run.global_step")
    assert seen == []
    assert run.global_step == 0, "and afterwards it is told"


def test_no_further_step_is_begun_when_it_has_taken_long(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Mock(return_value=0.0)  # as above
    monkeypatch.setattr(dry_run, "time", SimpleNamespace(monotonic=clock))

    def slow(_: Any) -> None:
        clock.return_value += dry_run.BEGIN_S

    target.show(slow, X)
    target.show(step, X)
    assert target.rehearse(slow, step) == f"rehearsed a step in {dry_run.BEGIN_S:.1f} s; it takes too long for more"
    assert len(target.tried) == 1
