"""Journals of any age: the events of a job that was hurt again and again, by the core itself and obedient workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import JobId, NodeId, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.rules.cluster import EMPTY, Cluster, advance, orders

JOB = JobId("aged")


def aged(ranks: int, incidents: int, nodes: int = 2) -> Iterator[tuple[ev.AnyEvent, int]]:
    """Events and their moments, in ms. A rank is lost every hour, each time the next one."""
    cluster, now, heeded = EMPTY, 0, set[od.Order]()
    slots = ranks // nodes + 1
    spec = ev.JobSpec(
        job=JOB, world_size=ranks, nproc_per_node=ranks // nodes, nodes=nodes, spares=nodes, slot_faults=0
    )
    coming: list[ev.Event] = [ev.JobSubmitted(spec=spec)]
    coming += [ev.NodeJoined(node=NodeId(f"node-{n}"), incarnation="a", slots=slots) for n in range(nodes)]
    for number in range(incidents + 1):
        while coming:
            event = coming.pop(0)
            now += 1
            yield event, now  # type: ignore[misc]  # only events of the union are told
            cluster = advance(cluster, event, now)
            said = sorted(orders(cluster) - heeded, key=lambda one: (type(one).__name__, getattr(one, "worker", "")))
            heeded |= set(said)
            for order in said:
                coming += answers(cluster, order, number + 1)
        now += 3_600_000
        heeded = set(orders(cluster))
        victim = cluster.jobs[JOB].seats[Rank(number % ranks)].worker
        assert victim is not None, "the job trains"
        coming = [ended(cluster, victim, number + 2, signal=9)] if number < incidents else []


def ended(cluster: Cluster, worker: WorkerId, step: int, signal: int) -> ev.WorkerExited:
    known = cluster.workers[worker]
    record = (ev.PrivateRecord(Point(step), b"private"),) if known.rank is not None else ()
    return ev.WorkerExited(worker=worker, node=known.node, signal=signal, private=record)


def answers(cluster: Cluster, order: od.Order, step: int) -> Iterator[ev.Event]:
    """What a worker or its agent says to an order, at once."""
    match order:
        case od.StartWorker(worker=worker, node=node, slot=slot):
            yield ev.WorkerStarted(worker=worker, node=node, slot=slot, pid=9, address="at", store="on")
            yield ev.WorkerWarm(worker=worker)
        case od.Fence(worker=worker):
            if worker in cluster.workers:
                yield ended(cluster, worker, step, 9)
        case od.WorkerOrder():
            yield from says(order, step)


def says(order: od.WorkerOrder, step: int) -> Iterator[ev.Event]:
    """What a worker says, in the order in which a recovery asks."""
    worker, job = order.worker, order.job
    rank = getattr(order, "rank", Rank(0))
    point: Any = getattr(order, "point", None)
    who: dict[str, Any] = {"job": job, "generation": order.generation, "worker": worker, "rank": rank}
    match order:
        case od.Assign(replacement=True):
            yield ev.WorkerJoined(worker=worker, job=job, rank=rank)
        case od.Assign():
            yield ev.WorkerReady(**who, point=None)
        case od.Interrupt():
            yield ev.WorkerReported(**who, committed=Point(step), phase=WorkerPhase.BETWEEN)
        case od.Decide() | od.Replay():
            yield ev.WorkerReady(**who, point=point)
        case od.Reconfigure():
            yield ev.WorkerReconfigured(**who)
        case od.Restore(sources=sources):
            yield ev.StateRestored(**who, point=point, sources=(sources[0].rank,), digest="same", size=1)
        case od.Resume():
            yield ev.WorkerResumed(**who)
            if point is None:
                yield ev.WorkerJoined(worker=worker, job=job, rank=rank)
