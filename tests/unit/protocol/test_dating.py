"""Dates: an incident counts all the time in which training stood, whoever was away; deadlines do not."""

from __future__ import annotations

import pytest

from tests.support.migration import halting
from tests.support.telling import JOB, Story, place_of, raised, running, say, submitted
from torchrelay.orchestrator.views.places import pause_of
from torchrelay.orchestrator.views.views import phases_of
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.model.incident import Incident, Mark, Resolution
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.rules.cluster import orders

NODE = NodeId("node-0")
SIGKILL = 9
HANG_MS = 12_000


def left_out(story: Story, ms: int = HANG_MS) -> None:
    """The orchestrator does not run for so long."""
    story.hear(ev.TimeLeftOut(ms=ms))


def exited(story: Story, rank: int, age_ms: int = 0) -> ev.WorkerExited:
    worker = story.holder(rank)
    left = story.stands[worker].records(worker)
    return ev.WorkerExited(worker=worker, node=NODE, signal=SIGKILL, private=left, age_ms=age_ms)


def until(story: Story, phase: JobPhase) -> None:
    """All do what they are told until the job is in this phase."""
    for _ in range(20):
        if story.job.phase is not phase:
            story.answer((od.Interrupt, od.Fence, od.Assign) if story.job.phase is JobPhase.AGREEING else ())
    assert story.job.phase is phase


def incident(story: Story) -> Incident:
    return story.job.accounting.incidents[-1]


def pause(story: Story) -> int | None:
    return pause_of(incident(story))


# ---------------------------------------------------------------- the job's time


def test_time_that_was_left_out_counts_for_the_ledger_and_for_no_deadline() -> None:
    story = running(report_ms=500)
    story.wait(1_000)
    story.hear(exited(story, 1))
    left_out(story)
    story.wait(499)
    assert story.job.phase is JobPhase.AGREEING, "nobody is late"
    story.settle()
    assert incident(story).resolution is Resolution.RESUMED
    assert pause(story) == HANG_MS + 499
    assert sum(phases_of(incident(story)).values()) == HANG_MS + 499
    assert incident(story).story[-1][0] - incident(story).story[0][0] == HANG_MS + 499


def test_it_is_the_same_for_all_jobs_and_adds_up() -> None:
    story = running()
    left_out(story, 70)
    left_out(story, 30)
    assert (story.job.accounting.left_out_ms, story.job.moment(1_000, 20)) == (100, 1_080)


@pytest.mark.parametrize(
    ("event", "fields"),
    [(ev.WorkerExited, {}), (ev.CollectiveFailed, {}), (ev.WorkerHung, {"evidence": "stopped"})],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_that_nobody_heard_of_is_dated_when_it_happened(event: type[ev.Event], fields: dict[str, str]) -> None:
    story = running(collective_grace_ms=0)
    story.wait(1_000)
    left_out(story)
    given = {"worker": story.holder(1), "age_ms": HANG_MS - 400, **fields}
    if event is ev.WorkerExited:
        given |= {"node": NODE, "signal": SIGKILL, "private": story.stands[story.holder(1)].records(story.holder(1))}
    elif event is ev.CollectiveFailed:
        given |= {"job": JOB, "rank": 1, "generation": story.job.generation, "summary": "reset"}
    story.hear(event(**given))
    assert incident(story).marks[Mark.FAULT] == incident(story).faults[0].at_ms == 1_400
    assert incident(story).marks[Mark.HEARD] == HANG_MS + 1_000
    story.settle()
    if event is not ev.WorkerHung:
        assert pause(story) == HANG_MS - 400


def test_an_undeclared_collective_is_dated_too() -> None:
    story = running(max_restarts=1)
    story.wait(1_000)
    story.hear(raised(story, 1, kind="undeclared", age_ms=300))
    assert incident(story).marks[Mark.FAULT] == 700


def test_a_first_connection_that_is_not_made_is_dated_by_the_jobs_time() -> None:
    story = submitted(reconfigure_ms=500)
    left_out(story)
    until(story, JobPhase.RECONFIGURING)
    story.wait(500)
    late = incident(story).faults[0]
    assert (late.detector, late.at_ms) == ("deadline", HANG_MS + 500)


# ---------------------------------------------------------------- when it began


def test_a_collective_that_failed_first_is_when_the_pause_began() -> None:
    story = running()
    story.wait(1_000)
    story.hear(say(story, ev.CollectiveFailed, 0, summary="reset", age_ms=5))
    story.wait(600)  # the node's agent was gone, and is back
    story.hear(exited(story, 1))
    assert incident(story).marks[Mark.FAULT] == 995
    assert incident(story).faults[0].at_ms == 1_600


def test_a_collective_that_failed_after_the_fault_was_an_echo() -> None:
    story = running()
    story.wait(1_000)
    story.hear(say(story, ev.CollectiveFailed, 0, summary="reset"))
    story.hear(exited(story, 1, age_ms=5))
    assert incident(story).marks[Mark.FAULT] == 995


def test_a_fault_that_is_heard_later_and_was_earlier_is_when_the_pause_began() -> None:
    story = running(ranks=3, spares=2)
    story.wait(1_000)
    story.hear(exited(story, 1))
    story.wait(10)
    story.hear(exited(story, 2, age_ms=50))
    assert incident(story).marks[Mark.FAULT] == 960
    story.wait(10)
    story.hear(exited(story, 0))
    assert incident(story).marks[Mark.FAULT] == 960


@pytest.mark.parametrize("kind", ["hang", "silence"])
def test_what_is_judged_later_does_not_say_when_the_pause_began(kind: str) -> None:
    """Who does not move, or is not heard, may have been so for long while all trained."""
    story = running(ranks=3, spares=2)
    story.wait(600_000)
    story.hear(exited(story, 1))
    story.wait(10)
    if kind == "hang":
        story.hear(ev.WorkerHung(worker=story.holder(0), evidence="stopped", age_ms=500_000))
    else:
        story.hear(ev.NodeLost(node=NODE, incarnation="a", reason="silence", age_ms=60_000))
    assert incident(story).marks[Mark.FAULT] == 600_000


def test_an_exception_that_is_judged_to_be_a_fault_does_not_say_when_the_pause_began() -> None:
    story = running(ranks=3, spares=2, max_restarts=1)
    story.wait(1_000)
    story.hear(exited(story, 1))
    story.wait(10)
    story.hear(raised(story, 0, kind="undeclared", age_ms=300))
    assert incident(story).marks[Mark.FAULT] == 1_000
    assert [fault.exact for fault in incident(story).faults] == [True, False]


def test_an_echo_says_no_more_than_when() -> None:
    story = running(ranks=3, spares=2)
    first = story.job.generation
    story.wait(1_000)
    story.hear(exited(story, 1))
    echo = say(story, ev.CollectiveFailed, 0, generation=first, summary="reset", age_ms=30)
    before = story.cluster
    story.hear(echo)
    assert incident(story).marks[Mark.FAULT] == 970
    assert len(incident(story).faults) == 1
    assert story.job.exceptions.broken is None
    story.hear(say(story, ev.CollectiveFailed, 0, generation=first, summary="reset"))
    assert incident(story).marks[Mark.FAULT] == 970
    other = say(story, ev.CollectiveFailed, 0, generation=story.job.generation, summary="reset", age_ms=500)
    story.hear(other)
    assert incident(story).marks[Mark.FAULT] == 970, "of another generation it says nothing about the first fault"
    assert story.orders() == sorted(orders(before), key=place_of)


def test_an_incident_in_which_not_all_went_on_has_no_pause() -> None:
    story = running(spares=1, refill=False, spare_wait_ms=1_000)
    story.hear(exited(story, 1))
    until(story, JobPhase.RESUMING)
    story.wait(40)
    story.hear(say(story, ev.WorkerResumed, 0))
    story.hear(exited(story, 1))
    story.wait(1_000)
    story.settle()
    assert incident(story).resolution is Resolution.ENDED
    assert pause(story) is None
    assert "resume" not in phases_of(incident(story))


def test_the_grace_after_a_failed_collective_is_not_left_out() -> None:
    story = running(collective_grace_ms=1_000)
    story.wait(1_000)
    story.hear(say(story, ev.CollectiveFailed, 0, summary="reset", age_ms=900))
    left_out(story)
    story.wait(999)
    assert not story.job.accounting.incidents, "what nobody heard may be the cause"
    story.wait(1)
    assert story.job.phase is JobPhase.AGREEING
    assert incident(story).marks[Mark.FAULT] == 100


# ---------------------------------------------------------------- when all stood, and when all went on


def test_the_first_that_stood_and_the_last_that_went_on_are_heard_in_any_order() -> None:
    story = halting()
    story.wait(1_000)
    point = story.job.boundary
    for rank, age_ms in ((0, 100), (1, 300)):
        story.hear(say(story, ev.WorkerReady, rank, point=point, private=b"private", age_ms=age_ms))
    assert incident(story).marks[Mark.STOOD] == 700
    until(story, JobPhase.RESUMING)
    story.wait(1_000)
    story.hear(say(story, ev.WorkerResumed, 0, age_ms=100), say(story, ev.WorkerResumed, 1, age_ms=600))
    assert (incident(story).marks[Mark.RESUMED], pause(story)) == (1_900, 1_200)


def test_what_is_repeated_dates_nothing_anew() -> None:
    story = halting()
    story.wait(1_000)
    ready = say(story, ev.WorkerReady, 0, point=story.job.boundary)
    story.hear(ready)
    story.wait(50)
    story.hear(ready)
    assert incident(story).marks[Mark.STOOD] == 1_000


def test_who_has_finished_has_gone_on() -> None:
    story = running()
    story.hear(exited(story, 1))
    until(story, JobPhase.RESUMING)
    story.wait(40)
    story.hear(say(story, ev.WorkerResumed, 0))
    story.wait(30)
    story.hear(say(story, ev.WorkerFinished, 1))
    assert (story.job.phase, pause(story)) == (JobPhase.RUNNING, 70)


def test_a_second_try_stands_anew() -> None:
    """The boundary is called off after one has stood, and asked for again in the same generation's replacement."""
    story = halting()
    story.wait(1_000)
    story.hear(say(story, ev.WorkerReady, 0, point=story.job.boundary))
    story.hear(ev.MoveWithdrawn(job=JOB, ranks=(1,), source="ann"))  # type: ignore[arg-type]
    assert story.job.phase is JobPhase.RELEASING
    story.wait(200)
    story.answer((od.Resume,))
    assert incident(story).resolution is Resolution.CALLED_OFF
    assert pause(story) == 200, "it stood, although nothing came of it"
