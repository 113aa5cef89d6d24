"""Coming back from a parking: who looks where, who reads whose files, and that nothing begins from nothing."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.telling import JOB, Stand, Story, private
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.enclosed import JobSpec, Resumed
from torchrelay.protocol.messages.ids import NodeId, Point, Rank
from torchrelay.protocol.model.incident import COMES_BACK, Resolution
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.recovery.ending import NO_STATE

A, B = NodeId("node-0"), NodeId("node-1")
PLACE: dict[str, Any] = {"park_dir": "/parked", "park_key": "0123456789abcdef"}
RESUMES = Resumed(folder="/parked/parked-0123456789abcdef-2", point=Point(7), restarts=1, every=4)


def now(story: Story) -> JobPhase:
    return story.job.phase


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


def test_who_is_asked_to_park_on_the_way_back_comes_back_first() -> None:
    story = come_back((A, None), (B, None))
    story.hear(ev.ParkAsked(job=JOB, reason="the nodes go", source="test"))
    assert story.job.resuming
    go_on(story)
    assert not story.job.resuming
    assert story.job.parking.asked


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
