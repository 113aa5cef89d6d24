"""Budgets: how often and how long a job tries, and what it does then."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.support.migration import asked, cleared, cut_over, halting, on_nodes, preparing, tainted
from tests.support.telling import JOB, Story, raised, running, say, submitted
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Point, Rank, WorkerId
from torchrelay.protocol.model.incident import Mark, Resolution
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.moves import MoveState
from torchrelay.protocol.model.roster import Life
from torchrelay.protocol.placement.policy import DYING_MS, ENDING_MS, GENERATION_BUDGET, START_BUDGET
from torchrelay.protocol.recovery.ending import NO_SPARE
from torchrelay.protocol.rules.cluster import orders

HERE, NEXT = Point(3), Point(4)
SIGKILL = 9


def test_a_job_that_never_commits_anything_tries_it_so_often() -> None:
    story = submitted()
    for attempt in range(1, START_BUDGET):
        story.settle()
        story.lose(story.holder(1), code=4)
        story.answer((od.Interrupt,))
        assert story.job.attempts.starts == attempt
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
    assert (story.job.attempts.starts, story.job.attempts.trained) == (0, True)


def test_a_job_that_only_recovers_gives_up_and_one_that_trains_does_not() -> None:
    story = running(slot_faults=0)
    for count in range(1, GENERATION_BUDGET):
        story.lose(story.holder(1), signal=9)
        story.settle()
        story.train(HERE)
        assert story.job.attempts.fruitless == (0 if count == 1 else count - 1)
    story.train(NEXT)
    story.lose(story.holder(1), signal=9)
    story.settle()
    assert story.job.attempts.fruitless == 0
    for _ in range(GENERATION_BUDGET):
        story.train(NEXT)
        story.lose(story.holder(1), signal=9)
        story.settle()
    assert story.job.outcome is not None
    assert (story.job.outcome.code, GENERATION_BUDGET) == (137, 20)


def test_a_fall_back_is_no_failed_start() -> None:
    story = submitted(slot_faults=0, max_restarts=1)
    for _ in range(START_BUDGET - 1):
        story.settle()
        story.lose(story.holder(1), code=4)
        story.answer((od.Interrupt,))
    story.settle()
    story.hear(say(story, ev.CollectiveFailed, 1, summary="reset"))
    story.hear(raised(story, 0, kind="undeclared"))
    assert (story.job.phase, story.job.attempts.starts, story.job.attempts.restarts) == (JobPhase.STARTING, 0, 1)
    assert story.job.exceptions.broken is None
    assert story.job.accounting.incidents[-1].resolution is Resolution.FELL_BACK


def test_after_a_fall_back_the_wait_for_places_begins_anew() -> None:
    story = running(spares=0, refill=False, max_restarts=1, spare_wait_ms=5_000)
    story.lose(story.holder(1), signal=SIGKILL)
    story.answer((od.Interrupt,))
    story.wait(5_000)
    assert (story.job.phase, story.job.attempts.restarts) == (JobPhase.STARTING, 1)
    story.settle()
    story.wait(4_999)
    assert story.job.outcome is None
    story.wait(1)
    assert story.job.outcome is not None
    assert (story.job.waiting_ms, story.job.exceptions.broken) == (None, None)


def test_a_replacement_at_the_safepoint_is_counted_on() -> None:
    story = running(spares=2)
    story.lose(story.holder(1), signal=SIGKILL)
    story.answer((od.Interrupt,))
    story.answer((od.Assign,))
    story.answer((od.Replay,))
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


# ---------------------------------------------------------------- buddies


def without_a_node(late_ms: int = 0, **fields: Any) -> Story:
    """Rank 1's node is lost, `late_ms` after the verdict, and with it the page."""
    story = on_nodes(3, 1, nproc_per_node=1, nodes=2, spares=1, **fields)
    lost = story.cluster.workers[story.holder(1)].node
    if late_ms:
        story.hear(say(story, ev.CollectiveFailed, 0, summary="reset"))
        story.wait(1_100)
        story.answer((od.Interrupt,), but=(1,))
        story.wait(5_000)  # rank 1 is silent: it is fenced, and its end is waited for
        story.answer((od.Interrupt,))
        story.answer((od.Decide,))
        story.wait(late_ms)
        assert not story.job.seats[Rank(1)].ready
    story.hear(ev.NodeLost(node=lost, incarnation="a", reason="silence"))
    story.answer((od.Interrupt,))
    return story


@pytest.mark.parametrize("late_ms", [4_000, 6_000, 50_000])
def test_buddies_are_asked_however_late_the_loss_of_a_node_is_heard(late_ms: int) -> None:
    story = without_a_node(late_ms)
    story.stands = {worker: replace(stand, keeps=True) for worker, stand in story.stands.items()}
    story.settle()
    assert story.job.phase is JobPhase.RUNNING
    assert story.job.accounting.incidents[-1].resolution is Resolution.RESUMED


def test_buddies_are_waited_for_as_long_as_for_a_report() -> None:
    story = without_a_node(report_ms=500)
    story.wait(300)
    story.answer((od.Decide,))
    story.wait(499)
    assert (story.job.phase, story.job.outcome) == (JobPhase.PREPARING, None)
    story.wait(1)
    assert story.job.outcome is not None
    assert story.job.outcome.reason == "rank 1's private state at 3 is lost"


def test_buddies_have_longer_while_nobody_answers_at_all() -> None:
    story = without_a_node(report_ms=500)
    story.wait(6 * 500 - 1)
    assert (story.job.phase, story.job.outcome) == (JobPhase.PREPARING, None)
    story.wait(1)
    assert story.job.outcome is not None


def kept(story: Story, by: int, of: int, **fields: Any) -> ev.Event:
    """The holder of a rank says that it has a copy of the record of its ward."""
    event = say(story, ev.RecordKept, by, ward=Rank(of), point=HERE, private=b"kept")
    return msgspec.structs.replace(event, **fields)


def test_a_copy_counts_from_a_buddy_that_was_asked_and_of_the_point_that_is_looked_for() -> None:
    story = without_a_node()
    before = story.cluster
    for stranger in (
        {"job": JobId("other")},
        {"rank": Rank(9)},
        {"ward": Rank(9)},
        {"worker": story.holder(1)},
        {"generation": Generation(1)},
        {"point": NEXT},
    ):
        story.hear(kept(story, 0, 1, **stranger))
        assert story.cluster == before, stranger
    story.hear(kept(story, 0, 1))
    record = story.job.seats[Rank(1)].record_of(HERE)
    assert record is not None
    assert record.data == b"kept"


def test_a_copy_that_comes_when_all_are_at_the_safepoint_comes_too_late() -> None:
    story = running()
    story.lose(story.holder(1), signal=SIGKILL)
    for kind in (od.Interrupt, od.Decide, od.Replay):
        story.answer((kind,))
    assert story.job.phase is JobPhase.RECONFIGURING
    before = story.cluster
    story.hear(kept(story, 1, 0))
    assert story.cluster == before


def test_a_outgoing_is_a_buddy_as_well() -> None:
    story = Story()
    story.hear(ev.JobSubmitted(spec=ev.JobSpec(job=JOB, world_size=2, nproc_per_node=1, nodes=2, spares=2)))
    for node, slots in (("node-0", 1), ("node-1", 1), ("node-2", 2)):
        story.hear(ev.NodeJoined(node=NodeId(node), incarnation="a", slots=slots))
    story.settle()
    story.train(HERE)
    story.hear(asked(1))
    for kind in (od.Assign, od.Halt, od.Decide, od.Replay):
        story.answer((kind,))
    outgoing = story.job.seats[Rank(1)].outgoing
    assert story.job.phase is JobPhase.RECONFIGURING
    story.hear(ev.NodeLost(node=NodeId("node-0"), incarnation="a", reason="silence"))
    story.answer((od.Interrupt,))
    recalls = [(order.worker, order.ward) for order in story.orders() if isinstance(order, od.Recall)]
    assert recalls == [(outgoing, 0)]
    story.hear(kept(story, 1, 0, worker=outgoing, point=NEXT))
    assert story.job.seats[Rank(0)].record_of(NEXT) is not None


# ---------------------------------------------------------------- moves


def test_at_a_boundary_what_others_say_does_not_count() -> None:
    story = preparing(spares=3)
    former = story.move.targets[Rank(1)]
    story.hear(ev.WorkerHung(worker=former, evidence="stopped"))
    for kind in (od.Assign, od.Halt):
        story.answer((kind,))
    assert story.job.phase is JobPhase.HALTING
    target, before = story.move.targets[Rank(1)], story.cluster
    for who in (
        {"worker": WorkerId("nobody")},
        {"worker": former},
        {"worker": target, "generation": Generation(1)},
        {"worker": WorkerId("node-0.4.4")},
        {"generation": Generation(1)},
    ):
        story.hear(say(story, ev.WorkerReady, 1, point=NEXT, **who))
        assert story.cluster == before, who


def test_who_stands_at_a_boundary_has_said_so_once_and_the_first_dates_it() -> None:
    story = halting(ranks=3, spares=2)
    for rank, at_ms in ((1, 10), (0, 20), (2, 30)):
        story.wait(at_ms - story.now_ms)
        story.hear(say(story, ev.WorkerReady, rank, point=NEXT, private=b"first"))
    assert story.job.accounting.incidents[-1].marks[Mark.STOOD] == 10
    before = story.cluster
    story.hear(say(story, ev.WorkerReady, 1, point=NEXT, private=b"second"))
    assert story.cluster == before


def test_a_target_that_fails_while_all_are_asked_where_they_stand_makes_a_new_generation() -> None:
    """Its outgoing worker holds the rank again, and has promised nothing in this one."""
    story = cut_over(ranks=3, spares=3)
    outgoing = story.job.seats[Rank(1)].outgoing
    story.lose(story.holder(0), signal=SIGKILL)
    assert (story.job.phase, story.job.generation) == (JobPhase.AGREEING, 4)
    story.lose(story.holder(1), signal=SIGKILL)
    assert (story.holder(1), story.job.phase, story.job.generation) == (outgoing, JobPhase.AGREEING, 5)


def test_a_target_that_was_told_nothing_was_not_brought_anywhere() -> None:
    story = halting(ranks=3, spares=3)
    target = story.move.targets[Rank(1)]
    story.lose(story.holder(0), signal=SIGKILL)
    assert (story.job.phase, story.cluster.workers[target].brought) == (JobPhase.AGREEING, None)


def test_a_node_may_take_with_it_both_a_target_that_is_on_its_way_and_the_holder_of_a_rank() -> None:
    story = Story()
    story.hear(ev.JobSubmitted(spec=ev.JobSpec(job=JOB, world_size=2, nproc_per_node=1, nodes=2, spares=2)))
    for node, slots in (("node-0", 1), ("node-1", 1), ("node-2", 2)):
        story.hear(ev.NodeJoined(node=NodeId(node), incarnation="a", slots=slots))
    story.settle()
    story.train(HERE)
    story.hear(tainted("node-2", 0, effect=ev.Effect.PREFER_NO_SCHEDULE))
    story.lose(story.holder(0), signal=SIGKILL)
    story.settle()
    story.train(NEXT)
    story.hear(cleared("node-2", 0), asked(1, to="node-2"))
    target, holder = story.move.targets[Rank(1)], story.holder(0)
    assert (target[:8], holder[:8], target < holder) == ("node-2.0", "node-2.1", True)
    for kind in (od.Assign, od.Halt, od.Decide):
        story.answer((kind,))
    assert [order.worker for order in story.orders() if isinstance(order, od.Replay)] == [target]
    story.hear(ev.NodeLost(node=NodeId("node-2"), incarnation="a", reason="silence"))
    assert (story.job.phase, len(story.move.targets)) == (JobPhase.AGREEING, 0)


def test_no_move_outlives_its_workers() -> None:
    story = halting(0, max_restarts=1)
    target = story.move.targets[Rank(0)]
    story.hear(asked(1), raised(story, 0, kind="undeclared", summary="all_reduce"))
    assert (story.job.phase, story.job.attempts.restarts, story.job.boundary) == (JobPhase.STARTING, 1, None)
    assert (story.job.moving.moves[0].state, story.job.moving.moves[0].story[-1][1]) == (
        MoveState.CALLED_OFF,
        "all workers start again: all_reduce",
    )
    assert (story.cluster.workers[target].life, len(story.job.moving.requests)) == (Life.FENCING, 2)


def test_a_move_ends_with_its_job() -> None:
    story = preparing()
    story.hear(ev.JobCancelled(job=JOB, reason="enough"))
    assert (story.move.state, story.move.story[-1][1]) == (MoveState.CALLED_OFF, "the job ends with 130: enough")
    assert len(story.job.moving.requests) == 0


def broken(story: Story) -> None:
    """A connection breaks, and nobody is known to be lost."""
    story.hear(say(story, ev.CollectiveFailed, 0, summary="reset"))
    story.wait(1_000)


def test_while_frozen_nothing_is_done_about_a_broken_connection_of_who_trains() -> None:
    for story, phase in ((running(), JobPhase.RUNNING), (halting(), JobPhase.RELEASING)):
        story.hear(ev.FreezeSet(source="ann"))
        assert story.job.phase is phase
        broken(story)
        assert story.job.outcome is not None
        assert story.job.outcome.reason.startswith("frozen, so nothing is done about it: its collective failed")


def test_a_recovery_that_was_begun_is_finished_though_frozen() -> None:
    story = running()
    story.lose(story.holder(1), signal=SIGKILL)
    while story.job.phase is not JobPhase.RESUMING:
        story.answer()
    story.hear(ev.FreezeSet(source="ann"))
    generation = story.job.generation
    broken(story)
    assert (story.job.phase, story.job.generation) == (JobPhase.AGREEING, generation + 1)


def test_a_lost_rank_goes_last_to_a_place_that_is_to_be_used_last() -> None:
    story = running(spares=2)
    story.hear(tainted(slot=2, effect=ev.Effect.PREFER_NO_SCHEDULE))
    story.lose(story.holder(1), signal=SIGKILL)
    assert story.holder(1) == "node-0.3.3"


def test_outgoing_workers_whose_ranks_have_their_state_make_room_for_a_lost_rank() -> None:
    for restored in (True, False):
        story = cut_over(ranks=3, spares=1, refill=False)
        outgoing = story.job.seats[Rank(1)].outgoing
        assert outgoing is not None
        if restored:
            story.answer((od.Restore,))
        story.lose(story.holder(0), signal=SIGKILL)
        dismissed = story.cluster.workers[outgoing].life is Life.FENCING
        assert (dismissed, story.job.seats[Rank(1)].outgoing) == ((True, None) if restored else (False, outgoing))
        story.settle()
        assert (story.job.phase is JobPhase.RUNNING) == restored


def test_a_node_that_takes_all_targets_leaves_none_to_make_way() -> None:
    story = Story()
    story.hear(ev.JobSubmitted(spec=ev.JobSpec(job=JOB, world_size=3, nproc_per_node=2, nodes=2, spares=2)))
    for node, slots in (("node-0", 2), ("node-1", 3)):
        story.hear(ev.NodeJoined(node=NodeId(node), incarnation="a", slots=slots))
    story.settle()
    story.train(HERE)
    story.hear(asked(0, 1))
    assert [target[:6] for target in story.move.targets.values()] == ["node-1", "node-1"]
    story.hear(ev.NodeLost(node=NodeId("node-1"), incarnation="a", reason="silence"))
    assert (story.job.phase, story.move.state, story.move.tries) == (JobPhase.AGREEING, MoveState.PREPARING, 2)


# ---------------------------------------------------------------- boundaries and faults


def test_all_ranks_change_hands_and_a_connection_cannot_be_made() -> None:
    story = cut_over(0, 1, spares=2)
    story.hear(say(story, ev.ReconfigureFailed, 0, reason="refused"))
    story.answer((od.Interrupt,))
    assert (story.job.phase, story.job.resume_point) == (JobPhase.PREPARING, NEXT)
    assert story.job.why.endswith("all ranks change hands, and their outgoing workers stand after 4")


def test_who_stands_is_followed_and_not_the_outgoing_workers() -> None:
    story = cut_over(spares=2)
    story.hear(say(story, ev.ReconfigureFailed, 0, reason="refused"))
    story.answer((od.Interrupt,))
    assert story.job.why.endswith("step 4 is committed on rank 0: no rank goes back behind it")


def test_a_boundary_to_which_nobody_has_come_is_nothing_to_go_on_from() -> None:
    story = halting()
    story.hear(ev.NodeLost(node=NodeId("node-0"), incarnation="a", reason="silence"))
    assert story.job.outcome is not None
    assert story.job.outcome.reason.startswith("every rank that held state is lost; the last fault, of rank 1")


def test_a_boundary_is_forgotten_when_it_is_not_the_point_from_which_all_go_on() -> None:
    story = halting(ranks=3, spares=3)
    story.lose(story.holder(0), signal=SIGKILL)
    story.answer((od.Interrupt,))
    assert (story.job.phase, story.job.resume_point, story.job.boundary) == (JobPhase.PREPARING, HERE, None)


def test_a_boundary_is_forgotten_when_training_goes_on() -> None:
    story = cut_over()
    story.settle()
    assert (story.job.phase, story.job.resume_point, story.job.boundary) == (JobPhase.RUNNING, NEXT, None)
