"""Requests: what operators have asked for, rank by rank, until it is fulfilled or not wanted any more.

A request is for the worker that holds the rank, on the place that it is to leave. Moves and faults change holders;
whether that is what was asked for is weighed when training goes on: before, a replacement may be lost in its turn.

    fulfilled      the rank is on the node that was named, or, if none was, on another place than before
    not fulfilled  the request is for the new holder from now on, and its turn is still to come
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.events import Effect
from torchrelay.protocol.messages.ids import Rank
from torchrelay.protocol.model.job import Job
from torchrelay.protocol.model.moves import KEPT_MOVES, Move, MoveKind, MoveState, Request
from torchrelay.protocol.model.roster import Worker
from torchrelay.protocol.model.state import Cluster, is_over
from torchrelay.protocol.model.table import Table


def move_asked(cluster: Cluster, event: ev.MoveAsked) -> Cluster:
    """Keep the wish with the worker that holds the rank now; ranks that are where they should be need none."""
    job = cluster.jobs.get(event.job)
    if job is None or is_over(job):
        return cluster
    group = 1 + max((request.group for request in job.moving.requests.values()), default=job.moving.named)
    requests = job.moving.requests
    for rank in event.ranks:
        seat = job.seats.get(rank)
        if seat is None or seat.worker is None:
            continue
        holder = cluster.workers[seat.worker]
        if holder.node == event.to:
            continue
        request = Request(
            rank, holder.worker, holder.node, holder.slot, event.to, event.reason, event.source, group, cluster.now_ms
        )
        before = requests.get(rank)
        if before is None or replace(before, group=group, asked_ms=cluster.now_ms) != request:
            requests = requests.put(rank, request)
    return cluster.with_job(job.with_moving(requests=requests))


def move_withdrawn(cluster: Cluster, event: ev.MoveWithdrawn) -> Cluster:
    job = cluster.jobs.get(event.job)
    if job is None:
        return cluster
    requests = job.moving.requests
    for rank in event.ranks:
        requests = requests.drop(rank)
    return cluster.with_job(job.with_moving(requests=requests))


# ---------------------------------------------------------------- when ranks have new holders


def weigh_requests(cluster: Cluster, job: Job) -> Job:
    """Training goes on: drop the requests that are fulfilled, and bind the others to the new holders of their ranks."""
    by_fault: dict[int, list[Request]] = {}
    for rank, request in sorted(job.moving.requests.items()):
        name = job.seats[rank].worker
        assert name is not None, "all have resumed"
        holder = cluster.workers[name]
        if holder.worker == request.worker:
            continue
        if not fulfilled(request, holder):
            back = "it came back to" if (holder.node, holder.slot) == (request.node, request.slot) else "it is on"
            job = job.tell(cluster.now_ms, f"rank {rank} is to move yet: {back} {holder.place}")
            request = replace(request, worker=holder.worker, node=holder.node, slot=holder.slot)
            job = job.with_moving(requests=job.moving.requests.put(rank, request))
            continue
        job = job.with_moving(requests=job.moving.requests.drop(rank))
        if not told_by_move(job, request):
            by_fault.setdefault(request.group, []).append(request)
    for group in by_fault.values():
        job = record(cluster, job, group)
    return job


def fulfilled(request: Request, holder: Worker) -> bool:
    """Whether the rank is where it was wanted, now that this worker holds it."""
    if request.to is not None:
        return holder.node == request.to
    return (holder.node, holder.slot) != (request.node, request.slot)


def told_by_move(job: Job, request: Request) -> bool:
    """Whether the story of a move tells what has become of this request: it was to move the rank, or still is."""
    return any(
        move.outgoing_workers.get(request.rank) == request.worker and (move.open or move.state is MoveState.RECOVERED)
        for move in job.moving.moves
    )


def record(cluster: Cluster, job: Job, group: Sequence[Request]) -> Job:
    """What was asked for together, and a fault has fulfilled before it was its turn: a move that nobody had to make."""
    first = group[0]
    move = Move(
        job.moving.named + 1,
        MoveKind.PLANNED,
        tuple(request.rank for request in group),
        first.reason,
        first.asked_ms,
        outgoing_workers=Table((request.rank, request.worker) for request in group),
        to=Table((request.rank, request.to) for request in group if request.to is not None),
    ).begin(first.asked_ms, first.source)
    ways = []
    for request in group:
        name = job.seats[request.rank].worker
        assert name is not None, "all have resumed"
        ways.append(f"rank {request.rank} has gone from {request.node}/{request.slot} to {cluster.workers[name].place}")
    move = move.close(MoveState.RECOVERED, cluster.now_ms, f"a fault came first: {'; '.join(ways)}")
    # The open one stays the last, whatever its number.
    at = len(job.moving.moves) - (job.open_move is not None)
    moves = (*job.moving.moves[:at], move, *job.moving.moves[at:])
    return job.with_moving(moves=moves[-KEPT_MOVES:], named=move.number)


def ranks_in_question(cluster: Cluster, job: Job) -> list[Rank]:
    """Ranks that something may be wished for: on a tainted node, asked for, or away from home. In order."""
    if job.spec.return_home:
        return list(job.seats)
    nodes = {taint.node for taint in cluster.taints.values() if taint.effect is Effect.NO_EXECUTE}
    there = {worker.rank for node in nodes for worker in cluster.on_node(node) if worker.job == job.spec.job}
    return sorted({rank for rank in there if rank is not None} | set(job.moving.requests))


__all__ = ["move_asked", "move_withdrawn", "ranks_in_question", "weigh_requests"]
