"""Workers that the core does not know: strays of its own job, and those of a job that nobody knows."""

from __future__ import annotations

from msgspec.structs import replace

from tests.support.telling import JOB, running
from torchrelay.protocol.messages.ids import JobId, NodeId, WorkerId
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.model.table import Table
from torchrelay.protocol.rules.cluster import gone, meet, recount

ONE, TWO, THREE = WorkerId("one"), WorkerId("two"), WorkerId("three")
NODE, OTHER = NodeId("node-0"), NodeId("node-1")


def known(cluster: Cluster) -> tuple[set[WorkerId], set[WorkerId]]:
    return set(cluster.strays), set(cluster.foreign)


def with_strangers() -> Cluster:
    places = Table({ONE: (NODE, 0), TWO: (NODE, 1), THREE: (OTHER, 0)}.items())
    return replace(running().cluster, strays=places, foreign=places)


def test_one_of_a_job_that_nobody_knows_is_let_be() -> None:
    cluster = meet(running().cluster, ONE, JobId("of another orchestrator"), (NODE, 7))
    assert known(cluster) == (set(), {ONE})
    assert dict(cluster.foreign.items()) == {ONE: (NODE, 7)}
    assert meet(cluster, ONE, JobId("of another orchestrator"), (NODE, 7)) == cluster


def test_one_of_our_job_is_a_stray_and_stays_one() -> None:
    cluster = meet(running().cluster, ONE, None, (NODE, 7))
    assert known(cluster) == (set(), {ONE}), "it has not said yet whose it is"
    cluster = meet(cluster, ONE, JOB, (NODE, 7))
    assert known(cluster) == ({ONE}, set())
    assert meet(cluster, ONE, JobId("of another orchestrator"), (OTHER, 1)) == cluster


def test_an_agent_that_counts_its_workers_speaks_for_its_node_alone() -> None:
    cluster = recount(with_strangers(), NODE, [TWO])
    assert known(cluster) == ({TWO, THREE}, {TWO, THREE})
    assert known(recount(cluster, OTHER, [TWO])) == ({TWO}, {TWO})


def test_one_that_has_ended_is_forgotten() -> None:
    assert known(gone(with_strangers(), TWO)) == ({ONE, THREE}, {ONE, THREE})
