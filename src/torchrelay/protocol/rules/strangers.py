"""Strangers: workers that agents tell of and that are not known here. Strays are fenced; foreign ones are let be.

A stray is of a known job: its node was lost and came back, or its job is over. A foreign one is of a job that nobody
here has heard of: the journal that knows it was lost, or is another orchestrator's. It is never fenced.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torchrelay.protocol.messages.ids import JobId, NodeId, WorkerId
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.model.table import Table


def meet(cluster: Cluster, worker: WorkerId, job: JobId | None, place: tuple[NodeId, int]) -> Cluster:
    """An unknown worker runs there."""
    if worker in cluster.strays:
        return cluster
    if job in cluster.jobs:
        foreign = cluster.foreign.drop(worker)
        return replace(cluster, strays=cluster.strays.put(worker, place), foreign=foreign)
    return replace(cluster, foreign=cluster.foreign.put(worker, place))


def recount(cluster: Cluster, node: NodeId, alive: Collection[WorkerId]) -> Cluster:
    """An agent has told who lives on its node: strangers that it does not name are gone."""
    strays, foreign = (
        Table((name, place) for name, place in known.items() if place[0] != node or name in alive)
        for known in (cluster.strays, cluster.foreign)
    )
    return replace(cluster, strays=strays, foreign=foreign)


def gone(cluster: Cluster, worker: WorkerId) -> Cluster:
    """A stranger has ended."""
    return replace(cluster, strays=cluster.strays.drop(worker), foreign=cluster.foreign.drop(worker))
