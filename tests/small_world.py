"""Small worlds: every state that the core can reach with two ranks and a spare, whatever order things happen in.

The alphabet is what healthy workers answer to the orders that stand, each in three variants where a report can differ,
and a few faults. Time is folded: everything happens at 0, and one long tick lets every deadline pass. So states are
compared without their times, texts and past incidents, and there are finitely many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.telling import JOB, Stand, answers, submitted, training
from torchrelay.protocol import events as ev
from torchrelay.protocol import orders as od
from torchrelay.protocol.cluster import Cluster, advance, orders
from torchrelay.protocol.ids import NodeId, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.incident import Incident
from torchrelay.protocol.job import Job, JobPhase
from torchrelay.protocol.roster import Life, Seat
from torchrelay.protocol.table import Table

# Two points are enough: what was committed, and what was about to be.
HERE, NEXT = Point(1), Point(2)
LONG_MS = 10_000_000
# What follows is only the end of processes: transcripts tell it.
LAST_PHASES = (JobPhase.FINISHING, JobPhase.ENDING, JobPhase.ENDED)

# What an interrupted worker may say that holds state.
STANDS = (
    training(HERE),
    Stand(HERE, WorkerPhase.GATE, NEXT),
    Stand(NEXT, WorkerPhase.UPDATING),
)


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


def happenings(cluster: Cluster) -> Iterator[Happening]:
    """All that may happen next."""
    job = cluster.jobs[JOB]
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
    else:
        yield from answers(order, {})
    if isinstance(order, od.Rewire):
        yield ev.RewireFailed(**address(job, order.rank, order.worker), reason="refused")
    if isinstance(order, od.Restore):
        for mismatch in (False, True):
            source = order.sources[0].rank if order.sources else Rank(0)
            who = address(job, order.rank, order.worker)
            yield ev.RestoreFailed(**who, source=source, reason="broken", mismatch=mismatch)


def standing(job: Job, seat: Seat) -> Iterator[Stand]:
    """Where an interrupted worker may stand. Nobody stands behind the last target, unless it is in the gate of that."""
    if not seat.newcomer:
        yield from (stand for stand in STANDS if job.target != NEXT or (NEXT in (stand.committed, stand.pending)
                    and stand.phase is not WorkerPhase.COMPUTING))  # fmt: skip
        return
    yield Stand()
    if job.target is not None:
        yield Stand(caught_up=job.target)
        yield Stand(job.target, WorkerPhase.STOPPED)


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
    records = tuple(ev.PrivateRecord(point, b"private") for point in (HERE, NEXT))
    return ev.WorkerExited(worker=worker, node=NodeId("node-0"), code=1, private=records)


# ---------------------------------------------------------------- states without times


def folded(cluster: Cluster) -> Cluster:
    """The same state as if everything had happened at 0, and nothing had been told."""
    workers = Table((name, replace(worker, since_ms=0)) for name, worker in cluster.workers.items())
    strikes = Table((place, (0,) * min(1, len(times))) for place, times in cluster.strikes.items())
    jobs = Table((name, folded_job(job)) for name, job in cluster.jobs.items())
    return replace(cluster, now_ms=0, workers=workers, strikes=strikes, jobs=jobs)


def folded_job(job: Job) -> Job:
    seats = Table((rank, replace(seat, assigned_ms=0, private=seat.private[-2:])) for rank, seat in job.seats.items())
    incident = (Incident(1, JOB, job.generation),) if job.open_incident is not None else ()
    return replace(
        job,
        seats=seats,
        phase_ms=0,
        why="",
        fruitless=0,
        last_code=1,
        waiting_ms=None if job.waiting_ms is None else 0,
        broken=None if job.broken is None else replace(job.broken, at_ms=0, cause=""),
        raised=tuple(replace(entry, at_ms=0) for entry in job.raised),
        incidents=incident,
        outcome=None if job.outcome is None else replace(job.outcome, reason=""),
    )


def reachable(start: Cluster, *, limit: int, last_generation: int) -> Iterator[tuple[Cluster, Happening, Cluster]]:
    """Every transition between reachable states, breadth first, as (state, what happens, state after it, unfolded).

    Does not look behind `last_generation` and `LAST_PHASES`; raises `AssertionError` if more than `limit` states.
    """
    seen = {start}
    waiting = deque([start])
    while waiting:
        state = waiting.popleft()
        for happening in happenings(state):
            after = advance(state, happening.event, happening.at_ms)
            yield state, happening, after
            short = folded(after)
            job = short.jobs[JOB]
            if short not in seen and job.generation <= last_generation and job.phase not in LAST_PHASES:
                seen.add(short)
                waiting.append(short)
        assert len(seen) <= limit, f"more than {limit} states"
