"""Answers: what those who were asked say. They count in the job's generation, in a phase that asks for them, and once.

They are the holder's, but for two: the target of a move tells that it stands at the boundary (`stood_at_boundary`), and
an outgoing worker may have the record of another rank (`record_kept`). Whoever repeats an answer changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest

from msgspec.structs import replace

from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.model import facts
from torchrelay.protocol.model.incident import Mark
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.model.phases import counts
from torchrelay.protocol.model.roster import Life, Seat
from torchrelay.protocol.model.state import Cluster, keep_private
from torchrelay.protocol.recovery.recovery import try_again
from torchrelay.protocol.recovery.rollback import not_there, note_kept


def answering(cluster: Cluster, event: ev.Answer) -> tuple[Job, Seat] | None:
    """The job and seat that an answer is about; None if it is stale, or from somebody else, or not asked for."""
    job = cluster.jobs.get(event.job)
    if job is None or job.generation != event.generation or not counts(job, event):
        return None
    seat = job.seats.get(event.rank)
    if seat is None or seat.worker != event.worker:
        return None
    return job, seat


# What a seat shows once it has given this answer.
GIVEN: dict[type[ev.Event], Callable[[Seat], bool]] = {
    ev.WorkerReported: lambda seat: seat.report is not None,
    ev.WorkerReady: lambda seat: seat.ready,
    ev.WorkerReconfigured: lambda seat: seat.reconfigured,
    ev.WorkerResumed: lambda seat: seat.resumed,
    ev.WorkerParked: lambda seat: seat.parked is not None,
}


def is_repeated(cluster: Cluster, event: ev.Event) -> bool:
    """Whether an answer was heard before, so that nothing follows from it. Who is asked twice answers twice."""
    given = GIVEN.get(type(event))
    if given is None or not isinstance(event, ev.Answer):
        return False
    job = cluster.jobs.get(event.job)
    seat = None if job is None or job.generation != event.generation else job.seats.get(event.rank)
    if job is None or seat is None or seat.worker != event.worker:
        return False
    return given(seat) or (isinstance(event, ev.WorkerResumed) and job.phase is JobPhase.RUNNING)


def worker_reported(cluster: Cluster, event: ev.WorkerReported) -> Cluster:
    found = answering(cluster, event)
    if found is None or found[1].report is not None:
        return cluster
    job, seat = found
    if job.seats.count(facts.has_not_reported) == len(job.seats):
        job = job.mark(Mark.INTERRUPTED, cluster.now_ms)
    job = replace(job.with_seat(event.rank, replace(seat, report=event)), answered_ms=cluster.now_ms)
    cluster = cluster.with_job(job)
    return note_kept(cluster, event.job, cluster.workers[event.worker].node, event.kept)


def worker_ready(cluster: Cluster, event: ev.WorkerReady) -> Cluster:
    """At the safepoint after the resume point; at the first wiring, before protect(); in a move, after the boundary."""
    job = cluster.jobs.get(event.job)
    if job is not None and job.phase is JobPhase.HALTING:
        return stood_at_boundary(cluster, job, event)
    found = answering(cluster, event)
    if found is None or event.point != found[0].resume_point:
        return cluster
    job, seat = found
    if seat.ready:
        return cluster
    return cluster.with_job(replace(job.with_seat(event.rank, replace(seat, ready=True)), answered_ms=cluster.now_ms))


def stood_at_boundary(cluster: Cluster, job: Job, event: ev.WorkerReady) -> Cluster:
    """A holder stands after the boundary, and hands over if it leaves; or a target was brought there."""
    known = cluster.workers.get(event.worker)
    if known is None or job.generation != event.generation or event.point != job.boundary:
        return cluster
    if known.incoming_for == event.rank and known.life is not Life.FENCING:
        return cluster.with_worker(replace(known, brought=event.point))
    found = answering(cluster, event)
    if found is None or found[1].ready:
        return cluster
    seat = replace(found[1], ready=True)
    if event.private and event.point is not None:
        seat = keep_private(seat, [ev.PrivateRecord(event.point, event.private)])
    job = job.mark_first(Mark.STOOD, job.moment(cluster.now_ms, event.age_ms))
    return cluster.with_job(job.with_seat(event.rank, seat))


def record_kept(cluster: Cluster, event: ev.RecordKept) -> Cluster:
    """A buddy has a copy of a lost rank's record, or none. An outgoing worker is one, too."""
    job = cluster.jobs.get(event.job)
    seat = None if job is None else job.seats.get(event.rank)
    ward = None if job is None else job.seats.get(event.ward)
    if job is None or seat is None or ward is None or event.worker not in (seat.worker, seat.outgoing):
        return cluster
    if job.generation != event.generation or not counts(job, event) or event.point != job.resume_point:
        return cluster
    if event.worker in ward.asked_buddies or ward.record_of(event.point) is not None:
        return cluster
    job = replace(job, answered_ms=cluster.now_ms)
    if not event.private:
        asked = replace(ward, asked_buddies=ward.asked_buddies | {event.worker})
        if job.rollback.point is not None:
            job = not_there(job, cluster.workers[event.worker].node, event.ward, event.point)
        return cluster.with_job(job.with_seat(event.ward, asked))
    text = f"rank {event.rank} has kept rank {event.ward}'s private record of {event.point}"
    ward = keep_private(ward, [ev.PrivateRecord(event.point, event.private)])
    return cluster.with_job(job.with_seat(event.ward, ward).tell(cluster.now_ms, text))


def worker_reconfigured(cluster: Cluster, event: ev.WorkerReconfigured) -> Cluster:
    found = answering(cluster, event)
    if found is None:
        return cluster
    job, seat = found
    job = job.with_seat(event.rank, replace(seat, reconfigured=True))
    if not seat.reconfigured and not job.seats.any(facts.is_not_reconfigured):
        job = job.mark(Mark.RECONFIGURED, cluster.now_ms)
    return cluster.with_job(job)


def reconfigure_failed(cluster: Cluster, event: ev.ReconfigureFailed) -> Cluster:
    """Connecting failed although nobody is known to be lost: ask everybody again."""
    found = answering(cluster, event)
    if found is None:
        return cluster
    job = found[0].tell(cluster.now_ms, f"rank {event.rank} could not connect: {event.reason}")
    return try_again(cluster, job, f"rank {event.rank} could not connect")


def state_restored(cluster: Cluster, event: ev.StateRestored) -> Cluster:
    found = answering(cluster, event)
    if found is None or event.point != found[0].resume_point or found[1].holds == event.point:
        return cluster
    job, seat = found
    job = job.with_seat(event.rank, replace(seat, holds=event.point)).mark(Mark.RESTORED, cluster.now_ms)
    incident = job.open_incident
    if incident is not None:
        incident = incident.receive(event.sources, event.shares, event.size, event.digest)
        parts = [f" ({share:,} bytes)" for share in event.shares] if len(event.sources) > 1 else []
        source = ", ".join(f"rank {rank}{part}" for rank, part in zip_longest(event.sources, parts, fillvalue=""))
        if job.rollback.point is not None:
            source = f"{'its parking, read' if job.resuming else 'its snapshot, kept'} on the node of {source}"
        text = f"rank {event.rank} restored from {source}: {event.size:,} bytes, digest {event.digest} equal"
        job = job.with_incident(incident).tell(cluster.now_ms, text)
    return cluster.with_job(job)


def restore_failed(cluster: Cluster, event: ev.RestoreFailed) -> Cluster:
    """One source did not deliver: the next one is asked. Whose digest differed is not trusted again."""
    found = answering(cluster, event)
    if found is None or found[1].holds == found[0].resume_point:
        return cluster
    job, seat = found
    seat = replace(seat, failed=seat.failed | {event.source})
    if event.mismatch:
        seat = replace(seat, distrusted=seat.distrusted | {event.source})
    text = f"rank {event.rank} could not be restored from rank {event.source}: {event.reason}"
    return cluster.with_job(job.with_seat(event.rank, seat).tell(cluster.now_ms, text))


def worker_resumed(cluster: Cluster, event: ev.WorkerResumed) -> Cluster:
    found = answering(cluster, event)
    if found is None:
        return cluster
    job, seat = found
    if not seat.resumed:
        job = job.mark_last(Mark.RESUMED, job.moment(cluster.now_ms, event.age_ms))
    return cluster.with_job(job.with_seat(event.rank, replace(seat, resumed=True)))


def worker_finished(cluster: Cluster, event: ev.WorkerFinished) -> Cluster:
    """The script ended with 0, in any of the phases in which scripts run: it also proves that it had resumed."""
    found = answering(cluster, event)
    if found is None:
        return cluster
    job, seat = found
    if not seat.resumed:
        job = job.mark_last(Mark.RESUMED, job.moment(cluster.now_ms))
    job = job.with_seat(
        event.rank, replace(seat, finished=True, resumed=True, ended_at=event.point, checksum=event.held)
    )
    if job.phase is JobPhase.STARTING and not job.seats.any(facts.has_not_finished):
        why = "every rank has finished without being wired"
        job = job.enter(JobPhase.FINISHING, cluster.now_ms, why)
    return cluster.with_job(job)
