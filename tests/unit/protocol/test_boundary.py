"""Boundary: stopping a job for a move, cutting over, going back; each limit by itself."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from tests.support.migration import HERE, NEXT, SIGKILL, asked, cut_over, halting, on_nodes, preparing, quiescing
from tests.support.telling import JOB, Stand, Story, running, say, submitted
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import NodeId, Point, Rank, WorkerPhase
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.moves import MoveState
from torchrelay.protocol.model.roster import Life
from torchrelay.protocol.placement.boundary import begin_generation

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
    assert story.job.accounting.incidents[-1].resume_point == HERE
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
    story = halting(reconfigure_ms=700)
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
    assert (story.job.phase, story.holder(0), story.holder(1)) == (JobPhase.RECONFIGURING, first, second)
    # Nobody survives who has the state: it comes from those who left, and each has its own.
    assert {order.rank: order.sources[0].address for order in story.orders() if isinstance(order, od.Restore)} == {
        0: "at:node-0.0.0",
        1: "at:node-0.1.1",
    }
    story.settle()
    assert (story.move.state, story.job.accounting.incidents[-1].sources) == (MoveState.DONE, (0, 1))


def test_a_fault_after_a_cutover_of_all_ranks_goes_on_from_where_the_outgoing_workers_stand() -> None:
    story = cut_over(0, 1, spares=3)
    outgoing_workers = [story.job.seats[Rank(rank)].outgoing for rank in (0, 1)]
    story.lose(outgoing_workers[1])  # type: ignore[arg-type]
    story.lose(story.holder(1), signal=SIGKILL)
    story.answer((od.Interrupt,))
    assert (story.job.phase, story.job.resume_point) == (JobPhase.PREPARING, NEXT)
    story.settle()
    assert (story.job.phase, story.job.resume_point) == (JobPhase.RUNNING, NEXT)


def test_a_outgoing_that_has_not_handed_over_yet_is_not_followed() -> None:
    story = halting()
    target = story.move.targets[Rank(1)]
    story.answer((od.Decide,), but=(1,))
    assert not any(isinstance(order, od.Replay) for order in story.orders())
    # Ready without a record: the target cannot be brought there.
    story.hear(say(story, ev.WorkerReady, 1, point=NEXT))
    assert not any(isinstance(order, od.Replay) for order in story.orders())
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
    story.answer((od.Replay,))
    seat = story.job.seats[Rank(1)]
    assert (seat.shard, seat.joined, seat.assigned_in, seat.replacement) == ("other", True, 3, True)


def test_the_cutovers_of_the_last_hour_are_kept() -> None:
    story = running(spares=1, slots=4)
    for at, kept in ((0, (0,)), (1_000, (0, 1_000)), (3_600_000, (1_000, 3_600_000))):
        story.wait(at - story.now_ms)
        story.hear(asked(1))
        story.settle()
        assert story.job.moving.cutovers == kept
        story.train(Point(len(story.job.moving.moves) * 10))


def test_a_move_is_progress_and_the_interruption_knows_its_move() -> None:
    story = running(spares=1, slots=4, slot_faults=0)
    story.lose(story.holder(1), signal=SIGKILL)
    story.settle()
    assert story.job.resume_point == HERE
    story.lose(story.holder(1), signal=SIGKILL)
    story.settle()
    assert story.job.attempts.fruitless == 1
    story.train(HERE)
    story.hear(asked(1))
    story.settle()
    tried, incident = story.job.attempts, story.job.accounting.incidents[-1]
    assert (tried.fruitless, story.job.resume_point, tried.trained, tried.starts) == (0, NEXT, True, 0)
    assert (incident.move, incident.kind, story.move.incident) == (1, "planned", 3)


def test_a_move_after_which_nothing_was_committed_is_no_progress() -> None:
    story = running(spares=2, slot_faults=0)
    for _ in range(2):
        story.lose(story.holder(1), signal=SIGKILL)
        story.settle()
    before = story.job.attempts.fruitless
    story.hear(asked(1))
    story.answer((od.StartWorker,))
    story.answer((od.Assign,))
    for rank in (0, 1):
        story.stands[story.holder(rank)] = Stand(HERE, WorkerPhase.BETWEEN)
    story.settle()
    assert (story.job.resume_point, story.job.attempts.fruitless, before > 0) == (HERE, before, True)


# ---------------------------------------------------------------- after the cutover


def brought_home(story: Story) -> None:
    """The target that holds rank 1 dies after the cutover, and its outgoing worker takes the rank again."""
    target = story.holder(1)
    story.lose(target, signal=SIGKILL)
    story.settle()
    assert story.job.phase is JobPhase.RUNNING


def test_a_rank_that_went_back_is_moved_again_and_given_up_after_three_tries() -> None:
    story = cut_over(spares=3, slot_faults=0)
    for tries in (1, 2):
        before = story.now_ms
        brought_home(story)
        assert (story.move.state, story.move.ranks, story.move.tries) == (MoveState.PREPARING, (1,), tries)
        assert story.move.again_ms == before + 1_000
        story.train(Point(10 * tries))
        story.answer((od.StartWorker,))
        story.answer((od.Assign,))
        story.wait(999)
        assert story.job.phase is JobPhase.RUNNING
        story.wait(1)
        for kind in (od.Halt, od.Decide, od.Replay):
            story.answer((kind,))
        assert story.move.state is MoveState.CUT_OVER
    story.hear(ev.FreezeSet(source="ann"), asked(0))
    brought_home(story)
    given_up = story.job.moving.moves[0]
    assert (given_up.state, given_up.again_ms) == (MoveState.FAILED, story.now_ms + 300_000)
    assert given_up.story[-1][1] == "given up after 3 tries"
    assert set(story.job.moving.requests) == {0}


def test_of_two_ranks_only_the_one_that_went_back_is_moved_again() -> None:
    story = cut_over(0, 1, spares=3, slot_faults=0)
    target = story.holder(0)
    brought_home(story)
    assert (story.move.state, story.move.ranks, story.holder(0)) == (MoveState.PREPARING, (1,), target)
    assert set(story.move.targets) == {1}


def test_who_takes_its_rank_back_has_all_that_it_had() -> None:
    story = cut_over(ranks=2, spares=2)
    outgoing, home = story.job.seats[Rank(1)].outgoing, story.job.seats[Rank(1)].home
    story.hear(say(story, ev.RestoreFailed, 1, source=Rank(0), reason="differs", mismatch=True))
    story.lose(story.holder(1), signal=SIGKILL)
    seat = story.job.seats[Rank(1)]
    assert (seat.worker, seat.shard, seat.home, seat.holds) == (outgoing, "all", home, NEXT)
    assert (seat.joined, seat.replacement, seat.outgoing, seat.distrusted) == (True, False, None, frozenset({0}))
    assert [record.point for record in seat.private] == [NEXT]


def test_when_training_is_further_a_outgoing_takes_nothing_back() -> None:
    """Its rank's target was restored, all were told to go on, and the outgoing worker's end has not been seen yet."""
    story = cut_over(spares=2)
    outgoing = story.job.seats[Rank(1)].outgoing
    for kind in (od.Reconfigure, od.Restore):
        story.answer((kind,))
    assert (story.job.phase, story.job.seats[Rank(1)].outgoing) == (JobPhase.RESUMING, None)
    assert story.cluster.workers[outgoing].life is Life.FENCING  # type: ignore[index]
    story.lose(story.holder(1), signal=SIGKILL)
    assert story.job.seats[Rank(1)].worker is None
    story.settle()
    assert story.job.phase is JobPhase.RUNNING
    assert story.holder(1) != outgoing


def test_after_a_release_nothing_is_left_of_the_boundary() -> None:
    story = halting(reconfigure_ms=700)
    story.wait(5_000)
    story.hear(ev.MoveWithdrawn(job=JOB, ranks=(Rank(1),), source="ann"))
    story.wait(699)
    assert story.job.phase is JobPhase.RELEASING
    story.answer((od.Resume,))
    assert (story.job.phase, story.job.boundary) == (JobPhase.RUNNING, None)
    story.hear(asked(1))
    story.answer((od.StartWorker,))
    story.answer((od.Assign,))
    story.wait(1_000)
    assert (story.job.phase, story.job.boundary) == (JobPhase.QUIESCING, None)


# ---------------------------------------------------------------- values at a new generation


def test_a_new_generation_begins_with_nothing_answered() -> None:
    story = cut_over(0, spares=2)
    story.answer((od.Reconfigure,))
    story.hear(say(story, ev.RestoreFailed, 0, source=Rank(1), reason="broken"))
    story.hear(say(story, ev.ReconfigureFailed, 1, reason="refused"))
    seat = story.job.seats[Rank(0)]
    assert (seat.report, seat.ready, seat.reconfigured, seat.resumed, seat.serves) == (None, False, False, False, False)
    assert (seat.failed, seat.asked_buddies) == (frozenset(), frozenset())


def test_who_had_no_record_is_asked_again_in_the_next_generation() -> None:
    story = Story()
    spec = ev.JobSpec(job=JOB, world_size=2, nproc_per_node=1, nodes=2, spares=1)
    story.hear(ev.JobSubmitted(spec=spec))
    for node, slots in (("node-0", 3), ("node-1", 1)):
        story.hear(ev.NodeJoined(node=NodeId(node), incarnation="a", slots=slots))
    story.settle()
    story.train(HERE)
    story.hear(ev.NodeLost(node=NodeId("node-1"), incarnation="a", reason="silence"))
    story.answer((od.Interrupt,))
    job = story.job
    seat = replace(job.seats[Rank(1)], asked_buddies=frozenset({story.holder(0)}))
    story.cluster = story.cluster.with_job(job.with_seat(Rank(1), seat))
    assert not any(isinstance(order, od.Recall) for order in story.orders())
    story.cluster = story.cluster.with_job(begin_generation(story.job))
    assert story.job.seats[Rank(1)].asked_buddies == frozenset()


def test_wishes_for_a_job_that_is_over_or_unknown_change_nothing() -> None:
    story = running()
    before = story.cluster
    other = ev.MoveAsked(job=type(JOB)("other"), ranks=(Rank(0),), reason="r", source="ann")
    story.hear(other)
    assert story.cluster == before
    story.hear(ev.JobCancelled(job=JOB, reason="enough"))
    before = story.cluster
    story.hear(asked(0))
    assert story.cluster == before


def test_the_newest_moves_are_kept() -> None:
    story = running(slots=3)
    for _ in range(70):
        story.hear(ev.FreezeSet(source="ann"), asked(1))
        story.hear(ev.MoveWithdrawn(job=JOB, ranks=(Rank(1),), source="ann"))
    assert (len(story.job.moving.moves), story.job.moving.moves[0].number, story.move.number) == (64, 7, 70)
    assert {move.state for move in story.job.moving.moves} == {MoveState.CALLED_OFF}


# ---------------------------------------------------------------- who is waited for, and how long


def let_go_on(story: Story) -> None:
    """A boundary was called off: all go on; what was fenced ends, and new spares come up and are prepared."""
    assert story.job.phase is JobPhase.RELEASING
    for _ in range(4):
        story.answer((od.Resume, od.Fence, od.StartWorker, od.Assign))


def test_when_all_ranks_stand_the_targets_are_waited_for_as_long_as_connecting_may_take() -> None:
    story = halting(reconfigure_ms=700, ready_ms=60_000)
    story.wait(5_000)
    story.answer((od.Decide,))
    assert story.job.stood_ms == 5_000
    story.wait(699)
    assert (story.job.phase, story.job.stood_ms) == (JobPhase.HALTING, 5_000)
    story.wait(1)
    why = "the target of rank 1 did not come to the boundary in time"
    assert (story.job.phase, story.job.why, story.move.tries) == (JobPhase.RELEASING, f"called off: {why}", 1)


def test_it_is_the_late_target_that_is_named() -> None:
    story = halting(0, 1, spares=2, reconfigure_ms=700)
    story.answer((od.Decide,))
    first = story.move.targets[Rank(0)]
    story.hear(say(story, ev.WorkerReady, 0, worker=first, point=NEXT))
    story.wait(0)
    story.wait(700)
    assert "the target of rank 1 did not come" in story.job.why


def test_the_wait_for_targets_begins_anew_at_each_boundary() -> None:
    story = halting(reconfigure_ms=700, spares=3)
    story.answer((od.Decide,))
    story.wait(700)
    let_go_on(story)
    story.train(Point(7))
    story.wait(1_000)
    story.answer((od.Halt,))
    assert (story.job.phase, story.job.stood_ms) == (JobPhase.HALTING, None)


def test_a_boundary_that_comes_to_nothing_three_times_is_given_up() -> None:
    story = quiescing(report_ms=500)
    target = story.move.targets[Rank(1)]
    for tries in (1, 2):
        story.wait(500)
        assert (story.move.state, story.move.tries, story.move.again_ms) == (
            MoveState.PREPARING,
            tries,
            story.now_ms + 1_000,
        )
        assert story.move.targets[Rank(1)] == target
        let_go_on(story)
        story.wait(1_000)
        assert story.job.phase is JobPhase.QUIESCING
    story.wait(500)
    assert (story.job.phase, story.move.state, story.move.tries) == (JobPhase.RELEASING, MoveState.FAILED, 3)
    assert story.move.story[-1][1] == "called off: given up after 3 tries: rank 0 did not say how far it is"
    assert story.cluster.workers[target].life is Life.FENCING
    assert (len(story.job.moving.requests), story.move.again_ms) == (0, story.now_ms + 300_000)


def test_a_target_that_was_told_where_to_go_is_let_go_and_does_not_count_as_lost() -> None:
    story = halting(ready_ms=2_000)
    target = story.move.targets[Rank(1)]
    story.answer((od.Decide,), but=(0,))
    story.wait(2_000)
    assert story.cluster.workers[target].life is Life.FENCING
    assert (len(story.move.targets), story.move.tries) == (0, 1)
    assert not any("is lost" in text for _, text in story.move.story)


def test_what_a_former_holder_left_of_the_boundary_sends_no_target_there_before_the_outgoing_stands() -> None:
    story = running(spares=2, slots=4)
    story.stands[story.holder(1)] = Stand(HERE, WorkerPhase.GATE, NEXT)
    story.lose(story.holder(1), signal=SIGKILL)
    story.settle()
    story.train(HERE)
    assert story.job.seats[Rank(1)].record_of(NEXT) is not None
    story.hear(asked(1))
    for kind in (od.Assign, od.Halt):
        story.answer((kind,))
    target = story.move.targets[Rank(1)]
    assert (story.job.phase, story.job.boundary) == (JobPhase.HALTING, NEXT)
    assert not any(isinstance(order, od.Replay) for order in story.orders())
    story.answer((od.Decide,))
    assert [order.worker for order in story.orders() if isinstance(order, od.Replay)] == [target]


# ---------------------------------------------------------------- what a cutover leaves


def test_a_target_serves_nobody_in_the_generation_in_which_it_was_restored() -> None:
    story = cut_over(0, 1, ranks=3, spares=2)
    outgoing = story.job.seats[Rank(1)].outgoing
    story.answer((od.Restore,), but=(1,))
    assert story.job.seats[Rank(0)].holds == NEXT
    sources = [order.sources for order in story.orders() if isinstance(order, od.Restore)]
    assert [[source.address for source in each] for each in sources] == [
        [f"at:{outgoing}", f"at:{story.holder(2)}", f"at:{story.job.seats[Rank(0)].outgoing}"]
    ]


def test_a_target_of_which_nobody_heard_what_it_needs_needs_what_its_rank_did() -> None:
    story = preparing()
    target = story.move.targets[Rank(1)]
    story.hear(ev.WorkerPrepared(worker=target))
    assert story.cluster.workers[target].shard == ""
    for kind in (od.Halt, od.Decide, od.Replay):
        story.answer((kind,))
    assert (story.holder(1), story.job.seats[Rank(1)].shard) == (target, "all")


def test_a_move_shows_that_a_job_that_had_to_start_again_trains() -> None:
    story = submitted(spares=1, slot_faults=0)
    story.settle()
    story.lose(story.holder(1), signal=SIGKILL)
    story.answer((od.Interrupt,))
    assert story.job.attempts.starts == 1
    story.settle()
    story.train(HERE)
    story.hear(asked(1))
    story.settle()
    assert (story.move.state, story.job.attempts.starts) == (MoveState.DONE, 0)


def test_who_serves_is_asked_anew_in_each_generation() -> None:
    job = cut_over().job
    assert [seat.serves for seat in job.seats.values()] == [True, False]
    assert [seat.serves for seat in begin_generation(job).seats.values()] == [False, False]


def test_a_rank_that_has_moved_is_not_said_to_need_it_no_more() -> None:
    story = cut_over(0, 1, spares=3, slot_faults=0)
    brought_home(story)
    said = [text for _, text in story.move.story]
    assert "once more for rank 1" in said
    assert not any("need not move any more" in text for text in said)


def test_each_target_that_is_lost_with_its_node_counts() -> None:
    story = on_nodes(2, 2, nproc_per_node=2, spares=2)
    story.hear(asked(0, 1))
    for kind in (od.StartWorker, od.Assign, od.Halt, od.Decide):
        story.answer((kind,))
    assert (story.job.phase, len(story.move.targets)) == (JobPhase.HALTING, 2)
    story.hear(ev.NodeLost(node=NodeId("node-1"), incarnation="a", reason="silence"))
    assert (story.job.phase, story.move.tries, len(story.move.targets)) == (JobPhase.RELEASING, 2, 0)


def test_when_it_is_given_up_only_what_went_back_is_forgotten() -> None:
    story = cut_over(0, 1, spares=2, slot_faults=0, slots=6)
    for point in (Point(10), Point(20)):
        for rank in (0, 1):
            story.lose(story.holder(rank), signal=SIGKILL)
        story.settle()
        assert (story.job.phase, story.move.state, story.move.ranks) == (JobPhase.RUNNING, MoveState.PREPARING, (0, 1))
        story.train(point)
        for _ in range(3):
            story.answer((od.StartWorker, od.Assign))
        story.wait(1_000)
        for kind in (od.Halt, od.Decide, od.Replay):
            story.answer((kind,))
        assert story.move.state is MoveState.CUT_OVER
    story.hear(ev.FreezeSet(source="ann"), asked(0))
    brought_home(story)
    assert (story.move.state, story.job.moving.moves[0].state) == (MoveState.WAITING, MoveState.FAILED)
    assert (set(story.job.moving.requests), story.move.ranks) == ({0}, (0,))
