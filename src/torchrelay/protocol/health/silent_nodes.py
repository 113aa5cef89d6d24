"""Silent nodes: which of them are lost, and how long the others have left. The rule is that of `silence`."""

from __future__ import annotations

from functools import cached_property
from heapq import nlargest

from torchrelay.protocol.health.deafness import all_silent
from torchrelay.protocol.health.pulses import FailureDetector
from torchrelay.protocol.health.silence import DEAF_MS, Rhythm, Silence
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.model.job import TRAINING, Job
from torchrelay.protocol.model.roster import Node
from torchrelay.protocol.model.state import Cluster


class SilentNodes:
    """How long nodes have not been heard, at one moment. What is the same for all nodes is found once."""

    def __init__(self, failure_detector: FailureDetector, cluster: Cluster, now_ms: int) -> None:
        self._failure_detector, self._cluster, self._now_ms = failure_detector, cluster, now_ms

    def of(self, node: Node) -> Silence | None:
        """How it stands with a node that is not heard; None if it is, or if there is nothing to wait for."""
        heard = self._failure_detector.heard.get((node.node, node.incarnation))
        if not node.alive or heard is None or self._now_ms - heard < self._failure_detector.fresh_ms:
            return None
        rhythm = self._failure_detector.rhythms.get(node.node, Rhythm(self._now_ms))
        limit = rhythm.limit_ms(self._failure_detector.beat_ms)
        proof = self._last_proof(node.node)
        proof = proof if proof is not None and proof > heard else None
        deaf = self.all_silent
        until = max((heard if proof is None else proof) + limit, heard + (DEAF_MS if deaf else 0))  # proof is newer
        proved = None if proof is None else self._now_ms - proof
        return Silence(node.node, self._now_ms - heard, limit, max(0, until - self._now_ms), proved, deaf)

    @cached_property
    def all_silent(self) -> bool:
        """Whether no living node has been heard of late."""
        return all_silent(self._failure_detector, self._cluster, self._now_ms)

    def _last_proof(self, node: NodeId) -> int | None:
        """When ranks on other nodes last passed a gate of a running job that has ranks on this node."""
        newest = [two for nodes, two in self._gates if node in nodes]
        return max((at for two in newest for at, other in two if other != node), default=None)

    @cached_property
    def _gates(self) -> list[tuple[frozenset[NodeId], list[tuple[int, NodeId]]]]:
        """Of each job that trains: the nodes of its ranks, and which two of them have passed a gate last, and when."""
        jobs = [job for job in self._cluster.jobs.values() if job.phase in TRAINING]
        return [gates_of(self._failure_detector, self._cluster, job) for job in jobs]


def gates_of(
    failure_detector: FailureDetector, cluster: Cluster, job: Job
) -> tuple[frozenset[NodeId], list[tuple[int, NodeId]]]:
    """The nodes of a job's ranks, and the two of them whose ranks passed a gate last, with the time."""
    nodes: set[NodeId] = set()
    passed: dict[NodeId, int] = {}
    for seat in job.seats.values():
        worker = None if seat.worker is None else cluster.workers.get(seat.worker)
        if worker is None:
            continue
        nodes.add(worker.node)
        pulse = failure_detector.pulses.get(worker.worker)
        if pulse is not None and pulse.advanced_ms is not None:
            passed[worker.node] = max(pulse.advanced_ms, passed.get(worker.node, pulse.advanced_ms))
    return frozenset(nodes), nlargest(2, ((at, node) for node, at in passed.items()))
