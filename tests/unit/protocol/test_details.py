"""Details: small things of the core that somebody relies on, each by itself."""

from __future__ import annotations

from msgspec.structs import replace

from tests.support.migration import asked, cut_over, halting, on_nodes, quiescing
from tests.support.telling import JOB, Stand, Story, after_an_error, answers, raised, running, say, submitted
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import START, Generation, NodeId, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.model.incident import Fault, Incident, Mark
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.moves import Move, MoveKind, MoveState
from torchrelay.protocol.model.roster import Life, Seat, natural_key
from torchrelay.protocol.model.state import vacate_seat
from torchrelay.protocol.model.table import Table
from torchrelay.protocol.placement.policy import DYING_MS, UNJOINED_MS
from torchrelay.protocol.recovery.ending import NO_STATE
from torchrelay.protocol.recovery.placing import asked_nodes, free_slots

HERE, NEXT = Point(3), Point(4)
NODE = NodeId("node-0")
SIGKILL = 9


# ---------------------------------------------------------------- placing


def test_ranks_take_the_first_slots_of_all_nodes() -> None:
    story = Story()
    for node in ("node-10", "node-2"):
        story.hear(ev.NodeJoined(node=NodeId(node), incarnation="a", slots=2))
    story.hear(ev.JobSubmitted(spec=ev.JobSpec(job=JOB, world_size=2, nproc_per_node=1, nodes=2)))
    held = [story.cluster.workers[story.holder(rank)] for rank in (0, 1)]
    assert [(worker.node, worker.slot) for worker in held] == [("node-2", 0), ("node-10", 0)]


def test_a_node_that_comes_first_does_not_take_the_ranks_of_those_that_follow() -> None:
    story = Story()
    story.hear(ev.JobSubmitted(spec=ev.JobSpec(job=JOB, world_size=4, nproc_per_node=2, nodes=2, spares=2)))
    for number in (0, 1):
        story.hear(ev.NodeJoined(node=NodeId(f"node-{number}"), incarnation="a", slots=4))
    held = [story.cluster.workers[story.holder(rank)] for rank in range(4)]
    assert [(worker.node, worker.slot) for worker in held] == [
        ("node-0", 0),
        ("node-0", 1),
        ("node-1", 0),
        ("node-1", 1),
    ]


def test_when_a_node_is_lost_the_others_give_all_their_slots() -> None:
    story = Story()
    story.hear(ev.JobSubmitted(spec=ev.JobSpec(job=JOB, world_size=2, nproc_per_node=1, nodes=2, spares=0)))
    for number in (0, 1):
        story.hear(ev.NodeJoined(node=NodeId(f"node-{number}"), incarnation="a", slots=3))
    story.settle()
    story.train(HERE)
    story.hear(ev.NodeLost(node=NodeId("node-1"), incarnation="a", reason="silent"))
    assert [order.slot for order in story.orders() if isinstance(order, od.StartWorker)] == [1]


def test_a_wait_for_places_that_is_over_does_not_count_for_the_next() -> None:
    story = submitted(slots=1, spares=0, spare_wait_ms=1_000)
    story.wait(10)
    assert story.job.waiting_ms == 0
    story.hear(ev.NodeJoined(node=NODE, incarnation="a", slots=2))
    assert story.job.waiting_ms is None
    story.settle()
    assert story.job.phase is JobPhase.RUNNING


def test_once_started_a_job_starts_again_on_the_nodes_that_are_left() -> None:
    story = Story()
    for node in ("node-0", "node-1"):
        story.hear(ev.NodeJoined(node=NodeId(node), incarnation="a", slots=2))
    story.hear(ev.JobSubmitted(spec=ev.JobSpec(job=JOB, world_size=2, nproc_per_node=1, nodes=2)))
    story.hear(ev.NodeLost(node=NodeId("node-1"), incarnation="a", reason="silence"))
    story.settle()
    assert (story.job.phase, story.job.attempts.starts) == (JobPhase.RUNNING, 1)


def test_who_is_lost_at_the_first_wiring_makes_all_start_again() -> None:
    story = submitted()
    while story.job.phase is not JobPhase.RECONFIGURING:
        story.answer()
    story.lose(story.holder(1), signal=SIGKILL)
    assert (story.job.phase, story.job.attempts.starts, story.job.generation) == (JobPhase.STARTING, 1, 2)


def test_only_in_a_recovery_nodes_where_workers_have_come_up_come_first() -> None:
    story = on_nodes(2, 3, nproc_per_node=1, nodes=2, spares=0)
    node = replace(story.cluster.nodes[NODE], proven=False)
    cluster = replace(story.cluster, nodes=story.cluster.nodes.put(NODE, node))
    for phase, first in ((JobPhase.RUNNING, "node-0"), (JobPhase.AGREEING, "node-1")):
        assert free_slots(cluster, replace(story.job, phase=phase))[0] == (first, 1)


def test_a_name_may_have_digits_that_are_no_numbers() -> None:
    assert sorted(["node-²", "node-10", "node-2"], key=natural_key) == ["node-2", "node-10", "node-²"]


def started(story: Story) -> list[tuple[NodeId, int]]:
    """The places in which workers are being started."""
    return [(order.node, order.slot) for order in story.orders() if isinstance(order, od.StartWorker)]


def test_a_rank_that_wants_to_go_to_a_node_gets_a_worker_there_and_no_other_is_started() -> None:
    story = on_nodes(3, 2, nproc_per_node=2, spares=0)
    story.hear(asked(1, to="node-2"))
    assert started(story) == [("node-2", 0)]
    story = on_nodes(3, 2, nproc_per_node=2, spares=0)
    story.hear(asked(0, 1, to="node-1"))
    assert started(story) == [("node-1", 0), ("node-1", 1)]


def test_while_a_move_waits_there_are_as_many_spares_as_ever() -> None:
    story = running(spares=0, slots=4)
    story.hear(ev.FreezeSet(source="ann"), asked(0, 1))
    assert (story.move.state, started(story)) == (MoveState.WAITING, [])
    story.hear(ev.FreezeCleared(source="ann"))
    assert (story.move.state, started(story)) == (MoveState.PREPARING, [(NODE, 2), (NODE, 3)])


def test_wanted_nodes_are_served_as_people_sort_them() -> None:
    story = on_nodes(11, 1, nproc_per_node=1, nodes=2, spares=0)
    to = Table({Rank(0): NodeId("node-10"), Rank(1): NodeId("node-2")})
    move = Move(1, MoveKind.PLANNED, (Rank(0), Rank(1)), "a wish", 0, MoveState.PREPARING, to=to)
    job = story.job.with_moving(moves=(move,))
    assert asked_nodes(story.cluster, job, free_slots(story.cluster, job)) == ["node-2", "node-10"]


# ---------------------------------------------------------------- what is kept


def test_a_vacant_seat_keeps_what_belongs_to_the_rank_and_nothing_of_its_holder() -> None:
    belongs = {
        "shard": "left", "home": NODE, "private": (ev.PrivateRecord(HERE, b"private"),), "ended_ms": 7,
        "distrusted": frozenset({Rank(2)}), "outgoing": WorkerId("outgoing"),
    }  # fmt: skip
    seat = Seat(worker=WorkerId("w"), joined=True, replacement=True, holds=HERE, ready=True, serves=True, **belongs)  # type: ignore[arg-type]
    vacant = vacate_seat(seat)
    assert {name: getattr(vacant, name) for name in belongs} == belongs
    assert (vacant.worker, vacant.joined, vacant.replacement, vacant.holds) == (None, False, False, None)
    assert (vacant.ready, vacant.serves) == (False, False)


def test_what_a_move_does_to_its_ranks_is_planned_and_a_fault_that_comes_into_it_is_not() -> None:
    first, second = (Fault("a wish", "move M-2", 0, Rank(rank)) for rank in (0, 1))
    incident = Incident(1, JOB, Generation(2), kind="planned", move=2).suffer(first).suffer(second)
    assert (incident.kind, incident.faults) == ("planned", (first, second))
    fault = Fault("ended by signal 9", "agent: process exit", 5, Rank(0))
    incident = incident.suffer(fault)
    assert (incident.kind, incident.faults, incident.cause) == ("unplanned", (fault, first, second), fault.cause)


def test_the_end_of_a_job_is_dated() -> None:
    story = running()
    story.hear(ev.JobCancelled(job=JOB, reason="Ctrl-C"))
    story.wait(70)
    story.settle()
    assert (story.job.phase, story.job.phase_ms) == (JobPhase.ENDED, 70)


def test_what_is_said_again_and_again_stands_in_the_story_once() -> None:
    story = running()
    story.lose(story.holder(1), signal=SIGKILL)
    while story.job.phase is not JobPhase.RECONFIGURING:
        story.answer()
    for _ in range(3):
        story.wait(10)
        story.hear(say(story, ev.RestoreFailed, 1, source=Rank(7), reason="refused"))
    told = [text for _, text in story.job.accounting.incidents[-1].story if "could not be restored" in text]
    assert len(told) == 1


# ---------------------------------------------------------------- deadlines


def test_a_survivor_has_as_long_to_the_safepoint_as_was_agreed() -> None:
    story = running(ready_ms=1_000)
    story.lose(story.holder(1), signal=SIGKILL)
    story.answer((od.Interrupt,))
    assert story.job.phase is JobPhase.PREPARING
    story.answer((od.Assign, od.Replay))
    story.wait(999)
    assert (story.job.phase, story.job.generation) == (JobPhase.PREPARING, 2)
    story.wait(1)
    assert (story.job.phase, story.job.generation) == (JobPhase.AGREEING, 3)


def test_who_does_not_come_to_the_safepoint_is_found_though_another_rank_is_vacant() -> None:
    story = running(ranks=2, spares=0, refill=False, ready_ms=1_000)
    story.lose(story.holder(0), signal=SIGKILL)
    story.answer((od.Interrupt,))
    late = story.holder(1)
    story.wait(1_000)
    assert late in [order.worker for order in story.orders() if isinstance(order, od.Fence)]


def test_leaving_takes_as_long_as_was_agreed_from_the_moment_all_have_finished() -> None:
    story = running(ready_ms=1_000)
    story.wait(900)
    story.hear(*(say(story, ev.WorkerFinished, rank) for rank in (0, 1)))
    story.wait(999)
    assert not any(isinstance(order, od.Fence) for order in story.orders())
    story.wait(1)
    assert [order.worker for order in story.orders() if isinstance(order, od.Fence)] != []


def test_one_who_raised_and_is_gone_does_not_hide_another_who_raised_and_stays() -> None:
    story = after_an_error(NEXT)
    story.hear(raised(story, 0, signature="other", point=NEXT))
    story.wait(DYING_MS)
    assert story.job.accounting.incidents[-1].faults[0].cause == "raised and did not end: E"


def test_what_was_raised_in_the_wake_of_a_fault_is_settled_when_training_goes_on() -> None:
    story = running()
    story.hear(raised(story, 0, signature="echo", fatal=False), raised(story, 1))
    story.lose(story.holder(1), code=5)
    story.wait(300)
    story.settle()
    assert story.job.phase is JobPhase.RUNNING
    assert [entry.rank for entry in story.job.exceptions.raised] == [1]


def test_a_wait_for_a_spare_that_is_over_does_not_count_for_the_next() -> None:
    story = running(spares=0, refill=False, spare_wait_ms=1_000)
    story.lose(story.holder(1), signal=SIGKILL)
    story.answer((od.Interrupt,))
    assert story.job.waiting_ms == 0
    story.hear(ev.NodeJoined(node=NodeId("node-1"), incarnation="a", slots=1))
    assert story.job.waiting_ms is None
    story.wait(10)
    story.lose(story.holder(1), signal=SIGKILL)
    story.wait(990)
    assert (story.job.waiting_ms, story.job.outcome) == (10, None)


def test_ranks_count_as_given_away_when_the_last_of_them_is() -> None:
    story = running(ranks=3, spares=1, refill=False)
    first, second = story.holder(1), story.holder(2)
    for worker in (first, second):
        story.hear(ev.WorkerHung(worker=worker, evidence="stopped"))
    story.lose(first)
    assert [story.job.seats[Rank(rank)].worker is None for rank in (1, 2)] == [False, True]
    assert Mark.ACQUIRED not in story.job.accounting.incidents[-1].marks


def test_a_rank_stays_on_its_own_node_whatever_else_was_lost_since() -> None:
    story = Story()
    for node in ("node-0", "node-1"):
        story.hear(ev.NodeJoined(node=NodeId(node), incarnation="a", slots=4))
    story.hear(ev.JobSubmitted(spec=ev.JobSpec(job=JOB, world_size=4, nproc_per_node=2, nodes=2, spares=4)))
    story.settle()
    story.train(HERE)
    assert [story.holder(rank)[:6] for rank in range(4)] == ["node-0", "node-0", "node-1", "node-1"]
    story.hear(raised(story, 0))
    story.lose(story.holder(0), code=5)
    story.lose(story.holder(2), signal=SIGKILL)
    story.wait(250)
    assert [story.holder(rank)[:6] for rank in (0, 2)] == ["node-0", "node-1"]


# ---------------------------------------------------------------- when all state is lost


def test_once_something_was_decided_the_loss_of_all_ranks_is_no_start_like_the_first() -> None:
    story = running()
    story.hear(say(story, ev.CollectiveFailed, 0, summary="reset"))
    story.wait(1_000)
    story.settle()
    assert (story.job.phase, story.job.generation) == (JobPhase.RUNNING, 2)
    story.hear(ev.NodeLost(node=NODE, incarnation="a", reason="silence"))
    assert story.job.outcome is not None
    assert story.job.outcome.code == NO_STATE


def test_a_node_that_is_lost_with_its_pages_takes_with_it_what_was_committed() -> None:
    story = running()
    story.hear(ev.NodeLost(node=NODE, incarnation="a", reason="silence"))
    assert story.job.outcome is not None
    assert story.job.outcome.code == NO_STATE


def test_a_node_that_is_lost_before_anybody_joined_takes_nothing_with_it() -> None:
    story = submitted()
    while story.job.phase is not JobPhase.RESUMING:
        story.answer()
    story.hear(*(say(story, ev.WorkerResumed, rank) for rank in (0, 1)))
    assert story.job.why == "training"
    story.hear(ev.NodeLost(node=NODE, incarnation="a", reason="silence"))
    assert (story.job.phase, story.job.attempts.starts) == (JobPhase.STARTING, 1)


def test_what_lost_ranks_left_tells_whether_anything_was_committed() -> None:
    for points, phase in (((START, Point(0, 1)), JobPhase.ENDING), ((START,), JobPhase.STARTING)):
        story = running(spares=2)
        for worker in (story.holder(0), story.holder(1)):
            records = tuple(ev.PrivateRecord(point, b"private") for point in points)
            story.hear(ev.WorkerExited(worker=worker, node=NODE, signal=SIGKILL, private=records))
        story.answer((od.Interrupt,))
        assert story.job.phase is phase


def test_a_shard_that_nobody_holds_is_lost_though_another_replacements_is_not_known_yet() -> None:
    story = running(ranks=3, spares=2)
    story.hear(*(say(story, ev.WorkerJoined, rank, shard=shard) for rank, shard in enumerate(("left", "right", ""))))
    for rank in (0, 2):
        story.lose(story.holder(rank), signal=SIGKILL)
    story.answer((od.Interrupt,))
    assert story.job.outcome is not None
    assert story.job.outcome.reason == "no replica holds the shard of rank 0"


# ---------------------------------------------------------------- answers


def test_answers_of_another_generation_or_of_somebody_else_change_nothing() -> None:
    story = running()
    story.lose(story.holder(1), signal=SIGKILL)
    while story.job.phase is not JobPhase.RECONFIGURING:
        story.answer()
    before = story.cluster
    for fields in ({"generation": Generation(1)}, {"worker": WorkerId("nobody")}):
        story.hear(say(story, ev.WorkerReconfigured, 1, **fields))
        story.hear(say(story, ev.ReconfigureFailed, 1, reason="late", **fields))
        story.hear(say(story, ev.RestoreFailed, 1, source=Rank(0), reason="late", **fields))
    assert story.cluster == before


def test_the_code_of_an_exit_belongs_to_what_its_own_process_raised() -> None:
    story = running(ranks=3)
    story.hear(raised(story, 0, signature="one"), raised(story, 1, signature="other"))
    story.lose(story.holder(1), code=5)
    assert [entry.code for entry in story.job.exceptions.raised] == [None, 5]


# ---------------------------------------------------------------- orders


def test_who_waits_for_the_first_wiring_is_asked_no_more() -> None:
    story = submitted()
    story.answer((od.StartWorker,))
    story.hear(say(story, ev.WorkerReady, 0, point=None))
    assert [order.rank for order in story.orders() if isinstance(order, od.Assign)] == [1]


def ordered(story: Story, kind: type[od.WorkerOrder]) -> list[WorkerId]:
    """Who is ordered something of this kind."""
    return [order.worker for order in story.orders() if isinstance(order, kind)]


def test_who_has_said_how_far_it_is_is_not_asked_again_to_stop() -> None:
    story = quiescing()
    story.answer((od.Halt,), but=(1,))
    assert ordered(story, od.Halt) == [story.holder(1)]


def test_a_target_is_assigned_before_it_is_warm_and_though_nobody_can_show_it_a_step() -> None:
    story = running(spares=1, slots=3)
    spare = story.cluster.spares(JOB)[0]
    story.cluster = story.cluster.with_worker(replace(spare, life=Life.STARTED))
    story.hear(asked(1))
    (order,) = (order for order in story.orders() if isinstance(order, od.Assign))
    assert (order.worker, order.examples) == (spare.worker, (od.Source(Rank(1), f"at:{story.holder(1)}"),))
    story.hear(ev.WorkerHung(worker=story.holder(1), evidence="stopped"))
    (order,) = (order for order in story.orders() if isinstance(order, od.Assign))
    assert (order.worker, order.examples) == (spare.worker, ())


def test_a_target_learns_from_those_who_have_the_same_shard() -> None:
    story = quiescing(ranks=3)
    story.hear(say(story, ev.WorkerJoined, 0, shard="other"))
    story.answer((od.Halt,))
    story.answer((od.Decide,))
    (order,) = (order for order in story.orders() if isinstance(order, od.Replay))
    assert [source.rank for source in order.sources] == [1, 2]


def test_a_target_is_sent_to_a_boundary_while_all_halt_and_not_in_a_recovery() -> None:
    """A former holder has left a record of the boundary, so that nothing is missing."""
    story = running(ranks=3, spares=3, slots=6)
    story.stands[story.holder(1)] = Stand(HERE, WorkerPhase.GATE, NEXT)
    story.lose(story.holder(1), signal=SIGKILL)
    story.settle()
    story.train(HERE)
    story.hear(asked(1))
    story.answer((od.Assign,))
    target = story.move.targets[Rank(1)]
    story.stands[story.holder(1)] = Stand(HERE, WorkerPhase.GATE, NEXT)
    story.answer((od.Halt,))
    story.answer((od.Decide,), but=(1, 2))
    story.lose(story.holder(2), signal=SIGKILL)
    assert story.cluster.workers[target].brought is None
    story.answer((od.Interrupt,))
    story.answer((od.Decide,))
    assert (story.job.phase, story.job.resume_point, story.job.boundary) == (JobPhase.PREPARING, NEXT, NEXT)
    assert target not in ordered(story, od.Replay)
    story.lose(story.holder(0), signal=SIGKILL)
    assert (story.job.phase, story.cluster.workers[target].brought) == (JobPhase.AGREEING, None)


def test_a_outgoing_is_told_to_stand_when_the_target_is_known() -> None:
    story = cut_over(ranks=3, spares=3)
    outgoing = story.job.seats[Rank(1)].outgoing
    assert ordered(story, od.Decide) == [outgoing]
    story.lose(story.holder(0), signal=SIGKILL)
    assert (story.job.phase, ordered(story, od.Decide)) == (JobPhase.AGREEING, [])
    story.answer((od.Interrupt,))
    assert (story.job.phase, story.job.resume_point) == (JobPhase.PREPARING, NEXT)
    assert outgoing in ordered(story, od.Decide)


def test_a_connection_that_breaks_on_the_way_to_a_boundary_is_mended() -> None:
    story = halting()
    story.hear(say(story, ev.CollectiveFailed, 0, summary="reset", generation=story.job.generation - 1))
    story.wait(1_000)
    assert story.job.phase is JobPhase.AGREEING


def test_who_should_not_be_there_is_ended_until_its_node_comes_back_without_it() -> None:
    story = Story()
    story.hear(ev.JobSubmitted(spec=ev.JobSpec(job=JOB, world_size=4, nproc_per_node=2, nodes=3)))
    for node in ("node-0", "node-1"):
        story.hear(ev.NodeJoined(node=NodeId(node), incarnation="a", slots=2))
    for name, node in (("gone", "node-0"), ("there", "node-0"), ("elsewhere", "node-1")):
        story.hear(ev.WorkerStarted(worker=WorkerId(name), node=NodeId(node), slot=0, pid=5, job=JOB))
    seen = ev.WorkerSeen(worker=WorkerId("there"), slot=0, pid=5, job=JOB)
    story.hear(ev.NodeJoined(node=NODE, incarnation="a", slots=2, workers=(seen,)))
    assert {(order.worker, order.node) for order in story.orders() if isinstance(order, od.Fence)} == {
        ("there", "node-0"),
        ("elsewhere", "node-1"),
    }


# ---------------------------------------------------------------- tables


def test_a_table_is_equal_to_tables_only() -> None:
    assert Table({1: 2}) == Table([(1, 2)])
    assert Table({1: 2}) != {1: 2}


def test_a_script_that_never_joins_is_not_started_again_after_a_while() -> None:
    for waited, phase in ((UNJOINED_MS - 1, JobPhase.AGREEING), (UNJOINED_MS, JobPhase.ENDING)):
        story = wired()
        story.wait(waited)
        story.lose(story.holder(1), signal=SIGKILL)
        assert story.job.phase is phase
    assert story.job.outcome is not None
    assert story.job.outcome.code == 137
    assert "has not called protect() in 10 minutes" in story.job.outcome.reason
    for joined in (0, 1):
        story = wired()
        story.hear(say(story, ev.WorkerJoined, joined))
        story.wait(UNJOINED_MS)
        story.lose(story.holder(1), signal=SIGKILL)
        assert story.job.phase is JobPhase.AGREEING


def wired() -> Story:
    """A job whose ranks are connected, and have not joined."""
    story = submitted(spares=0)
    story.wait(1_000)
    while story.job.phase is not JobPhase.RUNNING:
        story.hear(
            *(
                answer
                for order in story.orders()
                for answer in answers(order, story.stands)
                if not isinstance(answer, ev.WorkerJoined)
            )
        )
    return story


def test_what_several_replacements_have_received_adds_up() -> None:
    first = Incident(1, JOB, Generation(2)).receive((Rank(0), Rank(2)), (700, 300), 1_010, "d")
    both = first.receive((Rank(2), Rank(3)), (50, 60), 120, "e")
    assert (both.sources, both.size, both.digest) == ((0, 2, 3), 1_130, "e")
    assert dict(both.shares) == {0: 700, 2: 350, 3: 60}
