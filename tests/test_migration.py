"""Migration: choices and limits of moves in the core, each by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.telling import JOB, Stand, Story, running, say
from torchrelay.protocol import events as ev
from torchrelay.protocol import orders as od
from torchrelay.protocol.ids import NodeId, Point, Rank, WorkerPhase
from torchrelay.protocol.job import JobPhase
from torchrelay.protocol.moves import MoveState
from torchrelay.protocol.roster import Life

HERE, NEXT = Point(3), Point(4)
NODE = NodeId("node-0")
SIGKILL = 9


def asked(*ranks: int, to: str | None = None, reason: str = "a wish") -> ev.MoveAsked:
    node = None if to is None else NodeId(to)
    return ev.MoveAsked(job=JOB, ranks=tuple(Rank(rank) for rank in ranks), to=node, reason=reason, source="ann")


def tainted(node: str = "node-0", slot: int | None = 1, **fields: Any) -> ev.TaintSet:
    return ev.TaintSet(node=NodeId(node), slot=slot, **({"key": "ecc", "source": "detector"} | fields))


def cleared(node: str = "node-0", slot: int | None = 1, **fields: Any) -> ev.TaintCleared:
    return ev.TaintCleared(node=NodeId(node), slot=slot, **({"key": "ecc", "source": "detector"} | fields))


def preparing(*ranks: int, **fields: Any) -> Story:
    """A job of which some ranks are asked to move; their targets are being prepared."""
    story = running(**({"spares": 2} | fields))
    story.hear(asked(*(ranks or (1,))))
    return story


def quiescing(*ranks: int, **fields: Any) -> Story:
    story = preparing(*ranks, **fields)
    story.answer((od.Assign,))
    assert story.job.phase is JobPhase.QUIESCING
    return story


def halting(*ranks: int, **fields: Any) -> Story:
    story = quiescing(*ranks, **fields)
    story.answer((od.Halt,))
    assert story.job.phase is JobPhase.HALTING
    return story


def cut_over(*ranks: int, **fields: Any) -> Story:
    story = halting(*ranks, **fields)
    story.answer((od.Decide,))
    story.answer((od.CatchUp,))
    assert (story.job.phase, story.move.state) == (JobPhase.REWIRING, MoveState.MOVING)
    return story


# ---------------------------------------------------------------- heirs


def test_a_target_that_was_told_of_another_point_does_not_inherit_when_it_is_too_late_to_ask() -> None:
    story = quiescing(ranks=3, spares=2)
    for rank in (0, 2):
        story.stands[story.holder(rank)] = Stand(HERE, WorkerPhase.GATE, NEXT)
    story.answer((od.Halt,))
    story.answer((od.Decide,), but=(0, 2))
    target, leaver = story.move.targets[Rank(1)], story.holder(1)
    story.answer((od.CatchUp,))
    story.hear(ev.WorkerHung(worker=leaver, evidence="stopped"))
    story.answer((od.Interrupt,))
    assert (story.job.phase, story.job.target) == (JobPhase.PREPARING, HERE)
    records = tuple(ev.PrivateRecord(point, b"private") for point in (HERE, NEXT))
    story.hear(ev.WorkerExited(worker=leaver, node=NODE, signal=SIGKILL, private=records))
    assert story.holder(1) != target
    story.settle()
    assert story.job.phase is JobPhase.RUNNING


def test_a_target_that_inherits_when_all_have_reported_is_asked_for_no_report() -> None:
    story = preparing()
    target, leaver = story.move.targets[Rank(1)], story.holder(1)
    story.hear(ev.WorkerPrepared(worker=target))
    story.hear(ev.WorkerHung(worker=leaver, evidence="stopped"))
    story.answer((od.Interrupt,))
    assert story.job.phase is JobPhase.PREPARING
    story.lose(leaver, signal=SIGKILL)
    assert story.holder(1) == target
    assert story.job.seats[Rank(1)].assigned_in == story.job.generation


# ---------------------------------------------------------------- the boundary


def test_what_is_under_way_will_be_committed_so_it_is_the_boundary() -> None:
    for phase in (WorkerPhase.COMPUTING, WorkerPhase.SECTION, WorkerPhase.GATE):
        story = quiescing()
        story.stands[story.holder(0)] = Stand(HERE, WorkerPhase.BETWEEN)
        story.stands[story.holder(1)] = Stand(HERE, phase, NEXT)
        story.answer((od.Halt,))
        assert (story.job.phase, story.job.boundary) == (JobPhase.HALTING, NEXT)


def test_what_is_not_under_way_does_not_count() -> None:
    story = quiescing()
    for rank in (0, 1):
        story.stands[story.holder(rank)] = Stand(HERE, WorkerPhase.BETWEEN, Point(9))
    story.answer((od.Halt,))
    assert story.job.boundary == HERE
    assert story.job.incidents[-1].target == HERE
    story = quiescing()
    for rank in (0, 1):
        story.stands[story.holder(rank)] = Stand(HERE, WorkerPhase.COMPUTING)
    story.answer((od.Halt,))
    assert story.job.boundary == HERE


def test_without_anything_committed_there_is_no_boundary() -> None:
    for stand, why in (
        (Stand(), "rank 0 holds no state"),
        (Stand(Point(0), WorkerPhase.BETWEEN), "nothing was committed yet"),
        (Stand(HERE, WorkerPhase.FINISHED), "the job is about to end"),
    ):
        story = quiescing()
        for rank in (0, 1):
            story.stands[story.holder(rank)] = stand
        story.answer((od.Halt,))
        assert (story.job.phase, story.job.boundary) == (JobPhase.RELEASING, None)
        assert (story.move.state, story.job.why) == (MoveState.PREPARING, f"called off: {why}")
        assert story.move.again_ms == 1_000


def test_who_does_not_say_how_far_it_is_is_not_waited_for_long() -> None:
    story = quiescing(report_ms=500)
    story.answer((od.Halt,), but=(0,))
    story.wait(499)
    assert story.job.phase is JobPhase.QUIESCING
    story.wait(1)
    assert (story.job.phase, story.move.state) == (JobPhase.RELEASING, MoveState.PREPARING)


def test_who_does_not_come_to_the_boundary_is_not_waited_for_longer_than_agreed() -> None:
    story = halting(ready_ms=2_000)
    story.answer((od.Decide,), but=(0,))
    story.wait(1_999)
    assert story.job.phase is JobPhase.HALTING
    story.wait(1)
    assert (story.job.phase, story.move.state) == (JobPhase.RELEASING, MoveState.PREPARING)
    assert story.move.targets == {} or len(story.move.targets) == 0


def test_who_does_not_go_on_is_asked_again_where_it_stands() -> None:
    story = halting(rewire_ms=700)
    story.hear(ev.MoveWithdrawn(job=JOB, ranks=(Rank(1),), source="ann"))
    story.answer((od.Resume,), but=(0,))
    story.wait(699)
    assert story.job.phase is JobPhase.RELEASING
    story.wait(1)
    assert (story.job.phase, story.job.generation) == (JobPhase.AGREEING, 3)


def test_all_targets_have_to_be_there_before_ranks_change_hands() -> None:
    story = halting(0, 1, spares=2)
    story.answer((od.Decide,))
    first, second = story.move.targets[Rank(0)], story.move.targets[Rank(1)]
    for target in (first, second):
        assert story.job.phase is JobPhase.HALTING
        known: dict[str, Any] = {"job": JOB, "generation": story.job.generation, "worker": target}
        rank = Rank(0 if target == first else 1)
        story.hear(ev.WorkerReady(**known, rank=rank, point=Point(9)))
        assert story.cluster.workers[target].brought is None
        story.hear(ev.WorkerReady(**known, rank=rank, point=NEXT))
    assert (story.job.phase, story.holder(0), story.holder(1)) == (JobPhase.REWIRING, first, second)
    # Nobody survives who has the state: it comes from those who left, and each has its own.
    assert {order.rank: order.sources[0].address for order in story.orders() if isinstance(order, od.Restore)} == {
        0: "at:node-0.0.0", 1: "at:node-0.1.1"
    }  # fmt: skip
    story.settle()
    assert (story.move.state, story.job.incidents[-1].sources) == (MoveState.DONE, (0, 1))


def test_a_fault_after_a_cutover_of_all_ranks_goes_on_from_where_the_leavers_stand() -> None:
    story = cut_over(0, 1, spares=3)
    leavers = [story.job.seats[Rank(rank)].leaver for rank in (0, 1)]
    story.lose(leavers[1])  # type: ignore[arg-type]
    story.lose(story.holder(1), signal=SIGKILL)
    story.answer((od.Interrupt,))
    assert (story.job.phase, story.job.target) == (JobPhase.PREPARING, NEXT)
    story.settle()
    assert (story.job.phase, story.job.target) == (JobPhase.RUNNING, NEXT)


def test_a_leaver_that_has_not_handed_over_yet_is_not_followed() -> None:
    story = halting()
    target = story.move.targets[Rank(1)]
    story.answer((od.Decide,), but=(1,))
    assert not any(isinstance(order, od.CatchUp) for order in story.orders())
    # Ready without a record: the target cannot be brought there.
    story.hear(say(story, ev.WorkerReady, 1, point=NEXT))
    assert not any(isinstance(order, od.CatchUp) for order in story.orders())
    story.hear(ev.MoveWithdrawn(job=JOB, ranks=(Rank(1),), source="ann"))
    assert story.cluster.workers[target].life is Life.FENCING


def test_a_target_that_was_told_nothing_is_kept_for_the_next_boundary() -> None:
    story = halting(0, 1, spares=2, ready_ms=2_000)
    told, kept = story.move.targets[Rank(0)], story.move.targets[Rank(1)]
    story.answer((od.Decide,), but=(1,))
    story.wait(2_000)
    assert story.job.phase is JobPhase.RELEASING
    assert story.cluster.workers[told].life is Life.FENCING
    assert dict(story.move.targets) == {1: kept}


def test_what_the_target_joined_with_is_what_it_needs() -> None:
    story = halting()
    target = story.move.targets[Rank(1)]
    story.hear(ev.WorkerJoined(worker=target, job=JOB, rank=Rank(1), shard="other"))
    story.answer((od.Decide,))
    story.answer((od.CatchUp,))
    seat = story.job.seats[Rank(1)]
    assert (seat.shard, seat.joined, seat.assigned_in, seat.newcomer) == ("other", True, 3, True)


def test_the_cutovers_of_the_last_hour_are_kept() -> None:
    story = running(spares=1, slots=4)
    for at, kept in ((0, (0,)), (1_000, (0, 1_000)), (3_600_000, (1_000, 3_600_000))):
        story.wait(at - story.now_ms)
        story.hear(asked(1))
        story.settle()
        assert story.job.cutovers == kept
        story.train(Point(len(story.job.moves) * 10))


def test_a_move_is_progress_and_the_interruption_knows_its_move() -> None:
    story = running(spares=1, slots=4, slot_faults=0)
    story.lose(story.holder(1), signal=SIGKILL)
    story.settle()
    assert story.job.target == HERE
    story.lose(story.holder(1), signal=SIGKILL)
    story.settle()
    assert story.job.fruitless == 1
    story.train(HERE)
    story.hear(asked(1))
    story.settle()
    assert (story.job.fruitless, story.job.target, story.job.trained, story.job.starts) == (0, NEXT, True, 0)
    assert (story.job.incidents[-1].move, story.job.incidents[-1].kind, story.move.incident) == (1, "planned", 3)


def test_a_move_after_which_nothing_was_committed_is_no_progress() -> None:
    story = running(spares=2, slot_faults=0)
    for _ in range(2):
        story.lose(story.holder(1), signal=SIGKILL)
        story.settle()
    before = story.job.fruitless
    story.hear(asked(1))
    story.answer((od.StartWorker,))
    story.answer((od.Assign,))
    for rank in (0, 1):
        story.stands[story.holder(rank)] = Stand(HERE, WorkerPhase.BETWEEN)
    story.settle()
    assert (story.job.target, story.job.fruitless, before > 0) == (HERE, before, True)


# ---------------------------------------------------------------- what is wished


def test_a_wish_is_for_the_holder_of_its_time_and_the_same_again_changes_nothing() -> None:
    story = preparing()
    before = story.cluster
    story.hear(asked(1))
    assert story.cluster == before
    story.hear(asked(1, to="node-0"), asked(7), ev.MoveWithdrawn(job=type(JOB)("x"), ranks=(Rank(1),), source="ann"))
    assert story.cluster == before
    story.lose(story.holder(1), signal=SIGKILL)
    story.settle()
    assert (len(story.job.requests), story.move.state) == (0, MoveState.RECOVERED)


def test_what_is_about_to_fail_comes_before_what_is_planned() -> None:
    story = running(spares=0, slots=2)
    story.hear(asked(0), tainted(slot=1, reason="hot"))
    assert (story.move.number, story.move.ranks, str(story.move.kind)) == (1, (1,), "pre-emptive")
    assert story.move.reason == "node-0/1 is tainted ecc: hot"
    story.hear(cleared(healed=True))
    assert (story.move.ranks, str(story.move.kind), story.move.reason) == ((0,), "planned", "a wish")


def test_a_warning_comes_before_a_plan_for_the_same_place_and_the_older_before_the_newer() -> None:
    story = running(spares=0, slots=2)
    story.hear(tainted(key="b", planned=True))
    story.wait(5)
    story.hear(tainted(key="d"))
    story.wait(5)
    story.hear(tainted(key="c"))
    assert story.move.reason == "node-0/1 is tainted d"


def test_as_many_as_there_is_room_for_leave_a_place_that_is_about_to_fail() -> None:
    story = running(ranks=3, spares=1)
    story.hear(tainted(slot=0), tainted(slot=2))
    assert (story.move.ranks, story.move.state) == ((0,), MoveState.PREPARING)


def test_a_plan_for_which_there_is_room_comes_before_one_for_which_there_is_none() -> None:
    story = running(ranks=3, spares=1)
    story.hear(ev.FreezeSet(source="ann"), asked(0, 1), asked(2))
    assert story.move.ranks == (2,)
    story.hear(ev.FreezeCleared(source="ann"))
    assert (story.move.ranks, story.move.state) == ((2,), MoveState.PREPARING)


def test_a_move_that_was_given_up_rests_and_others_do_not() -> None:
    story = running(ranks=2, spares=1, slot_faults=0)
    story.hear(tainted())
    for _ in range(3):
        story.answer((od.StartWorker,))
        story.lose(story.move.targets[Rank(1)], signal=SIGKILL)
    assert (story.move.state, story.move.ended_ms, story.move.again_ms) == (MoveState.FAILED, 0, 300_000)
    story.answer((od.StartWorker,))
    story.hear(asked(0))
    assert (story.move.ranks, story.move.number) == ((0,), 2)
    story.settle()
    story.wait(299_999)
    assert (story.move.state, story.move.ranks) == (MoveState.DONE, (0,))
    story.wait(1)
    assert (story.move.number, story.move.ranks) == (3, (1,))


def test_a_move_that_was_given_up_is_made_at_once_when_an_operator_asks_again() -> None:
    story = running(ranks=2, spares=1, slot_faults=0)
    story.hear(asked(1))
    for _ in range(3):
        story.answer((od.StartWorker,))
        story.lose(story.move.targets[Rank(1)], signal=SIGKILL)
    story.answer((od.StartWorker,))
    assert (story.move.state, len(story.job.requests)) == (MoveState.FAILED, 0)
    story.hear(asked(1))
    assert (story.move.number, story.move.state) == (2, MoveState.PREPARING)


# ---------------------------------------------------------------- targets


def test_a_target_has_as_long_to_prepare_as_was_agreed() -> None:
    story = running(spares=2, ready_ms=2_000)
    story.wait(100)
    story.hear(asked(1))
    late = story.move.targets[Rank(1)]
    story.wait(1_999)
    assert story.move.tries == 0
    story.wait(1)
    assert (story.move.tries, story.cluster.workers[late].life) == (1, Life.FENCING)
    other = story.move.targets[Rank(1)]
    story.hear(ev.WorkerPrepared(worker=other, note="a note"), ev.WorkerPrepared(worker=other, note="another"))
    assert story.cluster.workers[other].note == "a note"


def test_a_target_on_a_place_that_is_closed_by_now_is_replaced() -> None:
    story = preparing()
    first = story.move.targets[Rank(1)]
    story.hear(tainted(slot=2))
    assert story.cluster.workers[first].life is Life.FENCING
    assert (story.move.tries, story.move.targets[Rank(1)]) == (1, "node-0.3.3")
    story.hear(ev.WorkerPrepared(worker=first))
    assert not story.cluster.workers[first].prepared


def test_what_a_target_raises_is_told_and_does_not_end_the_job() -> None:
    story = preparing()
    target = story.move.targets[Rank(1)]
    said: dict[str, Any] = {"point": None, "signature": "E", "summary": "no device"}
    for kind in ("script", "refused", "undeclared"):
        story.hear(ev.WorkerRaised(worker=target, job=JOB, rank=Rank(1), kind=kind, **said))
    assert (story.job.outcome, story.job.raised) == (None, ())
    assert story.move.story[-1][1] == f"target {target} of rank 1 raised: no device"
    story.lose(target, code=3)
    assert (story.job.last_code, story.job.phase) == (1, JobPhase.RUNNING)


def test_a_cold_move_waits_until_all_have_joined() -> None:
    story = running(spares=1)
    job = story.job
    seat = replace(job.seats[Rank(0)], joined=False)
    story.cluster = story.cluster.with_job(job.with_seat(Rank(0), seat))
    story.hear(asked(1))
    assert story.move.story[-1][1] == "waits: not all ranks have called join()"
    story.hear(say(story, ev.WorkerJoined, 0))
    assert story.move.state is MoveState.PREPARING


def test_no_move_is_allowed_and_any_number_is() -> None:
    for limit, state in ((0, MoveState.WAITING), (1, MoveState.PREPARING), (-1, MoveState.PREPARING)):
        assert preparing(moves_per_hour=limit).move.state is state


def test_a_broken_connection_is_seen_to_before_a_halt_and_within_one() -> None:
    story = preparing()
    story.hear(say(story, ev.CollectiveFailed, 0, summary="reset"))
    story.answer((od.Assign,))
    assert story.job.phase is JobPhase.RUNNING
    story.wait(1_000)
    assert story.job.phase is JobPhase.AGREEING
    story = quiescing()
    story.hear(say(story, ev.CollectiveFailed, 0, summary="reset", generation=story.job.generation - 1))
    story.wait(999)
    assert story.job.phase is JobPhase.QUIESCING
    story.wait(1)
    assert (story.job.phase, story.move.state) == (JobPhase.AGREEING, MoveState.PREPARING)


def test_a_rank_returns_home_when_it_was_away_long_enough_and_nothing_lies_there() -> None:
    story = Story()
    for node in ("node-0", "node-1"):
        story.hear(ev.NodeJoined(node=NodeId(node), incarnation="a", slots=2))
    spec = ev.JobSpec(job=JOB, world_size=2, nproc_per_node=1, nodes=2, spares=1, return_home=True)
    story.hear(ev.JobSubmitted(spec=spec))
    story.settle()
    story.train(HERE)
    story.lose(story.holder(1), signal=SIGKILL)
    story.settle()
    story.hear(asked(1, to="node-0")) if story.holder(1).startswith("node-1") else None
    story.settle()
    assert story.holder(1).startswith("node-0")
    moves = len(story.job.moves)
    story.wait(599_999)
    assert len(story.job.moves) == moves
    story.hear(tainted("node-1", 1, effect=ev.Effect.PREFER_NO_SCHEDULE, ttl_ms=1_000))
    story.wait(1)
    assert len(story.job.moves) == moves
    story.wait(999)
    assert (story.move.reason, story.move.to[Rank(1)]) == ("returns home to node-1", "node-1")
