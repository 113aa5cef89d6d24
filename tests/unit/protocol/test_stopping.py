"""A job that stops: signals are passed on once, ranks leave with their codes, and nobody is replaced for that."""

from __future__ import annotations

import pytest

from tests.support.telling import JOB, Story, raised, running, say, submitted
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import Rank
from torchrelay.protocol.model.incident import Resolution
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.placement.policy import DYING_MS
from torchrelay.protocol.recovery.ending import STOPPED
from torchrelay.protocol.rules.stopping import PASS_MS

SIGKILL, SIGTERM, SIGUSR1 = 9, 15, 10
GRACE_MS = 30_000


def asked(number: int = SIGTERM, grace_ms: int | None = GRACE_MS) -> ev.SignalAsked:
    return ev.SignalAsked(job=JOB, number=number, grace_ms=grace_ms, reason="told to stop")


def stopping(ranks: int = 2) -> Story:
    story = running(ranks=ranks)
    story.hear(asked())
    return story


def passed(story: Story) -> set[tuple[str, int, int]]:
    return {(order.worker, order.number, order.nth) for order in story.orders() if isinstance(order, od.PassOn)}


def outcome(story: Story) -> tuple[int, str]:
    assert story.job.outcome is not None
    return story.job.outcome.code, story.job.outcome.reason


def test_every_rank_has_the_signal_and_training_goes_on() -> None:
    story = running(ranks=3)
    story.hear(asked(SIGUSR1, None), asked())
    assert passed(story) == {
        (story.holder(rank), number, nth) for rank in range(3) for number, nth in ((SIGUSR1, 1), (SIGTERM, 2))
    }
    story.wait(GRACE_MS - 1)
    assert story.job.phase is JobPhase.RUNNING


def test_a_signal_that_ends_nothing_is_passed_on_for_a_while() -> None:
    story = running()
    story.hear(asked(SIGUSR1, None))
    story.wait(PASS_MS - 1)
    assert len(passed(story)) == 2
    story.wait(1)
    assert passed(story) == set()
    story.wait(10 * GRACE_MS)
    assert story.job.phase is JobPhase.RUNNING


@pytest.mark.parametrize(("codes", "code"), [([3, 3], 3), ([0, 0], 0), ([0, 5], 5), ([None, None], STOPPED)])
def test_the_job_ends_with_the_code_with_which_the_ranks_left(codes: list[int | None], code: int) -> None:
    story = stopping()
    holders = [story.holder(rank) for rank in range(2)]
    for holder, one in zip(holders, codes, strict=True):
        story.lose(holder, code=one, signal=SIGTERM if one is None else None)
    assert outcome(story) == (code, "told to stop: all ranks have left")
    assert story.job.accounting.incidents == ()
    assert not story.cluster.strikes, "their slots have done nothing wrong"


def test_nobody_is_replaced_who_has_left_and_the_others_have_their_time() -> None:
    story = stopping()
    story.hear(raised(story, 0))
    story.lose(story.holder(0), code=3)
    story.wait(1_000)
    assert not [order for order in story.orders() if isinstance(order, od.StartWorker | od.Assign)]
    assert story.job.phase is JobPhase.RUNNING
    assert story.job.seats[Rank(0)].worker is None
    story.wait(GRACE_MS)
    assert outcome(story) == (STOPPED, "told to stop: ranks were still there after 30 s")


def test_ranks_that_leave_with_the_same_words_leave_in_peace() -> None:
    story = stopping()
    holders = [story.holder(rank) for rank in range(2)]
    story.hear(raised(story, 0), raised(story, 1))
    story.wait(DYING_MS)
    assert [story.holder(rank) for rank in range(2)] == holders, "they have their time to end"
    story.lose(holders[0], code=3)
    assert story.holder(1) == holders[1], "it may still have something to do"
    story.lose(holders[1], code=3)
    assert outcome(story) == (3, "told to stop: all ranks have left")


def test_a_fault_before_anybody_has_left_is_recovered() -> None:
    story = stopping()
    story.lose(story.holder(1), signal=SIGKILL)
    assert story.job.phase is not JobPhase.ENDING
    replacement = story.holder(1)
    assert replacement not in {worker for worker, _, _ in passed(story)}, "it has no handler yet"
    story.settle()
    assert story.job.phase is JobPhase.RUNNING
    assert story.job.accounting.incidents[-1].resolution is Resolution.RESUMED
    assert replacement in {worker for worker, _, _ in passed(story)}


@pytest.mark.parametrize(("left", "code"), [(3, 3), (0, STOPPED)])
@pytest.mark.parametrize("killed", [True, False])
def test_a_fault_after_somebody_has_left_ends_what_is_left(killed: bool, left: int, code: int) -> None:
    story = stopping(ranks=3)
    story.lose(story.holder(0), code=left)
    if killed:
        story.lose(story.holder(1), signal=SIGKILL)
    story.hear(say(story, ev.CollectiveFailed, 2, summary="gone"))
    story.wait(story.job.spec.collective_grace_ms)
    assert outcome(story) == (code, "told to stop: some ranks have left, the others cannot go on")


def test_who_keeps_others_waiting_while_it_saves_does_not_hang() -> None:
    story = stopping()
    holder = story.holder(0)
    story.hear(ev.WorkerHung(worker=holder, evidence="others wait"))
    assert story.holder(0) == holder


def test_a_rank_whose_script_has_ended_need_not_wait_for_the_others() -> None:
    story = stopping()
    story.hear(say(story, ev.WorkerFinished, 0))
    assert [order.worker for order in story.orders() if isinstance(order, od.Leave)] == [story.holder(0)]


def test_a_job_in_which_nobody_has_begun_ends_at_once() -> None:
    story = submitted()
    story.hear(asked())
    assert outcome(story)[0] == STOPPED
