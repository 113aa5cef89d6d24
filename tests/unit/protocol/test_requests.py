"""Requests: what becomes of what an operator asked for when a fault gives a rank to somebody else before its turn."""

from __future__ import annotations

from tests.support.migration import SIGKILL, asked, cleared, cut_over, on_nodes, preparing, tainted
from tests.support.telling import JOB, Story, running
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import NodeId, Rank
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.moves import KEPT_MOVES, Move, MoveKind, MoveState

RECOVERY = (od.Fence, od.Interrupt, od.Decide, od.Replay, od.Reconfigure, od.Restore, od.Resume)


def waiting(*ranks: int, to: str | None = None, **fields: object) -> Story:
    """A job in which nothing is moved, and somebody wishes it: each rank by itself."""
    story = running(**({"ranks": 2, "spares": 1, "moves_per_hour": 0, "slot_faults": 0} | fields))  # type: ignore[arg-type]
    story.wait(5)
    for rank in ranks:
        story.hear(asked(rank, to=to, reason=f"wish {rank}"))
    story.wait(5)
    return story


def lose(story: Story, rank: int) -> None:
    """The holder of a rank is lost, and all are brought to train again."""
    story.lose(story.holder(rank), signal=SIGKILL)
    recover(story)


def recover(story: Story) -> None:
    for _ in range(20):
        if story.job.phase in (JobPhase.RUNNING, JobPhase.QUIESCING):
            return
        for kinds in ((od.StartWorker,), (od.Assign,), RECOVERY):
            story.answer(kinds)
    raise AssertionError(f"it stays {story.job.phase}")


def told(move: Move) -> list[str]:
    return [text for _, text in move.story]


def place(story: Story, rank: int) -> str:
    return story.cluster.workers[story.holder(rank)].place


def incident(story: Story) -> list[str]:
    return [text for _, text in story.job.accounting.incidents[-1].story]


# ---------------------------------------------------------------- the move that was to move the rank waits


def test_a_waiting_move_ends_when_a_fault_has_moved_its_rank() -> None:
    story = waiting(1)
    lose(story, 1)
    assert (place(story, 1), len(story.job.moving.requests)) == ("node-0/2", 0)
    assert (len(story.job.moving.moves), story.move.state, story.move.ended_ms) == (1, MoveState.RECOVERED, 10)
    assert told(story.move)[-1] == "a fault came first: rank 1 is on node-0/2 now"


def test_a_rank_that_comes_back_to_the_slot_it_was_to_leave_is_to_move_yet() -> None:
    story = waiting(1, spares=0)
    first = story.holder(1)
    lose(story, 1)
    assert story.holder(1) != first
    assert (place(story, 1), story.move.state, story.move.ranks) == ("node-0/1", MoveState.WAITING, (1,))
    request = story.job.moving.requests[Rank(1)]
    assert (request.worker, request.node, request.slot) == (story.holder(1), "node-0", 1)
    assert (request.asked_ms, story.move.outgoing_workers[Rank(1)]) == (5, story.holder(1))
    assert told(story.move)[-2:] == [
        "a fault came first: rank 1 is on node-0/1 now, and is to move yet",
        "waits: 0 moves within the last hour, 0 are allowed (--moves-per-hour)",
    ]
    assert "rank 1 is to move yet: it came back to node-0/1" in incident(story)
    lose(story, 1)  # and again
    assert (story.job.moving.requests[Rank(1)].worker, len(story.job.moving.moves)) == (story.holder(1), 1)


def test_a_fault_of_another_rank_changes_nothing_of_what_is_asked_for() -> None:
    story = waiting(1)
    before = story.job.moving.requests
    lose(story, 0)
    assert (story.job.moving.requests, story.move.state) == (before, MoveState.WAITING)
    assert not any("is to move yet" in text for text in incident(story))


def test_the_same_asked_for_later_changes_nothing() -> None:
    story = waiting(1)
    before = story.cluster
    story.wait(5)
    story.hear(asked(1, reason="wish 1"))
    assert story.cluster == before


def test_a_request_that_was_kept_is_fulfilled_by_a_move_when_there_is_room() -> None:
    story = running(ranks=2, spares=0, slots=2, slot_faults=0)
    story.hear(asked(1))
    lose(story, 1)
    assert (story.move.state, place(story, 1)) == (MoveState.WAITING, "node-0/1")
    story.hear(ev.NodeJoined(node=NodeId("node-1"), incarnation="a", slots=1))
    story.settle()
    assert (place(story, 1), story.move.number, story.move.state) == ("node-1/0", 1, MoveState.DONE)
    assert len(story.job.moving.requests) == 0


def test_a_waiting_move_goes_on_without_the_rank_that_a_fault_has_moved() -> None:
    story = running(ranks=3, spares=1, moves_per_hour=0)
    story.hear(asked(0, 1))
    before = story.holder(1)
    lose(story, 1)
    assert (story.move.ranks, story.move.state, set(story.job.moving.requests)) == ((0,), MoveState.WAITING, {0})
    assert "rank 1 need not move any more: a fault came first" in told(story.move)
    assert dict(story.move.outgoing_workers) == {1: before, 0: story.holder(0)}
    story.hear(ev.MoveWithdrawn(job=JOB, ranks=(Rank(0),), source="ann"))
    assert (story.move.state, len(story.job.moving.moves)) == (MoveState.RECOVERED, 1)
    assert told(story.move)[-1] == "a fault came first: rank 1 is on node-0/3 now"


def test_a_waiting_move_of_which_nothing_is_left_is_not_made_one_for_others() -> None:
    story = waiting(0, 1)
    lose(story, 0)
    first, second = story.job.moving.moves
    assert (first.state, first.ranks, first.reason) == (MoveState.RECOVERED, (0,), "wish 0")
    assert (second.state, second.ranks, second.reason) == (MoveState.WAITING, (1,), "wish 1")


def test_a_move_that_nobody_wants_any_more_becomes_one_for_others_when_nothing_has_failed() -> None:
    story = waiting(0, 1)
    story.hear(ev.MoveWithdrawn(job=JOB, ranks=(Rank(0),), source="ann"))
    assert (story.move.number, story.move.ranks, story.move.state) == (1, (1,), MoveState.WAITING)
    assert dict(story.move.outgoing_workers) == {1: story.holder(1)}
    story.hear(ev.MoveWithdrawn(job=JOB, ranks=(Rank(1),), source="ann"))
    assert (told(story.move)[-1], story.move.state) == ("the request was withdrawn", MoveState.CALLED_OFF)


def test_a_move_for_a_taint_ends_when_a_fault_has_moved_its_rank() -> None:
    story = waiting()
    story.hear(tainted())
    lose(story, 1)
    assert (story.move.state, told(story.move)[-1]) == (
        MoveState.RECOVERED,
        "a fault came first: rank 1 is on node-0/2 now",
    )


def test_a_move_for_taints_goes_on_without_the_rank_that_a_fault_has_moved() -> None:
    story = waiting(ranks=3, spares=2)
    story.hear(tainted(slot=0), tainted(slot=1))
    assert set(story.move.ranks) == {0, 1}
    lose(story, 1)
    assert (len(story.job.moving.moves), story.move.ranks, story.move.state) == (1, (0,), MoveState.WAITING)


def test_what_is_left_of_a_move_is_judged_by_what_is_wanted_still() -> None:
    story = running(ranks=3, spares=2, moves_per_hour=0)
    story.hear(asked(0, 1), asked(2))
    assert story.move.ranks == (0, 1)
    story.lose(story.holder(1), signal=SIGKILL)
    story.hear(ev.MoveWithdrawn(job=JOB, ranks=(Rank(0),), source="ann"))
    recover(story)
    assert [(move.state, move.ranks) for move in story.job.moving.moves] == [
        (MoveState.RECOVERED, (0, 1)),
        (MoveState.WAITING, (2,)),
    ]


def test_a_rank_of_several_that_has_to_leave_its_new_place_too_is_moved_by_another_move() -> None:
    story = running(ranks=3, spares=1, moves_per_hour=0)
    story.hear(asked(0, 1))
    before = story.holder(1)
    story.lose(before, signal=SIGKILL)
    story.hear(tainted(slot=None, planned=True))
    recover(story)
    first, second = story.job.moving.moves
    assert (first.state, first.outgoing_workers[Rank(1)], first.ended_ms) == (MoveState.RECOVERED, before, story.now_ms)
    assert told(first)[-1] == "a fault came first: rank 1 is on node-0/3 now; rank 0 is to move yet"
    assert (second.state, second.ranks) == (MoveState.WAITING, (0, 1, 2))
    assert set(story.job.moving.requests) == {0}


def test_a_rank_that_has_to_leave_its_new_place_too_is_moved_by_another_move() -> None:
    story = waiting(1)
    story.lose(story.holder(1), signal=SIGKILL)
    story.hear(tainted(slot=2))
    recover(story)
    assert [(move.state, str(move.kind)) for move in story.job.moving.moves] == [
        (MoveState.RECOVERED, "planned"),
        (MoveState.WAITING, "pre-emptive"),
    ]


def test_a_move_by_halves_whose_other_half_was_withdrawn_says_who_has_gone() -> None:
    story = cut_over(0, 1, ranks=3, spares=3, slots=8, slot_faults=0)
    story.lose(story.holder(1))  # the target: rank 1 goes back, and there is no room for another try
    held = {story.cluster.workers[story.holder(rank)].slot for rank in range(3)}
    closed = ev.Effect.NO_SCHEDULE
    story.hear(*(tainted(slot=slot, effect=closed) for slot in range(8) if slot not in held))
    recover(story)
    assert (story.move.state, story.move.ranks, story.move.moved) == (MoveState.WAITING, (1,), (0,))
    story.lose(story.holder(2), signal=SIGKILL)
    story.hear(ev.MoveWithdrawn(job=JOB, ranks=(Rank(1),), source="ann"))
    story.hear(tainted(slot=story.cluster.workers[story.holder(0)].slot))
    recover(story)
    first, second = story.job.moving.moves
    assert (first.state, told(first)[-1]) == (MoveState.RECOVERED, "rank 0 has gone")
    assert (second.state, second.ranks) == (MoveState.WAITING, (0,))


def test_a_waiting_move_that_makes_way_for_a_warning_forgets_whom_it_was_to_move() -> None:
    story = waiting(1, spares=0)
    story.lose(story.holder(1), signal=SIGKILL)
    story.hear(tainted(slot=0))
    recover(story)
    assert (set(story.job.moving.requests), story.move.ranks, set(story.move.outgoing_workers)) == ({1}, (0,), {0})


# ---------------------------------------------------------------- no move has come to it


def test_a_request_that_a_fault_has_fulfilled_before_its_turn_leaves_a_move_that_tells_it() -> None:
    story = waiting(0, 1)
    before = story.holder(1)
    story.wait(20)
    lose(story, 1)
    record, waits = story.job.moving.moves
    assert (record.number, waits.number, story.job.moving.named, story.job.open_move) == (2, 1, 2, waits)
    assert (record.state, record.kind, record.ranks) == (MoveState.RECOVERED, MoveKind.PLANNED, (1,))
    assert (record.reason, dict(record.outgoing_workers), dict(record.to)) == ("wish 1", {1: before}, {})
    assert (record.asked_ms, record.ended_ms) == (5, 30)
    assert record.story == ((5, "wish 1 (ann)"), (30, "a fault came first: rank 1 has gone from node-0/1 to node-0/2"))
    assert (set(story.job.moving.requests), waits.ranks, waits.state) == ({0}, (0,), MoveState.WAITING)


def test_what_is_asked_for_after_that_has_a_number_of_its_own() -> None:
    story = waiting(0, 1)
    lose(story, 1)
    story.hear(ev.MoveWithdrawn(job=JOB, ranks=(Rank(0),), source="ann"), asked(0))
    assert [move.number for move in story.job.moving.moves] == [2, 1, 3]


def test_ranks_that_were_asked_for_together_leave_one_move() -> None:
    story = waiting(0, ranks=3, spares=2)
    story.hear(asked(1, 2, reason="both"))
    story.lose(story.holder(2), signal=SIGKILL)
    lose(story, 1)
    record = story.job.moving.moves[0]
    assert (len(story.job.moving.moves), record.ranks, set(record.outgoing_workers)) == (2, (1, 2), {1, 2})
    assert told(record)[-1].startswith("a fault came first: rank 1 has gone from node-0/1 to node-0/")
    assert "; rank 2 has gone from node-0/2 to node-0/" in told(record)[-1]


def test_ranks_that_were_asked_for_one_by_one_leave_a_move_each() -> None:
    story = waiting(0, 1, 2, ranks=3, spares=2)
    story.lose(story.holder(2), signal=SIGKILL)
    lose(story, 1)
    assert [(move.number, move.ranks) for move in story.job.moving.moves] == [(2, (1,)), (3, (2,)), (1, (0,))]


def test_only_the_newest_moves_are_kept() -> None:
    story = waiting(0, spares=3)
    for _ in range(KEPT_MOVES - 1):
        story.hear(ev.MoveWithdrawn(job=JOB, ranks=(Rank(0),), source="ann"), asked(0))
    assert (len(story.job.moving.moves), story.move.number) == (KEPT_MOVES, KEPT_MOVES)
    story.hear(asked(1, reason="another"))
    lose(story, 1)
    assert (len(story.job.moving.moves), story.job.moving.moves[0].number) == (KEPT_MOVES, 2)
    assert [move.number for move in story.job.moving.moves[-2:]] == [KEPT_MOVES + 1, KEPT_MOVES]


# ---------------------------------------------------------------- to a node


def test_a_request_for_a_node_is_fulfilled_there_only() -> None:
    story = on_nodes(3, 2, nproc_per_node=2, spares=1, moves_per_hour=0)
    story.hear(asked(0), asked(1, to="node-2"))
    story.hear(tainted("node-2", None, effect=ev.Effect.NO_SCHEDULE))
    story.settle()
    lose(story, 1)
    assert place(story, 1).startswith("node-1")
    request = story.job.moving.requests[Rank(1)]
    assert (request.worker, f"{request.node}/{request.slot}", request.to) == (story.holder(1), "node-1/0", "node-2")
    assert f"rank 1 is to move yet: it is on {place(story, 1)}" in incident(story)
    story.hear(cleared("node-2", None))
    story.hear(*(tainted(node, None, effect=ev.Effect.NO_SCHEDULE) for node in ("node-0", "node-1")))
    story.settle()
    lose(story, 1)
    assert (place(story, 1).startswith("node-2"), set(story.job.moving.requests)) == (True, {0})
    record = next(move for move in story.job.moving.moves if move.state is MoveState.RECOVERED)
    assert (record.ranks, dict(record.to)) == ((1,), {1: "node-2"})


# ---------------------------------------------------------------- when it is weighed


def test_what_a_replacement_that_is_lost_in_its_turn_would_have_fulfilled_is_not_fulfilled() -> None:
    story = waiting(1)
    story.lose(story.holder(1), signal=SIGKILL)
    assert place(story, 1) == "node-0/2"
    story.answer((od.StartWorker, od.Interrupt))
    story.hear(tainted(slot=2, effect=ev.Effect.NO_SCHEDULE))
    lose(story, 1)
    assert (place(story, 1), set(story.job.moving.requests), story.move.state) == ("node-0/1", {1}, MoveState.WAITING)


def test_when_all_start_again_requests_are_weighed_like_after_any_fault() -> None:
    story = waiting(0, 1, spares=0, max_restarts=1)
    before = story.holder(0), story.holder(1)
    story.hear(ev.FreezeSet(source="ann"))
    story.lose(story.holder(1), signal=SIGKILL)
    assert (story.job.phase, story.job.moving.moves[0].state, len(story.job.moving.requests)) == (
        JobPhase.STARTING,
        MoveState.CALLED_OFF,
        2,
    )
    story.settle()
    assert (place(story, 0), place(story, 1), set(story.job.moving.requests)) == ("node-0/0", "node-0/1", {0, 1})
    assert story.holder(0) not in before
    story.hear(ev.FreezeCleared(source="ann"))
    assert (story.move.number, story.move.ranks, story.move.state) == (2, (0,), MoveState.WAITING)


def test_a_request_that_a_start_from_a_checkpoint_fulfils_is_told_though_its_move_was_called_off() -> None:
    story = waiting(1, spares=2, max_restarts=1)
    story.hear(ev.FreezeSet(source="ann"), tainted(slot=1, effect=ev.Effect.NO_SCHEDULE))
    story.lose(story.holder(1), signal=SIGKILL)
    story.settle()
    assert place(story, 1) != "node-0/1"
    assert [(move.number, move.state) for move in story.job.moving.moves] == [
        (1, MoveState.CALLED_OFF),
        (2, MoveState.RECOVERED),
    ]


def test_what_a_move_fulfils_leaves_no_other_move() -> None:
    story = cut_over(1)
    story.settle()
    assert (len(story.job.moving.requests), [move.state for move in story.job.moving.moves]) == (0, [MoveState.DONE])


def test_what_a_fault_fulfils_while_its_target_is_prepared_leaves_no_other_move() -> None:
    story = preparing(1)
    lose(story, 1)
    assert not story.job.moving.requests
    assert [move.state for move in story.job.moving.moves] == [MoveState.RECOVERED]


def test_a_move_that_does_not_go_where_it_was_asked_for_does_not_fulfil_the_request() -> None:
    story = on_nodes(3, 2, nproc_per_node=2, spares=1)
    story.hear(tainted("node-2", None, effect=ev.Effect.NO_SCHEDULE), tainted(slot=1), asked(1, to="node-2"))
    story.settle()
    assert (place(story, 1).startswith("node-1"), set(story.job.moving.requests)) == (True, {1})
    story.hear(cleared("node-2", None))
    story.settle()
    assert (place(story, 1).startswith("node-2"), len(story.job.moving.requests)) == (True, 0)


def test_who_asks_again_for_what_was_withdrawn_is_told_what_became_of_it() -> None:
    story = preparing(0, 1, ranks=3, spares=3)
    story.hear(ev.MoveWithdrawn(job=JOB, ranks=(Rank(1),), source="ann"), asked(1, reason="again"))
    assert (story.move.ranks, set(story.move.outgoing_workers)) == ((0,), {0})
    lose(story, 1)
    record = story.job.moving.moves[0]
    assert (record.ranks, record.state, record.reason) == ((1,), MoveState.RECOVERED, "again")


def test_a_rank_that_is_vacant_once_more_is_told_of_as_such() -> None:
    story = preparing(0, 1, ranks=3, spares=2, refill=False)
    story.lose(story.holder(1), signal=SIGKILL)
    assert story.move.ranks == (0,)
    story.hear(ev.WorkerHung(worker=story.holder(1), evidence="stopped"))
    story.hear(ev.MoveWithdrawn(job=JOB, ranks=(Rank(0),), source="ann"))
    assert told(story.job.moving.moves[0])[-1] == "a fault came first: rank 1 is vacant"
