"""Differing: replicas hold different bits. Who differs from most of them is replaced, from one of those that agree.

It is found out in a gate that nobody passes: the step is made again without the one. Where no majority can tell who is
right, nobody goes on: the job ends, or begins again from the script's own checkpoint.
"""

from __future__ import annotations

from torchrelay.protocol.health.replicas import DETECTOR
from torchrelay.protocol.messages.events import Effect, ReplicasDiffer, TaintSet
from torchrelay.protocol.model.incident import Fault
from torchrelay.protocol.model.job import MOVING, JobPhase
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.placement.taints import taint_set
from torchrelay.protocol.recovery.ending import fall_back, lose

TAINT = "replica-differs"
TAKEN_OVER = (
    "ranks changed hands after {}, and a worker that took one over has gone another way. The usual cause is a decision "
    "made between two calls from what the script has read there: make it in a step or section, and return it"
)


def replicas_differ(cluster: Cluster, event: ReplicasDiffer) -> Cluster:
    """Said by one of those that agree; again until it has led to something."""
    job = cluster.jobs.get(event.job)
    if job is None or job.rank_of(event.worker) != event.rank:
        return cluster
    # For a move a new generation begins in the old connections: who has not heard of it yet speaks of the one before.
    known = (job.generation, job.generation - 1) if job.phase in MOVING else (job.generation,)
    if event.generation not in known or job.phase not in MOVING | {JobPhase.RESUMING, JobPhase.RUNNING}:
        return cluster
    now = cluster.now_ms
    if not event.ranks:
        fault = Fault(event.evidence, DETECTOR, job.moment(now, event.age_ms))
        cause = "nobody can tell who is right" if event.since is None else TAKEN_OVER.format(event.since)
        return fall_back(cluster, job.suffer(fault, now), f"{event.evidence}: {cause}")
    if event.since is not None and all(job.seats[rank].resumed_in == event.generation for rank in event.ranks):
        # No bit has flipped: it was given its replicas' state a few steps ago, and so will be the next one.
        fault = Fault(event.evidence, DETECTOR, job.moment(now, event.age_ms))
        return fall_back(cluster, job.suffer(fault, now), f"{event.evidence}: {TAKEN_OVER.format(event.since)}")
    holders = [cluster.workers[seat.worker] for r in event.ranks if (seat := job.seats[r]).worker is not None]
    for holder in holders:
        # One bit may be nobody's fault: the place is taken last. A second one tells of the place.
        again = (holder.node, holder.slot, TAINT) in cluster.taints
        taint = TaintSet(
            node=holder.node, slot=holder.slot, key=TAINT, value=str(event.point), reason=event.evidence,
            source=DETECTOR, effect=Effect.NO_EXECUTE if again else Effect.PREFER_NO_SCHEDULE,
        )  # fmt: skip
        cluster = taint_set(cluster, taint)
        cluster = lose(
            cluster, holder.worker, cause=event.evidence, detector=DETECTOR, ended=False, age_ms=event.age_ms
        )  # fmt: skip
    return cluster
