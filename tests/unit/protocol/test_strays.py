"""Strays: processes of a lost node that came back. They end, and nobody is started in their slots before.

The processes of a job that is not known are no strays: nobody here has the right to end them.
"""

from __future__ import annotations

import pytest

from tests.support.telling import JOB
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.ids import JobId, NodeId, Rank, WorkerId
from torchrelay.protocol.messages.orders import Fence, StartWorker
from torchrelay.protocol.rules.cluster import EMPTY, Cluster, advance, orders

NODE = NodeId("node-0")
STRAY = WorkerId("node-0.1.9")


def back(cluster: Cluster, incarnation: str, *seen: ev.WorkerSeen) -> Cluster:
    cluster = advance(cluster, ev.NodeLost(node=NODE, incarnation="a", reason="silence"), 0)
    return advance(cluster, ev.NodeJoined(node=NODE, incarnation=incarnation, slots=2, workers=seen), 0)


def with_strays() -> Cluster:
    """A job of one rank and one spare, on a node that comes back with a stray in its second slot."""
    spec = ev.JobSpec(job=JOB, world_size=1, nproc_per_node=1, spares=1)
    cluster = advance(EMPTY, ev.JobSubmitted(spec=spec), 0)
    cluster = advance(cluster, ev.NodeJoined(node=NODE, incarnation="a", slots=2), 0)
    return back(cluster, "b", ev.WorkerSeen(worker=STRAY, slot=1, pid=7, job=JOB))


@pytest.fixture
def cluster() -> Cluster:
    return with_strays()


def slots_started(cluster: Cluster) -> list[int]:
    return sorted(order.slot for order in orders(cluster) if isinstance(order, StartWorker))


def test_nobody_is_started_in_the_slot_of_a_stray(cluster: Cluster) -> None:
    assert slots_started(cluster) == [0]
    assert Fence(node=NODE, worker=STRAY) in orders(cluster)
    ended = advance(cluster, ev.WorkerExited(worker=STRAY, node=NODE, signal=9), 0)
    assert slots_started(ended) == [0, 1]


def test_a_worker_that_nobody_has_ordered_has_its_slot_too() -> None:
    stray = ev.WorkerStarted(worker=WorkerId("node-0.0.7"), node=NODE, slot=0, pid=8, address="a", store="s")
    fresh = advance(EMPTY, ev.NodeJoined(node=NODE, incarnation="a", slots=2), 0)
    fresh = advance(fresh, stray, 0)
    fresh = advance(fresh, ev.JobSubmitted(spec=ev.JobSpec(job=JOB, world_size=1, nproc_per_node=1, spares=1)), 0)
    assert slots_started(fresh) == [1]


def test_a_stray_that_is_gone_when_its_node_comes_back_again_holds_no_slot(cluster: Cluster) -> None:
    cluster = advance(cluster, ev.NodeJoined(node=NODE, incarnation="c", slots=2), 0)
    assert slots_started(cluster) == [0, 1]
    assert not any(isinstance(order, Fence) and order.worker == STRAY for order in orders(cluster))


def test_a_stray_of_another_node_stays_one(cluster: Cluster) -> None:
    cluster = advance(cluster, ev.NodeJoined(node=NodeId("node-1"), incarnation="a", slots=1), 0)
    assert Fence(node=NODE, worker=STRAY) in orders(cluster)


# ---------------------------------------------------------------- jobs that nobody here knows


def unknown(worker: str, slot: int) -> ev.WorkerSeen:
    """A worker of a job that this orchestrator has never heard of: its journal was lost, or is another's."""
    job = JobId("trained-for-weeks")
    return ev.WorkerSeen(worker=WorkerId(worker), slot=slot, pid=7 + slot, job=job, rank=Rank(slot))


def fenced(cluster: Cluster) -> set[WorkerId]:
    return {order.worker for order in orders(cluster) if isinstance(order, Fence)}


def test_workers_of_a_job_that_is_not_known_are_never_fenced() -> None:
    """A lost journal, and an orchestrator that begins with nothing: the workers that the agents bring train on."""
    seen = tuple(unknown(f"node-0.{slot}.{slot}", slot) for slot in range(2))
    fresh = advance(EMPTY, ev.NodeJoined(node=NODE, incarnation="a", slots=3, workers=seen), 0)
    assert orders(fresh) == frozenset()
    fresh = advance(fresh, ev.NodeLost(node=NODE, incarnation="a", reason="silence"), 0)
    fresh = advance(fresh, ev.NodeJoined(node=NODE, incarnation="b", slots=3, workers=seen), 0)
    assert orders(fresh) == frozenset()


def test_one_that_starts_late_is_not_fenced_either() -> None:
    fresh = advance(EMPTY, ev.NodeJoined(node=NODE, incarnation="a", slots=3), 0)
    for job in (JobId("trained-for-weeks"), None):
        late = ev.WorkerStarted(worker=WorkerId("node-0.0.0"), node=NODE, slot=0, pid=8, job=job)
        assert orders(advance(fresh, late, 0)) == frozenset()


def test_their_slots_are_theirs_until_they_have_ended() -> None:
    fresh = advance(EMPTY, ev.NodeJoined(node=NODE, incarnation="a", slots=3, workers=(unknown("old", 1),)), 0)
    fresh = advance(fresh, ev.JobSubmitted(spec=ev.JobSpec(job=JOB, world_size=1, nproc_per_node=1, spares=2)), 0)
    assert (slots_started(fresh), fenced(fresh)) == ([0, 2], set())
    ended = advance(fresh, ev.WorkerExited(worker=WorkerId("old"), node=NODE, code=0), 0)
    assert slots_started(ended) == [0, 1, 2]


def test_one_that_is_gone_when_its_node_comes_back_holds_no_slot() -> None:
    fresh = advance(EMPTY, ev.NodeJoined(node=NODE, incarnation="a", slots=2, workers=(unknown("old", 1),)), 0)
    fresh = advance(fresh, ev.JobSubmitted(spec=ev.JobSpec(job=JOB, world_size=1, nproc_per_node=1, spares=1)), 0)
    assert slots_started(fresh) == [0]
    assert slots_started(advance(fresh, ev.NodeJoined(node=NODE, incarnation="b", slots=2), 0)) == [0, 1]


def test_a_worker_of_a_known_job_that_is_not_known_itself_is_a_stray(cluster: Cluster) -> None:
    """As before: its node was lost, and its rank is another's by now."""
    assert fenced(cluster) == {STRAY}
    again = ev.WorkerSeen(worker=WorkerId("node-0.0.7"), slot=0, pid=9, job=JobId("another"))
    assert WorkerId("node-0.0.7") not in fenced(back(cluster, "d", again))
