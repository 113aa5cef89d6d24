"""Decisions: every choice of the core by itself, at its limits."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from tests.support.migration import SIGKILL, asked, cut_over, on_nodes, preparing, tainted
from tests.support.seats import COMPUTING, GATE, HERE, NEXT, reported, seats
from tests.support.telling import JOB, Story, running
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.events import Effect, JobSpec
from torchrelay.protocol.messages.ids import START, NodeId, Point, Rank, WorkerId
from torchrelay.protocol.messages.orders import Verdict
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.moves import MoveKind, MoveState, Taint
from torchrelay.protocol.model.roster import Life, Seat, Worker, natural_key
from torchrelay.protocol.placement.policy import (
    choose_resume_point,
    choose_spare,
    is_cordoned,
    judge_report,
    slot_order,
)
from torchrelay.protocol.recovery.placing import target_of
from torchrelay.protocol.rules.migration import AWAY_MS, Wish, fit, wishes_to_move

SPEC = JobSpec(job=JOB, world_size=4, nproc_per_node=2)


# ---------------------------------------------------------------- spares


def spare(name: str, life: Life, node: str = "node-1") -> Worker:
    return Worker(WorkerId(name), NodeId(node), 0, JOB, life, 0)


def chosen(*spares: Worker, near: str = "node-1") -> str | None:
    best, reason = choose_spare(spares, Rank(3), near=NodeId(near))
    assert "rank 3" in reason
    return best.worker if best is not None else None


def test_a_spare_with_a_slot_of_its_own_comes_before_a_guest() -> None:
    guest, other = spare("a", Life.WARM), spare("b", Life.WARM)
    best, _ = choose_spare(
        [guest, other], Rank(3), near=None, host=lambda one: spare("host", Life.WARM) if one == guest else None
    )
    assert best == other


def test_a_warm_spare_comes_before_a_started_one_and_that_before_a_starting_one() -> None:
    starting, started, warm = spare("a", Life.STARTING), spare("b", Life.STARTED), spare("c", Life.WARM)
    assert chosen(starting, started, warm) == "c"
    assert chosen(starting, started) == "b"
    assert chosen(starting) == "a"


def test_a_spare_that_is_to_be_ended_is_none() -> None:
    assert chosen(spare("a", Life.FENCING)) is None
    assert chosen() is None


def test_a_rank_stays_on_its_node_if_it_can() -> None:
    here, there = spare("b", Life.WARM, "node-1"), spare("a", Life.WARM, "node-2")
    assert chosen(here, there, near="node-1") == "b"
    assert chosen(here, there, near="node-2") == "a"
    assert chosen(spare("b", Life.STARTED, "node-1"), there, near="node-1") == "a"


def test_of_equal_spares_the_first_by_name_is_taken() -> None:
    assert chosen(spare("w.10", Life.WARM), spare("w.9", Life.WARM)) == "w.9"


def test_names_are_sorted_as_people_do() -> None:
    assert sorted(["node-10", "node-2", "node-b", "node-a"], key=natural_key) == [
        "node-2",
        "node-10",
        "node-a",
        "node-b",
    ]
    assert sorted(["10", "x", "9"], key=natural_key) == ["9", "10", "x"]


def test_it_is_said_when_a_spare_is_taken_whose_place_is_to_be_used_last() -> None:
    warm = spare("warm", Life.WARM)
    taken = "rank 3 moves to warm spare warm on node-1"
    assert choose_spare([warm], Rank(3), near=None)[1] == taken
    last = choose_spare([warm], Rank(3), near=None, last=lambda _: True)
    assert last[1] == f"{taken}, though its place is to be used last"


# ---------------------------------------------------------------- incoming workers


def test_a_target_that_cannot_be_used_is_no_incoming_for() -> None:
    story = preparing()
    target = story.move.targets[Rank(1)]
    found = target_of(story.cluster, story.job, Rank(1))
    assert found is not None
    assert found.worker == target
    assert target_of(story.cluster, story.job, Rank(0)) is None
    assert target_of(story.cluster.fence(target), story.job, Rank(1)) is None
    full = Taint(found.node, found.slot, "full", "", Effect.NO_SCHEDULE, "", "ann", 0)
    lying = replace(story.cluster, taints=story.cluster.taints.put((full.node, full.slot, full.key), full))
    assert target_of(lying, story.job, Rank(1)) is None


def test_an_incoming_for_has_joined_if_it_said_so_and_is_asked_where_it_stands_if_it_was_prepared() -> None:
    for shard, prepared, known in (
        ("other", True, (True, "other", True)), ("", True, (True, "all", True)),
        ("other", False, (True, "other", False)), ("", False, (False, "all", False)),
    ):  # fmt: skip
        story = preparing()
        target = story.move.targets[Rank(1)]
        if shard:
            story.hear(ev.WorkerJoined(worker=target, job=JOB, rank=Rank(1), shard=shard))
        if prepared:
            story.hear(ev.WorkerPrepared(worker=target))
        story.lose(story.holder(1), signal=SIGKILL)
        seat = story.job.seats[Rank(1)]
        assert seat.worker == target
        assert (seat.joined, seat.shard, seat.assigned_in < story.job.generation) == known


# ---------------------------------------------------------------- the target and the verdicts


def test_the_target_is_the_newest_point_that_a_survivor_committed() -> None:
    assert choose_resume_point(seats(reported(HERE), reported(NEXT), Seat())) == (
        NEXT, "step 8 is committed on rank 1: no rank goes back behind it"
    )  # fmt: skip
    assert choose_resume_point(seats(reported(NEXT), reported(NEXT)))[1].startswith("step 8 is committed on rank 0")


def test_without_state_there_is_no_target() -> None:
    assert choose_resume_point(seats(Seat(), reported(None))) == (None, "no survivor holds any state")
    assert choose_resume_point(seats(reported(START), reported(None))) == (
        START, "nothing was committed yet: all workers start again"
    )  # fmt: skip


def test_what_was_decided_holds_as_long_as_somebody_can_get_there() -> None:
    waiting = reported(HERE, GATE, NEXT)
    target, why = choose_resume_point(seats(waiting, reported(HERE)), NEXT)
    assert (target, "is lost since" in why) == (NEXT, True)
    assert choose_resume_point(seats(reported(HERE, COMPUTING, NEXT)), NEXT)[0] == HERE
    assert choose_resume_point(seats(reported(HERE, GATE, Point(9))), NEXT)[0] == HERE
    assert choose_resume_point(seats(waiting), None)[0] == HERE
    there = choose_resume_point(seats(reported(NEXT), waiting), NEXT)
    assert (there[0], "is committed on rank 0" in there[1]) == (NEXT, True)
    assert choose_resume_point(seats(reported(Point(9)), waiting), NEXT)[0] == Point(9)


def test_a_survivor_redoes_or_rolls_forward_or_cannot_come() -> None:
    assert judge_report(reported(HERE), HERE) is Verdict.REDO
    assert judge_report(reported(HERE, GATE, NEXT), HERE) is Verdict.REDO
    assert judge_report(reported(HERE, GATE, NEXT), NEXT) is Verdict.ROLL_FORWARD
    assert judge_report(reported(HERE, COMPUTING, NEXT), NEXT) is None
    assert judge_report(reported(HERE, GATE, NEXT), Point(9)) is None
    assert judge_report(reported(None), HERE) is None
    assert judge_report(reported(None, GATE, HERE), HERE) is None
    assert judge_report(Seat(), HERE) is None


# ---------------------------------------------------------------- places


def test_ranks_fill_the_first_slots_of_each_node_and_spares_the_others() -> None:
    places = [(NodeId("node-10"), 0), (NodeId("node-2"), 2), (NodeId("node-2"), 1), (NodeId("node-2"), 0)]
    ordered = sorted(places, key=lambda place: slot_order(SPEC, *place))
    assert ordered == [("node-2", 0), ("node-2", 1), ("node-10", 0), ("node-2", 2)]


def test_a_slot_is_cordoned_while_its_faults_are_recent() -> None:
    spec = JobSpec(job=JOB, world_size=1, nproc_per_node=1, slot_faults=2, slot_window_ms=1_000)
    assert not is_cordoned(spec, (500,), 600)
    assert is_cordoned(spec, (0, 900), 1_000)
    assert not is_cordoned(spec, (0, 900), 1_001)
    assert is_cordoned(spec, (0, 0, 900, 901), 1_500)


def test_no_limit_means_no_cordon_and_no_refill_means_one_fault() -> None:
    free = JobSpec(job=JOB, world_size=1, nproc_per_node=1, slot_faults=0)
    assert not is_cordoned(free, (1,) * 16, 1)
    once = JobSpec(job=JOB, world_size=1, nproc_per_node=1, refill=False, slot_faults=0)
    assert not is_cordoned(once, (), 1)
    assert is_cordoned(once, (1,), 10_000_000)


# ---------------------------------------------------------------- room


def wish(to: str | None = None) -> Wish:
    return Wish(MoveKind.PLANNED, "a wish", "ann", None if to is None else NodeId(to))


def fitting(story: Story, *to: str | None) -> list[Rank]:
    wanted = {Rank(rank): wish(node) for rank, node in enumerate(to)}
    return fit(story.cluster, story.job, list(wanted), wanted)


def test_ranks_that_go_to_a_node_need_room_on_it() -> None:
    story = on_nodes(2, 4, nproc_per_node=4, spares=0)
    story.hear(*(tainted("node-1", slot, effect=Effect.NO_SCHEDULE) for slot in (2, 3)))
    assert fitting(story, "node-1", "node-1", "node-1") == [0, 1]
    assert fitting(story, "node-1", "node-0", "node-1", "node-0") == [0, 1, 2, 3]
    assert fitting(story, None, None, None, None, None) == [0, 1, 2, 3]


def test_who_can_go_to_one_node_only_has_its_room_before_who_can_go_anywhere() -> None:
    story = on_nodes(2, 2, nproc_per_node=2, spares=0)
    story.hear(tainted("node-1", 1, effect=Effect.NO_SCHEDULE))
    assert fitting(story, None, "node-1") == [1]


def test_of_what_is_about_to_fail_as_much_is_moved_as_there_is_room_for() -> None:
    story = running(ranks=3, spares=1)
    story.hear(ev.FreezeSet(source="ann"), asked(1), tainted(slot=0), tainted(slot=2))
    assert (story.move.kind, story.move.ranks) == (MoveKind.PRE_EMPTIVE, (0,))


def test_of_warnings_of_one_time_the_first_key_counts() -> None:
    story = running(spares=0, slots=2)
    story.hear(ev.FreezeSet(source="ann"), tainted(key="b"), tainted(key="a"))
    assert story.move.reason == "node-0/1 is tainted a"


def test_nodes_that_are_to_be_emptied_are_emptied_one_after_the_other() -> None:
    story = on_nodes(3, 1, nproc_per_node=1, nodes=2, spares=1)
    story.hear(ev.FreezeSet(source="ann"), *(tainted(node, None, planned=True) for node in ("node-0", "node-1")))
    assert story.move.ranks == (0,)
    story.hear(ev.FreezeCleared(source="ann"))
    assert (story.move.ranks, story.move.state) == ((0,), MoveState.PREPARING)


# ---------------------------------------------------------------- what is about to fail goes first


def test_a_plan_that_is_being_prepared_makes_way_for_a_warning() -> None:
    story = preparing(0, spares=1)
    target = story.move.targets[Rank(0)]
    story.hear(tainted())
    assert story.cluster.workers[target].life is Life.FENCING
    assert (story.move.kind, story.move.ranks, story.move.state) == (MoveKind.PRE_EMPTIVE, (1,), MoveState.WAITING)
    assert (len(story.move.targets), story.move.tries) == (0, 0)
    said = [text for _, text in story.move.story]
    assert "waits: a place is about to fail, and what is on it goes first" in said
    for _ in range(4):
        story.answer((od.Fence, od.StartWorker))
    assert story.move.state is MoveState.PREPARING


def test_a_plan_that_waits_does_not_hold_up_a_warning() -> None:
    story = running(spares=1)
    story.hear(ev.FreezeSet(source="ann"), asked(0))
    story.hear(tainted(), ev.FreezeCleared(source="ann"))
    assert (story.move.kind, story.move.ranks, story.move.state) == (MoveKind.PRE_EMPTIVE, (1,), MoveState.PREPARING)


def test_a_plan_makes_way_when_training_goes_on_and_not_in_a_recovery() -> None:
    story = preparing(0, ranks=3, spares=2)
    target = story.move.targets[Rank(0)]
    story.lose(story.holder(1), signal=SIGKILL)
    story.hear(tainted(slot=2))
    assert (story.job.phase, story.move.targets[Rank(0)]) == (JobPhase.AGREEING, target)
    story.answer((od.Interrupt,))
    assert story.cluster.workers[target].life is not Life.FENCING


def targetless(**fields: Any) -> Story:
    """A plan for rank 0 whose target is lost in the recovery of rank 1, in which rank 2's place is tainted."""
    story = preparing(0, ranks=3, **fields)
    story.lose(story.holder(1), signal=SIGKILL)
    story.lose(story.move.targets[Rank(0)], signal=SIGKILL)
    story.hear(tainted(slot=2))
    for kind in (od.Assign, od.Interrupt, od.Decide, od.Replay, od.Reconfigure, od.Restore, od.Resume):
        assert story.job.phase is not JobPhase.RUNNING
        assert (story.move.state, len(story.move.targets)) == (MoveState.PREPARING, 0)
        story.answer((kind,))
    return story


def test_room_goes_to_a_warning_and_not_first_to_a_plan() -> None:
    story = targetless(spares=3)
    assert (story.move.kind, story.move.ranks) == (MoveKind.PRE_EMPTIVE, (2,))
    assert set(story.move.targets) == {2}
    assert not any(isinstance(order, od.Fence) for order in story.orders())


def test_without_any_room_it_is_room_that_a_plan_is_said_to_wait_for() -> None:
    story = targetless(spares=2, refill=False)
    said = [text for _, text in story.move.story]
    assert "waits: no room for rank 0 any more" in said
    assert not any("goes first" in text for text in said)


# ---------------------------------------------------------------- the way home


def away(*, waited_ms: int = 0, **fields: Any) -> Story:
    """Rank 1, which began on node-1, was moved to node-2 after a while."""
    story = on_nodes(3, 1, **({"nproc_per_node": 1, "nodes": 2, "spares": 1, "return_home": True} | fields))
    story.wait(waited_ms)
    story.hear(asked(1))
    story.settle()
    story.train(Point(7))
    assert story.cluster.workers[story.holder(1)].node == "node-2"
    return story


def test_nobody_goes_home_who_is_not_to() -> None:
    story = away(return_home=False)
    story.wait(10 * AWAY_MS)
    assert (wishes_to_move(story.cluster, story.job), len(story.job.moving.moves)) == ({}, 1)


def test_the_time_away_begins_with_the_move() -> None:
    story = away(waited_ms=10 * AWAY_MS)
    story.wait(AWAY_MS - 1)
    assert wishes_to_move(story.cluster, story.job) == {}
    story.wait(1)
    assert (story.move.reason, story.move.state) == ("returns home to node-1", MoveState.PREPARING)


def test_the_only_room_at_home_is_that_of_the_move_which_takes_it() -> None:
    story = away()
    story.wait(AWAY_MS)
    target = story.move.targets[Rank(1)]
    assert target.startswith("node-1")
    story.settle()
    assert (story.holder(1), story.move.state) == (target, MoveState.DONE)


def test_nobody_goes_home_where_there_is_no_room() -> None:
    story = away(refill=False)
    spare = story.cluster.spares(JOB)[0]
    story.lose(spare.worker, signal=SIGKILL)
    story.wait(AWAY_MS)
    assert wishes_to_move(story.cluster, story.job) == {}
    # Another move is under way, to somewhere else.
    story.hear(ev.NodeJoined(node=NodeId("node-3"), incarnation="a", slots=1), asked(0, to="node-3"))
    assert (story.move.ranks, story.move.state, set(wishes_to_move(story.cluster, story.job))) == (
        (0,), MoveState.PREPARING, {0}
    )  # fmt: skip


def test_a_way_home_that_waits_is_called_off_when_its_room_is_gone() -> None:
    story = away(refill=False)
    story.hear(ev.FreezeSet(source="ann"))
    story.wait(AWAY_MS)
    assert (story.move.reason, story.move.state) == ("returns home to node-1", MoveState.WAITING)
    story.lose(story.cluster.spares(JOB)[0].worker, signal=SIGKILL)
    assert story.move.state is MoveState.CALLED_OFF


def test_the_way_home_ends_with_the_loss_of_home() -> None:
    story = away()
    story.wait(AWAY_MS)
    story.hear(ev.NodeLost(node=NodeId("node-1"), incarnation="a", reason="silence"))
    assert (story.move.state, story.move.tries) == (MoveState.CALLED_OFF, 0)


def test_who_is_moved_by_a_fault_on_its_way_home_has_moved() -> None:
    story = on_nodes(4, 1, nproc_per_node=1, nodes=2, spares=2, return_home=True, probation_ms=0)
    story.hear(asked(1))
    for kind in (od.Assign, od.Halt, od.Decide, od.Replay, od.Reconfigure, od.Restore, od.Resume, od.Fence):
        story.answer((kind,))
    assert (story.move.reason, story.move.state) == ("returns home to node-1", MoveState.PREPARING)
    away = story.holder(1)
    story.hear(ev.WorkerHung(worker=away, evidence="stopped"))
    story.lose(story.move.targets[Rank(1)], signal=SIGKILL)
    assert (story.move.tries, len(story.move.targets)) == (1, 0)
    story.lose(away, signal=SIGKILL)
    assert story.holder(1).startswith("node-3")
    assert [move.state for move in story.job.moving.moves] == [MoveState.DONE, MoveState.RECOVERED]


def test_in_a_move_that_has_cut_over_nothing_is_wished_of_the_new_holder() -> None:
    story = cut_over()
    assert set(story.job.moving.requests) == {1}
    assert wishes_to_move(story.cluster, story.job) == {}
