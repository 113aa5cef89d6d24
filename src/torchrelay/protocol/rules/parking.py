"""Parking: a job that has to leave all its nodes writes itself down at the next boundary, and ends.

    asked       by an operator, by the launcher or by all agents, told to end; or all its places are to be left
    a halt      as for a move: QUIESCING, HALTING (`boundary`)
    PARKING     each rank writes its state and its private record into a new folder
    SEALING     the orchestrator writes the manifest; with it, and not before, the job is parked: it ends

Until the manifest is there nothing has happened: whatever goes wrong, all go on as before, and it is tried again. What
cannot be written down in time ends as it would have without us: the signal that asked for it is passed on to the ranks.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.events import Effect
from torchrelay.protocol.messages.ids import JobId
from torchrelay.protocol.model import facts
from torchrelay.protocol.model.incident import PARKS, Fault, Resolution
from torchrelay.protocol.model.job import TRAINING, Job, JobPhase
from torchrelay.protocol.model.parts import Parking
from torchrelay.protocol.model.state import Cluster, is_over
from torchrelay.protocol.placement.boundary import REST_MS, TRIES, begin_parking, in_vain, put_off
from torchrelay.protocol.placement.taints import TOLD, on_slot
from torchrelay.protocol.recovery.ending import PARKED, STOPPED, end_job, interrupt_job
from torchrelay.protocol.rules.answers import answering
from torchrelay.protocol.rules.migration import abandon, over_by, room_for, room_to_share
from torchrelay.protocol.rules.stopping import signal_asked

# How long before its nodes are gone a job begins at the latest; longer, if writing takes long or was not measured.
LEAD_MS, UNMEASURED_MS = 120_000, 600_000
TIMES_AHEAD = 4
# How long a scheduler may take to say how long there is, when agents were told to end.
WORD_MS = 2_500
LEAVING = "all its places are to be left, and there is not room for all elsewhere"


# ---------------------------------------------------------------- facts


def park_asked(cluster: Cluster, event: ev.ParkAsked) -> Cluster:
    """Keep the wish. Asked again it may only be in more of a hurry."""
    job = cluster.jobs.get(event.job)
    if job is None or is_over(job) or not job.spec.park_dir or job.phase is JobPhase.SEALING:
        return cluster
    now, known = cluster.now_ms, job.parking
    deadline = None if event.grace_ms is None else now + event.grace_ms
    if known.asked:
        sooner = min((one for one in (known.deadline_ms, deadline) if one is not None), default=None)
        again = min(known.again_ms, begins(known, deadline, now)) if not known.why_not else known.again_ms
        number = known.number or event.number
        return cluster.with_job(job.with_parking(deadline_ms=sooner, number=number, again_ms=again))
    if event.grace_ms is not None and known.takes_ms > event.grace_ms:
        return too_slow(cluster, job, event)
    asked = replace(fresh(known), reason=event.reason, source=event.source, asked_ms=now, deadline_ms=deadline)
    asked = replace(asked, number=event.number, again_ms=begins(known, deadline, now))
    return cluster.with_job(replace(job, parking=asked).tell(now, f"the job is to park: {event.reason}"))


def begins(known: Parking, deadline_ms: int | None, now_ms: int) -> int:
    """When to begin: at once, unless the nodes are there for long yet."""
    if deadline_ms is None:
        return now_ms
    lead = max(LEAD_MS, TIMES_AHEAD * known.takes_ms) if known.takes_ms else UNMEASURED_MS
    return max(now_ms, deadline_ms - lead)


def too_slow(cluster: Cluster, job: Job, event: ev.ParkAsked) -> Cluster:
    """It would not fit: all ranks would stand still for nothing, and could save nothing themselves."""
    takes, there = job.parking.takes_ms / 1000, (event.grace_ms or 0) / 1000
    text = f"to write it down takes {takes:g} s, and there are {there:g} s"
    rest = replace(fresh(job.parking), rests_ms=cluster.now_ms + REST_MS, why_not=text)
    cluster = cluster.with_job(replace(job, parking=rest).tell(cluster.now_ms, text))
    if not event.number:
        return cluster
    reason = f"{event.reason}; {text}"
    return signal_asked(
        cluster, ev.SignalAsked(job=event.job, number=event.number, grace_ms=event.grace_ms, reason=reason)
    )


def fresh(known: Parking) -> Parking:
    """Nothing is asked for; what holds beside that stays."""
    return Parking(takes_ms=known.takes_ms, found=known.found)


def parking_sealed(cluster: Cluster, event: ev.ParkingSealed) -> Cluster:
    """From now on the job is what lies there."""
    job = cluster.jobs.get(event.job)
    if job is None or job.phase is not JobPhase.SEALING or job.parking.name != event.name:
        return cluster
    reason = f"parked after {job.boundary} in {job.spec.park_dir}: {job.parking.reason}"
    return end_job(cluster, job, PARKED, reason, eligible=False, resolution=Resolution.PARKED)


def seal_failed(cluster: Cluster, event: ev.SealFailed) -> Cluster:
    """All go on; those that have ended meanwhile are replaced."""
    job = cluster.jobs.get(event.job)
    if job is None or job.phase is not JobPhase.SEALING or job.parking.name != event.name:
        return cluster
    job = job.with_parking(tries=job.parking.tries + 1)
    if not job.seats.any(facts.is_vacant):
        return put_off(cluster, job, event.reason)
    now = cluster.now_ms
    for rank, _ in job.seats.where(facts.is_vacant):
        job = job.suffer(Fault("ended while the job was written down", PARKS, job.moment(now), rank), now)
    return interrupt_job(cluster, job, event.reason, in_vain=False)


# ---------------------------------------------------------------- answers


def worker_parked(cluster: Cluster, event: ev.WorkerParked) -> Cluster:
    found = answering(cluster, event)
    if found is None or event.point != found[0].boundary or found[1].parked is not None:
        return cluster
    job, seat = found
    return cluster.with_job(job.with_seat(event.rank, replace(seat, parked=event)))


def park_failed(cluster: Cluster, event: ev.ParkFailed) -> Cluster:
    found = answering(cluster, event)
    if found is None:
        return cluster
    return in_vain(cluster, found[0], f"rank {event.rank} could not be written down: {event.reason}")


# ---------------------------------------------------------------- one change at a time


def progress_parking(cluster: Cluster, job_id: JobId) -> Cluster:
    """One change, if one is due; the same cluster if not."""
    job = cluster.jobs[job_id]
    if is_over(job) or not job.spec.park_dir or job.phase is JobPhase.SEALING:
        return cluster
    told = told_to_end(cluster, job)
    if not job.parking.asked:
        return of_our_own_accord(cluster, job) if told is None else as_told(cluster, job, told)
    if told is not None and not job.parking.number:
        again_ms = job.parking.again_ms if job.parking.why_not else cluster.now_ms
        return cluster.with_job(job.with_parking(number=told.number, again_ms=again_ms))
    if job.stop is not None and job.parking.name:
        return put_off(cluster, job, job.stop.reason)
    late = job.parking.deadline_ms is not None and cluster.now_ms >= job.parking.deadline_ms
    if late or job.parking.tries >= TRIES:
        return give_up(cluster, job, late=late)
    if job.phase is not JobPhase.RUNNING:
        return cluster
    why = objection(cluster, job)
    if why:
        return cluster.with_job(job if job.parking.why_not == why else job.with_parking(why_not=why))
    move = job.open_move
    if move is not None:
        return abandon(cluster, job, move, over_by(job, move), "the job parks")
    return cluster if cluster.now_ms < job.parking.again_ms else begin_parking(cluster, job)


def lasting_objection(cluster: Cluster, job: Job) -> str:
    """What speaks against a parking until somebody does something about it; empty if nothing does."""
    if cluster.freezes:
        who, why = next(iter(sorted(cluster.freezes.items())))
        return f"frozen by {who}" + (f": {why}" if why else "")
    if job.stop is not None:
        return job.stop.reason
    if job.phase is JobPhase.STARTING:
        return "it is only starting: not all ranks have called protect()"
    if job.resuming:
        return "it has not come back from its parking yet, which is as it was"
    if job.phase is JobPhase.RUNNING and job.seats.any(facts.has_not_joined):
        return "not all ranks have called protect()"
    if job.seats.count(facts.has_not_finished) < len(job.seats):
        return "the job is about to end"
    return ""


def objection(cluster: Cluster, job: Job) -> str:
    """What speaks against beginning now; empty if nothing does."""
    if job.exceptions.broken is not None:
        return "a connection has broken"
    again = job.parking.why_not if cluster.now_ms < job.parking.again_ms else ""
    return again or lasting_objection(cluster, job)


def give_up(cluster: Cluster, job: Job, *, late: bool) -> Cluster:
    """It does not succeed: the job goes on, or ends as it would have without us, if somebody wanted its end."""
    parking, now = job.parking, cluster.now_ms
    why = parking.why_not or f"{job.phase}: {job.why}"
    text = f"{'the time is over' if late else f'{parking.tries} tries came to nothing'}: {why}"
    if job.parking.name:
        cluster = put_off(cluster, job, text)
        job = cluster.jobs[job.spec.job]
    rest = replace(fresh(parking), rests_ms=now + REST_MS, why_not=text)
    cluster = cluster.with_job(replace(job, parking=rest).tell(now, text))
    if not parking.number or job.stop is not None:
        return cluster
    if late:
        return end_job(cluster, cluster.jobs[job.spec.job], STOPPED, f"{parking.reason}; {text}", eligible=False)
    left = 0 if parking.deadline_ms is None else parking.deadline_ms - now
    reason = f"{parking.reason}; {text}"
    return signal_asked(cluster, ev.SignalAsked(job=job.spec.job, number=parking.number, grace_ms=left, reason=reason))


# ---------------------------------------------------------------- nowhere to go


def of_our_own_accord(cluster: Cluster, job: Job) -> Cluster:
    """A job whose places are all taken away at a time that is known, and that has nowhere to go, parks."""
    if not cluster.taints or job.phase not in TRAINING or job.stop is not None or cluster.now_ms < job.parking.rests_ms:
        return cluster
    gone_ms = when_gone(cluster, job)
    if gone_ms is None or room_elsewhere(cluster, job) >= len(job.seats):
        return cluster
    left = max(0, gone_ms - cluster.now_ms)
    return park_asked(cluster, ev.ParkAsked(job=job.spec.job, reason=LEAVING, source="torchrelay", grace_ms=left))


class Told(Struct, frozen=True):
    """All places of a job were told to end, by this signal. `gone_ms`: when they are taken away, if that is known."""

    number: int
    since_ms: int
    gone_ms: int | None
    reason: str


def told_to_end(cluster: Cluster, job: Job) -> Told | None:
    """What was said to the agents of all places that it has; None if one of them heard nothing, or it has none.

    A rank without a place has nowhere to go either: there is a scheduler that takes all that it has given.
    """
    if not any(key == TOLD for _, _, key in cluster.taints):
        return None
    nodes = {cluster.workers[seat.worker].node for seat in job.seats.values() if seat.worker is not None}
    lying = [cluster.taints.get((node, None, TOLD)) for node in sorted(nodes)]
    found = [taint for taint in lying if taint is not None and taint.value.isdecimal()]
    if not found or len(found) < len(lying):
        return None
    since = min(taint.since_ms for taint in found)
    dated = [(taint.gone_ms, taint.reason) for taint in found if taint.gone_ms is not None]
    gone_ms, reason = min(dated, default=(None, found[0].reason))
    return Told(int(found[0].value), since, gone_ms, reason)


def as_told(cluster: Cluster, job: Job, told: Told) -> Cluster:
    """A job whose processes were all told to end parks, if there is no room elsewhere, or ends as it would without us.

    Its own grace time counts if the scheduler does not say within `WORD_MS` how long there is. It begins at once,
    however long that is: somebody waits for the nodes, and nobody who is lost meanwhile could be replaced there.
    """
    now = cluster.now_ms
    if job.stop is not None:
        return cluster
    if told.gone_ms is None and now < told.since_ms + WORD_MS:
        return cluster
    if room_elsewhere(cluster, job) >= len(job.seats):
        return cluster
    gone = told.since_ms + job.spec.grace_ms if told.gone_ms is None else told.gone_ms
    left, why = max(0, gone - now), lasting_objection(cluster, job)
    if why:
        reason = f"{told.reason}; it cannot be parked: {why}"
        return signal_asked(cluster, ev.SignalAsked(job=job.spec.job, number=told.number, grace_ms=left, reason=reason))
    asked = ev.ParkAsked(job=job.spec.job, reason=told.reason, source="torchrelay", grace_ms=left, number=told.number)
    cluster = park_asked(cluster, asked)
    job = cluster.jobs[job.spec.job]
    return cluster.with_job(job.with_parking(again_ms=now)) if job.parking.asked else cluster


def room_elsewhere(cluster: Cluster, job: Job) -> int:
    """How many of its ranks could be somewhere else; with those that are on their way there."""
    move = job.open_move
    under_way = 0 if move is None else len(move.targets)
    return under_way + room_for(cluster, job, None) + room_to_share(cluster, job)


def when_gone(cluster: Cluster, job: Job) -> int | None:
    """When the first of its places is taken away, if all are to be left and that is known of one; else None."""
    times: list[int] = []
    for seat in job.seats.values():
        worker = None if seat.worker is None else cluster.workers.get(seat.worker)
        if worker is None:
            return None
        lying = [t for t in on_slot(cluster, worker.node, worker.slot) if t.effect is Effect.NO_EXECUTE]
        if not lying:
            return None
        times += [taint.gone_ms for taint in lying if taint.gone_ms is not None]
    return min(times, default=None)
