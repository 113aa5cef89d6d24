"""Recovery: agree, acquire, reconfigure, restore, resume.

    AGREEING   every survivor has reported      -> the resume point is chosen
    PREPARING  every rank stands at the safepoint    -> after the resume point, survivors and replacements
    RECONFIGURING   everybody is connected, and holds the state of the resume point
    RESUMING   everybody trains on              -> RUNNING

`progress_recovery` takes a job on, as far as what is known allows; it is called after every event, so the order in
which facts and answers arrive does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from msgspec.structs import replace

from torchrelay.protocol.messages.ids import START, Point, Rank, WorkerId
from torchrelay.protocol.messages.orders import Verdict
from torchrelay.protocol.model import facts
from torchrelay.protocol.model.incident import COMES_BACK, Fault, Mark, Resolution
from torchrelay.protocol.model.job import BEFORE_CUTOVER, Job, JobPhase
from torchrelay.protocol.model.phases import enter_next, is_complete, still_lacking
from torchrelay.protocol.model.roster import Life, Seat, Worker
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.model.table import Table
from torchrelay.protocol.placement.boundary import (
    finish_halt,
    finish_move,
    finish_release,
    in_vain,
    release_outgoing_workers,
    set_boundary,
    settled,
)
from torchrelay.protocol.placement.policy import (
    DYING_MS,
    MOST_SOURCES,
    choose_resume_point,
    choose_sources,
    judge_report,
)
from torchrelay.protocol.recovery.ending import (
    NO_STATE,
    end_job,
    fall_back,
    interrupt_job,
    lose_worker,
    start_again,
)
from torchrelay.protocol.recovery.placing import acquire_ranks
from torchrelay.protocol.recovery.records import ask_others, buddies_to_ask, note_keepers
from torchrelay.protocol.recovery.replicas import DETECTOR, differing_at_the_end
from torchrelay.protocol.recovery.requests import weigh_requests
from torchrelay.protocol.recovery.rollback import (
    is_out_of_reach,
    is_somewhere,
    keepers_of,
    may_come,
    nodes_with,
    not_there,
    roll_back,
    still_ending,
    why_not_back,
    within_reach,
)

# So many times as long as one worker has, if several do not report, or nobody does: silence loses no node sooner.
SEVERAL_SILENT, ALL_SILENT = 2, 6
MOST_SILENT = 2 * ALL_SILENT  # and nobody is waited for any longer, though some report now and then
TIMES_LATE = 3  # so many times as long as was expected all may stand still to be written down
BEGUN_ANEW = "begin anew from the snapshots of"


def progress_recovery(cluster: Cluster, job: Job) -> Cluster:
    """One step of it, if one is due; the same cluster if not."""
    match job.phase:
        case JobPhase.RUNNING:
            return watch_running(cluster, job)
        case JobPhase.QUIESCING | JobPhase.HALTING | JobPhase.RELEASING | JobPhase.PARKING:
            return watch_move(cluster, job)
        case JobPhase.AGREEING:
            return acquire_ranks(cluster, job) or agree(cluster, job)
        case JobPhase.PREPARING:
            return acquire_ranks(cluster, job) or prepare(cluster, job)
        case JobPhase.RECONFIGURING:
            return reconfigure(cluster, job)
        case JobPhase.RESUMING:
            return resume(cluster, job)
        case JobPhase.FINISHING:
            return see_off(cluster, job)
        case JobPhase.STARTING | JobPhase.SEALING | JobPhase.ENDING | JobPhase.ENDED:
            return cluster


def watch_running(cluster: Cluster, job: Job) -> Cluster:
    """All ranks finished: they may leave. A collective broken without a cause: connect anew, nobody is replaced."""
    now = cluster.now_ms
    if is_complete(job):
        if wrong := differing_at_the_end(job.seats.items()):
            job = job.suffer(Fault(wrong, DETECTOR, now), now)
            return end_job(cluster, job, NO_STATE, wrong)  # its own checkpoint may hold these, too
        job = prove_at_the_end(job, now)
        return cluster.with_job(enter_next(job, now, "every rank has finished"))
    if job.exceptions.broken is not None:
        return mend(cluster, job, job.exceptions.broken)
    for raised in job.exceptions.raised:
        if raised.fatal and now - raised.at_ms >= DYING_MS and job.is_held_by(raised.worker, raised.rank):
            cause = f"raised and did not end: {raised.summary}"
            return lose_worker(cluster, raised.worker, cause=cause, detector="exit deadline", ended=False)
    return cluster


def prove_at_the_end(job: Job, now_ms: int) -> Job:
    """All scripts have ended: what they had committed by then, they have committed."""
    points = [seat.ended_at for seat in job.seats.values()]
    known = [point for point in points if point is not None]
    return job.prove(job.generation, min(known), now_ms) if known and len(known) == len(points) else job


def watch_move(cluster: Cluster, job: Job) -> Cluster:
    """A job that stops, or goes on, for a move. Connections are alive, so they can break."""
    if job.exceptions.broken is not None:
        return mend(cluster, job, job.exceptions.broken)
    match job.phase:
        case JobPhase.QUIESCING:
            return set_boundary(cluster, job)
        case JobPhase.HALTING:
            return finish_halt(cluster, job)
        case JobPhase.PARKING:
            return finish_writing(cluster, job)
        case _:
            return finish_release(cluster, job) or try_again(cluster, job, "not everybody went on in time")


def finish_writing(cluster: Cluster, job: Job) -> Cluster:
    """When everybody is written down: what is left is the manifest."""
    now = cluster.now_ms
    if is_complete(job):
        assert job.boundary is not None, "all stand after it"
        job = job.prove(job.generation, job.boundary, now)
        size = sum(seat.parked.size for seat in job.seats.values() if seat.parked is not None)
        return cluster.with_job(enter_next(job, now, f"all ranks are written down, {size:,} bytes"))
    limit = max(job.spec.park_ms, TIMES_LATE * job.parking.takes_ms)
    if now - job.phase_ms >= limit:
        return in_vain(cluster, job, f"not everybody was written down within {limit / 1000:g} s")
    return cluster


def mend(cluster: Cluster, job: Job, broken: Fault) -> Cluster:
    """A collective has failed. Mostly that is the echo of a loss; if none shows in time, connect anew."""
    if cluster.now_ms - job.exceptions.broken_ms < job.spec.collective_grace_ms:
        return cluster
    job = job.suffer(broken, cluster.now_ms)
    if cluster.freezes and job.phase in BEFORE_CUTOVER | {JobPhase.RUNNING}:
        return fall_back(cluster, job, f"frozen, so nothing is done about it: {broken.cause}", job.exceptions.last_code)
    return interrupt_job(cluster, job, "a connection broke, and every worker is alive")


def see_off(cluster: Cluster, job: Job) -> Cluster:
    """Everybody has finished and may leave. Who does not, long after it was told so, is ended."""
    if cluster.now_ms - job.phase_ms >= job.spec.ready_ms:
        for seat in job.seats.values():
            if seat.worker is not None:
                cluster = cluster.fence(seat.worker)
    return cluster


# ---------------------------------------------------------------- agree


def owes_report(cluster: Cluster, job: Job, seat: Seat) -> bool:
    """Whether this seat's holder was there before this generation and has not said where it stands.

    A spare that was given the rank before its process was up knows of no generation yet: it owes nothing.
    """
    return seat.worker is not None and holder_owes_report(job, seat, cluster.workers[seat.worker])


def holder_owes_report(job: Job, seat: Seat, holder: Worker) -> bool:
    """The same of a seat whose holder is at hand."""
    return seat.report is None and seat.assigned_in < job.generation and holder.life is not Life.STARTING


def agree(cluster: Cluster, job: Job) -> Cluster:
    """When all survivors have reported: the resume point. A worker that is silent too long is lost."""
    now = cluster.now_ms
    if any(owes_report(cluster, job, seat) for _, seat in still_lacking(job)):
        return lose_silent(cluster, job) if now - job.phase_ms >= job.spec.report_ms else cluster
    point, reason = choose_resume_point(job.seats, job.resume_point)
    if point is None and job.rollback.point is not None:
        point, reason = job.rollback.point, f"of {job.rollback.point} there is a snapshot of every rank"
    if point is None and job.seats.any(facts.has_outgoing):
        point, reason = job.boundary, f"all ranks change hands, and their outgoing workers stand after {job.boundary}"
    if point is None and not job.attempts.trained and not left_records(job):
        return start_again(cluster, job, "no rank had called protect() yet")
    if (
        point is None
        and job.rollback.every
        and any(now - worker.since_ms < DYING_MS for worker in still_ending(cluster, job))
    ):
        return cluster  # with their ends it is told which snapshots are on their nodes
    if point is None:
        job = replace(job, resume_point=furthest(job))  # nobody is left to say how far all have come
        return go_back(cluster, job, f"every rank that held state is lost{last_of(job)}")
    if point == START:
        return start_again(cluster, job, "nothing was committed yet")
    for rank, seat in sorted(job.seats.items()):
        misplaced = unable(seat, point)
        if misplaced:
            assert seat.worker is not None, "what a lost holder reported is forgotten"
            return lose_worker(cluster, seat.worker, cause=misplaced, detector=f"report of rank {rank}", ended=False)
    return decide(cluster, job, point, reason)


def last_of(job: Job) -> str:
    """The last fault of this incident: it is mostly another one than the fault that the incident began with."""
    incident = job.open_incident
    if incident is None or len(incident.faults) < 2:
        return ""
    fault = incident.faults[-1]
    return "; the last fault" + ("" if fault.rank is None else f", of rank {fault.rank}") + f": {fault.cause}"


def left_records(job: Job) -> bool:
    """Whether a lost rank had committed anything."""
    return any(record.point > START for seat in job.seats.values() for record in seat.private)


def furthest(job: Job) -> Point | None:
    """The furthest point of which anything is known: the last resume point, or what lost ranks left since."""
    left = (record.point for seat in job.seats.values() for record in seat.private)
    return max(left, default=None) if job.resume_point is None else max(job.resume_point, *left, START)


def unable(seat: Seat, point: Point) -> str:
    """Why this worker cannot come to the safepoint after `point`; empty if it can."""
    report = seat.report
    if report is None:
        return ""
    if report.committed is None:
        if report.caught_up in (None, point):
            return ""
        return f"replacement was brought to {report.caught_up}, the job goes on from {point}"
    if judge_report(seat, point) is None:
        return f"stands at {report.committed} ({report.phase}), the job goes on from {point}"
    return ""


def decide(cluster: Cluster, job: Job, point: Point, reason: str) -> Cluster:
    """Fix the resume point, and note what each survivor holds or will hold."""
    now = cluster.now_ms
    verdicts = {rank: judge_report(seat, point) for rank, seat in job.seats.items()}
    stands = {rank for rank, verdict in verdicts.items() if verdict is not None}
    seats = Table(
        (rank, replace(seat, holds=point if rank in stands else None, serves=rank in stands))
        for rank, seat in job.seats.items()
    )
    job = replace(job, seats=seats)
    if point != job.boundary:  # what the outgoing workers of a move have is of the past
        cluster = release_outgoing_workers(cluster, job)
        job = replace(cluster.jobs[job.spec.job], boundary=None)
    forward = [rank for rank, verdict in verdicts.items() if verdict is Verdict.ROLL_FORWARD]
    text = f"redo the step after {point}"
    if point == job.rollback.point:
        text = f"{COMES_BACK} {point}" if job.resuming else f"{BEGUN_ANEW} {point}"
    elif forward:
        text = f"roll forward to {point} on ranks {', '.join(map(str, forward))}"
    incident = job.open_incident
    if incident is not None:
        job = job.with_incident(replace(incident, verdict=text, resume_point=point))
    advanced = job.resume_point is None or point > job.resume_point
    rolled = point if point == job.rollback.point else None
    attempts = job.attempts.going_on(job.generation, advanced=advanced)
    job = replace(job, resume_point=point, attempts=attempts).with_rollback(point=rolled)
    job = job.mark(Mark.AGREED, now)
    return cluster.with_job(enter_next(job, now, f"{text}: {reason}"))


def lose_silent(cluster: Cluster, job: Job) -> Cluster:
    """A worker that alone has not reported is lost. What keeps several silent, or all, may be the network: they have
    longer, and are lost together.

    Nobody is alone before the others have been heard: when all were cut off, one of them comes back first.
    """
    late = [seat.worker for _, seat in still_lacking(job) if owes_report(cluster, job, seat)]
    since_ms, what = (job.phase_ms, "the interrupt") if job.answered_ms is None else (job.answered_ms, "the others")
    times = ALL_SILENT if job.answered_ms is None else SEVERAL_SILENT if len(late) > 1 else 1
    limit_ms = times * job.spec.report_ms
    if cluster.now_ms - since_ms < limit_ms and cluster.now_ms - job.phase_ms < MOST_SILENT * job.spec.report_ms:
        return cluster
    for worker in late:
        assert worker is not None, "a vacant seat owes nothing"
        cause = f"did not report within {limit_ms / 1000:g} s of {what}"
        cluster = lose_worker(cluster, worker, cause=cause, detector="report deadline", ended=False)
    return cluster


# ---------------------------------------------------------------- prepare


def prepare(cluster: Cluster, job: Job) -> Cluster:
    """When every rank stands at the safepoint: reconfigure. A replacement needs what its rank's former holder left."""
    now, point = cluster.now_ms, job.resume_point
    assert point is not None, "the resume point is decided before any rank prepares for it"
    for rank, _ in job.seats.where(facts.holds_nothing):
        if cluster.still_held(job.spec.job, rank):
            continue
        lacking = what_lacks(cluster, job, rank, point)
        if lacking:
            return go_back(cluster, job, lacking)
        widened = ask_others(cluster, job, rank)
        if widened is not None:
            return widened
    if now - job.phase_ms >= job.spec.ready_ms and (late := late_for(job, now)):
        for worker in late:
            cause = f"did not reach the safepoint of {point} within {job.spec.ready_ms / 1000:g} s"
            cluster = lose_worker(cluster, worker, cause=cause, detector="safepoint deadline", ended=False)
        return cluster
    if is_complete(job):
        job = job.mark(Mark.READY, now)
        return cluster.with_job(enter_next(job, now, f"all ranks stand after {point}"))
    return cluster


def late_for(job: Job, now_ms: int) -> list[WorkerId]:
    """Workers that have had their time to come to the safepoint, and have not."""
    pairs = ((seat.worker, max(job.phase_ms, seat.assigned_ms)) for _, seat in still_lacking(job))
    return [worker for worker, since in pairs if worker is not None and now_ms - since >= job.spec.ready_ms]


def what_lacks(cluster: Cluster, job: Job, rank: Rank, point: Point) -> str:
    """What is needed for this rank's replacement, and can not be had; empty if it can, or if that is not known yet."""
    seat, now = job.seats[rank], cluster.now_ms
    if job.rollback.point is not None:
        late = now - job.phase_ms >= job.spec.ready_ms
        there = seat.record_of(point) is not None and is_somewhere(job, rank, point)
        if not there and (late or not may_come(cluster, job, rank)):
            return f"the snapshot of rank {rank} at {point} is lost"
        if there and job.resuming and is_out_of_reach(cluster, job, rank):
            return f"no rank is where the files of rank {rank} are found"
    elif seat.record_of(point) is None:
        times = ALL_SILENT if job.answered_ms is None else 1  # as in `lose_silent`
        asked_ms = max(job.phase_ms, seat.ended_ms, job.answered_ms or 0)
        if not buddies_to_ask(cluster, job, rank) or now - asked_ms >= times * job.spec.report_ms:
            return f"rank {rank}'s private state at {point} is lost"
    elif shards_known(job, rank) and not has_sources(cluster, job, rank):
        return f"no replica holds the shard of rank {rank}"
    return ""


def go_back(cluster: Cluster, job: Job, reason: str) -> Cluster:
    """We cannot go on from what the ranks hold: from their snapshots, or else as without us."""
    if job.rollback.point is not None:
        job = within_reach(cluster, job)
    return roll_back(cluster, job, reason) or fall_back(cluster, job, reason + why_not_back(cluster, job))


def sources_of(cluster: Cluster, job: Job, rank: Rank) -> list[tuple[Rank, Worker]]:
    """Sources of this rank's state: its outgoing worker first, then replicas, then outgoing workers of others.

    `MOST_SOURCES` of them, if there are more. Then those that follow this rank, so that not all ask the same.
    """
    found = list(islice(candidates(cluster, job, rank), MOST_SOURCES + 1))
    if len(found) > MOST_SOURCES:
        return list(islice(candidates(cluster, job, rank, after=rank), MOST_SOURCES))
    return found


def has_sources(cluster: Cluster, job: Job, rank: Rank, *, tried: bool = False) -> bool:
    """Whether there is one. `tried`: see `choose_sources`."""
    return next(candidates(cluster, job, rank, tried=tried), None) is not None


def candidates(
    cluster: Cluster, job: Job, rank: Rank, *, tried: bool = False, after: Rank | None = None
) -> Iterator[tuple[Rank, Worker]]:
    """All sources of this rank's state, in that order."""
    assert job.resume_point is not None, "state is fetched for a resume point"
    if job.rollback.point is not None:
        yield from keepers_of(cluster, job, rank, tried=tried)
        return
    yield from outgoing_workers_of(cluster, job, rank, (rank,), tried=tried)
    for other in choose_sources(job.seats, rank, job.resume_point, tried=tried, after=after):
        holder = job.seats[other].worker
        if holder is not None:
            yield other, cluster.workers[holder]
    others = [other for other, _ in job.seats.where(facts.has_outgoing) if other != rank]
    replicas = set(choose_sources(job.seats, rank, job.resume_point, tried=tried)) if others else set()
    yield from outgoing_workers_of(cluster, job, rank, (one for one in others if one not in replicas), tried=tried)


def outgoing_workers_of(
    cluster: Cluster, job: Job, rank: Rank, those: Iterable[Rank], *, tried: bool
) -> list[tuple[Rank, Worker]]:
    """Outgoing workers of these ranks that stand at the resume point and have the shard of `rank`."""
    seat = job.seats[rank]
    found: list[tuple[Rank, Worker]] = []
    for other in those if job.resume_point == job.boundary else ():
        name = job.seats[other].outgoing
        outgoing = None if name is None else cluster.workers.get(name)
        mistrusted = other in seat.distrusted or (other in seat.failed and not tried)
        if outgoing is None or outgoing.life is Life.FENCING or mistrusted or job.seats[other].shard != seat.shard:
            continue
        found.append((other, outgoing))
    return found


def shards_known(job: Job, rank: Rank) -> bool:
    """Whether it is known which shard this rank needs, and which those hold who could have it.

    What a worker says when it joins may be lost with its agent. Survivors say it again, and so does the replacement.
    """
    return bool(job.seats[rank].shard) and not job.seats.any(facts.holds_unnamed)


def store_host(job: Job) -> Rank:
    """Who hosts the store of this generation: the lowest rank that holds state."""
    return min(job.seats, key=lambda rank: (job.seats[rank].replacement, rank))


# ---------------------------------------------------------------- reconfigure and restore


def reconfigure(cluster: Cluster, job: Job) -> Cluster:
    """When everybody is connected and holds the state: resume. Otherwise mind the deadlines and the sources."""
    now = cluster.now_ms
    if is_complete(job):
        # No rank has gone on yet, and none needs the outgoing workers any more: every rank holds its state.
        job = enter_next(note_keepers(cluster, job), now, "all connected and restored")
        return release_outgoing_workers(cluster, job)
    for rank, seat in job.seats.where(facts.is_not_restored):
        if has_sources(cluster, job, rank):
            continue
        holder = seat.worker
        if seat.outgoing is not None and holder is not None:  # it has all of the state still, and can go on
            cause = "its state could not be had, verified"
            return lose_worker(cluster, holder, cause=cause, detector="restore", ended=False)
        if has_sources(cluster, job, rank, tried=True):
            return try_again(cluster, job, f"no source delivered the state of rank {rank}: all are asked again")
        return unrestored(cluster, job, rank)
    limit = job.spec.reconfigure_ms
    if job.seats.any(facts.is_not_reconfigured):
        if now - job.phase_ms >= limit:
            return try_again(cluster, job, f"not everybody was connected within {limit / 1000:g} s")
    elif now - job.phase_ms >= limit + job.spec.restore_ms:
        return try_again(cluster, job, "the state did not arrive in time")
    return cluster


def unrestored(cluster: Cluster, job: Job, rank: Rank) -> Cluster:
    """Nobody has this rank's state, or delivers it. If there are snapshots, all say anew what is kept, to go back."""
    reason = f"rank {rank}'s state could not be had, verified, from any replica"
    if job.rollback.point is not None:
        for node in nodes_with(job, rank, job.rollback.point):
            job = not_there(job, node, rank, job.rollback.point)
        return go_back(cluster, job, f"no snapshot of rank {rank} at {job.rollback.point} could be had, verified")
    return interrupt_job(cluster, job, reason) if job.rollback.kept else fall_back(cluster, job, reason)


def try_again(cluster: Cluster, job: Job, reason: str) -> Cluster:
    """The same workers in a new generation. At the first wiring nobody has a state yet: then with new workers.

    Once some have been told to resume they may have committed something, so all are asked where they stand.
    """
    if job.open_incident is None:  # nobody was lost, and yet training stops: that is an interruption like others
        job = job.suffer(Fault(reason, "deadline", job.moment(cluster.now_ms)), cluster.now_ms)
    if job.resume_point is None and job.phase is JobPhase.RECONFIGURING:
        return start_again(cluster, job, reason)
    return interrupt_job(cluster, job, reason)


# ---------------------------------------------------------------- resume


def resume(cluster: Cluster, job: Job) -> Cluster:
    """When everybody trains again the incident is closed; not if a connection has broken meanwhile."""
    now = cluster.now_ms
    if job.exceptions.broken is not None:
        return mend(cluster, job, job.exceptions.broken)
    if not is_complete(job):
        if now - job.phase_ms >= job.spec.reconfigure_ms:
            return try_again(cluster, job, "not everybody resumed in time")
        return cluster
    # What was raised in the wake of this fault, and did not end its worker, is settled by now.
    raised = tuple(entry for entry in job.exceptions.raised if entry.fatal)
    job = settled(job).with_exceptions(raised=raised)
    why = "training" if job.resume_point is None else f"training on after {job.resume_point}"
    incident = job.open_incident
    rolled_back = incident is not None and incident.lost
    job = replace(job, boundary=None).with_rollback(point=None, kept=Table()).with_parking(found=None)
    job = weigh_requests(cluster, enter_next(job, now, why))
    return finish_move(cluster, job.close(Resolution.ROLLED_BACK, now) if rolled_back else job.went_on(now))
