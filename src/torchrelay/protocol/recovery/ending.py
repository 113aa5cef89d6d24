"""Losing workers, starting again, falling back and ending: what happens to a job as a whole."""

from __future__ import annotations

from msgspec.structs import replace

from torchrelay.protocol.messages.events import PrivateRecord
from torchrelay.protocol.messages.ids import Generation, JobId, Rank, WorkerId
from torchrelay.protocol.model import facts
from torchrelay.protocol.model.incident import Fault, Resolution
from torchrelay.protocol.model.job import BEFORE_CUTOVER, Job, JobPhase, Outcome
from torchrelay.protocol.model.moves import MoveState
from torchrelay.protocol.model.parts import Attempts, Rollback
from torchrelay.protocol.model.roster import Life, Seat
from torchrelay.protocol.model.state import Cluster, is_over, keep_private, vacate_seat
from torchrelay.protocol.model.table import Table
from torchrelay.protocol.placement.boundary import begin_generation, give_back, told_where, with_move
from torchrelay.protocol.placement.policy import ENDING_MS, GENERATION_BUDGET, MOST_STARTS, START_BUDGET, UNJOINED_MS

NO_SPARE = 90
NO_STATE = 91
REFUSED = 93
PARKED = 75  # EX_TEMPFAIL: to be tried again later, with --resume
STOPPED = 130
SILENCE = "heartbeat"  # the detector that finds nodes lost
# Losses that the core finds itself: what was tried has failed, and may fail for each rank.
DEADLINES = frozenset({"exit deadline", "report deadline", "safepoint deadline", "restore"})


def lose_worker(
    cluster: Cluster,
    worker: WorkerId,
    *,
    cause: str,
    detector: str,
    ended: bool,
    private: tuple[PrivateRecord, ...] = (),
    unread: bool = False,
    age_ms: int = 0,
) -> Cluster:
    """A worker is lost: vacate its seat, make sure that it ends, and let its job react.

    `unread`: its page is lost with it, so that nobody can tell what it had committed.
    """
    known = cluster.workers.get(worker)
    if known is None:
        return cluster
    job = cluster.jobs[known.job]
    rank = known.rank if job.is_held_by(worker, known.rank) else None
    if known.rank is not None:
        seat = job.seats[known.rank]
        if seat.outgoing == worker:
            seat = replace(seat, outgoing=None)
        if ended:
            seat = replace(seat, ended_ms=cluster.now_ms)
        if rank is not None:
            seat = replace(seat, place=(known.node, known.slot))
        # Its record could not be read, but it had joined: the job has trained, and must not silently begin anew.
        job = job.with_attempts(trained=job.attempts.trained or (unread and seat.joined))
        job = job.with_seat(known.rank, keep_private(seat, private))
        cluster = cluster.with_job(job)
    if known.life is not Life.FENCING:  # one that was fenced has had its strike, or was ended without a fault
        cluster = cluster.strike(known)
    cluster = cluster.forget(worker) if ended else cluster.fence(worker)
    if rank is None or is_over(job):
        return cluster
    at = job.moment(cluster.now_ms, age_ms)
    fault = Fault(cause, detector, at, rank, worker, known.node, exact=ended and not unread)
    return react(cluster, job, rank, fault)


def react(cluster: Cluster, job: Job, rank: Rank, fault: Fault) -> Cluster:
    """A rank has lost its holder."""
    now = cluster.now_ms
    seat = job.seats[rank]
    if job.stop is not None and job.stop.left:  # others have left: nobody is replaced
        stop = replace(job.stop, left=(*job.stop.left, None))
        return cluster.with_job(replace(job.with_seat(rank, vacate_seat(seat)), stop=stop))
    if job.phase is JobPhase.SEALING:  # it is written down, and nobody is needed any more
        vacant = replace(vacate_seat(seat), parked=seat.parked)
        return cluster.with_job(job.with_seat(rank, vacant).tell(now, f"rank {rank} has ended: {fault.cause}"))
    job = job.suffer(fault, now)
    job = give_back(cluster, job, rank) or job.with_seat(rank, vacate_seat(seat))
    if cluster.freezes and job.phase in BEFORE_CUTOVER | {JobPhase.RUNNING}:
        return fall_back(cluster, job, f"frozen, so nothing is done about it: {fault.cause}", job.exceptions.last_code)
    match job.phase:
        case JobPhase.STARTING | JobPhase.RECONFIGURING if job.resume_point is None:
            # That a node is lost says nothing about the script.
            failed = fault.detector != SILENCE
            return start_again(cluster, job, "a worker was lost before anything was committed", failed=failed)
        case JobPhase.AGREEING | JobPhase.PREPARING if is_expendable(seat) and job.seats[rank].worker is None:
            # No rank counts on a replacement that is not at the safepoint yet: the next spare follows. One that was
            # restored in an earlier generation is a survivor like others.
            return cluster.with_job(job.tell(now, f"rank {rank}'s replacement is replaced"))
        case JobPhase.AGREEING if job.seats[rank].worker is None and nobody_has_reported(job):
            # There is nothing to ask anew. Many ranks may be lost at once; so may the only one that has reported.
            return cluster.with_job(replace(job, answered_ms=None))
        case JobPhase.RUNNING if unprotected(cluster, job, seat):
            why = f"the script has not called protect() in {UNJOINED_MS // 60_000} minutes: it ran unprotected"
            return fall_back(cluster, job, why, job.exceptions.last_code)
        case JobPhase.SEALING | JobPhase.FINISHING | JobPhase.ENDING | JobPhase.ENDED:
            raise AssertionError("nobody misses a rank of a job that is over")
        case _:
            tried = job.phase is not JobPhase.AGREEING and seat.assigned_in >= job.attempts.advanced_in
            return interrupt_job(cluster, job, fault.cause, in_vain=tried or fault.detector in DEADLINES)


def nobody_has_reported(job: Job) -> bool:
    return job.seats.count(facts.has_not_reported) == len(job.seats)


def is_expendable(seat: Seat) -> bool:
    """Whether its holder is a replacement on whom nobody counts yet, and whom the next spare replaces if it is lost.

    One that was restored in an earlier generation is a survivor; so is an outgoing worker that took its rank back.
    """
    return seat.replacement and not seat.ready and seat.holds is None


def unprotected(cluster: Cluster, job: Job, lost: Seat) -> bool:
    """Whether this script trains without us: to start it again would be to do in silence what it has done before."""
    joined = lost.joined or job.seats.count(facts.has_not_joined) < len(job.seats)
    return not joined and cluster.now_ms - job.phase_ms >= UNJOINED_MS


def interrupt_job(cluster: Cluster, job: Job, reason: str, *, in_vain: bool = True) -> Cluster:
    """A new generation: survivors stop and report where they stand.

    `in_vain`: what this generation tried has failed. It has not if a rank is lost that was there before: a rack takes
    one node after another with it. Nor if nothing was tried yet. Both happen only as often as there are ranks.
    """
    fruitless = job.attempts.fruitless + in_vain
    cluster = spend_targets(cluster, job)
    job = begin_generation(pause_move(job, cluster.now_ms)).with_attempts(fruitless=fruitless)
    if job.parking.name:
        job = job.with_parking(name="", why_not=f"a fault has come first: {reason}")
    if fruitless >= GENERATION_BUDGET:
        why = f"{fruitless} generations in a row committed nothing"
        return fall_back(cluster, job, why, job.exceptions.last_code)
    why = f"generation {job.generation}: survivors are asked where they stand ({reason})"
    return cluster.with_job(job.enter(JobPhase.AGREEING, cluster.now_ms, why))


def spend_targets(cluster: Cluster, job: Job) -> Cluster:
    """Targets that were told where to go can go nowhere else, whether they have come there or not."""
    move = job.open_move
    if move is None or job.phase is not JobPhase.HALTING:
        return cluster
    for rank, target in move.targets.items():
        worker = cluster.workers.get(target)
        if worker is not None and told_where(job, rank):
            cluster = cluster.with_worker(replace(worker, brought=job.boundary))
    return cluster


def pause_move(job: Job, now_ms: int) -> Job:
    """A fault has come into a move: it goes on, if it is wanted still, when the fault is dealt with."""
    move = job.open_move
    if move is None or move.state not in (MoveState.STOPPING, MoveState.CUT_OVER):
        return job
    if move.state is MoveState.STOPPING:
        return with_move(job, move.enter(MoveState.PREPARING, now_ms, "a fault has come first: recovery"))
    return with_move(job, move.tell(now_ms, "a fault has come into it: recovery"))


def drop_move(job: Job, now_ms: int, why: str) -> Job:
    """No move outlives its workers."""
    move = job.open_move
    return job if move is None else with_move(job, move.close(MoveState.CALLED_OFF, now_ms, why))


def start_again(
    cluster: Cluster, job: Job, reason: str, *, from_checkpoint: bool = False, failed: bool = True
) -> Cluster:
    """All workers that hold a rank end, and all ranks are placed anew. Spares without a rank are kept.

    `failed`: the start that ends with this counts as one that the script may have failed.
    """
    if job.resuming and not from_checkpoint:  # it would begin from nothing in silence
        return fall_back(cluster, job, reason)
    failed_starts = job.attempts.failed_starts + failed
    if not from_checkpoint and (failed_starts >= START_BUDGET or job.attempts.starts + 1 >= MOST_STARTS):
        why = f"{job.attempts.starts + 1} starts ended before anything was committed: {reason}"
        return end_job(cluster, job, job.exceptions.last_code, why)
    for worker in cluster.of_job(job.spec.job):
        if worker.rank is not None:
            cluster = cluster.fence(worker.worker).disown(worker.worker)
        elif worker.incoming_for is not None:
            cluster = cluster.fence(worker.worker)
    attempts, rollback = job.attempts, job.rollback
    if from_checkpoint:
        attempts = Attempts(restarts=attempts.restarts + 1, advanced_in=attempts.advanced_in)
    else:
        attempts = replace(
            attempts, trained=False, starts=attempts.starts + 1, failed_starts=failed_starts, fruitless=0
        )
    job = drop_move(job, cluster.now_ms, f"all workers start again: {reason}")
    job = replace(
        job,
        seats=Table((rank, Seat()) for rank in job.seats),
        generation=Generation(job.generation + 1),
        resume_point=None,
        waiting_ms=None,
        boundary=None,
        attempts=attempts,
        exceptions=replace(job.exceptions, broken=None),
        parking=replace(job.parking, name="", found=None),
        # What was not proved by now never will be: points are counted anew.
        accounting=replace(job.accounting, unproved=0),
        rollback=Rollback(every=rollback.every, buddies=rollback.buddies),
        keepers=(),
        once=Table(),  # what was done once was done by processes that end: a checkpoint is to be loaded again
    )
    resolution = Resolution.FELL_BACK if from_checkpoint else Resolution.RESTARTED
    job = job.enter(JobPhase.STARTING, cluster.now_ms, f"all workers start again: {reason}")
    return cluster.with_job(job.close(resolution, cluster.now_ms))


def fall_back(cluster: Cluster, job: Job, reason: str, code: int = NO_STATE) -> Cluster:
    """We cannot go on from what is in memory: the script's own checkpoint, if a restart is left, else the end.

    A job that has not come back from its parking ends: what it began from is there still.
    """
    if job.resuming:
        return end_job(cluster, job, code, f"could not go on from its parking, which is as it was: {reason}")
    if job.attempts.restarts < job.spec.max_restarts:
        job = job.tell(cluster.now_ms, f"falls back to the script's own checkpoint: {reason}")
        return start_again(cluster, job, reason, from_checkpoint=True)
    return end_job(cluster, job, code, reason)


def end_job(
    cluster: Cluster,
    job: Job,
    code: int,
    reason: str,
    *,
    eligible: bool = True,
    resolution: Resolution = Resolution.ENDED,
) -> Cluster:
    """The job ends with this code; its processes are ended."""
    job = drop_move(job, cluster.now_ms, f"the job ends with {code}: {reason}")
    job = replace(job, outcome=Outcome(code, reason), waiting_ms=None).with_moving(requests=Table())
    job = job.enter(JobPhase.ENDING, cluster.now_ms, f"ends with {code}: {reason}")
    job = job.close(resolution, cluster.now_ms, eligible=eligible)
    for worker in cluster.of_job(job.spec.job):
        cluster = cluster.fence(worker.worker)
    return cluster.with_job(job)


def collect_ended(cluster: Cluster, job_id: JobId) -> Cluster:
    """When the last process of an ending or finishing job is gone, it has ended."""
    job = cluster.jobs[job_id]
    if job.phase not in (JobPhase.FINISHING, JobPhase.ENDING):
        return cluster
    left = cluster.of_job(job_id)
    # All ranks have finished: one that hangs on its way out, and may be beyond SIGKILL, has nothing more to give.
    leaving = [worker for worker in left if worker.rank is not None and worker.life is not Life.FENCING]
    if job.phase is JobPhase.FINISHING and not leaving:
        return end_job(cluster, job, 0, "the script ended with 0 on every rank")
    if job.phase is JobPhase.ENDING and (not left or cluster.now_ms - job.phase_ms >= ENDING_MS):
        assert job.outcome is not None, "a job that is ending has an outcome"
        return cluster.with_job(replace(job, phase=JobPhase.ENDED, phase_ms=cluster.now_ms))
    return cluster
