"""Small worlds: every state that the core can reach with two ranks and a few spares, whatever order things happen in.

The alphabet is what healthy workers answer to the orders that stand, each in three variants where a report can differ,
and a few faults. Time is folded: everything happens at 0, and one long tick lets every deadline pass. So states are
compared without their times, texts and past incidents, and there are finitely many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from tests.support.telling import JOB, Stand, answers, private, submitted, training
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import Generation, NodeId, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.model.incident import Incident
from torchrelay.protocol.model.job import BEFORE_CUTOVER, Job, JobPhase
from torchrelay.protocol.model.moves import Move
from torchrelay.protocol.model.roster import Life, Seat, Worker
from torchrelay.protocol.model.table import Table
from torchrelay.protocol.rules.cluster import Cluster, advance, orders

# Two points are enough: what was committed, and what was about to be.
HERE, NEXT = Point(1), Point(2)
LONG_MS = 10_000_000
# What follows is only the end of processes: transcripts tell it.
LAST_PHASES = (JobPhase.FINISHING, JobPhase.ENDING, JobPhase.ENDED)
EARLIER_PHASES = tuple(phase for phase in JobPhase if phase not in LAST_PHASES)

# What an interrupted worker may say that holds state.
STANDS = (
    training(HERE),
    Stand(HERE, WorkerPhase.GATE, NEXT),
    Stand(NEXT, WorkerPhase.UPDATING),
)
# What a worker may say besides that is asked, in peace, to stop.
IN_PEACE = (Stand(HERE, WorkerPhase.BETWEEN), Stand(NEXT, WorkerPhase.FINISHED))


@dataclass(frozen=True)
class Happening:
    """Something that may happen in a state."""

    event: ev.Event
    at_ms: int = 0

    def __str__(self) -> str:
        return f"{type(self.event).__name__}" + (f" at {self.at_ms}" if self.at_ms else "")


def beginning(**fields: Any) -> Cluster:
    """A job that trains, without refill: the workers there are all there will ever be."""
    story = submitted(ranks=2, spares=1, refill=False, **fields)
    story.settle()
    return folded(story.cluster)


def beginning_of_a_move(*, ranks: tuple[int, ...] = (1,), spares: int = 2) -> Cluster:
    """A job that trains, of which some ranks are to be moved; their targets are being prepared."""
    story = submitted(ranks=2, spares=spares, refill=False)
    story.settle()
    asked = tuple(Rank(rank) for rank in ranks)
    story.hear(ev.MoveAsked(job=JOB, ranks=asked, reason="a wish", source="ann"))
    return folded(story.cluster)


def beginning_of_a_halt() -> Cluster:
    """A job that trains, of which one rank is to be moved: its target is prepared, and all are asked to stop."""
    state = advance(beginning_of_a_move(spares=1), ev.WorkerPrepared(worker=WorkerId("node-0.2.2")), 0)
    assert state.jobs[JOB].phase is JobPhase.QUIESCING
    return folded(state)


def beginning_of_a_cutover(*, spares: int = 2) -> Cluster:
    """A job that has halted after NEXT, rank 1's outgoing worker included; the target is on its way there."""
    story = submitted(ranks=2, spares=spares, refill=False)
    story.settle()
    story.train(HERE)
    story.hear(ev.MoveAsked(job=JOB, ranks=(Rank(1),), reason="a wish", source="ann"))
    for kind in (od.Assign, od.Halt, od.Decide):
        story.answer((kind,))
    return folded(story.cluster)


def happenings_of_a_move(cluster: Cluster) -> Iterator[Happening]:
    """What may happen next in a world with a move: not what has no part in it, and is looked at in other worlds."""
    spares = {spare.worker for spare in cluster.spares(JOB)}
    for happening in happenings(cluster):
        match happening.event:
            case ev.ReconfigureFailed() | ev.RestoreFailed(mismatch=True) | ev.CollectiveFailed():
                continue
            case ev.WorkerExited(worker=worker) if worker in spares:
                continue
            case _:
                yield happening


def happenings(cluster: Cluster) -> Iterator[Happening]:
    """All that may happen next."""
    job = cluster.jobs[JOB]
    if job.open_move is not None:
        yield Happening(ev.MoveWithdrawn(job=JOB, ranks=job.open_move.ranks[:1], source="ann"))
    if job.phase in BEFORE_CUTOVER and not cluster.freezes:
        yield Happening(ev.FreezeSet(source="ann"))
    for order in sorted(orders(cluster), key=repr):
        yield from (Happening(event) for event in answered(job, order))
    for worker in cluster.workers.values():
        if worker.life is not Life.FENCING:
            yield Happening(died(worker.worker))
    for rank, seat in job.seats.items():
        if seat.worker is not None:
            yield from (Happening(event) for event in uttered(job, rank, seat.worker))
    yield Happening(ev.Tick(), LONG_MS)


def answered(job: Job, order: od.Order) -> Iterator[ev.Event]:
    """What an order may be answered with."""
    if isinstance(order, od.Fence):
        yield died(order.worker)
    elif isinstance(order, od.Interrupt):
        seat = job.seats[order.rank]
        for stand in standing(job, seat):
            yield from answers(order, {order.worker: stand})
    elif isinstance(order, od.Halt):
        for stand in (*STANDS, *IN_PEACE):
            yield from answers(order, {order.worker: stand})
    else:
        yield from answers(order, {})
    if isinstance(order, od.Reconfigure):
        yield ev.ReconfigureFailed(**address(job, order.rank, order.worker), reason="refused")
    if isinstance(order, od.Restore):
        for mismatch in (False, True):
            source = order.sources[0].rank if order.sources else Rank(0)
            who = address(job, order.rank, order.worker)
            yield ev.RestoreFailed(**who, source=source, reason="broken", mismatch=mismatch)


def standing(job: Job, seat: Seat) -> Iterator[Stand]:
    """Where an interrupted worker may stand. Nobody stands behind the last target, unless it is in the gate of that."""
    if not seat.replacement:
        yield from (
            stand
            for stand in STANDS
            if job.resume_point != NEXT
            or (NEXT in (stand.committed, stand.pending) and stand.phase is not WorkerPhase.COMPUTING)
        )
        return
    yield Stand()
    if job.resume_point is not None:
        yield Stand(caught_up=job.resume_point)
        yield Stand(job.resume_point, WorkerPhase.STOPPED)
    if job.boundary is not None and job.boundary != job.resume_point:
        yield Stand(caught_up=job.boundary)


def uttered(job: Job, rank: Rank, worker: WorkerId) -> Iterator[ev.Event]:
    """What the holder of a rank may say unasked."""
    who = address(job, rank, worker)
    if job.phase is JobPhase.RUNNING:
        yield ev.CollectiveFailed(**who, summary="reset")
        yield ev.WorkerFinished(**who)
        yield ev.WorkerHung(worker=worker, evidence="stopped")


def address(job: Job, rank: Rank, worker: WorkerId) -> dict[str, Any]:
    return {"job": JOB, "generation": job.generation, "worker": worker, "rank": rank}


def died(worker: WorkerId) -> ev.WorkerExited:
    """A worker ends; its page holds both points."""
    records = tuple(ev.PrivateRecord(point, private(point)) for point in (HERE, NEXT))
    return ev.WorkerExited(worker=worker, node=NodeId("node-0"), code=1, private=records)


# ---------------------------------------------------------------- states without times


def folded(cluster: Cluster) -> Cluster:
    """The same state as if everything had happened at 0, and nothing had been told."""
    workers = Table((name, folded_worker(worker)) for name, worker in cluster.workers.items())
    strikes = Table((place, (0,) * min(1, len(times))) for place, times in cluster.strikes.items())
    jobs = Table((name, folded_job(job)) for name, job in cluster.jobs.items())
    return replace(cluster, now_ms=0, workers=workers, strikes=strikes, jobs=jobs)


def folded_worker(worker: Worker) -> Worker:
    """Of one that is being ended it does not matter how far it had come."""
    if worker.life is Life.FENCING:
        worker = replace(worker, prepared=False, brought=None, shard="", note="")
    return replace(worker, since_ms=0)


def folded_job(job: Job) -> Job:
    seats = Table(
        (rank, replace(seat, assigned_ms=0, ended_ms=0, private=seat.private[-2:])) for rank, seat in job.seats.items()
    )
    if job.phase is JobPhase.RELEASING:  # what was reported, and who stood already, is of no account any more
        seats = Table((rank, replace(seat, report=None, ready=False)) for rank, seat in seats.items())
    tried, troubles, moving = job.attempts, job.exceptions, job.moving
    broken = None if troubles.broken is None else replace(troubles.broken, at_ms=0, cause="")
    requests = ((rank, replace(request, group=0, asked_ms=0)) for rank, request in moving.requests.items())
    return replace(
        job,
        seats=seats,
        phase_ms=0,
        why="",
        asks="",
        keepers=(),
        waiting_ms=None if job.waiting_ms is None else 0,
        answered_ms=None if job.answered_ms is None else 0,
        stood_ms=None if job.stood_ms is None else 0,
        attempts=replace(tried, fruitless=0, advanced_in=Generation(0)),
        exceptions=replace(
            troubles, last_code=1, broken=broken, raised=tuple(replace(entry, at_ms=0) for entry in troubles.raised)
        ),
        moving=replace(
            moving,
            moves=tuple(folded_move(move) for move in moving.moves[-2:]),
            named=0,
            cutovers=(),
            requests=Table(requests),
        ),
        accounting=replace(job.accounting, incidents=folded_incidents(job)),
        outcome=None if job.outcome is None else replace(job.outcome, reason=""),
    )


def folded_incidents(job: Job) -> tuple[Incident, ...]:
    return (Incident(1, JOB, job.generation),) if job.open_incident is not None else ()


def folded_move(move: Move) -> Move:
    """Which move it is does not matter, and neither does its past: only where it is, and what it is to do."""
    return replace(
        move, number=0, asked_ms=0, again_ms=0, ended_ms=None if move.open else 0, incident=None, story=(), tries=0
    )


def reachable(
    start: Cluster,
    *,
    limit: int,
    last_generation: int,
    alphabet: Callable[[Cluster], Iterator[Happening]] = happenings,
    phases: Container[JobPhase] = EARLIER_PHASES,
) -> Iterator[tuple[Cluster, Happening, Cluster]]:
    """Every transition between reachable states, breadth first, as (state, what happens, state after it, unfolded).

    Does not look behind `last_generation`, nor into other `phases`; more than `limit` states are an `AssertionError`.
    """
    seen = {start}
    waiting = deque([start])
    while waiting:
        state = waiting.popleft()
        for happening in alphabet(state):
            after = advance(state, happening.event, happening.at_ms)
            yield state, happening, after
            short = folded(after)
            job = short.jobs[JOB]
            if short not in seen and job.generation <= last_generation and job.phase in phases:
                seen.add(short)
                waiting.append(short)
        assert len(seen) <= limit, f"more than {limit} states"
