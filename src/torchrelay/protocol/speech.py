"""Standing orders: what must still be done, read off the state alone and repeated until the state moves on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypedDict

from torchrelay.protocol.ids import Generation, JobId, NodeId, Rank, WorkerId
from torchrelay.protocol.job import Job, JobPhase
from torchrelay.protocol.orders import (
    Assign,
    CatchUp,
    Decide,
    Fence,
    Interrupt,
    Leave,
    Order,
    Restore,
    Resume,
    Rewire,
    Source,
    StartWorker,
)
from torchrelay.protocol.policy import choose_sources, judge_report
from torchrelay.protocol.recovery import owes_report, restored, store_host
from torchrelay.protocol.roster import Life, Seat, Worker
from torchrelay.protocol.state import Cluster


def standing_orders(cluster: Cluster) -> frozenset[Order]:
    """Everything that is to be done now, for all jobs and nodes."""
    said: list[Order] = [Fence(node=node, worker=worker) for worker, node in cluster.strays.items()]
    for worker in cluster.workers.values():
        if worker.life is Life.STARTING:
            said.append(StartWorker(node=worker.node, worker=worker.worker, slot=worker.slot, job=worker.job))
        elif worker.life is Life.FENCING:
            said.append(Fence(node=worker.node, worker=worker.worker))
    for job in cluster.jobs.values():
        said.extend(job_orders(cluster, job))
    return frozenset(said)


def job_orders(cluster: Cluster, job: Job) -> Iterator[Order]:
    """What the holders of the job's ranks are to do."""
    for rank, seat in sorted(job.seats.items()):
        # When a job is over its seats keep the names of holders that have left.
        worker = None if seat.worker is None else cluster.workers.get(seat.worker)
        if worker is not None and worker.life in (Life.STARTED, Life.WARM):
            yield from seat_orders(cluster, job, rank, seat, worker)


def seat_orders(cluster: Cluster, job: Job, rank: Rank, seat: Seat, worker: Worker) -> Iterator[Order]:
    """What one holder is to do. A phase of the job is a set of orders to its seats."""
    if job.phase is JobPhase.STARTING and not seat.ready and not seat.finished:
        yield assign(job, rank, seat, worker)
    if seat.newcomer and not seat.ready:
        yield assign(job, rank, seat, worker)
    match job.phase:
        case JobPhase.AGREEING:
            if owes_report(cluster, job, seat):
                yield Interrupt(**to(job, worker), rank=rank, reason=job.why)
        case JobPhase.PREPARING:
            yield from prepare_orders(cluster, job, rank, seat, worker)
        case JobPhase.REWIRING:
            yield from rewire_orders(cluster, job, rank, seat, worker)
        case JobPhase.RESUMING:
            if not seat.resumed:
                yield Resume(**to(job, worker), rank=rank, point=job.target)
        case JobPhase.FINISHING:
            yield Leave(**to(job, worker), code=0)
        case JobPhase.STARTING | JobPhase.RUNNING | JobPhase.ENDING | JobPhase.ENDED:
            pass


class Address(TypedDict):
    """To whom an order goes, and in which generation."""

    node: NodeId
    worker: WorkerId
    job: JobId
    generation: Generation


def to(job: Job, worker: Worker) -> Address:
    """The address of an order to a worker."""
    return Address(node=worker.node, worker=worker.worker, job=job.spec.job, generation=job.generation)


def assign(job: Job, rank: Rank, seat: Seat, worker: Worker) -> Assign:
    once = tuple(sorted((name, value) for (of, name), value in job.once.items() if of == rank))
    return Assign(
        **to(job, worker),
        rank=rank,
        world_size=job.spec.world_size,
        local_world_size=job.spec.nproc_per_node,
        newcomer=seat.newcomer,
        restarts=job.restarts,
        once=once,
    )


def prepare_orders(cluster: Cluster, job: Job, rank: Rank, seat: Seat, worker: Worker) -> Iterator[Order]:
    """Survivors hear their verdict, newcomers where to go; both until they stand at the edge."""
    assert job.target is not None, "a target is decided before anybody prepares for it"
    if seat.ready:
        return
    verdict = judge_report(seat, job.target)
    if verdict is not None:
        yield Decide(**to(job, worker), rank=rank, verdict=verdict, point=job.target)
        return
    record = seat.record_of(job.target)
    sources = source_list(cluster, job, rank)
    if record is not None and sources:
        yield CatchUp(**to(job, worker), rank=rank, point=job.target, private=record.data, sources=sources)


def rewire_orders(cluster: Cluster, job: Job, rank: Rank, seat: Seat, worker: Worker) -> Iterator[Order]:
    """Connect, and fetch the state if it is not there; both may be asked for at the same time."""
    if not seat.rewired:
        host = job.seats[store_host(job)].worker
        assert host is not None, "all ranks are held while they connect"
        yield Rewire(**to(job, worker), rank=rank, store=cluster.workers[host].store)
    if not restored(job, seat):
        assert job.target is not None, "at the first wiring nobody has anything to restore"
        sources = source_list(cluster, job, rank)
        yield Restore(**to(job, worker), rank=rank, point=job.target, sources=sources)


def source_list(cluster: Cluster, job: Job, rank: Rank) -> tuple[Source, ...]:
    """Where a rank's state can be had, with addresses."""
    assert job.target is not None, "state is fetched for a target"
    found = []
    for other in choose_sources(job.seats, rank, job.target):
        holder = job.seats[other].worker
        if holder is not None:
            found.append(Source(other, cluster.workers[holder].address))
    return tuple(found)
