"""A job that stops: signals are passed on once, ranks leave with their codes, and nobody is replaced for that."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.support.telling import JOB, Story, raised, running, say, submitted
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import JobId, Rank
from torchrelay.protocol.model.incident import Resolution
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.placement.policy import DYING_MS
from torchrelay.protocol.recovery.ending import STOPPED

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
    story.wait(3_000)
    story.hear(asked(SIGUSR1, None))
    story.wait(4_999)
    assert len(passed(story)) == 2
    story.wait(1)
    assert passed(story) == set()
    story.wait(10 * GRACE_MS)
    assert story.job.phase is JobPhase.RUNNING


def test_one_that_ends_the_job_is_passed_on_for_as_long_as_it_lasts() -> None:
    story = running()
    story.hear(asked(SIGUSR1, None), asked())
    story.wait(GRACE_MS - 1)
    assert {number for _, number, _ in passed(story)} == {SIGUSR1, SIGTERM}


def test_of_many_signals_the_newest_are_passed_on() -> None:
    story = running()
    story.hear(*(asked(SIGUSR1, None) for _ in range(20)))
    assert {nth for _, _, nth in passed(story)} == set(range(5, 21))


def test_a_second_signal_does_not_give_the_ranks_more_time() -> None:
    story = running()
    story.wait(5_000)
    story.hear(asked())
    story.wait(GRACE_MS - 1)
    story.hear(asked())
    assert story.job.phase is JobPhase.RUNNING
    story.wait(1)
    assert outcome(story) == (STOPPED, "told to stop: ranks were still there after 30 s")


def test_nobody_is_told_to_stop_who_is_not_known_or_over() -> None:
    story = running()
    before = story.cluster
    story.hear(replace(asked(), job=JobId("other")))
    assert story.cluster == before
    story.hear(ev.JobCancelled(job=JOB, reason="enough"))
    before = story.cluster
    story.hear(asked())
    assert story.cluster == before


@pytest.mark.parametrize(
    ("codes", "code"), [([3, 3], 3), ([0, 0], 0), ([0, 5], 5), ([0, None], STOPPED), ([None, None], STOPPED)]
)
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


def test_a_spare_that_ends_leaves_no_rank() -> None:
    story = stopping()
    story.lose(story.cluster.spares(JOB)[0].worker, code=1)
    assert story.job.stop is not None
    assert (story.job.phase, story.job.stop.left) == (JobPhase.RUNNING, ())


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


def test_what_is_asked_in_a_recovery_stands_in_its_story() -> None:
    story = running()
    story.lose(story.holder(1), signal=SIGKILL)
    story.hear(asked())
    told = [text for _, text in story.job.accounting.incidents[-1].story]
    assert told[-1] == "told to stop: the ranks have 30 s to end by themselves"


def test_who_leaves_in_a_recovery_ends_it_and_that_is_no_incident_of_ours() -> None:
    story = stopping(ranks=3)
    story.lose(story.holder(1), signal=SIGKILL)
    assert story.job.phase is JobPhase.AGREEING
    story.lose(story.holder(0), code=3)
    assert outcome(story) == (3, "told to stop: some ranks have left, the others cannot go on")
    incident = story.job.accounting.incidents[-1]
    assert (incident.resolution, incident.eligible) == (Resolution.ENDED, False)


@pytest.mark.parametrize(("ranks", "how"), [(1, "all ranks have left"), (2, "ranks were still there after 1 s")])
def test_what_is_left_of_a_recovery_when_the_job_stops_is_no_incident_of_ours(ranks: int, how: str) -> None:
    story = running(ranks=ranks)
    story.hear(asked(grace_ms=1_000))
    story.lose(story.holder(0), signal=SIGKILL)
    story.wait(1_000)
    assert outcome(story) == (STOPPED, f"told to stop: {how}")
    incident = story.job.accounting.incidents[-1]
    assert (incident.resolution, incident.eligible) == (Resolution.ENDED, False)


def test_a_broken_connection_leaves_the_others_the_time_to_leave_as_well() -> None:
    story = running(ranks=3)
    story.wait(10_000)
    story.hear(asked())
    story.lose(story.holder(0), code=0)
    story.hear(say(story, ev.CollectiveFailed, 2, summary="gone"))
    story.wait(story.job.spec.collective_grace_ms - 1)
    assert story.job.phase is JobPhase.RUNNING
    for rank in (1, 2):
        story.lose(story.holder(rank), code=0)
    assert outcome(story) == (0, "told to stop: all ranks have left")


def test_who_has_left_is_gone_and_the_job_is_over_once() -> None:
    story = stopping()
    holders = [story.holder(rank) for rank in range(2)]
    story.lose(holders[0], code=3)
    assert holders[0] not in story.cluster.workers
    story.lose(holders[1], code=3)
    story.settle()
    assert story.job.phase is JobPhase.ENDED
    before = story.cluster
    story.wait(GRACE_MS)
    assert story.cluster == before


def test_who_leaves_when_all_scripts_have_ended_does_not_leave_for_the_signal() -> None:
    story = stopping()
    story.hear(*(say(story, ev.WorkerFinished, rank) for rank in range(2)))
    assert story.job.phase is JobPhase.FINISHING
    story.lose(story.holder(0), code=0)
    assert story.job.stop is not None
    assert story.job.stop.left == ()
    story.settle()
    assert outcome(story) == (0, "the script ended with 0 on every rank")


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


def test_of_a_job_that_is_starting_those_who_have_begun_have_their_time() -> None:
    story = submitted(spares=0)
    begun, late = story.holder(0), story.holder(1)
    known = story.cluster.workers[begun]
    story.hear(ev.WorkerStarted(worker=begun, node=known.node, slot=known.slot, pid=5, address="a", store="s"))
    story.hear(asked())
    assert [order.worker for order in story.orders() if isinstance(order, od.Fence)] == [late]
    story.answer((od.Fence,))
    assert not [order for order in story.orders() if isinstance(order, od.StartWorker)]
    assert (story.job.phase, story.holder(0)) == (JobPhase.STARTING, begun)
    story.lose(begun, code=0)
    assert outcome(story) == (0, "told to stop: all ranks have left")


def test_a_job_that_waits_for_nodes_ends_at_once() -> None:
    story = Story()
    story.hear(ev.JobSubmitted(spec=ev.JobSpec(job=JOB, world_size=2, nproc_per_node=2)), asked())
    assert outcome(story) == (STOPPED, "told to stop: all ranks have left")
