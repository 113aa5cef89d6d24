"""Exhaustive: every state of small worlds, every next event, and what must be true of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from tests import small_world as small
from tests.telling import JOB, answers, submitted
from torchrelay.protocol import events as ev
from torchrelay.protocol import orders as od
from torchrelay.protocol.cluster import Cluster, advance, orders
from torchrelay.protocol.ids import Generation, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.incident import Resolution
from torchrelay.protocol.job import RECOVERING, Job, JobPhase
from torchrelay.protocol.roster import Life, Seat
from torchrelay.simulation.invariants import check_together

(
    STARTING, RUNNING, QUIESCING, HALTING, RELEASING, AGREEING, PREPARING, REWIRING, RESUMING, FINISHING, ENDING,
    ENDED,
) = JobPhase  # fmt: skip

# One event moves a job as far as what is known allows, so a step may pass over phases; what is not here never happens.
AFTER: dict[JobPhase, set[JobPhase]] = {
    STARTING: {STARTING, REWIRING, FINISHING, ENDING, ENDED},
    RUNNING: {RUNNING, AGREEING, PREPARING, STARTING, FINISHING, ENDING, ENDED},
    AGREEING: {AGREEING, PREPARING, REWIRING, STARTING, ENDING, ENDED},
    PREPARING: {PREPARING, REWIRING, AGREEING, STARTING, ENDING, ENDED},
    REWIRING: {REWIRING, RESUMING, AGREEING, PREPARING, STARTING, ENDING, ENDED},
    RESUMING: {RESUMING, RUNNING, AGREEING, PREPARING, STARTING, FINISHING, ENDING, ENDED},
    FINISHING: {FINISHING, ENDING, ENDED},
    ENDING: {ENDING, ENDED},
    ENDED: {ENDED},
}


def check_transition(before: Cluster, happening: small.Happening, after: Cluster) -> None:
    """What must be true of one event in one state."""
    was, job = before.jobs[JOB], after.jobs[JOB]
    assert job.generation >= was.generation
    assert job.phase in AFTER[was.phase], f"{was.phase} -> {job.phase}"
    if was.phase in AFTER and was.target is not None and job.target is not None and job.restarts == was.restarts:
        assert job.target >= was.target, "the point to go on from never goes back"
    check_roster(after, job)
    check_orders(after, job)
    check_progress(job)
    assert advance(after, ev.Tick(), after.now_ms) == after, "it comes to rest at once"
    assert advance(after, happening.event, after.now_ms) == after, "what is heard twice counts once"
    if isinstance(happening.event, ev.Answer):
        stale = msgspec.structs.replace(happening.event, generation=Generation(was.generation - 1))
        assert advance(before, stale, 0) == before, "stale answers change nothing"
        stranger = msgspec.structs.replace(happening.event, worker="somebody")
        assert advance(before, stranger, 0) == before, "only the holder of a rank answers for it"


def check_roster(cluster: Cluster, job: Job) -> None:
    """One owner: a seat has a living holder that knows its rank, and nobody sits twice."""
    holders = [seat.worker for seat in job.seats.values() if seat.worker is not None]
    assert len(set(holders)) == len(holders)
    if job.phase in small.LAST_PHASES:
        return
    for rank, seat in job.seats.items():
        if seat.worker is not None:
            worker = cluster.workers[seat.worker]
            assert worker.life is not Life.FENCING
            assert worker.rank == rank
            former = [w for w in cluster.workers.values() if w.rank == rank and w.worker != seat.worker]
            assert not former, "a rank is given away when its former holder has ended"
    assert all(worker.rank is None or worker.worker in holders or worker.life is Life.FENCING
               for worker in cluster.workers.values())  # fmt: skip


def check_orders(cluster: Cluster, job: Job) -> None:
    """Orders go to those who may obey them, make sense together, and name only who can help."""
    standing = orders(cluster)
    check_together(standing)
    for order in standing:
        name: WorkerId = order.worker  # type: ignore[attr-defined]  # all orders name a worker
        known = cluster.workers.get(name)
        if known is None:
            assert isinstance(order, od.Fence)
            assert cluster.strays[name] == order.node
            continue
        assert order.node == known.node
        if isinstance(order, od.Fence):
            assert known.life is Life.FENCING
        elif isinstance(order, od.StartWorker):
            assert known.life is Life.STARTING
            assert order.slot == known.slot
        else:
            assert isinstance(order, od.WorkerOrder)
            assert known.life in (Life.STARTED, Life.WARM)
            assert order.generation == job.generation
            assert job.rank_of(order.worker) == getattr(order, "rank", known.rank)
            check_order(job, order)


def check_order(job: Job, order: od.WorkerOrder) -> None:
    match order:
        case od.Decide(rank=rank, verdict=verdict, point=point):
            check_verdict(job, job.seats[rank], verdict, point)
        case od.CatchUp(rank=rank, point=point, private=private, sources=sources):
            assert point == job.target
            assert ev.PrivateRecord(point, private) in job.seats[rank].private
            check_sources(job, rank, sources)
        case od.Restore(rank=rank, point=point, sources=sources):
            assert point == job.target
            assert job.seats[rank].newcomer
            check_sources(job, rank, sources)
        case od.Resume(point=point):
            assert point == job.target
        case od.Assign(rank=rank, newcomer=newcomer):
            assert newcomer == job.seats[rank].newcomer
            assert newcomer == (job.phase in RECOVERING)
        case _:
            pass


def check_verdict(job: Job, seat: Seat, verdict: od.Verdict, point: Point) -> None:
    """Nobody goes back behind what it has committed, and forward only from the gate of the target."""
    report = seat.report
    assert report is not None
    assert point == job.target
    if verdict is od.Verdict.REDO:
        assert report.committed == point
    else:
        assert report.committed != point
        assert (report.phase, report.pending) == (WorkerPhase.GATE, point)


def check_sources(job: Job, rank: Rank, sources: tuple[od.Source, ...]) -> None:
    seat = job.seats[rank]
    for source in sources:
        other = job.seats[source.rank]
        assert source.rank != rank
        assert other.worker is not None
        assert source.address.endswith(other.worker)
        assert other.holds == job.target
        assert other.shard == seat.shard
        assert source.rank not in seat.distrusted
        assert source.rank not in seat.failed


def check_progress(job: Job) -> None:
    """A phase is left when everybody has done what it asks, and not before."""
    seats = list(job.seats.values())
    reported = [
        seat.report.committed for seat in seats if seat.report is not None and seat.report.committed is not None
    ]
    match job.phase:
        case JobPhase.PREPARING:
            assert reported
            assert job.target is not None
            assert job.target >= max(reported)
            assert job.target == max(reported) or any(
                seat.report is not None and seat.report.phase is WorkerPhase.GATE and seat.report.pending == job.target
                for seat in seats
            )
            survivors = [seat for seat in seats if seat.worker is not None and seat.assigned_in < job.generation]
            assert all(seat.report is not None for seat in survivors)
            assert not all(seat.ready for seat in seats)
        case JobPhase.REWIRING:
            assert all(seat.ready for seat in seats)
        case JobPhase.RESUMING | JobPhase.RUNNING:
            assert all(seat.ready and seat.rewired for seat in seats)
            assert job.target is None or all(seat.holds == job.target for seat in seats)
            if job.phase is JobPhase.RUNNING:
                assert all(seat.resumed and not seat.newcomer for seat in seats)
                assert job.open_incident is None
        case JobPhase.ENDING | JobPhase.ENDED:
            assert job.outcome is not None
            assert job.outcome.reason
            assert job.open_incident is None
        case _:
            pass
    if job.phase in RECOVERING and job.target is not None:
        assert job.open_incident is not None
    assert all(incident.cause for incident in job.incidents[1:] if incident.resolution is not Resolution.OPEN)


def check_quiet(state: Cluster) -> None:
    """When faults cease, every job trains or ends."""
    cluster, now = state, 0
    for _ in range(30):
        for order in sorted(orders(cluster), key=repr):
            for event in answers(order, {}):
                cluster = advance(cluster, event, now)
        if cluster.jobs[JOB].phase in (RUNNING, FINISHING, ENDED):
            return
        now += 1_000
        cluster = advance(cluster, ev.Tick(), now + (small.LONG_MS if now > 10_000 else 0))
    raise AssertionError(f"it stays {cluster.jobs[JOB].phase} for ever: {cluster.jobs[JOB].why}")


def explore(start: Cluster, *, last_generation: int, limit: int, quiet: Callable[[Cluster], None] = check_quiet) -> int:
    """Check every transition; returns how many states there were."""
    states = set()
    for before, happening, after in small.reachable(start, limit=limit, last_generation=last_generation):
        if before not in states:
            states.add(before)
            quiet(before)
        try:
            check_transition(before, happening, after)
        except AssertionError as error:
            raise AssertionError(f"{error}\nin {before.jobs[JOB]}\nwhen {happening.event}") from error
    return len(states)


def from_the_start() -> Cluster:
    return small.folded(submitted(ranks=2, spares=1, refill=False).cluster)


def test_one_recovery_in_every_order_of_things() -> None:
    assert explore(small.beginning(), last_generation=2, limit=3_000) > 500


def test_a_start_in_every_order_of_things() -> None:
    assert explore(from_the_start(), last_generation=1, limit=3_000) > 100


@pytest.mark.slow
def test_a_second_fault_in_every_order_of_things() -> None:
    assert explore(small.beginning(), last_generation=3, limit=10_000, quiet=lambda _: None) > 3_000


def test_a_state_is_told_from_another_by_what_matters() -> None:
    """The folding must not make different states equal."""
    start = small.beginning()
    job = start.jobs[JOB]
    seat = job.seats[Rank(0)]
    for other in (
        replace(job, target=Point(2)),
        replace(job, generation=Generation(7)),
        job.with_seat(Rank(0), replace(seat, finished=True)),
    ):
        assert small.folded(start.with_job(other)) != start
