"""Budgets: how often and how long a job tries, and what it does then."""

from __future__ import annotations

from tests.telling import JOB, raised, running, say, submitted
from torchrelay.protocol import events as ev
from torchrelay.protocol import orders as od
from torchrelay.protocol.cluster import orders
from torchrelay.protocol.ending import NO_SPARE
from torchrelay.protocol.ids import Point, Rank
from torchrelay.protocol.incident import Resolution
from torchrelay.protocol.job import JobPhase
from torchrelay.protocol.policy import DYING_MS, ENDING_MS, GENERATION_BUDGET, START_BUDGET

HERE, NEXT = Point(3), Point(4)
SIGKILL = 9


def test_a_job_that_never_commits_anything_tries_it_so_often() -> None:
    story = submitted()
    for attempt in range(1, START_BUDGET):
        story.settle()
        story.lose(story.holder(1), code=4)
        story.answer((od.Interrupt,))
        assert story.job.starts == attempt
    story.settle()
    story.lose(story.holder(1), code=4)
    story.answer((od.Interrupt,))
    assert story.job.outcome is not None
    assert story.job.outcome.code == 4
    assert START_BUDGET == 3


def test_a_start_that_commits_something_begins_the_count_anew() -> None:
    story = submitted(slot_faults=0)
    for _ in range(START_BUDGET - 1):
        story.settle()
        story.lose(story.holder(1), code=4)
        story.answer((od.Interrupt,))
    story.settle()
    story.train(HERE)
    story.lose(story.holder(1), code=4)
    story.settle()
    assert story.job.phase is JobPhase.RUNNING
    assert (story.job.starts, story.job.trained) == (0, True)


def test_a_job_that_only_recovers_gives_up_and_one_that_trains_does_not() -> None:
    story = running(slot_faults=0)
    for count in range(1, GENERATION_BUDGET):
        story.lose(story.holder(1), code=6)
        story.settle()
        story.train(HERE)
        assert story.job.fruitless == (0 if count == 1 else count - 1)
    story.train(NEXT)
    story.lose(story.holder(1), code=6)
    story.settle()
    assert story.job.fruitless == 0
    for _ in range(GENERATION_BUDGET):
        story.train(NEXT)
        story.lose(story.holder(1), code=6)
        story.settle()
    assert story.job.outcome is not None
    assert (story.job.outcome.code, GENERATION_BUDGET) == (6, 20)


def test_a_fall_back_is_no_failed_start() -> None:
    story = submitted(slot_faults=0, max_restarts=1)
    for _ in range(START_BUDGET - 1):
        story.settle()
        story.lose(story.holder(1), code=4)
        story.answer((od.Interrupt,))
    story.settle()
    story.hear(say(story, ev.CollectiveFailed, 1, summary="reset"))
    story.hear(raised(story, 0, kind="undeclared"))
    assert (story.job.phase, story.job.starts, story.job.restarts) == (JobPhase.STARTING, 0, 1)
    assert story.job.broken is None
    assert story.job.incidents[-1].resolution is Resolution.FELL_BACK


def test_after_a_fall_back_the_wait_for_places_begins_anew() -> None:
    story = running(spares=0, refill=False, max_restarts=1, spare_wait_ms=5_000)
    story.lose(story.holder(1), signal=SIGKILL)
    story.answer((od.Interrupt,))
    story.wait(5_000)
    assert (story.job.phase, story.job.restarts) == (JobPhase.STARTING, 1)
    story.settle()
    story.wait(4_999)
    assert story.job.outcome is None
    story.wait(1)
    assert story.job.outcome is not None
    assert (story.job.waiting_ms, story.job.broken) == (None, None)


def test_a_newcomer_at_the_edge_is_counted_on() -> None:
    story = running(spares=2)
    story.lose(story.holder(1), signal=SIGKILL)
    story.answer((od.Interrupt,))
    story.answer((od.Assign,))
    story.answer((od.CatchUp,))
    assert (story.job.phase, story.job.generation) == (JobPhase.PREPARING, 2)
    story.lose(story.holder(1), signal=SIGKILL)
    assert (story.job.phase, story.job.generation) == (JobPhase.AGREEING, 3)


def test_a_job_ends_though_a_process_cannot_be_ended() -> None:
    story = running()
    story.wait(1_000)
    story.hear(ev.JobCancelled(job=JOB, reason="Ctrl-C"))
    story.wait(ENDING_MS - 1)
    assert story.cluster.of_job(JOB)
    assert story.job.phase.name == "ENDING"
    story.wait(1)
    assert story.job.phase.name == "ENDED"
    assert any(isinstance(order, od.Fence) for order in orders(story.cluster))


def test_a_rank_whose_holder_cannot_be_ended_is_given_to_nobody() -> None:
    story = running(spare_wait_ms=30_000, report_ms=1_000_000)
    story.wait(1_000)
    story.hear(ev.WorkerHung(worker=story.holder(1), evidence="stopped"))
    story.answer((od.Interrupt,))
    story.wait(DYING_MS - 1)
    assert (story.job.seats[Rank(1)].worker, story.job.waiting_ms) == (None, None)
    story.wait(1)
    assert story.job.waiting_ms == 1_000 + DYING_MS
    assert "cannot be ended" in story.job.why
    story.wait(30_000)
    assert story.job.outcome is not None
    assert story.job.outcome.code == NO_SPARE


def test_who_cannot_be_ended_holds_up_its_own_rank_only() -> None:
    story = running(ranks=3, spares=2)
    story.hear(ev.WorkerHung(worker=story.holder(1), evidence="stopped"))
    story.lose(story.holder(2), signal=SIGKILL)
    assert story.job.seats[Rank(2)].worker is not None
    assert story.job.seats[Rank(1)].worker is None
