"""Records: who has the private record of a rank that is lost with its node, and who is asked for it.

First those to whom it was sent. If none of them has it, or they do not answer, all others: a job may have tried to go
on many times since.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from torchrelay.protocol.messages.ids import Rank, WorkerId
from torchrelay.protocol.model.job import Job
from torchrelay.protocol.model.roster import Life, Worker
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.model.table import Table
from torchrelay.protocol.placement import buddies
from torchrelay.protocol.recovery.rollback import keepers_of

KEEPERS = 3  # generations of which it is kept who was sent whose record


def circle_of(cluster: Cluster, job: Job) -> dict[Rank, tuple[Rank, ...]]:
    """Who keeps a copy of whose record in this generation."""
    held = {rank: seat.worker for rank, seat in job.seats.items()}
    places = {rank: cluster.workers[worker].node for rank, worker in held.items() if worker is not None}
    return buddies.circle(places)


def note_keepers(cluster: Cluster, job: Job) -> Job:
    """Keep whom the records are sent to from now on. Until all have passed a gate those of before have them, too."""
    found = {
        rank: tuple(name for name in (job.seats[other].worker for other in some) if name is not None)
        for rank, some in circle_of(cluster, job).items()
    }
    return replace(job, keepers=(Table(found), *job.keepers[: KEEPERS - 1]))


def buddies_to_ask(cluster: Cluster, job: Job, rank: Rank) -> list[tuple[Rank, Worker]]:
    """Survivors and outgoing workers that may have a copy of this rank's record, and have not denied it."""
    seat = job.seats[rank]
    if job.rollback.point is not None:
        return [keeper for keeper in keepers_of(cluster, job, rank) if keeper[1].worker not in seat.asked_buddies]
    found = [one for one in named(cluster, job, rank) if one[1].worker not in seat.silent_buddies]
    if found:
        return found
    names = (name for _, other in sorted(job.seats.items()) for name in (other.worker, other.outgoing))
    return [
        one
        for name in names
        if name is not None and name not in seat.asked_buddies
        for one in still_there(cluster, job, name)
    ]


def named(cluster: Cluster, job: Job, rank: Rank) -> list[tuple[Rank, Worker]]:
    """Those to whom it was sent, and that have not denied it."""
    names = dict.fromkeys(name for some in job.keepers for name in some.get(rank, ()))
    asked = job.seats[rank].asked_buddies
    return [one for name in names if name not in asked for one in still_there(cluster, job, name)]


def ask_others(cluster: Cluster, job: Job, rank: Rank) -> Cluster | None:
    """Those to whom a rank's record was sent do not answer: others are asked as well. None if it is not time for that.

    Their node may be silent, too, and not be given up yet.
    """
    seat = job.seats[rank]
    assert job.resume_point is not None, "it is decided before any record is asked for"
    if job.rollback.point is not None or seat.record_of(job.resume_point) is not None:
        return None
    if cluster.now_ms - max(job.phase_ms, seat.ended_ms) < job.spec.report_ms // 2:
        return None
    silent = frozenset(worker.worker for _, worker in named(cluster, job, rank))
    if silent <= seat.silent_buddies:
        return None
    seat = replace(seat, silent_buddies=seat.silent_buddies | silent)
    return cluster.with_job(job.with_seat(rank, seat))


def still_there(cluster: Cluster, job: Job, name: WorkerId) -> Iterator[tuple[Rank, Worker]]:
    """This worker and its rank, if it holds the state of it, or held it until the cutover."""
    worker = cluster.workers.get(name)
    if worker is None or worker.rank is None or worker.life is Life.FENCING:
        return
    seat = job.seats[worker.rank]
    if seat.outgoing == name or (seat.worker == name and seat.holds is not None):
        yield worker.rank, worker
