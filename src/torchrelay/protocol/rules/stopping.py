"""Stopping: a signal to the launcher is passed on to the ranks, which may end by themselves within a grace time.

Training goes on meanwhile, so that ranks can agree, save and leave; a rank that is lost to a fault is replaced as ever.
As soon as one has left with its code, or by that signal, nobody is replaced any more, and the job ends when all have
left, or when the time is over.
"""

from __future__ import annotations

from msgspec.structs import replace

from torchrelay.protocol.messages.events import SignalAsked, WorkerExited
from torchrelay.protocol.messages.ids import JobId, Rank
from torchrelay.protocol.model import facts
from torchrelay.protocol.model.job import RECOVERING, Job, JobPhase, Stop
from torchrelay.protocol.model.parts import PassedOn, Signals
from torchrelay.protocol.model.roster import Life
from torchrelay.protocol.model.state import Cluster, is_over, vacate_seat
from torchrelay.protocol.recovery.ending import STOPPED, end_job

PASS_MS = 5_000  # how long a signal that ends nothing is passed on to ranks that have not had it
MOST_SIGNALS = 16


def signal_asked(cluster: Cluster, event: SignalAsked) -> Cluster:
    """A signal for all ranks; with a grace time it is the first step of the job's end."""
    job = cluster.jobs.get(event.job)
    if job is None or is_over(job):
        return cluster
    now = cluster.now_ms
    passed = PassedOn(event.number, job.signals.count + 1, now)
    job = replace(job, signals=Signals((*job.signals.fresh[1 - MOST_SIGNALS :], passed), passed.nth))
    if event.grace_ms is not None and job.stop is None:
        job = replace(job, stop=Stop(event.number, event.reason, now, event.grace_ms))
        job = job.tell(now, f"{event.reason}: the ranks have {event.grace_ms / 1000:g} s to end by themselves")
        if job.phase is JobPhase.STARTING:
            return give_up_starting(cluster, job)
    return cluster.with_job(job)


def give_up_starting(cluster: Cluster, job: Job) -> Cluster:
    """Processes that are only being started have nothing to save."""
    for rank, seat in job.seats.items():
        if seat.worker is not None and cluster.workers[seat.worker].life is Life.STARTING:
            cluster = cluster.fence(seat.worker)
            job = job.with_seat(rank, vacate_seat(seat))
    return cluster.with_job(job)


def has_left(job: Job, event: WorkerExited) -> bool:
    """Whether a process that held a rank has ended because the job stops, and not by a fault."""
    if job.stop is None or is_over(job):
        return False
    return event.code is not None or event.signal == job.stop.number


def leave(cluster: Cluster, event: WorkerExited, rank: Rank) -> Cluster:
    """A rank has ended by itself. Its slot has done nothing wrong, and the rank stays vacant."""
    job = cluster.jobs[cluster.workers[event.worker].job]
    code = event.code if event.signal is None else None
    cluster = cluster.with_job(note_left(job, rank, code))
    return cluster.forget(event.worker)


def note_left(job: Job, rank: Rank, code: int | None) -> Job:
    """`code`: None if it was ended by a signal, or went down with others that have left."""
    stop = job.stop
    assert stop is not None, "ranks leave a job that stops"
    return replace(job.with_seat(rank, vacate_seat(job.seats[rank])), stop=replace(stop, left=(*stop.left, code)))


def winds_up(job: Job) -> bool:
    """Whether nobody is placed, replaced or connected any more: somebody has left, or nobody has begun."""
    return job.stop is not None and (bool(job.stop.left) or job.phase is JobPhase.STARTING)


def wind_up(cluster: Cluster, job_id: JobId) -> Cluster:
    """End a job that stops when all have left, when those that are left cannot go on, or when the time is over."""
    job, now = cluster.jobs[job_id], cluster.now_ms
    if is_over(job):
        return cluster
    fresh = tuple(passed for passed in job.signals.fresh if job.stop is not None or now - passed.at_ms < PASS_MS)
    if fresh != job.signals.fresh:
        job = replace(job, signals=replace(job.signals, fresh=fresh))
        cluster = cluster.with_job(job)
    stop = job.stop
    if stop is None:
        return cluster
    cut = job.exceptions.broken is not None and now - job.exceptions.broken_ms >= job.spec.collective_grace_ms
    if stop.left and (job.phase in RECOVERING or cut):
        # Those that are left have not ended with 0, whatever the others did.
        code, how = code_of(stop) or STOPPED, "some ranks have left, the others cannot go on"
        return end_job(cluster, job, code, f"{stop.reason}: {how}", eligible=False)
    if job.seats.count(facts.is_vacant) == len(job.seats):
        return end_job(cluster, job, code_of(stop), f"{stop.reason}: all ranks have left", eligible=False)
    if now - stop.since_ms >= stop.grace_ms:
        late = f"{stop.reason}: ranks were still there after {stop.grace_ms / 1000:g} s"
        return end_job(cluster, job, STOPPED, late, eligible=False)
    return cluster


def code_of(stop: Stop) -> int:
    """The script's own code, if it has one: the first that is not 0; 0 if all ranks left with it; else `STOPPED`."""
    own = [code for code in stop.left if code]
    if own:
        return own[0]
    return 0 if stop.left and all(code == 0 for code in stop.left) else STOPPED
