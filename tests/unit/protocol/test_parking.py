"""Parking: when a job writes itself down, what happens when that is disturbed, and how it comes back."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.telling import JOB, Story, running
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Point, Rank
from torchrelay.protocol.model.incident import Resolution
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.placement.boundary import AGAIN_MS, REST_MS, TRIES
from torchrelay.protocol.recovery.ending import PARKED, STOPPED
from torchrelay.protocol.rules.parking import LEAD_MS

A, B = NodeId("node-0"), NodeId("node-1")
PLACE: dict[str, Any] = {"park_dir": "/parked", "park_key": "0123456789abcdef"}
SIGTERM = 15


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


def test_what_is_said_of_another_job_or_generation_changes_nothing(trains: Story) -> None:
    halt(trains)
    other, job = JobId("other"), trains.job
    before = trains.cluster
    trains.hear(ev.ParkAsked(job=other, reason="?", source="?"), ev.ParkingSealed(job=other, name="?"))
    trains.hear(ev.SealFailed(job=other, name="?", reason="?"))
    trains.hear(ev.ParkingSealed(job=JOB, name=job.parking.name))  # nobody can have written it yet
    trains.hear(ev.SealFailed(job=JOB, name=job.parking.name, reason="?"))
    stale = Generation(job.generation - 1)
    trains.hear(ev.ParkFailed(job=JOB, generation=stale, worker=trains.holder(1), rank=Rank(1), reason="?"))
    trains.hear(parked(trains, 1, generation=stale), parked(trains, 1, point=Point(3)))
    assert trains.cluster == before


def parked(story: Story, rank: int, **changes: Any) -> ev.WorkerParked:
    told: dict[str, Any] = {
        "job": JOB,
        "generation": story.job.generation,
        "worker": story.holder(rank),
        "rank": Rank(rank),
        "node": A,
        "point": Point(4),
        "size": 1,
        "private": "p",
        "digest": "d",
    }
    return ev.WorkerParked(**told | changes)


def test_what_a_rank_has_said_first_counts(trains: Story) -> None:
    halt(trains)
    trains.hear(parked(trains, 1), parked(trains, 1, digest="another"))
    first = trains.job.seats[Rank(1)].parked
    assert first is not None
    assert first.digest == "d"


def test_what_speaks_against_it_is_said(trains: Story) -> None:
    trains.hear(ev.FreezeSet(source="ops", reason="look"), asked())
    assert trains.job.parking.why_not == "frozen by ops: look"
    assert (trains.job.parking.source, trains.job.parking.reason) == ("test", "the nodes go")
    seat = replace(trains.job.seats[Rank(1)], finished=True)
    trains.cluster = trains.cluster.with_job(trains.job.with_seat(Rank(1), seat))
    trains.hear(ev.FreezeCleared(source="ops"))
    assert trains.job.parking.why_not == "the job is about to end"
    assert now(trains) is JobPhase.RUNNING


def test_while_a_connection_is_broken_nobody_is_asked_to_stop(trains: Story) -> None:
    job, worker = trains.job, trains.holder(0)
    trains.hear(
        ev.CollectiveFailed(worker=worker, job=JOB, rank=Rank(0), generation=job.generation, summary="reset"), asked()
    )
    assert now(trains) is JobPhase.RUNNING
    assert trains.job.parking.why_not == "a connection has broken"


def test_a_job_that_is_stopped_does_not_park(trains: Story) -> None:
    trains.hear(ev.SignalAsked(job=JOB, number=SIGTERM, grace_ms=10_000, reason="stopped"), asked())
    assert now(trains) is JobPhase.RUNNING
    assert trains.job.parking.why_not == "stopped"


def test_each_try_that_fails_counts(trains: Story) -> None:
    to_seal(trains)
    unsealed(trains)
    assert trains.job.parking.tries == 1


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


def test_what_does_not_fit_and_has_no_signal_is_only_said(trains: Story) -> None:
    trains.hear(ev.WorkerJoined(worker=trains.holder(0), job=JOB, rank=Rank(0), park_ms=40_000))
    trains.hear(asked(grace_ms=0))
    assert trains.job.stop is None
    assert not trains.job.parking.asked
    assert trains.job.parking.why_not == "to write it down takes 40 s, and there are 0 s"
    assert trains.job.parking.takes_ms == 40_000


@pytest.mark.parametrize(("takes_ms", "lead_ms"), [(0, 600_000), (1_000, 120_000), (50_000, 200_000)])
def test_how_long_before_the_end_it_begins(trains: Story, takes_ms: int, lead_ms: int) -> None:
    trains.hear(ev.WorkerJoined(worker=trains.holder(0), job=JOB, rank=Rank(0), park_ms=takes_ms))
    trains.hear(asked(grace_ms=900_000))
    assert trains.job.parking.again_ms == 900_000 - lead_ms


def test_who_asked_first_with_a_signal_is_not_forgotten(trains: Story) -> None:
    trains.hear(ev.FreezeSet(source="ops"), asked(), asked(), asked(grace_ms=30_000, number=SIGTERM), asked())
    assert (trains.job.parking.number, trains.job.parking.deadline_ms) == (SIGTERM, 30_000)


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


def test_the_first_of_its_places_that_goes_counts_and_from_now_on() -> None:
    story = running(spares=0, **PLACE)
    story.wait(5_000)
    story.hear(ev.TaintSet(node=A, slot=0, key="k", source="s", gone_in_ms=90_000))
    assert not story.job.parking.asked
    story.hear(ev.TaintSet(node=A, slot=1, key="k", source="s", gone_in_ms=60_000))
    assert story.job.parking.deadline_ms == 65_000


def test_what_was_given_up_rests(trains: Story) -> None:
    trains.hear(asked())
    trains.cluster = trains.cluster.with_job(trains.job.with_parking(tries=TRIES, why_not="disk full"))
    trains.wait(1)
    assert not trains.job.parking.asked
    for slot in range(3):
        trains.hear(ev.TaintSet(node=A, slot=slot, key="k", source="s", gone_in_ms=900_000))
    assert not trains.job.parking.asked
    trains.answer((od.Resume,))
    trains.wait(REST_MS)
    assert trains.job.parking.asked


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
