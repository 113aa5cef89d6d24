"""Replicas compare values of the state, too: what differs is a fault only if it was alike, and ranks changed hands."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from torchrelay.errors import RefusedError, UnprovedError
from torchrelay.protocol.messages.ids import START, Generation, Point
from torchrelay.worker.agreement import agreement
from torchrelay.worker.agreement.comparing import SETTINGS, TENSORS, VALUES, Comparison, Differing, values_of
from torchrelay.worker.state.state import State


class Pair:
    """Rank 0 of two replicas; the other one tells the same, or other values."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept: dict[str, float] = {"count": 0}
        model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.state = State(model, self.optimizer, {"kept": self.kept})
        self.state.compare_every = 100
        identity = SimpleNamespace(wait=lambda: SimpleNamespace(world_size=2))
        standing = SimpleNamespace(wired=Generation(2))
        session: Any = SimpleNamespace(worker="w", job="j", rank=0, identity=identity, position=standing)
        self.comparison = Comparison(session, self.state, "all")
        self.other: list[str] | None = None
        monkeypatch.setattr(agreement, "tell", self.tell)
        monkeypatch.setattr(agreement, "lines_of_all", lambda lines: [lines, self.of_other(lines)])

    def of_other(self, lines: list[str]) -> list[str]:
        """What the other rank tells: tensors alike; of settings and values, which go apart, those that are not."""
        mine = values_of(self.state)
        if self.other is None or not set(lines) <= set(mine):
            return lines
        at = [mine.index(line) for line in lines]
        return [self.other[number] for number in at]

    def tell(self, shard: str, lines: list[str]) -> list[tuple[str, str]]:
        return [(shard, agreement.digest_of(lines)), (shard, agreement.digest_of(self.of_other(lines)))]

    def compare(self, step: int, renewed: Point = START) -> None:
        self.comparison.begin()
        self.comparison.exchange(Point(step + 1), renewed)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    return Pair(monkeypatch)


def test_it_is_due_after_the_first_steps_after_a_recovery_and_every_so_often(pair: Pair) -> None:
    due = [step for step in range(1, 220) if pair.comparison.due(Point(step + 1), START)]
    assert due == [1, 2, 4, 8, 16, 32, 64, 100, 200]
    due = [step for step in range(31, 120) if pair.comparison.due(Point(step + 1), Point(30, 2))]
    assert due == [31, 32, 34, 38, 46, 62, 94, 100]
    pair.state.compare_every = 0
    assert not pair.comparison.due(Point(2), START), "the script has ended it"


def test_it_is_due_at_the_first_section_after_a_step_once_ranks_have_changed_hands(pair: Pair) -> None:
    assert pair.comparison.due(Point(60, 1), Point(24))
    assert not pair.comparison.due(Point(60, 2), Point(24)), "nothing was trained in between"
    assert not pair.comparison.due(Point(24, 1), Point(24)), "nor here"
    assert not pair.comparison.due(Point(60, 1), START)


def test_values_that_were_alike_and_differ_after_a_recovery_are_a_fault_that_is_named(pair: Pair) -> None:
    pair.compare(1)
    assert pair.state.agreed == {TENSORS, SETTINGS, VALUES}
    pair.other = values_of(pair.state)
    pair.other[0] += "1"
    with pytest.raises(Differing) as found:
        pair.compare(31, Point(30))
    assert found.value.event.since == Point(30)
    assert "param_groups[0]" in found.value.event.evidence


def test_values_that_begin_to_differ_in_peace_are_a_ranks_own(pair: Pair) -> None:
    pair.compare(1)
    pair.other = [*values_of(pair.state)[:-1], "state['kept']: another count"]
    pair.compare(100)
    assert pair.state.private.own.paths == {"state['kept']"}
    pair.other = None
    pair.compare(131, Point(130))


def test_settings_that_begin_to_differ_are_a_fault_whenever_that_is(pair: Pair) -> None:
    pair.compare(1)
    pair.other = values_of(pair.state)
    pair.other[0] += "1"
    with pytest.raises(Differing) as found:
        pair.compare(100)
    assert "param_groups[0]" in found.value.event.evidence


def test_once_ranks_have_changed_hands_the_first_section_after_a_step_compares(pair: Pair) -> None:
    due = pair.comparison.due
    assert not due(Point(57, 1), START)
    assert due(Point(57, 1), Point(30))
    assert not due(Point(57, 2), Point(30)), "nothing has been trained since"
    assert not due(Point(30, 1), Point(30)), "nor here"
    pair.comparison.begin()
    pair.other = [f"{line}1" for line in values_of(pair.state)]
    pair.state.agreed |= {SETTINGS}
    with pytest.raises(Differing) as found:
        pair.comparison.exchange(Point(57, 1), Point(30))
    assert found.value.event.point == Point(57)


def test_values_that_were_never_alike_are_a_ranks_own(pair: Pair) -> None:
    pair.other = [f"{line}1" if "kept" in line else line for line in values_of(pair.state)]
    pair.compare(1)
    assert pair.state.private.own.paths == {"state['kept']"}
    pair.other = values_of(pair.state)
    pair.compare(31, Point(30))
    assert pair.state.agreed == {TENSORS, SETTINGS, VALUES}


def test_options_that_were_never_alike_are_refused(pair: Pair) -> None:
    pair.other = [f"{line}1" if "param_groups" in line else line for line in values_of(pair.state)]
    with pytest.raises(RefusedError, match="hold different options of their optimizers"):
        pair.compare(1)


def test_what_is_a_ranks_own_and_has_no_room_is_refused_in_the_first_steps(pair: Pair) -> None:
    pair.kept["count"] = 0
    pair.kept.update({f"sample {at}": float(at) for at in range(2000)})
    pair.other = [f"{line}1" if "kept" in line else line for line in values_of(pair.state)]
    with pytest.raises(RefusedError, match=r"state\['kept'\] is each rank's own, and has more than 16,384 bytes"):
        pair.compare(1)


def test_later_it_is_lacking(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    pair.compare(1)
    pair.kept.update({f"sample {at}": float(at) for at in range(2000)})
    pair.other = [f"{line}1" if "kept" in line else line for line in values_of(pair.state)]
    pair.compare(100)
    assert pair.state.private.own.lacking == {"state['kept']"}
    assert "state['kept'] is each rank's own" in capsys.readouterr().err
    with pytest.raises(UnprovedError, match=r"state\['kept'\] is each rank's own"):
        pair.state.private.load(pair.state.private.record())


def test_a_buffer_that_differs_late_and_is_too_large_ends_no_job(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("seen", torch.zeros(1 << 18))
    pair.state = State(model, torch.optim.SGD(model.parameters(), lr=0.1))
    pair.state.private.settle([], sections=False)
    monkeypatch.setattr("torchrelay.worker.state.private.sys.stderr", io.StringIO())
    pair.state.private.keep_own(["model.seen"], early=False)
    assert "model.seen" not in pair.state.private.compared()
    with pytest.raises(UnprovedError, match=r"model.seen is each rank's own"):
        pair.state.private.load(pair.state.private.record())
    with pytest.raises(RefusedError, match=r"buffers of .* may differ"):
        pair.state.private.keep_own(["model.seen"], early=True)


def test_a_history_that_outgrows_its_room_is_said_once(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    pair.state.private.keep_own(["state['kept']"], early=True)
    pair.kept.update({f"sample {at}": float(at) for at in range(2000)})
    for _ in range(3):
        pair.state.private.record()
    assert capsys.readouterr().err.count("state['kept'] is each rank's own") == 1
