"""Phases: the table is whole, the page of the protocol says what it says, and a row that is knocked out is missed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from tests import phases_page
from tests.support.telling import Story, running, submitted
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import NodeId, Point
from torchrelay.protocol.model import phases
from torchrelay.protocol.model.job import RECOVERING, JobPhase
from torchrelay.protocol.model.phases import PHASES, UNTIL, Phase, is_complete
from torchrelay.protocol.rules.speech import SAID

PAGE = phases_page.PAGE.read_text()


def test_the_page_of_the_protocol_has_the_table_as_it_is() -> None:
    assert phases_page.made(PAGE) == PAGE


def test_the_diagrams_of_the_page_lead_where_the_phases_do() -> None:
    found = list(phases_page.ways(PAGE))
    assert {*phases_page.FAULT, *phases_page.MOVE} & set(found)
    for before, after in found:
        known = (before, after) in phases_page.FAULT | phases_page.MOVE
        assert known or PHASES[before].then is after, f"{before} -> {after}"
    drawn = {before for before, _ in found}
    assert drawn >= {JobPhase.AGREEING, JobPhase.PREPARING, JobPhase.RECONFIGURING, JobPhase.RESUMING, JobPhase.HALTING}


def test_how_long_the_last_phases_last_is_not_for_the_seats_to_say() -> None:
    job = running().job
    for phase in (JobPhase.FINISHING, JobPhase.ENDING, JobPhase.ENDED):
        assert not is_complete(replace(job, phase=phase))


def test_what_the_page_explains_is_what_is_asked() -> None:
    found = list(phases_page.explained(PAGE))
    assert {phase for phase, _, _ in found} >= RECOVERING | {JobPhase.QUIESCING, JobPhase.HALTING}
    for phase, holders, others in found:
        asked = PHASES[phase]
        assert holders <= {kind.__name__ for kind in asked.holders}, phase
        if phase in RECOVERING - {JobPhase.RECONFIGURING}:
            assert holders == {kind.__name__ for kind in asked.holders}, phase
            missing = {kind.__name__ for kind in asked.replacements} - others
            assert missing <= {"Assign"}, phase  # it is explained once


def test_each_phase_has_a_row_and_each_order_is_said_and_taken_back() -> None:
    assert set(PHASES) == set(JobPhase)
    asked = {kind for what in PHASES.values() for kind in what.holders + what.replacements}
    assert asked == set(SAID)
    assert asked == set(UNTIL) | {od.Leave}
    assert all(what.then in PHASES or phase is JobPhase.ENDED for phase, what in PHASES.items())


def phase_of(story: Story) -> JobPhase:
    return story.job.phase


def recovers() -> bool:
    """Whether a job starts, recovers from a loss, and ends."""
    story = submitted(ranks=2, spares=1)
    story.settle()
    if phase_of(story) is not JobPhase.RUNNING:
        return False
    story.train(Point(3))
    story.lose(story.holder(1), signal=9)
    story.settle()
    if phase_of(story) is not JobPhase.RUNNING or story.job.open_incident is not None:
        return False
    for rank, seat in story.job.seats.items():
        assert seat.worker is not None
        story.hear(
            ev.WorkerFinished(job=story.job.spec.job, generation=story.job.generation, worker=seat.worker, rank=rank)
        )
    for order in story.orders():
        if isinstance(order, od.Leave):
            story.hear(ev.WorkerExited(worker=order.worker, node=NodeId("node-0"), code=0))
    story.settle()
    return phase_of(story) is JobPhase.ENDED


WAYS = (
    JobPhase.STARTING, JobPhase.RUNNING, JobPhase.AGREEING, JobPhase.PREPARING, JobPhase.RECONFIGURING,
    JobPhase.RESUMING, JobPhase.FINISHING,
)  # fmt: skip


def knocked_out() -> Iterator[tuple[str, JobPhase, Phase]]:
    """Each entry of the rows that a recovery goes through, taken out."""
    for phase in WAYS:
        what = PHASES[phase]
        for name in ("holders", "replacements", "answers", "lacks"):
            for one in getattr(what, name):
                if one in EXCUSED:
                    continue
                rest = tuple(other for other in getattr(what, name) if other is not one)
                yield f"{phase}: {name} without {one.__name__}", phase, replace(what, **{name: rest})


# What a healthy recovery can do without: they are for what goes wrong, or for scripts that end early.
EXCUSED: tuple[type | Callable[..., bool], ...] = (
    ev.ReconfigureFailed, ev.RestoreFailed, ev.RecordKept, ev.WorkerFinished, od.Assign,
)  # fmt: skip
ROWS = list(knocked_out())


@pytest.mark.parametrize(("phase", "row"), [case[1:] for case in ROWS], ids=[case[0] for case in ROWS])
def test_what_is_knocked_out_of_a_row_is_missed(phase: JobPhase, row: Phase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(phases.PHASES, phase, row)
    try:
        assert not recovers()
    except AssertionError:
        pass


def test_nothing_is_missed_as_it_is() -> None:
    assert recovers()
