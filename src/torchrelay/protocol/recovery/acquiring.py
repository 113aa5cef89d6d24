"""Acquiring: vacant ranks are given to spares, once their former holders are known to have ended."""

from __future__ import annotations

from dataclasses import replace

from torchrelay.protocol.messages.ids import Generation, NodeId, Rank, WorkerId
from torchrelay.protocol.model.incident import Mark
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.model.moves import MoveState
from torchrelay.protocol.model.roster import Life, Worker
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.model.table import Table
from torchrelay.protocol.placement.boundary import with_move
from torchrelay.protocol.placement.policy import DYING_MS
from torchrelay.protocol.placement.taints import closed
from torchrelay.protocol.recovery.ending import NO_SPARE, fall_back
from torchrelay.protocol.recovery.placing import spare_for, usable_spares
from torchrelay.protocol.recovery.rollback import all_vacant, places_for, still_ending


def acquire(cluster: Cluster, job: Job) -> Cluster | None:
    """Give each vacant rank to a spare, once its former holder is known to have ended. None if nothing changed."""
    if all_vacant(job):
        return reseat(cluster, job)
    vacant = [rank for rank, seat in sorted(job.seats.items()) if seat.worker is None]
    for rank in vacant:
        stuck = undying(cluster, job, rank)
        if stuck:
            return wait_for_spare(cluster, job, stuck)
        if cluster.still_held(job.spec.job, rank) or held_back(cluster, job, rank):
            continue
        incoming_for = incoming_for_of(cluster, job, rank)
        if incoming_for is not None:
            return inherit(cluster, job, rank, incoming_for)
        spare, reason = spare_for(cluster, job, rank, usable_spares(cluster, job), near=last_node(job, rank))
        if spare is not None:
            return take(cluster, job.tell(cluster.now_ms, reason), rank, spare.worker)
        room = give_way(cluster, job, rank) or dismiss_outgoing_workers(cluster, job)
        return room or wait_for_spare(cluster, job, reason)
    return None


def reseat(cluster: Cluster, job: Job) -> Cluster | None:
    """All go back to a snapshot: every rank is taken again, where it was. None if that has to wait."""
    for worker in still_ending(cluster, job):
        if cluster.now_ms - worker.since_ms >= DYING_MS:
            return wait_for_spare(cluster, job, f"{worker.worker} cannot be ended: waiting")
        return None
    places = places_for(job, usable_spares(cluster, job))
    missing = len(job.seats) - len(places)
    if missing:
        return wait_for_spare(cluster, job, f"{missing} of {len(job.seats)} ranks have no place to begin anew")
    for rank, name in sorted(places.items()):
        cluster = take(cluster, cluster.jobs[job.spec.job], rank, name)
    return cluster


def incoming_for_of(cluster: Cluster, job: Job, rank: Rank) -> Worker | None:
    """The target that a move has appointed for this rank, if it can be used."""
    move = job.open_move
    worker = None if move is None else cluster.workers.get(move.targets.get(rank, WorkerId("")))
    if worker is None or worker.life is Life.FENCING or closed(cluster, worker.node, worker.slot):
        return None
    # When the point is decided nobody is asked any more; one that was told of another can not come there.
    strayed = job.phase is JobPhase.PREPARING and worker.brought not in (None, job.target)
    return None if strayed else worker


def inherit(cluster: Cluster, job: Job, rank: Rank, incoming_for: Worker) -> Cluster:
    """The rank's holder was lost while its target was being prepared: that is the best of all spares.

    One that is prepared may have been told where to go: it is asked how far it was brought, like a survivor.
    """
    move = job.open_move
    assert move is not None, "a move has appointed it"
    text = f"rank {rank} moves to {incoming_for.worker} on {incoming_for.node}, the target of {move.name}"
    job = with_move(job, replace(move, targets=move.targets.drop(rank))).tell(cluster.now_ms, text)
    cluster = cluster.with_worker(replace(incoming_for, incoming_for=None))
    cluster = take(cluster, job, rank, incoming_for.worker)
    if not incoming_for.prepared and not incoming_for.shard:
        return cluster
    job = cluster.jobs[job.spec.job]
    seat = replace(job.seats[rank], joined=True, shard=incoming_for.shard or job.seats[rank].shard)
    if incoming_for.prepared and job.phase is JobPhase.AGREEING:
        seat = replace(seat, assigned_in=Generation(job.generation - 1))
    return cluster.with_job(job.with_seat(rank, seat))


def give_way(cluster: Cluster, job: Job, rank: Rank) -> Cluster | None:
    """A rank is lost and there is no spare: targets of a move, whose ranks are well, make room. None if there are none.

    A target has taken on the identity of its rank, and can have no other: a new worker is started in its place.
    """
    move = job.open_move
    targets = [] if move is None else [t for t in move.targets.values() if t in cluster.workers]
    if move is None or not targets:
        return None
    for target in targets:
        cluster = cluster.fence(target)
    text = f"gives way: rank {rank} is lost, and there is no other room"
    move = replace(move, targets=Table()).enter(MoveState.WAITING, cluster.now_ms, text)
    return cluster.with_job(with_move(job, move).tell(cluster.now_ms, f"{move.name} {text}"))


def undying(cluster: Cluster, job: Job, rank: Rank) -> str:
    """Why a vacant rank cannot be given away for long: a former holder does not end, whatever is done. Else empty."""
    for worker in cluster.of_job(job.spec.job):
        if worker.rank == rank and cluster.now_ms - worker.since_ms >= DYING_MS:
            return f"rank {rank}'s last holder {worker.worker} cannot be ended: waiting"
    return ""


def held_back(cluster: Cluster, job: Job, rank: Rank) -> bool:
    """Whether a spare must wait: the last holder raised, and others may be about to raise the same."""
    times = [raised.at_ms for raised in job.raised if raised.rank == rank and not raised.cramped]
    return bool(times) and cluster.now_ms - max(times) < job.spec.raise_grace_ms


def last_node(job: Job, rank: Rank) -> NodeId | None:
    """Where the rank was until it was lost."""
    incident = job.open_incident
    assert incident is not None, "a rank is vacant in an incident only"
    return next((fault.node for fault in reversed(incident.faults) if fault.rank == rank), None)


def take(cluster: Cluster, job: Job, rank: Rank, worker: WorkerId) -> Cluster:
    """A spare takes a rank."""
    now = cluster.now_ms
    seat = replace(job.seats[rank], worker=worker, replacement=True, assigned_in=job.generation, assigned_ms=now)
    job = replace(job.with_seat(rank, seat), waiting_ms=None)
    if all(other.worker is not None for other in job.seats.values()):
        job = job.mark(Mark.ACQUIRED, now)
    return cluster.with_worker(replace(cluster.workers[worker], rank=rank)).with_job(job)


def wait_for_spare(cluster: Cluster, job: Job, reason: str) -> Cluster | None:
    now = cluster.now_ms
    if job.waiting_ms is None:
        return cluster.with_job(replace(job, waiting_ms=now, why=reason).tell(now, reason))
    if now - job.waiting_ms >= job.spec.spare_wait_ms:
        waited = f"{reason} for {(now - job.waiting_ms) / 1000:.0f} s, in vain"
        return fall_back(cluster, job, waited, NO_SPARE)
    return None


def dismiss_outgoing_workers(cluster: Cluster, job: Job) -> Cluster | None:
    """A rank is lost and there is no spare: outgoing workers whose ranks have their state make room."""
    done = [rank for rank, seat in job.seats.items() if seat.outgoing is not None and seat.holds is not None]
    if not done:
        return None
    for rank in done:
        seat = job.seats[rank]
        assert seat.outgoing is not None, "just asked"
        cluster = cluster.fence(seat.outgoing)
        job = job.with_seat(rank, replace(seat, outgoing=None))
    return cluster.with_job(job)
