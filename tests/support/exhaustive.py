"""What tests of exhaustive share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tests.support import small_world as small
from tests.support.telling import JOB, answers, submitted
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import Generation, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.model import facts
from torchrelay.protocol.model.incident import Resolution
from torchrelay.protocol.model.job import RECOVERING, Job, JobPhase
from torchrelay.protocol.model.moves import MoveState
from torchrelay.protocol.model.roster import Life, Worker
from torchrelay.protocol.placement.boundary import UNDER_WAY
from torchrelay.protocol.rules.cluster import Cluster, advance, orders
from torchrelay.simulation.judge.checks import check_together

(
    STARTING,
    RUNNING,
    QUIESCING,
    HALTING,
    RELEASING,
    PARKING,
    SEALING,
    AGREEING,
    PREPARING,
    RECONFIGURING,
    RESUMING,
    FINISHING,
    ENDING,
    ENDED,
) = JobPhase

# One event moves a job as far as what is known allows, so a step may pass over phases; what is not here never happens.
AFTER: dict[JobPhase, set[JobPhase]] = {
    STARTING: {STARTING, RECONFIGURING, FINISHING, ENDING, ENDED},
    RUNNING: {RUNNING, QUIESCING, AGREEING, PREPARING, STARTING, FINISHING, ENDING, ENDED},
    QUIESCING: {QUIESCING, HALTING, RELEASING, AGREEING, PREPARING, STARTING, ENDING, ENDED},
    HALTING: {HALTING, RELEASING, RECONFIGURING, PARKING, AGREEING, PREPARING, STARTING, ENDING, ENDED},
    PARKING: {PARKING, SEALING, RELEASING, AGREEING, PREPARING, STARTING, ENDING, ENDED},
    SEALING: {SEALING, RELEASING, AGREEING, PREPARING, ENDING, ENDED},
    # The next move may begin at once, when all targets are prepared already.
    RELEASING: {RELEASING, RUNNING, QUIESCING, AGREEING, PREPARING, STARTING, FINISHING, ENDING, ENDED},
    AGREEING: {AGREEING, PREPARING, RECONFIGURING, STARTING, ENDING, ENDED},
    PREPARING: {PREPARING, RECONFIGURING, AGREEING, STARTING, ENDING, ENDED},
    RECONFIGURING: {RECONFIGURING, RESUMING, AGREEING, PREPARING, STARTING, ENDING, ENDED},
    RESUMING: {RESUMING, RUNNING, QUIESCING, AGREEING, PREPARING, STARTING, FINISHING, ENDING, ENDED},
    FINISHING: {FINISHING, ENDING, ENDED},
    ENDING: {ENDING, ENDED},
    ENDED: {ENDED},
}


def check_transition(before: Cluster, happening: small.Happening, after: Cluster) -> None:
    """What must be true of one event in one state."""
    was, job = before.jobs[JOB], after.jobs[JOB]
    assert job.generation >= was.generation
    assert job.phase in AFTER[was.phase], f"{was.phase} -> {job.phase}"
    if (
        was.phase in AFTER
        and was.resume_point is not None
        and job.resume_point is not None
        and job.attempts.restarts == was.attempts.restarts
    ):
        assert job.resume_point >= was.resume_point, "the point to go on from never goes back"
    check_roster(after, job)
    check_orders(after, job)
    check_progress(after, job)
    if was.phase in (JobPhase.RESUMING, JobPhase.RELEASING) and job.phase is RUNNING:
        check_resumed(was, happening.event, job)
    assert advance(after, ev.Tick(), after.now_ms) == after, "it comes to rest at once"
    assert advance(after, happening.event, after.now_ms) == after, "what is heard twice counts once"
    if isinstance(happening.event, ev.Answer):
        stale = msgspec.structs.replace(happening.event, generation=Generation(was.generation - 1))
        assert nothing_changes(before, stale), "stale answers change nothing"
        stranger = msgspec.structs.replace(happening.event, worker="somebody")
        assert nothing_changes(before, stranger), "only the holder of a rank answers for it"


def nothing_changes(before: Cluster, event: ev.Event) -> bool:
    """Whether a (folded) state stays as it is. What a move waits for is told anew, as folding has made it forget."""
    after = advance(before, event, 0)
    return after == before or small.folded(after) == before


def check_roster(cluster: Cluster, job: Job) -> None:
    """One owner: a seat has a living holder that knows its rank, and nobody sits twice."""
    holders = [seat.worker for seat in job.seats.values() if seat.worker is not None]
    outgoing_workers = [seat.outgoing for seat in job.seats.values() if seat.outgoing is not None]
    targets = [] if job.open_move is None else list(job.open_move.targets.values())
    if job.phase in small.LAST_PHASES:
        assert len(set(holders)) == len(holders)
        return
    taking_part = holders + outgoing_workers + targets
    assert len(set(taking_part)) == len(taking_part), "nobody has two parts"
    for rank, seat in job.seats.items():
        if seat.outgoing is not None:
            assert job.phase in RECOVERING - {RESUMING}
            assert job.boundary is not None
            assert cluster.workers[seat.outgoing].life is not Life.FENCING
            assert cluster.workers[seat.outgoing].rank == rank
        if seat.worker is not None:
            worker = cluster.workers[seat.worker]
            assert worker.life is not Life.FENCING
            assert (worker.rank, worker.incoming_for) == (rank, None)
            former = [w.worker for w in cluster.workers.values() if w.rank == rank and w.worker != seat.worker]
            assert all(left(job, rank, name) for name in former), "a rank is given away when its holder has ended"
    for worker in cluster.workers.values():
        if worker.life is not Life.FENCING:
            assert worker.rank is None or worker.worker in holders + outgoing_workers
            assert (worker.incoming_for is None) == (worker.worker not in targets)


def left(job: Job, rank: Rank, worker: WorkerId) -> bool:
    """Whether a worker has held a rank until a move took it: it stands at the boundary, or is being ended.

    Or it has never trained: a target that failed, whose outgoing worker has taken the rank back.
    """
    outgoing_workers = {move.outgoing_workers.get(rank) for move in job.moving.moves}
    return (
        worker in outgoing_workers or job.seats[rank].outgoing == worker or job.seats[rank].worker in outgoing_workers
    )


def check_orders(cluster: Cluster, job: Job) -> None:
    """Orders go to those who may obey them, make sense together, and name only who can help."""
    standing = orders(cluster)
    check_together(standing)
    for order in standing:
        name: WorkerId = order.worker  # type: ignore[attr-defined]  # all orders name a worker
        known = cluster.workers.get(name)
        if known is None:
            assert isinstance(order, od.Fence)
            assert cluster.strays[name][0] == order.node
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
            check_part(cluster, job, known, order)


def check_part(cluster: Cluster, job: Job, known: Worker, order: od.WorkerOrder) -> None:
    """Each is ordered what belongs to its part: to the holder of a rank, its target, or who has left it."""
    rank = getattr(order, "rank", known.rank)
    assert rank is not None
    if known.incoming_for is not None:
        assert rank == known.incoming_for
        assert isinstance(order, od.Assign | od.Replay)
        check_target(cluster, job, order)
    elif job.seats[rank].outgoing == known.worker:
        assert isinstance(order, od.Decide | od.Recall)
        assert order.point == job.resume_point == job.boundary
        assert not isinstance(order, od.Decide) or order.verdict is od.Verdict.REDO
    else:
        assert job.is_held_by(known.worker, rank)
        check_order(cluster, job, order)


def check_target(cluster: Cluster, job: Job, order: od.Assign | od.Replay) -> None:
    """What the target of a move is ordered: to prepare, from examples of the rank's holder; and to the boundary."""
    holder = job.seats[order.rank].worker
    if isinstance(order, od.Assign):
        assert order.replacement
        assert bool(order.examples) == (holder is not None)
        assert all(cluster.workers[holder].address == each.address for each in order.examples if holder is not None)
        return
    assert job.phase is HALTING
    assert order.point == job.boundary
    assert job.seats[order.rank].record_of(order.point) == ev.PrivateRecord(order.point, order.private)
    assert order.sources[0].rank == order.rank
    for source in order.sources:
        other = job.seats[source.rank]
        assert other.ready
        assert other.worker is not None
        assert source.address.endswith(other.worker)
        assert other.shard == job.seats[order.rank].shard


def check_order(cluster: Cluster, job: Job, order: od.WorkerOrder) -> None:
    match order:
        case od.Decide(rank=rank, verdict=verdict, point=point, hand_over=hand_over):
            check_verdict(job, rank, verdict, point)
            assert hand_over == (job.phase is HALTING and job.open_move is not None and rank in job.open_move.targets)
        case od.Halt(rank=rank):
            assert job.phase is QUIESCING
            assert job.seats[rank].report is None
        case od.Replay(rank=rank, point=point, private=private, sources=sources):
            assert point == job.resume_point
            assert ev.PrivateRecord(point, private) in job.seats[rank].private
            check_sources(cluster, job, rank, sources)
        case od.Recall(ward=ward, point=point):
            assert point == job.resume_point
            assert job.seats[ward].record_of(point) is None
        case od.Restore(rank=rank, point=point, sources=sources):
            assert point == job.resume_point
            assert job.seats[rank].replacement
            assert sources
            check_sources(cluster, job, rank, sources)
        case od.Resume(point=point):
            assert point == (job.boundary if job.phase is RELEASING else job.resume_point)
        case od.Assign(rank=rank, replacement=replacement):
            assert replacement == job.seats[rank].replacement
            assert replacement == (job.phase in RECOVERING)
            assert not order.examples
        case _:
            pass


def check_verdict(job: Job, rank: Rank, verdict: od.Verdict, point: Point) -> None:
    """Nobody goes back behind what it has committed, and forward only from the gate of the target, or in peace."""
    report = job.seats[rank].report
    assert report is not None
    if verdict is od.Verdict.GO_ON:
        assert job.phase is HALTING
        assert point == job.boundary
        assert report.committed is not None
        # Who was in a call goes on to its end, and is at most one call behind those who were furthest.
        bound = report.pending if report.phase in UNDER_WAY and report.pending is not None else report.committed
        assert point in (bound, bound.after_step(), bound.after_section())
        return
    assert point == job.resume_point
    if verdict is od.Verdict.REDO:
        assert report.committed == point
    else:
        assert report.committed != point
        assert (report.phase, report.pending) == (WorkerPhase.GATE, point)


def check_sources(cluster: Cluster, job: Job, rank: Rank, sources: tuple[od.Source, ...]) -> None:
    """All hold the shard at the target: a holder of another rank, or somebody who left its rank there."""
    seat = job.seats[rank]
    outgoing_workers = [source for source in sources if is_outgoing(cluster, job, source)]
    assert not outgoing_workers or job.resume_point == job.boundary
    if seat.outgoing is not None and rank not in seat.failed | seat.distrusted and job.resume_point == job.boundary:
        assert sources[0].address == cluster.workers[seat.outgoing].address, "its own outgoing worker comes first"
    for source in sources:
        other = job.seats[source.rank]
        if source not in outgoing_workers:
            assert source.rank != rank
            assert other.worker is not None
            assert source.address.endswith(other.worker)
            assert other.holds == job.resume_point
        assert other.shard == seat.shard
        assert source.rank not in seat.distrusted
        assert source.rank not in seat.failed


def is_outgoing(cluster: Cluster, job: Job, source: od.Source) -> bool:
    outgoing = job.seats[source.rank].outgoing
    return outgoing is not None and cluster.workers[outgoing].address == source.address


def check_progress(cluster: Cluster, job: Job) -> None:
    """A phase is left when everybody has done what it asks, and not before."""
    seats = list(job.seats.values())
    match job.phase:
        case JobPhase.QUIESCING | JobPhase.HALTING | JobPhase.RELEASING:
            check_halt(cluster, job)
        case JobPhase.PREPARING:
            check_target_point(job)
            survivors = [seat for seat in seats if seat.worker is not None and seat.assigned_in < job.generation]
            assert all(seat.report is not None for seat in survivors)
            assert not all(seat.ready for seat in seats)
        case JobPhase.RECONFIGURING:
            assert all(seat.ready for seat in seats)
        case JobPhase.RESUMING | JobPhase.RUNNING:
            assert job.phase is RUNNING or all(seat.ready and seat.reconfigured for seat in seats)
            assert job.resume_point is None or all(seat.holds == job.resume_point for seat in seats)
            if job.phase is JobPhase.RUNNING:
                assert job.boundary is None
                assert not any(seat.replacement or seat.reconfigured for seat in seats)
                assert job.open_incident is None
        case JobPhase.ENDING | JobPhase.ENDED:
            assert job.outcome is not None
            assert job.outcome.reason
            assert job.open_incident is None
        case _:
            pass
    if job.phase in RECOVERING and job.resume_point is not None:
        assert job.open_incident is not None
    later = job.accounting.incidents[1:]
    assert all(incident.cause for incident in later if incident.resolution is not Resolution.OPEN)


def check_resumed(was: Job, event: ev.Event, job: Job) -> None:
    """Training goes on when all have said that they do, and what was answered is forgotten."""
    last = event.rank if isinstance(event, ev.Answer) else None
    assert all(seat.resumed or rank == last for rank, seat in was.seats.items())
    assert not any(map(facts.has_answered, job.seats.values()))


def check_target_point(job: Job) -> None:
    """The newest that a survivor has committed, or the gate of the last target; else where outgoing workers stand."""
    reports = [seat.report for seat in job.seats.values() if seat.report is not None]
    committed = [report.committed for report in reports if report.committed is not None]
    if not committed:
        assert job.resume_point == job.boundary
        assert any(seat.outgoing is not None for seat in job.seats.values())
        return
    assert job.resume_point is not None
    assert job.resume_point >= max(committed)
    assert job.resume_point == max(committed) or any(
        report.phase is WorkerPhase.GATE and report.pending == job.resume_point for report in reports
    )


def check_halt(cluster: Cluster, job: Job) -> None:
    """A job stops for a move whose targets are prepared, and not before the furthest has come to its stop."""
    seats, move = list(job.seats.values()), job.open_move
    assert job.open_incident is not None
    assert not any(seat.reconfigured for seat in seats), "connections are not touched"
    if job.phase is RELEASING:
        assert move is None or move.state is MoveState.PREPARING
        assert not all(seat.resumed for seat in seats)
        return
    assert move is not None
    assert move.state is MoveState.STOPPING
    assert set(move.targets) == set(move.ranks)
    assert all(cluster.workers[target].prepared for target in move.targets.values())
    if job.phase is QUIESCING:
        assert job.boundary is None
        assert not all(seat.report is not None for seat in seats)
        return
    reports = [seat.report for seat in seats if seat.report is not None]
    assert len(reports) == len(seats)
    under_way = (WorkerPhase.COMPUTING, WorkerPhase.SECTION, WorkerPhase.GATE)
    points = [report.pending if report.phase in under_way else report.committed for report in reports]
    assert job.boundary == max(point for point in points if point is not None)
    brought = [cluster.workers[target].brought == job.boundary for target in move.targets.values()]
    assert not (all(seat.ready for seat in seats) and all(brought))


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


def explore(
    start: Cluster, *, last_generation: int, limit: int, quiet: Callable[[Cluster], None] = check_quiet, **world: Any
) -> int:
    """Check every transition; returns how many states there were."""
    states = set()
    for before, happening, after in small.reachable(start, limit=limit, last_generation=last_generation, **world):
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
