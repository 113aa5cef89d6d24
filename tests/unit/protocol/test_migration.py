"""Migration: choices and limits of moves in the core, each by itself."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from tests.support.migration import (
    HERE,
    NEXT,
    SIGKILL,
    asked,
    cleared,
    halting,
    on_nodes,
    preparing,
    quiescing,
    tainted,
)
from tests.support.telling import JOB, Stand, Story, running, say
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.events import Effect
from torchrelay.protocol.messages.ids import NodeId, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.moves import MoveKind, MoveState
from torchrelay.protocol.model.roster import Life
from torchrelay.protocol.placement.boundary import HOUR_MS

NODE = NodeId("node-0")


# ---------------------------------------------------------------- incoming workers


def test_a_target_that_was_told_of_another_point_does_not_inherit_when_it_is_too_late_to_ask() -> None:
    story = quiescing(ranks=3, spares=2)
    for rank in (0, 2):
        story.stands[story.holder(rank)] = Stand(HERE, WorkerPhase.GATE, NEXT)
    story.answer((od.Halt,))
    story.answer((od.Decide,), but=(0, 2))
    target, outgoing = story.move.targets[Rank(1)], story.holder(1)
    story.answer((od.Replay,))
    story.hear(ev.WorkerHung(worker=outgoing, evidence="stopped"))
    story.answer((od.Interrupt,))
    assert (story.job.phase, story.job.resume_point) == (JobPhase.PREPARING, HERE)
    records = tuple(ev.PrivateRecord(point, b"private") for point in (HERE, NEXT))
    story.hear(ev.WorkerExited(worker=outgoing, node=NODE, signal=SIGKILL, private=records))
    assert story.holder(1) != target
    story.settle()
    assert story.job.phase is JobPhase.RUNNING


def test_a_target_that_inherits_when_all_have_reported_is_asked_for_no_report() -> None:
    story = preparing()
    target, outgoing = story.move.targets[Rank(1)], story.holder(1)
    story.hear(ev.WorkerPrepared(worker=target))
    story.hear(ev.WorkerHung(worker=outgoing, evidence="stopped"))
    story.answer((od.Interrupt,))
    assert story.job.phase is JobPhase.PREPARING
    story.lose(outgoing, signal=SIGKILL)
    assert story.holder(1) == target
    assert story.job.seats[Rank(1)].assigned_in == story.job.generation


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
    assert (len(story.job.moving.requests), story.move.state) == (0, MoveState.RECOVERED)


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
    assert (story.move.state, len(story.job.moving.requests)) == (MoveState.FAILED, 0)
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
    assert (story.job.outcome, story.job.exceptions.raised) == (None, ())
    assert story.move.story[-1][1] == f"target {target} of rank 1 raised: no device"
    story.lose(target, code=3)
    assert (story.job.exceptions.last_code, story.job.phase) == (1, JobPhase.RUNNING)


def test_a_cold_move_waits_until_all_have_joined() -> None:
    story = running(spares=1)
    job = story.job
    seat = replace(job.seats[Rank(0)], joined=False)
    story.cluster = story.cluster.with_job(job.with_seat(Rank(0), seat))
    story.hear(asked(1))
    assert story.move.story[-1][1] == "waits: not all ranks have called protect()"
    story.hear(say(story, ev.WorkerJoined, 0))
    assert story.move.state is MoveState.PREPARING


def test_no_move_is_allowed_and_any_number_is() -> None:
    for limit, state in ((0, MoveState.WAITING), (1, MoveState.PREPARING), (-1, MoveState.PREPARING)):
        assert preparing(moves_per_hour=limit).move.state is state


def test_a_broken_connection_is_seen_to_before_a_halt_and_within_one() -> None:
    story = preparing()
    story.hear(say(story, ev.CollectiveFailed, 0, summary="reset"))
    story.answer((od.Assign,))
    before = story.job.phase
    story.wait(1_000)
    assert (before, story.job.phase) == (JobPhase.RUNNING, JobPhase.AGREEING)
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
    moves = len(story.job.moving.moves)
    story.wait(599_999)
    assert len(story.job.moving.moves) == moves
    story.hear(tainted("node-1", 1, effect=ev.Effect.PREFER_NO_SCHEDULE, ttl_ms=1_000))
    story.wait(1)
    assert len(story.job.moving.moves) == moves
    story.wait(999)
    assert (story.move.reason, story.move.to[Rank(1)]) == ("returns home to node-1", "node-1")


# ---------------------------------------------------------------- who is asked for, and who is not


def test_ranks_that_are_asked_for_one_after_the_other_are_not_moved_together() -> None:
    story = running(ranks=3, spares=1)
    story.hear(ev.FreezeSet(source="ann"), asked(0), asked(1), asked(2))
    assert len({request.group for request in story.job.moving.requests.values()}) == 3
    assert story.move.ranks == (0,)


def test_a_vacant_rank_is_recovered_and_cannot_be_asked_for() -> None:
    story = running(spares=0, refill=False)
    story.lose(story.holder(1), signal=SIGKILL)
    story.hear(asked(1))
    assert len(story.job.moving.requests) == 0


def test_only_a_target_is_prepared() -> None:
    story = preparing()
    before = story.cluster
    for worker in (WorkerId("nobody"), story.holder(0), WorkerId("node-0.3.3")):
        story.hear(ev.WorkerPrepared(worker=worker))
    assert story.cluster == before
    target = story.move.targets[Rank(1)]
    story.hear(ev.WorkerPrepared(worker=target))
    assert f"target {target} of rank 1 is prepared" in [text for _, text in story.move.story]


def test_a_request_whose_rank_has_moved_by_a_fault_is_forgotten_though_another_is_being_prepared() -> None:
    story = running(ranks=3, spares=2, slots=6)
    story.hear(asked(0), asked(1))
    assert (story.move.ranks, set(story.job.moving.requests)) == ((0,), {0, 1})
    story.lose(story.holder(1), signal=SIGKILL)
    assert (story.job.phase, set(story.job.moving.requests)) == (JobPhase.AGREEING, {0, 1})
    while story.job.phase is not JobPhase.RUNNING:
        story.answer((od.Interrupt, od.Decide, od.Replay, od.Reconfigure, od.Restore, od.Resume))
    assert set(story.job.moving.requests) == {0}
    story = preparing(0, 1, ranks=3, spares=2)
    story.lose(story.holder(1), signal=SIGKILL)
    assert (story.move.ranks, story.move.state) == ((0,), MoveState.PREPARING)
    assert story.move.story[-1][1] == "a fault came first: rank 1 is on node-0/4 now"


def test_who_asks_is_said_once() -> None:
    story = preparing()
    assert story.move.story[0][1] == "a wish (ann)"
    story = running(spares=2)
    story.hear(asked(1, reason="ann wishes it"))
    assert story.move.story[0][1] == "ann wishes it"


def test_a_plan_that_waits_becomes_a_warning_when_its_taint_does() -> None:
    story = running(spares=1)
    story.hear(ev.FreezeSet(source="ann"), tainted(planned=True))
    assert (story.move.kind, story.move.state) == (MoveKind.PLANNED, MoveState.WAITING)
    story.hear(tainted())
    assert (story.move.kind, story.move.number) == (MoveKind.PRE_EMPTIVE, 1)


# ---------------------------------------------------------------- when nothing is moved


def test_the_moves_of_the_last_hour_count_whatever_the_time() -> None:
    story = running(spares=1, slots=4, moves_per_hour=1)
    story.wait(2 * HOUR_MS)
    story.hear(asked(1))
    story.settle()
    story.hear(asked(0))
    assert story.move.story[-1][1] == "waits: 1 moves within the last hour, 1 are allowed (--moves-per-hour)"
    story.wait(HOUR_MS)
    assert story.move.state is MoveState.PREPARING


def test_nobody_is_asked_to_stop_when_the_job_is_about_to_end() -> None:
    story = preparing()
    story.hear(say(story, ev.WorkerFinished, 0))
    story.answer((od.Assign,))
    assert story.cluster.workers[story.move.targets[Rank(1)]].prepared
    assert (story.job.phase, story.move.state) == (JobPhase.RUNNING, MoveState.PREPARING)


def test_how_a_move_ended_of_which_a_fault_has_done_a_part() -> None:
    story = preparing(0, 1, ranks=3, spares=3)
    story.lose(story.holder(1), signal=SIGKILL)
    assert (story.move.ranks, story.move.state) == ((0,), MoveState.PREPARING)
    story.hear(ev.MoveWithdrawn(job=JOB, ranks=(Rank(0),), source="ann"))
    assert story.job.moving.moves[0].state is MoveState.RECOVERED
    story = preparing(0, 1, ranks=3, spares=3)
    story.lose(story.holder(1), signal=SIGKILL)
    story.hear(ev.FreezeSet(source="ann"))
    assert (story.job.phase, story.move.state) == (JobPhase.AGREEING, MoveState.CALLED_OFF)


def test_a_boundary_is_called_off_when_one_of_two_ranks_need_not_move_any_more() -> None:
    story = halting(0, 1, spares=2)
    story.hear(ev.MoveWithdrawn(job=JOB, ranks=(Rank(1),), source="ann"))
    assert (story.job.phase, story.move.ranks) == (JobPhase.RELEASING, (0,))


# ---------------------------------------------------------------- targets that are of no use


def test_a_target_that_hangs_is_replaced_before_its_end_is_seen() -> None:
    story = preparing()
    first = story.move.targets[Rank(1)]
    story.hear(ev.WorkerHung(worker=first, evidence="stopped"))
    assert (story.move.tries, story.move.targets[Rank(1)]) == (1, "node-0.3.3")
    assert f"target {first} of rank 1 is lost" in [text for _, text in story.move.story]


def test_why_a_target_was_of_no_use_is_told() -> None:
    story = preparing()
    first = story.move.targets[Rank(1)]
    story.hear(tainted(slot=2))
    assert f"the place of target {first} is tainted by now" in [text for _, text in story.move.story]
    story = preparing(ready_ms=2_000)
    first = story.move.targets[Rank(1)]
    story.wait(2_000)
    assert f"target {first} of rank 1 was not prepared in time" in [text for _, text in story.move.story]


def test_who_is_prepared_waits_for_a_slower_target() -> None:
    story = preparing(0, 1, spares=3, ready_ms=2_000)
    first = story.move.targets[Rank(0)]
    story.hear(ev.WorkerPrepared(worker=first))
    story.wait(2_000)
    assert (story.move.targets[Rank(0)], story.move.tries) == (first, 1)


def test_a_target_has_time_while_a_fault_is_dealt_with() -> None:
    story = preparing(ranks=3, spares=2, ready_ms=2_000)
    target = story.move.targets[Rank(1)]
    story.lose(story.holder(0), signal=SIGKILL)
    while story.job.phase is not JobPhase.RECONFIGURING:
        story.answer((od.Interrupt, od.Decide, od.Replay))
    story.wait(2_000)
    assert (story.job.phase, story.move.targets[Rank(1)], story.move.tries) == (JobPhase.RECONFIGURING, target, 0)


def test_a_place_that_is_used_last_is_no_targets_if_there_is_another() -> None:
    story = running(spares=2)
    story.hear(tainted(slot=2, effect=Effect.PREFER_NO_SCHEDULE), asked(1))
    assert story.move.targets[Rank(1)] == "node-0.3.3"


def test_a_spare_on_a_closed_place_is_no_room() -> None:
    story = running(spares=1)
    story.hear(tainted(slot=2, effect=Effect.NO_SCHEDULE), asked(1))
    assert story.move.story[-1][1] == "waits: 1 worker needed, there is room for 0"
    assert not any(isinstance(order, od.Fence) for order in story.orders())


def test_a_move_whose_room_is_gone_waits_again() -> None:
    story = preparing(spares=1, refill=False)
    story.lose(story.move.targets[Rank(1)], signal=SIGKILL)
    said = [text for _, text in story.move.story]
    assert (story.move.state, said[-2:]) == (
        MoveState.WAITING,
        ["waits: no room for rank 1 any more", "waits: 1 worker needed, there is room for 0"],
    )


def test_who_thinks_of_another_node_gives_up_the_target_that_was_being_prepared() -> None:
    story = on_nodes(3, 2, nproc_per_node=2, spares=2)
    story.hear(asked(1, to="node-1"))
    first = story.move.targets[Rank(1)]
    assert first.startswith("node-1")
    story.hear(asked(1, to="node-2"))
    assert story.cluster.workers[first].life is Life.FENCING
    assert (story.move.to[Rank(1)], story.move.tries) == ("node-2", 0)
    assert "rank 1 is to go to node-2" in [text for _, text in story.move.story]
    assert story.move.targets[Rank(1)].startswith("node-2")


def test_nobody_is_asked_to_stop_before_every_rank_has_a_target() -> None:
    """There is a spare elsewhere, and one on a place of the wanted node that is closed: neither is of use."""
    story = on_nodes(2, 3, nproc_per_node=2, spares=1)
    story.hear(tainted(slot=2, effect=Effect.NO_SCHEDULE))
    story.settle()
    story.hear(cleared(slot=2), tainted("node-1", 0, effect=Effect.NO_SCHEDULE), asked(1, to="node-1"))
    assert (story.job.phase, story.move.state) == (JobPhase.RUNNING, MoveState.PREPARING)
