"""Facts and answers at their limits: what counts, what changes nothing, and what is kept of it."""

from __future__ import annotations

import pytest

from tests.support.telling import JOB, Stand, Story, after_an_error, private, raised, running, say, submitted
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.model.incident import Mark, Resolution
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.roster import Life
from torchrelay.protocol.placement.policy import DYING_MS
from torchrelay.protocol.recovery.ending import REFUSED, STOPPED
from torchrelay.protocol.rules.cluster import EMPTY, advance, orders

HERE, NEXT = Point(3), Point(4)
NODE, NOBODY = NodeId("node-0"), WorkerId("nobody")
SIGKILL = 9


def changes(story: Story, *events: ev.Event) -> bool:
    """Whether events change anything but the time."""
    before = story.cluster
    story.hear(*events)
    return story.cluster != before


# ---------------------------------------------------------------- who and what is not known


@pytest.mark.parametrize(
    "event",
    [
        ev.JobCancelled(job=JobId("other"), reason="no"),
        ev.NodeLost(node=NodeId("other"), incarnation="a", reason="no"),
        ev.WorkerWarm(worker=NOBODY),
        ev.WorkerJoined(worker=NOBODY, job=JOB, rank=Rank(0)),
        ev.WorkerExited(worker=NOBODY, node=NODE, code=1),
        ev.WorkerHung(worker=NOBODY, evidence="no"),
        ev.CollectiveFailed(worker=NOBODY, job=JOB, rank=Rank(0), generation=Generation(1), summary="no"),
        ev.WorkerRaised(
            worker=NOBODY, job=JOB, rank=Rank(0), point=HERE, kind="script", signature="E", summary="E"
        ),
        ev.OnceRecorded(job=JobId("other"), rank=Rank(0), name="n", value=b"v"),
        ev.WorkerResumed(job=JobId("other"), generation=Generation(1), worker=NOBODY, rank=Rank(0)),
        ev.WorkerFinished(job=JOB, generation=Generation(1), worker=NOBODY, rank=Rank(9)),
        ev.WorkerReady(job=JobId("other"), generation=Generation(1), worker=NOBODY, rank=Rank(0), point=HERE),
        ev.WorkerJoined(worker=WorkerId("node-0.2.2"), job=JOB, rank=Rank(0), shard="a spare has none"),
        ev.Tick(),
    ],
    ids=lambda event: type(event).__name__,
)  # fmt: skip
def test_nothing_follows_from_what_strangers_say(event: ev.Event) -> None:
    assert not changes(running(), event)


def test_a_job_is_submitted_once() -> None:
    story = running()
    again = ev.JobSubmitted(spec=ev.JobSpec(job=JOB, world_size=9, nproc_per_node=9))
    assert not changes(story, again)


def test_time_does_not_go_back() -> None:
    story = running()
    story.wait(500)
    assert advance(story.cluster, ev.Tick(), 100).now_ms == 500


# ---------------------------------------------------------------- nodes


def test_a_lost_node_is_lost_once_and_another_incarnation_is_not_meant() -> None:
    story = running()
    lost = ev.NodeLost(node=NODE, incarnation="a", reason="silence")
    assert not changes(story, ev.NodeLost(node=NODE, incarnation="b", reason="silence"))
    assert changes(story, lost)
    assert not changes(story, lost)


def test_a_worker_that_was_only_ordered_is_not_missed_by_its_node() -> None:
    story = submitted()
    assert not changes(story, ev.NodeJoined(node=NODE, incarnation="a", slots=3))
    assert all(worker.life is Life.STARTING for worker in story.cluster.workers.values())


def test_a_process_of_the_job_that_nobody_knows_is_ended() -> None:
    story = running()
    story.hear(ev.WorkerStarted(worker=NOBODY, node=NODE, slot=7, pid=1, job=JOB))
    assert od.Fence(node=NODE, worker=NOBODY) in orders(story.cluster)
    story.hear(ev.WorkerExited(worker=NOBODY, node=NODE))
    assert od.Fence(node=NODE, worker=NOBODY) not in orders(story.cluster)


# ---------------------------------------------------------------- workers


def test_a_repeated_greeting_changes_nothing_however_late() -> None:
    story = running()
    known = story.cluster.workers[story.holder(0)]
    story.wait(9_000)
    greeting = ev.WorkerStarted(
        worker=known.worker, node=NODE, slot=known.slot, pid=known.pid, address=known.address, store=known.store
    )
    assert not changes(story, greeting, ev.WorkerWarm(worker=known.worker))


def test_a_worker_that_is_to_be_ended_cannot_talk_itself_out_of_it() -> None:
    story = running()
    worker = story.holder(1)
    story.hear(ev.WorkerHung(worker=worker, evidence="stopped"))
    story.wait(1_000)
    assert not changes(
        story,
        ev.WorkerHung(worker=worker, evidence="stopped"),
        ev.WorkerStarted(worker=worker, node=NODE, slot=1, pid=999),
        ev.WorkerWarm(worker=worker),
        ev.WorkerRaised(worker=worker, job=JOB, rank=Rank(1), point=HERE, kind="script", signature="E", summary="E"),
    )


def test_warmth_is_dated() -> None:
    story = submitted()
    worker = story.holder(0)
    story.wait(70)
    story.hear(ev.WorkerStarted(worker=worker, node=NODE, slot=0, pid=5, address="at", store="st"))
    known = story.cluster.workers[worker]
    assert (known.life, known.since_ms, known.pid, known.address, known.store) == (Life.STARTED, 70, 5, "at", "st")
    story.wait(30)
    story.hear(ev.WorkerWarm(worker=worker))
    assert (story.cluster.workers[worker].life, story.cluster.workers[worker].since_ms) == (Life.WARM, 100)


def test_a_fault_is_dated_by_its_detector() -> None:
    for event in (
        ev.WorkerExited(worker=WorkerId("node-0.1.1"), node=NODE, signal=SIGKILL, age_ms=40),
        ev.WorkerHung(worker=WorkerId("node-0.1.1"), evidence="stopped", age_ms=40),
        ev.NodeLost(node=NODE, incarnation="a", reason="silence", age_ms=40),
    ):
        story = running()
        story.wait(1_000)
        story.hear(event)
        marks = story.job.accounting.incidents[-1].marks
        assert (marks[Mark.FAULT], marks[Mark.HEARD]) == (960, 1_000)


def test_how_a_worker_ended_is_told() -> None:
    for how, told, code in (
        ({"code": 3}, "exited with 3", 3),
        ({"signal": 11}, "ended by signal 11", 139),
        ({"signal": 11, "cause": "out of memory"}, "out of memory", 139),
        ({}, "gone", 1),
        ({"code": 0}, "exited with 0", 1),
    ):
        story = running()
        story.hear(ev.WorkerExited(worker=story.holder(1), node=NODE, **how))
        assert story.job.accounting.incidents[-1].cause == told
        assert story.job.exceptions.last_code == code


def test_what_holders_left_is_kept_newest_last_and_once_a_point() -> None:
    story = running()
    worker = story.holder(1)
    points = tuple(Point(step) for step in range(1, 7))
    records = tuple(ev.PrivateRecord(point, private(point)) for point in points)
    story.hear(ev.WorkerHung(worker=worker, evidence="stopped"))
    story.hear(ev.WorkerExited(worker=worker, node=NODE, private=records))
    assert [record.point for record in story.job.seats[Rank(1)].private] == list(points[-4:])
    story.lose(story.holder(1))
    newer = (ev.PrivateRecord(Point(6), b"newer"),)
    story.hear(ev.WorkerExited(worker=story.holder(1), node=NODE, private=newer))
    seat = story.job.seats[Rank(1)]
    assert [record.data for record in seat.private if record.point == Point(6)] == [b"newer"]
    assert seat.record_of(Point(9)) is None


def test_time_alone_changes_nothing() -> None:
    story = running()
    before = story.cluster
    story.wait(10)
    assert story.cluster == before


def test_an_end_is_ordered_from_the_first_moment_on() -> None:
    story = running()
    worker = story.holder(1)
    story.wait(100)
    story.hear(ev.WorkerHung(worker=worker, evidence="stopped"))
    story.wait(100)
    assert story.cluster.fence(worker) == story.cluster
    assert story.cluster.fence(NOBODY) == story.cluster
    assert story.cluster.workers[worker].since_ms == 100


def test_a_spare_that_hangs_is_replaced_where_there_is_room() -> None:
    story = running(slots=4)
    spare = next(worker.worker for worker in story.cluster.workers.values() if worker.rank is None)
    story.hear(ev.WorkerHung(worker=spare, evidence="stopped"))
    fresh = [order for order in orders(story.cluster) if isinstance(order, od.StartWorker)]
    assert [order.slot for order in fresh] == [3]


def test_as_many_faults_of_a_slot_are_remembered_as_are_useful() -> None:
    story = running(slot_faults=0)
    for _ in range(20):
        story.wait(1)
        spare = next(each for each in story.cluster.workers.values() if each.slot == 2)
        story.lose(spare.worker, code=1)
        story.settle()
    assert story.cluster.strikes[NODE, 2] == tuple(range(5, 21))


def test_a_source_stays_distrusted_when_the_replacement_is_lost_too() -> None:
    story = running(ranks=3, spares=2)
    story.lose(story.holder(2), signal=SIGKILL)
    while story.job.phase is not JobPhase.RECONFIGURING:
        story.answer()
    story.hear(say(story, ev.RestoreFailed, 2, source=Rank(0), reason="digest differs", mismatch=True))
    story.lose(story.holder(2), signal=SIGKILL)
    while story.job.phase is not JobPhase.RECONFIGURING:
        story.answer()
    restores = [order for order in orders(story.cluster) if isinstance(order, od.Restore)]
    assert [source.rank for order in restores for source in order.sources] == [1]


# ---------------------------------------------------------------- exceptions


def test_a_spare_that_raises_something_undeclared_breaks_nothing() -> None:
    story = running()
    spare = next(worker.worker for worker in story.cluster.workers.values() if worker.rank is None)
    story.hear(raised(story, 0, worker=spare, kind="undeclared"))
    assert story.job.phase is JobPhase.RUNNING


def test_a_refusal_ends_the_job_and_is_no_incident_of_ours() -> None:
    story = running()
    story.lose(story.holder(1), signal=SIGKILL)
    story.hear(raised(story, 0, kind="refused", summary="models differ"))
    assert story.job.outcome is not None
    assert (story.job.outcome.code, story.job.outcome.reason) == (REFUSED, "models differ")
    incident = story.job.accounting.incidents[-1]
    assert (incident.resolution, incident.eligible) == (Resolution.ENDED, False)


def test_a_stop_by_the_operator_is_no_incident_of_ours() -> None:
    story = running()
    story.lose(story.holder(1), signal=SIGKILL)
    story.hear(ev.JobCancelled(job=JOB, reason="Ctrl-C"))
    assert story.job.outcome is not None
    assert (story.job.outcome.code, story.job.outcome.reason) == (STOPPED, "Ctrl-C")
    assert story.job.accounting.incidents[-1].eligible is False
    story.settle()
    assert story.job.phase is JobPhase.ENDED
    assert not changes(story, ev.JobCancelled(job=JOB, reason="again"))


def test_a_job_that_is_over_hears_of_no_exceptions() -> None:
    story = running(ranks=2)
    worker = story.holder(1)
    first, second = raised(story, 0), raised(story, 1)
    story.hear(say(story, ev.WorkerFinished, 0), say(story, ev.WorkerFinished, 1))
    assert story.job.phase is JobPhase.FINISHING
    assert not changes(story, first, second)
    story.hear(ev.WorkerExited(worker=worker, node=NODE, code=5))
    assert story.job.phase is JobPhase.FINISHING


def test_the_same_error_at_another_point_is_another_error() -> None:
    story = running()
    story.hear(raised(story, 0, point=HERE, fatal=False), raised(story, 1, point=NEXT))
    story.lose(story.holder(1), code=5)
    assert story.job.phase is JobPhase.AGREEING
    assert [entry.code for entry in story.job.exceptions.raised] == [None, 5]


def test_no_more_exceptions_are_remembered_than_are_useful() -> None:
    story = running(ranks=70, spares=0)
    story.hear(*(raised(story, rank, signature=str(rank), fatal=False) for rank in range(70)))
    assert [entry.rank for entry in story.job.exceptions.raised] == list(range(6, 70))


def test_an_exception_that_does_not_end_its_process_is_ended_after_its_time() -> None:
    story = running()
    story.wait(1_000)
    story.hear(raised(story, 1))
    story.wait(DYING_MS - 1)
    assert story.job.generation == 1
    story.wait(1)
    assert story.job.generation == 2


def test_an_exception_of_an_interrupted_worker_does_not_end_it() -> None:
    story = running()
    story.hear(raised(story, 1, fatal=False))
    story.wait(2 * DYING_MS)
    assert story.job.phase is JobPhase.RUNNING


def test_an_old_exception_of_a_worker_that_has_gone_holds_nobody() -> None:
    story = after_an_error(NEXT)
    story.wait(10 * DYING_MS)
    assert story.job.phase is JobPhase.RUNNING


def test_the_latest_exception_of_a_rank_holds_its_spare_back_and_nobody_elses() -> None:
    story = running(ranks=3, spares=2)
    story.wait(1_000)
    story.hear(raised(story, 1, signature="old"))
    story.lose(story.holder(1), code=5)
    story.lose(story.holder(2), signal=SIGKILL)
    assert (story.job.seats[Rank(1)].worker, story.job.seats[Rank(2)].worker) == (None, WorkerId("node-0.3.3"))
    story.wait(249)
    assert story.job.seats[Rank(1)].worker is None
    story.wait(1)
    assert story.job.seats[Rank(1)].worker is not None
    story.settle()
    story.train(NEXT)
    story.wait(5_000)
    story.hear(raised(story, 1, signature="new", point=NEXT))
    story.lose(story.holder(1), code=5)
    assert story.job.seats[Rank(1)].worker is None


# ---------------------------------------------------------------- collectives


def test_a_broken_collective_counts_in_its_own_generation_while_the_job_trains() -> None:
    story = running()
    stale = say(story, ev.CollectiveFailed, 1, generation=Generation(0), summary="reset")
    assert not changes(story, stale)
    story.lose(story.holder(1), signal=SIGKILL)
    assert not changes(story, say(story, ev.CollectiveFailed, 0, summary="reset"))


def test_a_loss_explains_a_broken_collective() -> None:
    story = running()
    story.wait(1_000)
    story.hear(say(story, ev.CollectiveFailed, 0, summary="reset"))
    story.wait(500)
    story.lose(story.holder(1), signal=SIGKILL)
    assert [fault.detector for fault in story.job.accounting.incidents[-1].faults] == ["agent: process exit"]
    assert story.job.exceptions.broken is None


# ---------------------------------------------------------------- answers


def test_the_first_report_counts() -> None:
    story = running()
    story.lose(story.holder(1), signal=SIGKILL)
    where = {"phase": WorkerPhase.COMPUTING, "pending": NEXT}
    story.wait(10)
    held = running(ranks=3)
    held.lose(held.holder(2), signal=SIGKILL)
    held.wait(10)
    held.hear(say(held, ev.WorkerReported, 0, committed=HERE, **where))
    held.wait(10)
    assert not changes(held, say(held, ev.WorkerReported, 0, committed=Point(9), **where))
    held.hear(say(held, ev.WorkerReported, 1, committed=HERE, **where))
    marks = held.job.accounting.incidents[-1].marks
    assert (marks[Mark.INTERRUPTED], marks[Mark.AGREED]) == (10, 20)
    assert held.job.resume_point == HERE


def test_only_the_safepoint_of_the_target_counts_as_ready() -> None:
    story = running()
    story.lose(story.holder(1), signal=SIGKILL)
    story.answer((od.Interrupt,))
    assert not changes(story, say(story, ev.WorkerReady, 0, point=NEXT))
    assert changes(story, say(story, ev.WorkerReady, 0, point=HERE))


def test_the_last_to_connect_dates_the_reconfiguring() -> None:
    story = recovering(until=JobPhase.RECONFIGURING)
    story.wait(10)
    story.hear(say(story, ev.WorkerReconfigured, 0))
    story.wait(10)
    assert Mark.RECONFIGURED not in story.job.accounting.incidents[-1].marks
    story.hear(say(story, ev.WorkerReconfigured, 1))
    story.wait(10)
    story.hear(say(story, ev.WorkerReconfigured, 0))
    assert story.job.accounting.incidents[-1].marks[Mark.RECONFIGURED] == 20


def test_state_is_restored_once_and_at_the_target() -> None:
    story = recovering(until=JobPhase.RECONFIGURING)
    given = {"sources": (Rank(0),), "digest": "d", "size": 10}
    assert not changes(story, say(story, ev.StateRestored, 1, point=NEXT, **given))
    restored = say(story, ev.StateRestored, 1, point=HERE, **given)
    assert changes(story, restored)
    assert not changes(story, restored)
    failed = say(story, ev.RestoreFailed, 1, source=Rank(0), reason="late")
    assert not changes(story, failed)
    incident = story.job.accounting.incidents[-1]
    assert (incident.sources, incident.size, incident.digest) == ((0,), 10, "d")


def test_what_each_of_several_sources_has_brought_is_told() -> None:
    story = recovering(until=JobPhase.RECONFIGURING)
    given = {"sources": (Rank(0), Rank(2)), "shares": (700, 300), "digest": "d", "size": 1_010}
    story.hear(say(story, ev.StateRestored, 1, point=HERE, **given))
    told = "rank 1 restored from rank 0 (700 bytes), rank 2 (300 bytes): 1,010 bytes, digest d equal"
    assert told in [text for _, text in story.job.accounting.incidents[-1].story]


def recovering(*, until: JobPhase) -> Story:
    """A recovery, as far as the beginning of a phase."""
    story = running()
    story.lose(story.holder(1), signal=SIGKILL)
    for _ in range(20):
        if story.job.phase is until:
            return story
        story.answer()
    raise AssertionError(f"it never comes to {until}")


# ---------------------------------------------------------------- the host of the store


def test_the_store_is_hosted_by_the_lowest_rank_that_holds_state() -> None:
    story = running()
    story.lose(story.holder(0), signal=SIGKILL)
    while story.job.phase is not JobPhase.RECONFIGURING:
        story.answer()
    stores = {order.store for order in orders(story.cluster) if isinstance(order, od.Reconfigure)}
    assert stores == {f"store:{story.holder(1)}"}


def test_without_a_job_there_is_nothing_to_do() -> None:
    cluster = advance(EMPTY, ev.NodeJoined(node=NODE, incarnation="a", slots=3), 0)
    assert orders(cluster) == frozenset()
    assert Stand().records(NOBODY) == ()


def test_who_hangs_on_its_way_out_and_cannot_be_ended_keeps_nobody() -> None:
    story = running(ranks=2)
    stuck = story.holder(1)
    story.hear(say(story, ev.WorkerFinished, 0), say(story, ev.WorkerFinished, 1))
    story.lose(story.holder(0), code=0)
    story.hear(ev.WorkerHung(worker=stuck, evidence="stopped in the kernel"))
    assert story.job.outcome is not None
    story.wait(60_000)
    assert story.job.phase is JobPhase.ENDED
    assert story.job.outcome.code == 0


def test_a_fenced_worker_that_was_never_heard_of_may_just_be_starting() -> None:
    story = submitted(ranks=2, spares=0, slots=2)
    story.hear(ev.JobCancelled(job=JOB, reason="Ctrl-C"))
    fenced = {order.worker for order in story.orders() if isinstance(order, od.Fence)}
    assert len(fenced) == 2
    story.hear(
        ev.NodeJoined(node=NODE, incarnation="second", slots=2)
    )  # its agent has asked for them, but knows no pid
    assert {order.worker for order in story.orders() if isinstance(order, od.Fence)} == fenced
    for worker in fenced:
        story.hear(ev.WorkerExited(worker=worker, node=NODE, cause="unknown here"))
    assert story.job.phase is JobPhase.ENDED


def test_the_first_wait_of_a_job_begins_with_its_submission() -> None:
    story = Story()
    story.now_ms = 5_000
    story.hear(ev.JobSubmitted(spec=ev.JobSpec(job=JOB, world_size=1, nproc_per_node=1)))
    assert story.job.phase_ms == 5_000


def test_the_cause_of_a_loss_is_what_the_lost_worker_has_raised_and_nobody_else() -> None:
    story = running()
    story.hear(raised(story, 0, summary="rank 0's trouble", fatal=False))
    story.lose(story.holder(1), signal=SIGKILL)
    assert "trouble" not in story.job.accounting.incidents[-1].faults[0].cause
    story = running()
    story.hear(raised(story, 1, summary="rank 1's trouble"))
    story.lose(story.holder(1), code=5)
    assert story.job.accounting.incidents[-1].faults[0].cause.startswith("rank 1's trouble; ")


def test_an_exception_that_was_caught_has_no_exit_code() -> None:
    story = running()
    story.hear(raised(story, 1, fatal=False), raised(story, 1, point=NEXT))
    story.lose(story.holder(1), code=5)
    assert [entry.code for entry in story.job.exceptions.raised] == [None, 5]


def test_what_is_raised_and_ends_after_the_operators_stop_does_not_change_the_outcome() -> None:
    story = running(ranks=2)
    first = story.holder(0)
    story.hear(raised(story, 0), raised(story, 1), ev.JobCancelled(job=JOB, reason="Ctrl-C"))
    story.lose(first, code=5)
    assert story.job.outcome is not None
    assert story.job.outcome.code == STOPPED
