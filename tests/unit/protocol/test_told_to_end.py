"""Agents that were told to end by a scheduler: the job parks, moves, or its ranks get the signal."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.telling import JOB, Story, running, submitted
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.placement.taints import TOLD
from torchrelay.protocol.recovery.ending import PARKED
from torchrelay.protocol.rules.parking import WORD_MS

A, B = NodeId("node-0"), NodeId("node-1")
PLACE: dict[str, Any] = {"park_dir": "/parked", "park_key": "0123456789abcdef", "grace_ms": 30_000}
SIGTERM = 15


def told(node: NodeId = A, gone_in_ms: int | None = None, value: str = "15") -> ev.TaintSet:
    return ev.TaintSet(node=node, key=TOLD, value=value, reason="told", source="agent", gone_in_ms=gone_in_ms)


def stopped(story: Story) -> tuple[int, int, str] | None:
    """By which signal the job is to stop, how long there is, and why."""
    stop = story.job.stop
    return None if stop is None else (stop.number, stop.grace_ms, stop.reason)


def with_a_place() -> Story:
    return running(**PLACE)


@pytest.fixture
def trains() -> Story:
    return with_a_place()


def takes(story: Story, ms: int) -> None:
    """It is known how long it takes to write the job down."""
    story.cluster = story.cluster.with_job(story.job.with_parking(takes_ms=ms))


def test_a_job_whose_only_node_is_told_parks_within_the_time_that_is_known(trains: Story) -> None:
    trains.hear(told(gone_in_ms=20_000))
    parking = trains.job.parking
    assert (parking.reason, parking.deadline_ms, parking.number) == ("told", trains.now_ms + 20_000, SIGTERM)
    assert trains.job.phase is JobPhase.QUIESCING
    trains.answer((od.Halt,))
    trains.answer((od.Decide,))
    trains.answer((od.Park,))
    trains.hear(ev.ParkingSealed(job=JOB, name=trains.job.parking.name))
    assert trains.job.outcome is not None
    assert trains.job.outcome.code == PARKED


def test_a_scheduler_that_says_nothing_is_waited_for_and_then_the_grace_time_counts(trains: Story) -> None:
    begun = trains.now_ms
    trains.hear(told())
    trains.wait(WORD_MS - 1)
    assert not trains.job.parking.asked
    trains.wait(1)
    assert (trains.job.parking.deadline_ms, trains.job.parking.number) == (begun + 30_000, SIGTERM)


def test_what_the_scheduler_says_in_time_counts(trains: Story) -> None:
    trains.hear(told())
    trains.wait(100)
    trains.hear(told(gone_in_ms=90_000))
    assert trains.job.parking.deadline_ms == trains.now_ms + 90_000


def test_one_that_would_not_fit_gives_the_signal_to_the_ranks(trains: Story) -> None:
    trains.wait(1_000)
    takes(trains, 20_001)
    trains.hear(told(gone_in_ms=20_000))
    assert stopped(trains) == (SIGTERM, 20_000, "told; to write it down takes 20.001 s, and there are 20 s")
    assert (trains.job.parking.asked, trains.job.parking.again_ms) == (False, 0)
    assert {order.number for order in trains.orders() if isinstance(order, od.PassOn)} == {SIGTERM}


def test_one_that_just_fits_parks(trains: Story) -> None:
    takes(trains, 20_000)
    trains.hear(told(gone_in_ms=20_000))
    assert stopped(trains) is None
    assert trains.job.phase is JobPhase.QUIESCING


def test_a_job_that_cannot_be_parked_gives_the_signal_to_the_ranks(trains: Story) -> None:
    trains.hear(ev.FreezeSet(source="operator", reason="look on"))
    trains.hear(told(gone_in_ms=20_000))
    assert stopped(trains) == (SIGTERM, 20_000, "told; it cannot be parked: frozen by operator: look on")


def test_a_job_that_only_starts_ends() -> None:
    story = submitted(**PLACE)
    story.hear(told(gone_in_ms=20_000))
    assert stopped(story) is not None


def test_a_job_without_a_place_to_park_hears_nothing_of_it() -> None:
    story = running()
    story.hear(told(gone_in_ms=20_000))
    assert not story.job.parking.asked
    assert stopped(story) is None


def test_a_parking_that_was_asked_for_before_passes_the_signal_on_if_it_fails(trains: Story) -> None:
    trains.hear(ev.ParkAsked(job=JOB, reason="cool", source="operator", grace_ms=1_000_000))
    assert trains.job.parking.number == 0
    trains.hear(told(gone_in_ms=20_000))
    assert (trains.job.parking.reason, trains.job.parking.number) == ("cool", SIGTERM)


def test_a_job_that_rests_after_a_parking_that_failed_is_asked_all_the_same(trains: Story) -> None:
    job = trains.job
    trains.cluster = trains.cluster.with_job(replace(job, parking=replace(job.parking, rests_ms=trains.now_ms + 10**6)))
    trains.hear(told(gone_in_ms=20_000))
    assert trains.job.parking.asked


def test_a_job_that_stops_already_is_left_alone(trains: Story) -> None:
    trains.hear(ev.SignalAsked(job=JOB, number=2, grace_ms=5_000, reason="Ctrl-C"))
    trains.hear(told(gone_in_ms=20_000))
    assert not trains.job.parking.asked
    assert stopped(trains) == (2, 5_000, "Ctrl-C")


def test_a_taint_without_a_number_is_none_of_ours(trains: Story) -> None:
    trains.hear(told(gone_in_ms=20_000, value="x"))
    assert trains.job.parking.number == 0


# ---------------------------------------------------------------- several nodes


def two_nodes(slots: int) -> Story:
    """Two ranks on one node, and another node."""
    story = running(spares=0, **PLACE)
    story.hear(ev.NodeJoined(node=B, incarnation="b", slots=slots))
    return story


def test_ranks_move_to_a_node_that_was_told_nothing() -> None:
    story = two_nodes(2)
    story.hear(told(gone_in_ms=20_000))
    assert not story.job.parking.asked
    assert story.job.open_move is not None


def test_a_node_without_room_for_all_is_no_way_out() -> None:
    story = two_nodes(1)
    story.hear(told(gone_in_ms=20_000))
    assert story.job.parking.asked


def test_where_all_nodes_are_told_nobody_goes_anywhere() -> None:
    story = two_nodes(2)
    story.hear(told(B))
    story.hear(told(A, gone_in_ms=20_000))
    assert story.job.parking.asked


def test_ranks_on_another_node_keep_the_job_from_parking() -> None:
    story = running(spares=0, **PLACE)
    story.hear(told(B, gone_in_ms=20_000))
    assert not story.job.parking.asked
    assert stopped(story) is None
