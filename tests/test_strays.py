"""Strays: processes of a lost node that came back. They end, and nobody is started in their slots before."""

from __future__ import annotations

import pytest

from tests.telling import JOB
from torchrelay.protocol import events as ev
from torchrelay.protocol.cluster import EMPTY, Cluster, advance, orders
from torchrelay.protocol.ids import NodeId, WorkerId
from torchrelay.protocol.orders import Fence, StartWorker

NODE = NodeId("node-0")
STRAY = WorkerId("node-0.1.9")


def back(cluster: Cluster, incarnation: str, *seen: ev.WorkerSeen) -> Cluster:
    cluster = advance(cluster, ev.NodeLost(node=NODE, incarnation="a", reason="silence"), 0)
    return advance(cluster, ev.NodeJoined(node=NODE, incarnation=incarnation, slots=2, workers=seen), 0)


@pytest.fixture
def cluster() -> Cluster:
    """A job of one rank and one spare, on a node that comes back with a stray in its second slot."""
    spec = ev.JobSpec(job=JOB, world_size=1, nproc_per_node=1, spares=1)
    cluster = advance(EMPTY, ev.JobSubmitted(spec=spec), 0)
    cluster = advance(cluster, ev.NodeJoined(node=NODE, incarnation="a", slots=2), 0)
    return back(cluster, "b", ev.WorkerSeen(worker=STRAY, slot=1, pid=7))


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
