"""Replicas: ranks that hold the same part of the state, and of which some hold other bits than the rest.

It is found out in a gate that nobody passes: the step is made again without the one that differs from most, which is
replaced from one of those that agree. Where no majority can tell who is right, nobody goes on: the job ends, or begins
again from the script's own checkpoint. And once more when all scripts have ended, if ranks have changed hands.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from msgspec import Struct

from torchrelay.protocol.messages.events import Effect, ReplicasDiffer, TaintSet
from torchrelay.protocol.messages.ids import Rank
from torchrelay.protocol.model.incident import Fault
from torchrelay.protocol.model.job import BEFORE_CUTOVER, JobPhase
from torchrelay.protocol.model.roster import Seat
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.placement.taints import taint_set
from torchrelay.protocol.recovery.ending import fall_back, lose_worker

DETECTOR = "comparison of replicas"
AT_THE_END = (
    "when the script ended. Ranks have changed hands before, and a worker that took one over has gone another way. "
    "Don't use what was saved since. The usual cause is a decision made between two calls from what the script has "
    "read there: make it in a step or section, and return it"
)
TAINT = "replica-differs"
TAKEN_OVER = (
    "ranks changed hands after {}, and a worker that took one over has gone another way. The usual cause is a decision "
    "made between two calls from what the script has read there: make it in a step or section, and return it"
)


class Verdict(Struct, frozen=True):
    """Who differs from most of its replicas; and who from others, where there is no majority."""

    differing: tuple[int, ...]
    doubtful: tuple[int, ...]


def judge_replicas(told: Iterable[tuple[int, str, str]]) -> Verdict:
    """From what each rank holds: its number, the name of its shard, and a sum over it."""
    shards: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    for rank, shard, held in told:
        shards[shard].append((rank, held))
    differing: list[int] = []
    doubtful: list[int] = []
    for replicas in shards.values():
        (most, count), *others = Counter(held for _, held in replicas).most_common()
        if others and 2 * count > len(replicas):
            differing += [rank for rank, held in replicas if held != most]
        elif others:
            doubtful += [rank for rank, _ in replicas]
    return Verdict(tuple(sorted(differing)), tuple(sorted(doubtful)))


def differing_at_the_end(seats: Iterable[tuple[Rank, Seat]]) -> str:
    """All scripts have ended: in what way replicas differ, in words; empty if they do not, as far as they have told.

    What a script has changed itself after its last step is not told, nor what nobody had to compare.
    """
    verdict = judge_replicas(
        (rank, f"{seat.shard} at {seat.ended_at}", seat.checksum)
        for rank, seat in seats
        if seat.checksum and seat.joined  # what one holds that has not joined, as far as is heard, is not known
    )
    named = verdict.doubtful or verdict.differing
    if not named:
        return ""
    who = f"rank{'s' * (len(named) > 1)} {', '.join(map(str, named))}"
    how = "hold different parameters" if verdict.doubtful else "holds other parameters than most of its replicas"
    return f"{who} {how} {AT_THE_END}"


def replicas_differ(cluster: Cluster, event: ReplicasDiffer) -> Cluster:
    """Said by one of those that agree; again until it has led to something."""
    job = cluster.jobs.get(event.job)
    if job is None or not job.is_held_by(event.worker, event.rank):
        return cluster
    # For a move a new generation begins in the old connections: who has not heard of it yet speaks of the one before.
    known = (job.generation, job.generation - 1) if job.phase in BEFORE_CUTOVER else (job.generation,)
    if event.generation not in known or job.phase not in BEFORE_CUTOVER | {JobPhase.RESUMING, JobPhase.RUNNING}:
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
            node=holder.node,
            slot=holder.slot,
            key=TAINT,
            value=str(event.point),
            reason=event.evidence,
            source=DETECTOR,
            effect=Effect.NO_EXECUTE if again else Effect.PREFER_NO_SCHEDULE,
        )
        cluster = taint_set(cluster, taint)
        cluster = lose_worker(
            cluster, holder.worker, cause=event.evidence, detector=DETECTOR, ended=False, age_ms=event.age_ms
        )
    return cluster
