"""Boundary: stopping a job that is well, so that ranks can change hands.

    QUIESCING   every holder says how far it is, and begins no further call    -> the boundary B is the furthest of them
    HALTING     everybody stands after B; outgoing workers hand over; targets are brought there
    cutover     a new generation in which the targets hold the ranks           -> RECONFIGURING, as in a recovery
    RELEASING   or the move is called off: everybody goes on in the connections it has

A job that is to park stops in the same way, for no move: at the boundary all write themselves down (`parking`).

Up to the cutover nobody has touched anything, so whatever goes wrong on the targets' side costs a short stop at most.
"""

from __future__ import annotations

from msgspec.structs import astuple, replace

from torchrelay.protocol.messages.ids import START, Generation, Point, Rank, WorkerPhase
from torchrelay.protocol.model import facts
from torchrelay.protocol.model.incident import PARKS, Fault, Mark, Resolution
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.model.moves import Move, MoveKind, MoveState
from torchrelay.protocol.model.phases import enter_next, is_complete, still_lacking
from torchrelay.protocol.model.roster import STAYS, Life, Seat
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.model.table import FEW, Table

# After a boundary was called off: how long until it is asked for again.
AGAIN_MS = 1_000
# Targets and boundaries of one move that may come to nothing, before it is given up.
TRIES = 3
# After a move was given up: how long until the same is tried again.
REST_MS = 300_000
HOUR_MS = 3_600_000
# What is under way in these phases will be committed.
UNDER_WAY = frozenset({WorkerPhase.COMPUTING, WorkerPhase.SECTION, WorkerPhase.GATE})


def with_move(job: Job, move: Move) -> Job:
    """The job with its newest move as it is now."""
    return job.with_moving(moves=(*job.moving.moves[:-1], move))


def fresh(seat: Seat) -> Seat:
    """The seat at the beginning of a generation: nothing has been answered in it."""
    return Seat(*astuple(seat)[:STAYS])


def begin_generation(job: Job) -> Job:
    """The next generation."""
    seats = job.seats
    if seats.count(facts.has_answered) > FEW:
        seats = Table((rank, fresh(seat)) for rank, seat in seats.items())
    else:
        for rank, seat in tuple(seats.where(facts.has_answered)):
            seats = seats.put(rank, fresh(seat))
    job = replace(job, seats=seats, generation=Generation(job.generation + 1))
    return job.with_exceptions(broken=None)


def settled(job: Job) -> Job:
    """The job when all train: nobody is a replacement any more, and what was answered is done with.

    So the next generation finds nothing to forget or to count: everybody waits then to be told.
    """
    seats = Table((rank, trains(seat, job.generation)) for rank, seat in job.seats.items())
    return replace(job, seats=seats.counted(*facts.ASKED_OF_A_FAULT, by=facts.shard_of))


def trains(seat: Seat, generation: Generation) -> Seat:
    """The seat of a holder that trains, and has begun to in this generation if it is a replacement."""
    seat = fresh(seat)
    if seat.replacement:
        return replace(seat, replacement=False, resumed_in=generation, distrusted=frozenset())
    return replace(seat, distrusted=frozenset()) if seat.distrusted else seat


# ---------------------------------------------------------------- quiesce


def begin_quiesce(cluster: Cluster, job: Job, move: Move) -> Cluster:
    """Ask everybody to stop after the call that is under way. The interruption begins here, and is in the ledger."""
    now = cluster.now_ms
    job = begin_generation(job)
    for rank in move.ranks:
        holder = job.seats[rank].worker
        assert holder is not None, "only a rank that is held is moved"
        fault = Fault(move.reason, f"move {move.name}", job.moment(now), rank, holder, cluster.workers[holder].node)
        job = job.suffer(fault, now)
    incident = job.open_incident
    assert incident is not None, "it was opened just now"
    job = job.with_incident(replace(incident, kind=str(move.kind), move=move.number))
    move = replace(move, incident=incident.number).enter(MoveState.STOPPING, now, "all targets are prepared")
    why = f"generation {job.generation}: all are asked to stop, for {move.name}"
    return cluster.with_job(with_move(replace(job, boundary=None), move).enter(JobPhase.QUIESCING, now, why))


def begin_parking(cluster: Cluster, job: Job) -> Cluster:
    """The same for a job that is to write itself down."""
    now = cluster.now_ms
    job = begin_generation(job)
    job = job.suffer(Fault(f"parks: {job.parking.reason}", PARKS, job.moment(now)), now)
    incident = job.open_incident
    assert incident is not None, "it was opened just now"
    job = job.with_incident(replace(incident, kind=str(MoveKind.PLANNED)))
    job = job.with_parking(name=f"parked-{job.spec.park_key}-{job.generation}", why_not="")
    why = f"generation {job.generation}: all are asked to stop, to be written down"
    return cluster.with_job(replace(job, boundary=None).enter(JobPhase.QUIESCING, now, why))


def choose_boundary(job: Job) -> tuple[Point | None, str]:
    """The furthest point that anybody has committed or is about to commit; None, and why, if there is none."""
    furthest = START
    for rank, seat in sorted(job.seats.items()):
        report = seat.report
        assert report is not None, "all have reported"
        if report.committed is None:
            return None, f"rank {rank} holds no state"
        if report.phase is WorkerPhase.FINISHED:
            return None, "the job is about to end"
        bound = report.pending if report.phase in UNDER_WAY and report.pending is not None else report.committed
        furthest = max(furthest, bound)
    if furthest == START:
        return None, "nothing was committed yet"
    return furthest, f"the furthest that anybody has gone is {furthest}"


def set_boundary(cluster: Cluster, job: Job) -> Cluster:
    """When all have said how far they are: the boundary."""
    now = cluster.now_ms
    silent = next(still_lacking(job), None)
    if silent is not None:
        if now - job.phase_ms < job.spec.report_ms:
            return cluster
        return in_vain(cluster, job, f"rank {silent[0]} did not say how far it is")
    boundary, reason = choose_boundary(job)
    if boundary is None:
        return call_off(cluster, job, reason, MoveState.PREPARING)
    incident = job.open_incident
    assert incident is not None, "the move has made one"
    text = f"all stop after {boundary}"
    job = job.with_incident(replace(incident, verdict=text, resume_point=boundary)).mark(Mark.AGREED, now)
    job = replace(job, boundary=boundary, stood_ms=None)
    return cluster.with_job(enter_next(job, now, f"{text}: {reason}"))


# ---------------------------------------------------------------- halt


def finish_halt(cluster: Cluster, job: Job) -> Cluster:
    """When everybody stands after the boundary, targets included: cut over."""
    now, move = cluster.now_ms, job.open_move
    stand = is_complete(job)
    if not stand:
        if now - job.phase_ms >= job.spec.ready_ms:
            return in_vain(cluster, job, "not everybody came to the boundary in time")
        return cluster
    if move is None:  # it is for a parking that they stand here
        why = f"all stand after {job.boundary}, and write themselves down"
        return cluster.with_job(job.mark(Mark.READY, now).enter(JobPhase.PARKING, now, why))
    if all(cluster.workers[target].brought == job.boundary for target in move.targets.values()):
        return cut_over(cluster, job, move)
    # From here on everybody stands still for the targets alone.
    if job.stood_ms is None:
        return cluster.with_job(replace(job, stood_ms=now))
    if now - job.stood_ms >= job.spec.reconfigure_ms:
        late = [rank for rank, target in move.targets.items() if cluster.workers[target].brought != job.boundary]
        return in_vain(cluster, job, f"the target of rank {late[0]} did not come to the boundary in time")
    return cluster


def told_where(job: Job, rank: Rank) -> bool:
    """Whether the target of this rank has been told where to go: from then on it can go nowhere else."""
    seat = job.seats[rank]
    return job.boundary is not None and seat.ready and seat.record_of(job.boundary) is not None


def cut_over(cluster: Cluster, job: Job, move: Move) -> Cluster:
    """The new roster takes effect. Nobody is asked where it stands: everybody has said so, and has promised to stay."""
    now = cluster.now_ms
    boundary = job.boundary
    job = job.mark(Mark.READY, now).mark(Mark.CUTOVER, now)
    job = begin_generation(job)
    standing = Table((rank, replace(seat, holds=boundary, serves=True, ready=True)) for rank, seat in job.seats.items())
    job = replace(job, seats=standing)
    for rank, target in move.targets.items():
        seat, worker = job.seats[rank], cluster.workers[target]
        assert seat.worker is not None, "a vacant rank is recovered, not moved"
        changed = f"rank {rank}: {seat.worker} on {cluster.workers[seat.worker].node} -> {target} on {worker.node}"
        job = job.tell(now, changed)
        move = move.tell(now, changed)
        seat = replace(
            seat,
            worker=target,
            outgoing=seat.worker,
            replacement=True,
            holds=None,
            serves=False,
            shard=worker.shard or seat.shard,
            assigned_in=job.generation,
            assigned_ms=now,
        )
        job = job.with_seat(rank, seat)
        cluster = cluster.with_worker(replace(worker, rank=rank, incoming_for=None))
    incident = job.open_incident
    assert incident is not None, "the move has made one"
    cutovers = (*(at for at in job.moving.cutovers if now - at < HOUR_MS), now)
    advanced = job.resume_point is None or boundary is None or boundary > job.resume_point
    attempts = job.attempts.going_on(job.generation, advanced=advanced)
    job = replace(job, resume_point=boundary, attempts=attempts).with_moving(cutovers=cutovers)
    move = replace(move, targets=Table())
    move = move.enter(MoveState.CUT_OVER, now, f"cut over after {boundary}, generation {job.generation}")
    job = with_move(job, move)
    why = f"generation {job.generation}: all stand after {boundary}, and ranks have changed hands"
    return cluster.with_job(enter_next(job, now, why))


# ---------------------------------------------------------------- release


def call_off(cluster: Cluster, job: Job, why: str, state: MoveState) -> Cluster:
    """Everybody goes on. `state`: PREPARING, to try again with other targets; or how the move ends.

    Targets that were told where to go are of no use any more.
    """
    now, move = cluster.now_ms, job.open_move
    if move is None:
        return put_off(cluster, job, why)
    if job.phase is JobPhase.HALTING:
        for rank, target in move.targets.items():
            if told_where(job, rank) and target in cluster.workers:
                cluster = cluster.fence(target)
                move = replace(move, targets=move.targets.drop(rank))
    move = replace(move, again_ms=max(move.again_ms, now + AGAIN_MS))
    text = f"called off: {why}"
    move = move.enter(state, now, text) if state is MoveState.PREPARING else move.close(state, now, text)
    return cluster.with_job(with_move(job, move).enter(JobPhase.RELEASING, now, text))


def in_vain(cluster: Cluster, job: Job, why: str) -> Cluster:
    """A boundary came to nothing since somebody was too slow. That is tried again, but not for ever."""
    move = job.open_move
    if move is None:
        return put_off(cluster, job.with_parking(tries=job.parking.tries + 1), why)
    move = replace(move, tries=move.tries + 1)
    if move.tries < TRIES:
        return call_off(cluster, with_move(job, move), why, MoveState.PREPARING)
    for target in move.targets.values():
        if target in cluster.workers:
            cluster = cluster.fence(target)
    job = give_up(with_move(job, move), move, cluster.now_ms)
    return call_off(cluster, job, f"given up after {move.tries} tries: {why}", MoveState.FAILED)


def put_off(cluster: Cluster, job: Job, why: str) -> Cluster:
    """Nobody is written down this time: everybody goes on. What is asked for still is tried again."""
    now = cluster.now_ms
    job = job.with_parking(name="", again_ms=now + AGAIN_MS, why_not=why)
    return cluster.with_job(job.enter(JobPhase.RELEASING, now, f"called off: {why}"))


def give_up(job: Job, move: Move, now_ms: int) -> Job:
    """What this move was to do rests for a while; requests are dropped: an operator may ask again."""
    requests = Table((rank, one) for rank, one in job.moving.requests.items() if rank not in move.ranks)
    return with_move(job.with_moving(requests=requests), replace(move, again_ms=now_ms + REST_MS))


def finish_release(cluster: Cluster, job: Job) -> Cluster | None:
    """When everybody has gone on: it was no interruption. None if that takes too long."""
    now = cluster.now_ms
    if is_complete(job):
        job = enter_next(replace(settled(job), boundary=None), now, "training, as before")
        return cluster.with_job(job.close(Resolution.CALLED_OFF, now, eligible=False))
    return None if now - job.phase_ms >= job.spec.reconfigure_ms else cluster


# ---------------------------------------------------------------- outgoing workers


def give_back(cluster: Cluster, job: Job, rank: Rank) -> Job | None:
    """A target was lost after the cutover: its outgoing worker, which stands at the boundary yet, takes the rank again.

    None if there is none.
    """
    seat = job.seats[rank]
    outgoing = None if seat.outgoing is None else cluster.workers.get(seat.outgoing)
    if outgoing is None or outgoing.life is Life.FENCING or job.resume_point != job.boundary:
        return None
    text = f"rank {rank} goes back to {outgoing.worker} on {outgoing.node}, which has it still"
    kept = Seat(
        worker=outgoing.worker,
        joined=True,
        shard=seat.shard,
        home=seat.home,
        private=seat.private,
        distrusted=seat.distrusted,
        holds=job.boundary,
    )
    return job.with_seat(rank, kept).tell(cluster.now_ms, text)


def release_outgoing_workers(cluster: Cluster, job: Job) -> Cluster:
    """Nobody needs the outgoing workers any more: they end."""
    for rank, seat in list(job.seats.where(facts.has_outgoing)):
        assert seat.outgoing is not None, "just asked"
        cluster = cluster.fence(seat.outgoing)
        job = job.with_seat(rank, replace(seat, outgoing=None))
    return cluster.with_job(job)


def finish_move(cluster: Cluster, job: Job) -> Cluster:
    """Training goes on in the new roster. A rank that went back to its outgoing worker is still to be moved."""
    move = job.open_move
    if move is None or move.state is not MoveState.CUT_OVER:
        return cluster.with_job(job)
    left = tuple(rank for rank in move.ranks if job.seats[rank].worker == move.outgoing_workers[rank])
    move = replace(move, moved=(*move.moved, *(rank for rank in move.ranks if rank not in left)))
    if not left:
        move = move.close(MoveState.DONE, cluster.now_ms, "training goes on")
    elif move.tries + 1 >= TRIES:
        job = give_up(job, replace(move, ranks=left), cluster.now_ms)
        move = replace(move, ranks=left, again_ms=cluster.now_ms + REST_MS)  # those that did move may move again
        move = move.close(MoveState.FAILED, cluster.now_ms, f"given up after {move.tries + 1} tries")
    else:
        move = replace(move, ranks=left, targets=Table(), tries=move.tries + 1, again_ms=cluster.now_ms + AGAIN_MS)
        text = f"once more for rank {', '.join(map(str, left))}"
        move = move.enter(MoveState.PREPARING, cluster.now_ms, text)
    return cluster.with_job(with_move(job, move))
