"""Parking: when a job writes itself down, what happens when that is disturbed, and how it comes back."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.telling import JOB, Stand, Story, private, running
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.enclosed import JobSpec, Resumed
from torchrelay.protocol.messages.ids import NodeId, Point, Rank
from torchrelay.protocol.model.incident import COMES_BACK, Resolution
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.placement.boundary import AGAIN_MS, TRIES
from torchrelay.protocol.recovery.ending import NO_STATE, PARKED, STOPPED
from torchrelay.protocol.rules.parking import LEAD_MS

A, B = NodeId("node-0"), NodeId("node-1")
PLACE: dict[str, Any] = {"park_dir": "/parked", "park_key": "0123456789abcdef"}
SIGTERM = 15
RESUMES = Resumed(folder="/parked/parked-0123456789abcdef-2", point=Point(7), restarts=1, every=4)


def asked(grace_ms: int | None = None, number: int = 0) -> ev.ParkAsked:
    return ev.ParkAsked(job=JOB, reason="the nodes go", source="test", grace_ms=grace_ms, number=number)


def now(story: Story) -> JobPhase:
    return story.job.phase


def sealed(story: Story) -> None:
    story.hear(ev.ParkingSealed(job=JOB, name=story.job.parking.name))


def unsealed(story: Story) -> None:
    story.hear(ev.SealFailed(job=JOB, name=story.job.parking.name, reason="disk full"))


def with_a_place() -> Story:
    return running(**PLACE)


@pytest.fixture
def trains() -> Story:
    return with_a_place()


def halt(story: Story) -> None:
    """All are on the way to be written down, and stand."""
    story.hear(asked())
    story.answer((od.Halt,))
    story.answer((od.Decide,))
    assert now(story) is JobPhase.PARKING


def to_seal(story: Story) -> None:
    halt(story)
    story.answer((od.Park,))
    assert now(story) is JobPhase.SEALING


# ---------------------------------------------------------------- a parking


def test_all_stop_at_a_boundary_are_written_down_and_end(trains: Story) -> None:
    halt(trains)
    told = [order for order in trains.orders() if isinstance(order, od.Park)]
    assert [(order.rank, order.point) for order in told] == [(0, Point(4)), (1, Point(4))]
    assert {order.folder for order in told} == {f"/parked/parked-0123456789abcdef-{trains.job.generation}"}
    trains.answer((od.Park,))
    assert now(trains) is JobPhase.SEALING
    assert [order for order in trains.orders() if isinstance(order, od.WorkerOrder)] == []
    sealed(trains)
    outcome = trains.job.outcome
    assert outcome is not None
    assert (outcome.code, outcome.reason) == (PARKED, "parked after 4 in /parked: the nodes go")
    incident = trains.job.accounting.incidents[-1]
    assert (incident.resolution, incident.eligible, incident.kind) == (Resolution.PARKED, False, "planned")
    trains.settle()
    assert now(trains) is JobPhase.ENDED


def test_a_job_without_a_place_does_not_park() -> None:
    story = running()
    before = story.cluster
    story.hear(asked())
    assert story.cluster == before


def test_who_has_not_all_called_protect_is_waited_for(trains: Story) -> None:
    seat = replace(trains.job.seats[Rank(1)], joined=False)
    trains.cluster = trains.cluster.with_job(trains.job.with_seat(Rank(1), seat))
    trains.hear(asked())
    assert now(trains) is JobPhase.RUNNING
    assert trains.job.parking.why_not == "not all ranks have called protect()"
    trains.hear(ev.WorkerJoined(worker=trains.holder(1), job=JOB, rank=Rank(1)))
    assert now(trains) is JobPhase.QUIESCING


def test_under_a_freeze_nothing_is_written_down(trains: Story) -> None:
    trains.hear(ev.FreezeSet(source="ops"), asked())
    assert now(trains) is JobPhase.RUNNING
    trains.hear(ev.FreezeCleared(source="ops"))
    assert now(trains) is JobPhase.QUIESCING


def test_a_move_under_way_makes_way(trains: Story) -> None:
    trains.hear(ev.MoveAsked(job=JOB, ranks=(Rank(1),), reason="asked", source="ops"))
    assert trains.move.open
    trains.hear(asked())
    assert not trains.move.open
    assert now(trains) is JobPhase.QUIESCING


def test_a_seal_of_another_parking_counts_for_nothing(trains: Story) -> None:
    to_seal(trains)
    before = trains.cluster
    trains.hear(ev.ParkingSealed(job=JOB, name="parked-0123456789abcdef-99"))
    trains.hear(ev.SealFailed(job=JOB, name="parked-0123456789abcdef-99", reason="?"))
    assert trains.cluster == before


# ---------------------------------------------------------------- disturbed


def test_who_cannot_be_written_down_goes_on_and_is_tried_again_and_not_for_ever(trains: Story) -> None:
    trains.hear(asked())
    for turn in range(TRIES):
        trains.answer((od.Halt,))
        trains.answer((od.Decide,))
        assert now(trains) is JobPhase.PARKING, turn
        job, worker = trains.job, trains.holder(1)
        failed = ev.ParkFailed(job=JOB, generation=job.generation, worker=worker, rank=Rank(1), reason="disk full")
        trains.hear(failed)
        assert now(trains) is JobPhase.RELEASING
        trains.answer((od.Resume,))
        trains.train(Point(4 + turn))
        trains.wait(AGAIN_MS)
    assert now(trains) is JobPhase.RUNNING
    assert not trains.job.parking.asked
    assert trains.job.parking.why_not == "3 tries came to nothing: rank 1 could not be written down: disk full"
    assert {one.resolution for one in trains.job.accounting.incidents} == {Resolution.CALLED_OFF}


@pytest.mark.parametrize("phase", [JobPhase.QUIESCING, JobPhase.HALTING, JobPhase.PARKING])
def test_a_rank_that_dies_meanwhile_is_replaced_and_then_all_park(trains: Story, phase: JobPhase) -> None:
    trains.hear(asked())
    for kind in (od.Halt, od.Decide):
        if now(trains) is not phase:
            trains.answer((kind,))
    assert now(trains) is phase
    trains.lose(trains.holder(1), signal=9)
    assert now(trains) is JobPhase.AGREEING
    assert trains.job.parking.asked
    assert not trains.job.parking.name
    for _ in range(60):
        trains.answer()
        trains.wait(50)
        if now(trains) is JobPhase.SEALING:
            break
    sealed(trains)
    assert trains.job.outcome is not None
    assert trains.job.outcome.code == PARKED
    first = trains.job.accounting.incidents[0]
    assert first.cause == "ended by signal 9"
    assert first.eligible


def test_who_ends_when_all_is_written_down_is_not_missed(trains: Story) -> None:
    to_seal(trains)
    trains.lose(trains.holder(1), signal=9)
    assert now(trains) is JobPhase.SEALING
    assert trains.job.seats[Rank(1)].parked is not None
    sealed(trains)
    assert trains.job.outcome is not None
    assert trains.job.outcome.code == PARKED


def test_without_a_manifest_all_go_on(trains: Story) -> None:
    to_seal(trains)
    unsealed(trains)
    assert now(trains) is JobPhase.RELEASING
    trains.answer((od.Resume,))
    assert now(trains) is JobPhase.RUNNING
    assert trains.job.parking.why_not == "disk full"


def test_without_a_manifest_who_has_ended_is_replaced(trains: Story) -> None:
    to_seal(trains)
    trains.lose(trains.holder(1), signal=9)
    unsealed(trains)
    assert now(trains) is JobPhase.AGREEING
    trains.answer()
    assert trains.job.outcome is None


def test_who_writes_for_too_long_goes_on(trains: Story) -> None:
    halt(trains)
    trains.wait(trains.job.spec.park_ms)
    assert now(trains) is JobPhase.RELEASING


def test_a_stop_ends_a_parking_that_is_not_whole(trains: Story) -> None:
    halt(trains)
    trains.hear(ev.SignalAsked(job=JOB, number=SIGTERM, grace_ms=10_000, reason="stopped"))
    assert now(trains) is JobPhase.RELEASING
    trains.answer((od.Resume,))
    assert now(trains) is JobPhase.RUNNING
    assert trains.job.stop is not None


# ---------------------------------------------------------------- within a time


def test_what_does_not_fit_is_not_tried_and_the_ranks_are_told(trains: Story) -> None:
    worker = trains.holder(0)
    trains.hear(ev.WorkerJoined(worker=worker, job=JOB, rank=Rank(0), park_ms=40_000))
    trains.hear(asked(grace_ms=30_000, number=SIGTERM))
    assert now(trains) is JobPhase.RUNNING
    stop = trains.job.stop
    assert stop is not None
    assert stop.reason == "the nodes go; to write it down takes 40 s, and there are 30 s"
    assert stop.grace_ms == 30_000


def test_what_is_not_done_in_time_ends_as_a_stop_does(trains: Story) -> None:
    trains.hear(asked(grace_ms=30_000, number=SIGTERM))
    trains.wait(29_999)
    assert trains.job.outcome is None
    trains.wait(1)
    assert trains.job.outcome is not None
    assert trains.job.outcome.code == STOPPED


def test_what_is_given_up_before_leaves_the_rest_of_the_time_to_the_ranks(trains: Story) -> None:
    trains.hear(asked(grace_ms=30_000, number=SIGTERM))
    trains.cluster = trains.cluster.with_job(trains.job.with_parking(tries=TRIES, why_not="disk full"))
    trains.wait(10_000)
    stop = trains.job.stop
    assert stop is not None
    assert (stop.number, stop.grace_ms) == (SIGTERM, 20_000)
    assert trains.job.outcome is None


def test_asked_again_it_may_be_in_more_of_a_hurry(trains: Story) -> None:
    trains.hear(ev.FreezeSet(source="ops"), asked(), asked(grace_ms=5_000), asked(grace_ms=9_000))
    assert trains.job.parking.deadline_ms == 5_000


def test_while_its_nodes_are_there_for_long_a_job_trains(trains: Story) -> None:
    trains.hear(ev.WorkerJoined(worker=trains.holder(0), job=JOB, rank=Rank(0), park_ms=1_000))
    trains.hear(asked(grace_ms=600_000))
    trains.wait(600_000 - LEAD_MS - 1)
    assert now(trains) is JobPhase.RUNNING
    trains.wait(1)
    assert now(trains) is JobPhase.QUIESCING


def test_asked_again_without_time_it_begins_at_once(trains: Story) -> None:
    trains.hear(ev.WorkerJoined(worker=trains.holder(0), job=JOB, rank=Rank(0), park_ms=1_000))
    trains.hear(asked(grace_ms=600_000), asked())
    assert now(trains) is JobPhase.QUIESCING


# ---------------------------------------------------------------- nowhere to go


def leaves(story: Story, node: NodeId, in_ms: int | None = 60_000) -> None:
    story.hear(ev.TaintSet(node=node, key="slurm", source="slurm", gone_in_ms=in_ms))


def test_a_job_whose_only_node_goes_parks() -> None:
    story = running(spares=0, **PLACE)
    leaves(story, A)
    assert now(story) is JobPhase.QUIESCING
    assert story.job.parking.deadline_ms == 60_000


def test_a_job_whose_node_waits_for_it_does_not() -> None:
    story = running(spares=0, **PLACE)
    leaves(story, A, None)
    assert not story.job.parking.asked


def test_a_job_that_has_room_elsewhere_moves() -> None:
    story = running(spares=0, **PLACE)
    story.hear(ev.NodeJoined(node=B, incarnation="a", slots=2))
    story.settle()
    leaves(story, A)
    assert not story.job.parking.asked
    assert story.move.open


def test_a_job_that_has_room_for_some_only_parks() -> None:
    story = running(spares=0, **PLACE)
    story.hear(ev.NodeJoined(node=B, incarnation="a", slots=1))
    story.settle()
    leaves(story, A)
    assert story.job.parking.asked


# ---------------------------------------------------------------- coming back


def come_back(*found: tuple[NodeId, tuple[int, ...] | None], slots: int = 1) -> Story:
    """A job of two ranks that goes on after 7, on nodes that find files of these ranks (None: of all)."""
    story = Story()
    spec = JobSpec(job=JOB, world_size=2, nproc_per_node=1, nodes=2, resumes=RESUMES, **PLACE)
    story.hear(ev.JobSubmitted(spec=spec))
    for node, _ in found:
        story.hear(ev.NodeJoined(node=node, incarnation="a", slots=slots))
    there = dict(found)
    for order in story.orders():
        assert isinstance(order, od.StartWorker)
        ranks = there[order.node]
        story.hear(
            ev.WorkerStarted(
                worker=order.worker,
                node=order.node,
                slot=order.slot,
                pid=9,
                address=f"at:{order.worker}",
                store="s",
                parked=tuple(map(Rank, ranks or ())),
                all_parked=ranks is None,
            )
        )
        story.hear(ev.WorkerWarm(worker=order.worker))
    return story


def started(order: od.StartWorker, ranks: tuple[int, ...]) -> ev.WorkerStarted:
    found = tuple(map(Rank, ranks))
    return ev.WorkerStarted(worker=order.worker, node=order.node, slot=order.slot, pid=9, address="a", parked=found)


def go_on(story: Story) -> None:
    for _ in range(20):
        for worker in story.cluster.workers:
            story.stands[worker] = replace(story.stands.get(worker, Stand()), keeps=True)
        story.answer()


def test_all_come_back_from_their_files() -> None:
    story = come_back((A, None), (B, None))
    job = story.job
    assert now(story) is JobPhase.PREPARING
    assert all(seat.replacement for seat in job.seats.values())
    assert [seat.home for seat in job.seats.values()] == [A, B]
    go_on(story)
    assert now(story) is JobPhase.RUNNING
    assert story.job.resume_point == Point(7)
    assert story.job.attempts.restarts == RESUMES.restarts
    assert story.job.rollback.every == RESUMES.every
    assert not story.job.resuming
    incident = story.job.accounting.incidents[0]
    assert incident.cause == f"{COMES_BACK} 7"
    assert (incident.resolution, incident.eligible, incident.lost) == (Resolution.RESUMED, False, 0)
    story.prove(Point(8))
    assert story.job.accounting.incidents[0].resolution is Resolution.CLEAN


def test_each_rank_is_asked_for_its_files_on_its_own_node() -> None:
    story = come_back((A, None), (B, None))
    asked = {order.ward: order.node for order in story.orders() if isinstance(order, od.Recall)}
    assert asked == {0: A, 1: B}


def test_files_that_lie_elsewhere_are_brought() -> None:
    story = come_back((A, (1,)), (B, (0,)))
    asked = {order.ward: order.node for order in story.orders() if isinstance(order, od.Recall)}
    assert asked == {0: B, 1: A}
    go_on(story)
    assert now(story) is JobPhase.RUNNING


def test_what_no_node_has_is_named() -> None:
    story = come_back((A, (0,)), (B, ()))
    outcome = story.job.outcome
    assert outcome is not None
    assert outcome.code == NO_STATE
    assert f"of rank 1 there is no file in {RESUMES.folder} on any node with a rank (node-0, node-1)" in outcome.reason


def test_nobody_begins_before_all_have_looked() -> None:
    story = Story()
    spec = JobSpec(job=JOB, world_size=2, nproc_per_node=1, nodes=2, resumes=RESUMES, **PLACE)
    story.hear(ev.JobSubmitted(spec=spec))
    for node in (A, B):
        story.hear(ev.NodeJoined(node=node, incarnation="a", slots=1))
    assert now(story) is JobPhase.STARTING
    assert "to come up" in story.job.why


def nothing_kept(order: od.Recall) -> ev.RecordKept:
    return ev.RecordKept(
        job=JOB,
        generation=order.generation,
        worker=order.worker,
        rank=order.rank,
        ward=order.ward,
        point=order.point,
        private=b"",
    )


def lost_file(story: Story, rank: int) -> None:
    """Nobody can read this rank's file."""
    for _ in range(20):
        for order in story.orders():
            if isinstance(order, od.Recall) and order.ward == rank:
                who: dict[str, Any] = {
                    "job": JOB,
                    "generation": order.generation,
                    "worker": order.worker,
                    "rank": order.rank,
                }
                story.hear(ev.RecordKept(**who, ward=Rank(rank), point=Point(7), private=b""))


def test_a_file_that_cannot_be_read_ends_the_job_and_nothing_begins_anew() -> None:
    story = come_back((A, None), (B, (1,)))
    lost_file(story, 0)
    outcome = story.job.outcome
    assert outcome is not None
    assert outcome.code == NO_STATE
    assert outcome.reason.startswith("could not go on from its parking, which is as it was")


def test_a_file_that_one_node_cannot_read_another_reads() -> None:
    story = come_back((A, None), (B, None))
    first = next(order for order in story.orders() if isinstance(order, od.Recall) and order.ward == 0)
    story.hear(nothing_kept(first))
    asked = {order.ward: order.node for order in story.orders() if isinstance(order, od.Recall)}
    assert asked[Rank(0)] == B


@pytest.mark.parametrize("restarts", [0, 3])
def test_it_never_begins_from_nothing_in_silence(restarts: int) -> None:
    story = Story()
    spec = JobSpec(job=JOB, world_size=1, nproc_per_node=1, max_restarts=restarts, resumes=RESUMES, **PLACE)
    story.hear(ev.JobSubmitted(spec=spec), ev.NodeJoined(node=A, incarnation="a", slots=1))
    start = story.orders()[0]
    assert isinstance(start, od.StartWorker)
    story.hear(ev.WorkerStarted(worker=start.worker, node=A, slot=0, pid=9, parked=(Rank(0),)))
    story.hear(ev.NodeLost(node=A, incarnation="a", reason="silent"))
    story.wait(story.job.spec.spare_wait_ms)
    story.wait(story.job.spec.spare_wait_ms)
    assert ended(story.job)
    assert story.job.attempts.restarts == RESUMES.restarts


def ended(job: Job) -> bool:
    return job.outcome is not None and job.outcome.code != 0


def test_a_rank_lost_on_the_way_back_begins_again_from_its_file() -> None:
    story = come_back((A, None), (B, None), slots=2)
    worker = story.holder(1)
    story.hear(ev.WorkerExited(worker=worker, node=B, signal=9))
    go_on(story)
    assert now(story) is JobPhase.RUNNING
    incident = story.job.accounting.incidents[0]
    assert incident.kind == "unplanned"
    assert incident.eligible


def test_a_rank_whose_node_is_lost_on_the_way_back_goes_on_where_its_file_can_be_read() -> None:
    story = come_back((A, None), (B, None), slots=2)
    story.hear(ev.NodeLost(node=B, incarnation="a", reason="silent"))
    go_on(story)
    assert now(story) is JobPhase.RUNNING
    assert {story.cluster.workers[story.holder(rank)].node for rank in (0, 1)} == {A}


def test_a_node_that_nobody_needs_is_looked_at_if_files_are_missing() -> None:
    third = NodeId("node-2")
    story = Story()
    spec = JobSpec(job=JOB, world_size=2, nproc_per_node=1, nodes=2, resumes=RESUMES, **PLACE)
    story.hear(ev.JobSubmitted(spec=spec))
    for node in (A, B, third):
        story.hear(ev.NodeJoined(node=node, incarnation="a", slots=1))
    finds = {A: (0,), B: (), third: (1,)}
    for _ in range(2):
        for order in story.orders():
            if isinstance(order, od.StartWorker):
                story.hear(started(order, finds[order.node]))
    assert {story.cluster.workers[story.holder(rank)].node for rank in (0, 1)} == {A, third}


def test_what_was_told_there_is_private() -> None:
    story = come_back((A, None), (B, None))
    go_on(story)
    assert all(seat.record_of(Point(7)) is not None for seat in story.job.seats.values())
    assert private(Point(7)) == story.job.seats[Rank(0)].private[-1].data
