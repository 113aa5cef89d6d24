"""Moves, freezes and lost nodes where they meet faults: each case was a defect once."""

from __future__ import annotations

import pytest

from tests.support.migration import asked, cleared, cut_over, halting, on_nodes, preparing, tainted
from tests.support.telling import running, say, training
from torchrelay.protocol.health.failure_detector import judge
from torchrelay.protocol.health.pulses import Beat, FailureDetector, hear
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import NodeId, Point, Rank
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.moves import MoveKind, MoveState
from torchrelay.protocol.placement.boundary import REST_MS, TRIES
from torchrelay.protocol.placement.taints import PROBATION

RECONFIGURE_MS = 60_000


def test_the_late_end_of_a_outgoing_does_not_push_out_newer_records() -> None:
    story = cut_over(1)
    outgoing = story.job.seats[Rank(1)].outgoing
    assert outgoing is not None
    node = story.cluster.workers[outgoing].node
    for _ in range(3):
        story.answer((od.Reconfigure, od.Restore, od.Resume))
    for rank in (0, 1):
        story.stands[story.holder(rank)] = training(Point(6))
    newer = tuple(ev.PrivateRecord(Point(step), b"target") for step in (4, 5, 6))
    older = tuple(ev.PrivateRecord(Point(step), b"outgoing") for step in (1, 2, 3, 4))
    story.hear(ev.WorkerExited(worker=story.holder(1), node=node, signal=9, private=newer))
    story.hear(ev.WorkerExited(worker=outgoing, node=node, signal=9, cause="fenced", private=older))
    assert [record.point.step for record in story.job.seats[Rank(1)].private] == [3, 4, 5, 6]
    story.settle()
    assert story.job.phase is JobPhase.RUNNING


def test_a_target_that_does_not_come_to_the_boundary_holds_up_nobody_for_long_nor_for_ever() -> None:
    story = halting(1, spares=3, slots=6)
    for number in range(1, TRIES + 1):
        assert story.job.phase is JobPhase.HALTING
        story.answer((od.Decide,))
        story.wait(0)  # from here on all wait for the target alone
        story.wait(RECONFIGURE_MS - 1)
        assert story.job.phase is JobPhase.HALTING
        story.wait(1)
        assert story.move.tries == number
        for _ in range(4):
            story.answer((od.Resume, od.Fence, od.StartWorker))
        story.train(Point(4 + number))
        for _ in range(4):
            story.answer((od.StartWorker, od.Assign))
            story.wait(1_000)
        story.answer((od.Halt,))
    assert story.move.state is MoveState.FAILED
    assert story.job.phase is JobPhase.RUNNING
    assert not story.job.moving.requests
    assert story.move.again_ms > story.now_ms + REST_MS - 20_000


def test_a_freeze_holds_when_a_connection_breaks_before_the_loss_is_heard() -> None:
    story = running(spares=1)
    story.hear(ev.FreezeSet(source="ann"))
    story.hear(say(story, ev.CollectiveFailed, 0, summary="reset by peer"))
    story.wait(1_100)
    assert story.job.outcome is not None
    assert "frozen" in story.job.outcome.reason


def test_what_only_seems_to_be_lost_may_go_on_under_a_freeze() -> None:
    story = running(spares=1)
    failure_detector = hear(FailureDetector(), Beat(node=NodeId("node-0"), incarnation="a"), 0)
    assert judge(failure_detector, story.cluster, 10_000_000) != ()
    story.hear(ev.FreezeSet(source="ann"))
    assert judge(failure_detector, story.cluster, 10_000_000) == ()


def test_who_thinks_of_another_node_is_moved_there() -> None:
    story = on_nodes(3, 2, nproc_per_node=2, spares=2)
    story.hear(asked(1, to="node-1"))
    story.answer((od.StartWorker,))
    story.hear(asked(1, to="node-2"))
    for _ in range(4):
        story.answer((od.StartWorker, od.Fence))
    story.settle()
    story.train(Point(4))
    story.wait(2_000)
    story.settle()
    assert story.cluster.workers[story.holder(1)].node == "node-2"
    assert (story.move.state, story.move.tries) == (MoveState.DONE, 0)


@pytest.mark.parametrize("asks", [(od.StartWorker, od.Assign), (od.StartWorker, od.Assign, od.Halt)])
def test_who_thinks_of_another_node_while_all_are_stopped_connects_nobody_anew_for_nothing(
    asks: tuple[type[od.Order], ...],
) -> None:
    story = on_nodes(3, 2, nproc_per_node=2, spares=2)
    story.hear(asked(1, to="node-1"))
    for kind in asks:
        story.answer((kind,))
    assert story.job.phase is (JobPhase.HALTING if od.Halt in asks else JobPhase.QUIESCING)
    generation = story.job.generation
    story.hear(asked(1, to="node-2"))
    assert (story.job.phase, story.job.generation) == (JobPhase.RELEASING, generation)
    story.settle()
    assert (story.job.phase, story.job.moving.cutovers) == (JobPhase.RUNNING, ())
    story.train(Point(4))
    story.wait(2_000)
    story.settle()
    assert story.cluster.workers[story.holder(1)].node == "node-2"
    assert (story.move.state, story.move.tries, len(story.job.moving.cutovers)) == (MoveState.DONE, 0, 1)


def test_a_place_that_is_about_to_fail_goes_before_a_plan_that_is_being_prepared() -> None:
    story = preparing(0, spares=1)
    assert story.move.kind is MoveKind.PLANNED
    story.hear(tainted(slot=1))
    assert (story.move.kind, story.move.ranks, story.move.state) == (MoveKind.PRE_EMPTIVE, (1,), MoveState.WAITING)
    for _ in range(4):
        story.answer((od.Fence, od.StartWorker))
    assert story.move.state is MoveState.PREPARING


def test_the_way_home_is_not_lost_by_taking_the_only_room_there() -> None:
    story = on_nodes(3, 1, nproc_per_node=1, nodes=2, spares=1, return_home=True, probation_ms=60_000)
    story.hear(asked(1))
    story.settle()
    story.train(Point(4))
    assert story.cluster.workers[story.holder(1)].node == "node-2"
    story.wait(60_000)
    for step in range(5, 9):
        for _ in range(6):
            story.answer()
        story.train(Point(step))
        story.wait(2_000)
    assert story.cluster.workers[story.holder(1)].node == "node-1"
    assert story.job.moving.named == 2


def test_a_warning_without_room_does_not_hold_up_plans_that_have_room() -> None:
    story = on_nodes(2, 2, nproc_per_node=2, spares=1)
    for slot in (0, 1):
        story.hear(tainted("node-1", slot, effect=ev.Effect.NO_SCHEDULE, key="full"))
    story.hear(tainted("node-0", 0))
    assert story.move.kind is MoveKind.PRE_EMPTIVE
    assert "room for 0" in story.move.story[-1][1]


def test_a_taint_that_becomes_a_fault_is_remembered_and_one_that_is_lowered_leaves_a_probation() -> None:
    story = running(spares=1)
    story.hear(tainted(effect=ev.Effect.NO_SCHEDULE))
    assert not story.cluster.failures
    story.hear(tainted(effect=ev.Effect.NO_EXECUTE))
    assert [len(times) for times in story.cluster.failures.values()] == [1]
    story.hear(tainted(effect=ev.Effect.NO_SCHEDULE))
    assert {taint.key for taint in story.cluster.taints.values()} == {"ecc", PROBATION}


def test_a_target_that_joined_before_it_inherited_has_joined() -> None:
    """It says so once. Moves wait for those who have not."""
    story = preparing(1)
    target = story.move.targets[Rank(1)]
    story.hear(ev.WorkerJoined(worker=target, job=story.job.spec.job, rank=Rank(1), shard="half"))
    lost = story.cluster.workers[story.holder(1)]
    story.hear(ev.WorkerExited(worker=lost.worker, node=lost.node, signal=9))
    seat = story.job.seats[Rank(1)]
    assert (seat.worker, seat.joined, seat.shard) == (target, True, "half")
    unknown = preparing(1)
    lost = unknown.cluster.workers[unknown.holder(1)]
    unknown.hear(ev.WorkerExited(worker=lost.worker, node=lost.node, signal=9))
    assert not unknown.job.seats[Rank(1)].joined


def test_who_thinks_of_another_node_while_the_move_waits_is_moved_there() -> None:
    story = on_nodes(3, 2, nproc_per_node=2, spares=0)
    story.hear(ev.FreezeSet(source="ann"), asked(1, to="node-1"), asked(1, to="node-2"), ev.FreezeCleared(source="ann"))
    assert dict(story.move.to) == {Rank(1): NodeId("node-2")}
    assert story.cluster.workers[story.move.targets[Rank(1)]].node == "node-2"


def test_spares_on_closed_slots_keep_nobody_from_their_node() -> None:
    story = on_nodes(2, 4, nproc_per_node=2, spares=2)
    closed = ev.Effect.NO_SCHEDULE
    story.hear(tainted("node-0", 2, effect=closed), tainted("node-1", 0, effect=closed), cleared("node-0", 2))
    story.hear(tainted("node-1", 1, effect=closed), asked(1, to="node-1"))
    target = story.cluster.workers[story.move.targets[Rank(1)]]
    assert (target.node, target.slot) == ("node-1", 2)


def test_of_two_ranks_that_were_moved_to_the_end_of_all_tries_only_the_one_that_did_not_move_rests() -> None:
    story = cut_over(0, 1, ranks=3, spares=2, slots=8)
    for number in range(1, TRIES + 1):
        for rank in story.move.ranks if number < TRIES else (Rank(1),):
            story.lose(story.holder(rank))
        story.settle()
        if number < TRIES:
            story.train(Point(10 * number))
            for _ in range(6):
                story.wait(1_000)
                story.answer((od.StartWorker, od.Assign, od.Halt))
            story.answer((od.Decide,))
            story.answer((od.Replay,))
    assert story.move.state is MoveState.FAILED
    assert story.move.ranks == (1,)
