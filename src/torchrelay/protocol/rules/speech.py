"""Standing orders: what must still be done, read off the state alone and repeated until the state moves on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TypedDict

from msgspec import Struct

from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Rank, WorkerId
from torchrelay.protocol.messages.orders import (
    Assign,
    Decide,
    Fence,
    Halt,
    Interrupt,
    Interrupts,
    Leave,
    Order,
    Park,
    PassOn,
    Recall,
    Reconfigure,
    Replay,
    Restore,
    Resume,
    Source,
    StartWorker,
    Verdict,
)
from torchrelay.protocol.model import facts
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.model.phases import PHASES, asked
from torchrelay.protocol.model.roster import Life, Seat, Worker
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.model.table import FEW, Table
from torchrelay.protocol.placement import buddies
from torchrelay.protocol.placement.boundary import told_where
from torchrelay.protocol.placement.policy import MOST_SOURCES, judge_report
from torchrelay.protocol.recovery.records import buddies_to_ask, circle_of
from torchrelay.protocol.recovery.recovery import holder_owes_report, sources_of, store_host

UP = (Life.STARTED, Life.WARM)  # its process hears orders


def standing_orders(cluster: Cluster) -> frozenset[Order]:
    """Everything that is to be done now, for all jobs and nodes."""
    said: list[Order] = [*stray_orders(cluster)]
    for worker in cluster.workers.values():
        said.extend(worker_orders(worker))
    for job in cluster.jobs.values():
        said.extend(side_orders(cluster, job))
        wiring = wiring_of(cluster, job)
        for rank, seat in job.seats.items():
            said.extend(rank_orders(cluster, job, rank, seat, wiring))
    return frozenset(said)


def stray_orders(cluster: Cluster) -> Iterator[Order]:
    """Processes that should not be there are to end."""
    return (Fence(node=node, worker=worker) for worker, (node, _) in cluster.strays.items())


def worker_orders(worker: Worker) -> Iterator[Order]:
    """What the agent of a worker is to do with its process."""
    if worker.life is Life.STARTING:
        yield StartWorker(node=worker.node, worker=worker.worker, slot=worker.slot, job=worker.job, guest=worker.guest)
    elif worker.life is Life.FENCING:
        yield Fence(node=worker.node, worker=worker.worker)


def side_orders(cluster: Cluster, job: Job) -> Iterator[Order]:
    """What those are to do that will hold ranks of the job, or have held them, or keep what another rank has left."""
    yield from target_orders(cluster, job)
    yield from outgoing_orders(cluster, job)
    yield from recall_orders(cluster, job)


class Holder(Struct, frozen=True):
    """The worker that holds a rank, and all that an order to it may need."""

    cluster: Cluster
    job: Job
    rank: Rank
    seat: Seat
    worker: Worker
    wiring: Wiring | None


def rank_orders(cluster: Cluster, job: Job, rank: Rank, seat: Seat, wiring: Wiring | None) -> list[Order]:
    """What the holder of a rank is to do: what its phase asks for, as long as the seat lacks it."""
    # When a job is over its seats keep the names of holders that have left.
    worker = None if seat.worker is None else cluster.workers.get(seat.worker)
    if worker is None or worker.life not in UP:
        return []
    holder = Holder(cluster, job, rank, seat, worker, wiring)
    found: list[Order] = []
    if job.signals.fresh or job.stop is not None:
        found += signal_orders(job, seat, worker)
    for kind in asked(job, seat):
        order = SAID[kind](holder)
        if order is not None:
            found.append(order)
    return found


def signal_orders(job: Job, seat: Seat, worker: Worker) -> Iterator[Order]:
    """Signals of the launcher; and in a job that stops, a rank whose script has ended need not wait for the others."""
    if not seat.replacement or seat.resumed:  # whoever is still being brought to its place has no handler yet
        for passed in job.signals.fresh:
            yield PassOn(node=worker.node, worker=worker.worker, number=passed.number, nth=passed.nth)
    if job.stop is not None and seat.finished and job.phase is not JobPhase.FINISHING:
        yield Leave(**to(job, worker), code=0)


class Address(TypedDict):
    """To whom an order goes, and in which generation."""

    node: NodeId
    worker: WorkerId
    job: JobId
    generation: Generation


def to(job: Job, worker: Worker) -> Address:
    """The address of an order to a worker."""
    return Address(node=worker.node, worker=worker.worker, job=job.spec.job, generation=job.generation)


def target_orders(cluster: Cluster, job: Job) -> Iterator[Order]:
    """What the targets of a move are to do: prepare; and at the boundary, come there."""
    move = job.open_move
    for rank, target in sorted(move.targets.items()) if move is not None else ():
        worker = cluster.workers.get(target)
        if worker is None or worker.life not in UP or worker.incoming_for != rank:
            continue
        if not worker.prepared:
            holder = job.seats[rank].worker
            examples = () if holder is None else (Source(rank, cluster.workers[holder].address),)
            yield assign(job, rank, True, worker, examples)
        elif job.phase is JobPhase.HALTING and told_where(job, rank) and worker.brought != job.boundary:
            yield from bring(cluster, job, rank, worker)


def bring(cluster: Cluster, job: Job, rank: Rank, target: Worker) -> Iterator[Order]:
    """Tell a target where to go. Its sources: the outgoing worker, and whoever stands at the boundary as well."""
    assert job.boundary is not None, "it is told where to go"
    record = job.seats[rank].record_of(job.boundary)
    assert record is not None, "the outgoing worker has handed it over"
    yield Replay(
        **to(job, target), rank=rank, point=job.boundary, private=record.data, sources=at_boundary(cluster, job, rank)
    )


def at_boundary(cluster: Cluster, job: Job, rank: Rank) -> tuple[Source, ...]:
    """The holders of this rank and of its replicas that stand at the boundary, as many as are named: its own first."""

    def standing(after: Rank | None) -> Iterator[Source]:
        for other, seat in job.seats.group(facts.shard_of, job.seats[rank].shard, after=after):
            if other != rank and seat.worker is not None and seat.ready:
                yield Source(other, cluster.workers[seat.worker].address)

    own = job.seats[rank]
    first = (Source(rank, cluster.workers[own.worker].address),) if own.worker is not None and own.ready else ()
    rest = tuple(islice(standing(None), MOST_SOURCES + 1))
    if len(rest) > MOST_SOURCES:
        rest = tuple(islice(standing(rank), MOST_SOURCES))
    return first + rest


def outgoing_orders(cluster: Cluster, job: Job) -> Iterator[Order]:
    """Who has left a rank stands where it stood, and serves its state until all have theirs."""
    if (
        job.phase not in (JobPhase.PREPARING, JobPhase.RECONFIGURING)
        or job.resume_point is None
        or job.resume_point != job.boundary
    ):
        return
    for rank, seat in job.seats.where(facts.has_outgoing):
        outgoing = None if seat.outgoing is None else cluster.workers.get(seat.outgoing)
        if outgoing is not None and outgoing.life is not Life.FENCING:
            yield Decide(**to(job, outgoing), rank=rank, verdict=Verdict.REDO, point=job.resume_point)


def assign(job: Job, rank: Rank, replacement: bool, worker: Worker, examples: tuple[Source, ...] = ()) -> Assign:
    return Assign(
        **to(job, worker),
        rank=rank,
        world_size=job.spec.world_size,
        local_world_size=job.spec.nproc_per_node,
        local_rank=worker.slot,
        replacement=replacement,
        restarts=job.attempts.restarts,
        once=job.once.get(rank, ()),
        examples=examples,
    )


def recall_orders(cluster: Cluster, job: Job) -> Iterator[Order]:
    """Ask for the records of ranks that have left none: their node, and their page, is lost.

    Each is asked for one at a time.
    """
    busy: set[WorkerId] = set()
    if job.phase is not JobPhase.PREPARING or job.resume_point is None:
        return
    for rank, seat in job.seats.where(facts.holds_nothing):
        if seat.record_of(job.resume_point) is not None:
            continue
        if cluster.still_held(job.spec.job, rank):
            continue
        for other, keeper in buddies_to_ask(cluster, job, rank):
            if keeper.worker not in busy:
                busy.add(keeper.worker)
                restarts = job.attempts.restarts
                yield Recall(**to(job, keeper), rank=other, ward=rank, point=job.resume_point, restarts=restarts)


class Wiring(Struct, frozen=True):
    """How the ranks of one generation are connected: where its store is, and who keeps whose records."""

    store: str
    buddies: dict[Rank, tuple[Rank, ...]]
    wards: dict[Rank, tuple[Rank, ...]]


def wiring_of(cluster: Cluster, job: Job) -> Wiring | None:
    """The wiring of this generation; None if nobody is to connect now."""
    if job.phase is not JobPhase.RECONFIGURING:
        return None
    host = job.seats[store_host(job)].worker
    assert host is not None, "all ranks are held while they connect"
    keepers = circle_of(cluster, job)
    return Wiring(cluster.workers[host].store, keepers, buddies.wards_of(keepers))


def source_list(cluster: Cluster, job: Job, rank: Rank) -> tuple[Source, ...]:
    """Where a rank's state can be had, with addresses."""
    return tuple(Source(other, holder.address) for other, holder in sources_of(cluster, job, rank))


# ---------------------------------------------------------------- what is said to the holder of a rank

# Each says it, or None where it is not for this holder: `phases` has which are asked for when.


def say_assign(one: Holder) -> Order | None:
    starts = one.job.phase is JobPhase.STARTING and not one.seat.finished
    return assign(one.job, one.rank, one.seat.replacement, one.worker) if starts or one.seat.replacement else None


# Those that are said to every rank name all fields: to hand them on in a dict takes five times as long.


def say_interrupt(one: Holder) -> Order | None:
    job, worker = one.job, one.worker
    if not holder_owes_report(job, one.seat, worker):
        return None
    return Interrupt(
        node=worker.node,
        worker=worker.worker,
        job=job.spec.job,
        generation=job.generation,
        rank=one.rank,
        reason=job.asks,
    )


def begins_with_interrupts(before: Job, job: Job) -> bool:
    """Whether a generation begins in which all holders are asked to stop, and nothing else."""
    alone = PHASES[job.phase].holders == (Interrupt,) and not job.signals.fresh and job.stop is None
    return alone and job.generation > before.generation


class Holders(Struct, frozen=True):
    """The holders of a job's ranks that are to be asked when a rank is lost, by their nodes.

    All survivors wait in vain until they hear it: who they are is found out while they train.
    """

    workers: Table[WorkerId, Worker]
    seats: Table[Rank, Seat]
    on: dict[NodeId, tuple[tuple[Rank, WorkerId], ...]]


def holders_of(cluster: Cluster, job: Job) -> Holders:
    """Of all ranks."""
    seats = dict(job.seats.items())
    found: dict[NodeId, list[tuple[Rank, WorkerId]]] = {}
    for worker in cluster.workers.values():
        if worker.rank is not None and worker.job == job.spec.job and is_asked(seats[worker.rank], worker):
            found.setdefault(worker.node, []).append((worker.rank, worker.worker))
    workers = cluster.workers.counted(by=facts.node_of)  # `followed` looks at some of the nodes
    return Holders(workers, job.seats, {node: tuple(some) for node, some in found.items()})


def followed(holders: Holders, cluster: Cluster, job: Job) -> Holders:
    """The holders as they are now: only nodes on which anything has changed are looked at."""
    seats = list(job.seats.differences(holders.seats))
    if len(seats) > FEW:
        return holders_of(cluster, job)
    changed = [one for _, was, now in cluster.workers.differences(holders.workers) for one in (was, now)]
    names = (seat.worker for _, was, now in seats for seat in (was, now) if seat is not None)
    changed += [None if name is None else cluster.workers.get(name) for name in names]
    on = dict(holders.on)
    for node in {one.node for one in changed if one is not None}:
        some = [
            (worker.rank, worker.worker)
            for worker in cluster.on_node(node)
            if worker.rank is not None and worker.job == job.spec.job and is_asked(job.seats[worker.rank], worker)
        ]
        on[node] = tuple(some)
    return Holders(cluster.workers, job.seats, on)


def is_asked(seat: Seat, worker: Worker) -> bool:
    """Whether this is the holder of the seat, and one that is asked to stop, and nothing else, when a rank is lost."""
    return seat.worker == worker.worker and not seat.replacement and worker.life in UP


def interrupts(holders: Holders, job: Job) -> list[Interrupts]:
    """The same to all at once, an order a node."""
    name, generation, why = job.spec.job, job.generation, job.asks
    return [
        Interrupts(node=node, job=name, generation=generation, reason=why, holders=some)
        for node, some in holders.on.items()
        if some
    ]


def say_halt(one: Holder) -> Order | None:
    return Halt(**to(one.job, one.worker), rank=one.rank, reason=one.job.asks)


def say_decide(one: Holder) -> Order | None:
    """The verdict for a survivor; or that nothing is wrong, and where all stop for a move."""
    job, rank = one.job, one.rank
    if job.phase is JobPhase.HALTING:
        assert job.boundary is not None, "it was chosen before"
        leaves = job.open_move is not None and rank in job.open_move.targets
        return Decide(**to(job, one.worker), rank=rank, verdict=Verdict.GO_ON, point=job.boundary, hand_over=leaves)
    assert job.resume_point is not None, "the resume point is decided before any rank prepares for it"
    verdict, worker = judge_report(one.seat, job.resume_point), one.worker
    if verdict is None:
        return None
    return Decide(
        node=worker.node,
        worker=worker.worker,
        job=job.spec.job,
        generation=job.generation,
        rank=rank,
        verdict=verdict,
        point=job.resume_point,
    )


def say_replay(one: Holder) -> Order | None:
    """Where to go, if what is needed for that is there."""
    job, point = one.job, one.job.resume_point
    assert point is not None, "the resume point is decided before any rank prepares for it"
    record = one.seat.record_of(point)
    if record is None or judge_report(one.seat, point) is not None:
        return None
    sources, snapshot = source_list(one.cluster, job, one.rank), job.rollback.point is not None
    if not sources:
        return None
    where = to(job, one.worker)
    return Replay(**where, rank=one.rank, point=point, private=record.data, sources=sources, snapshot=snapshot)


def say_reconfigure(one: Holder) -> Order | None:
    job, worker, wiring, rank = one.job, one.worker, one.wiring, one.rank
    assert wiring is not None, "it is found when all are to connect"
    return Reconfigure(
        node=worker.node,
        worker=worker.worker,
        job=job.spec.job,
        generation=job.generation,
        rank=rank,
        store=wiring.store,
        buddies=wiring.buddies.get(rank, ()),
        wards=wiring.wards.get(rank, ()),
    )


def say_restore(one: Holder) -> Order | None:
    """At the same time as to connect."""
    job, point = one.job, one.job.resume_point
    assert point is not None, "at the first wiring nobody has anything to restore"
    sources, snapshot = source_list(one.cluster, job, one.rank), job.rollback.point is not None
    return Restore(**to(job, one.worker), rank=one.rank, point=point, sources=sources, snapshot=snapshot)


def say_resume(one: Holder) -> Order | None:
    job, worker = one.job, one.worker
    point = job.boundary if job.phase is JobPhase.RELEASING else job.resume_point
    return Resume(
        node=worker.node,
        worker=worker.worker,
        job=job.spec.job,
        generation=job.generation,
        rank=one.rank,
        point=point,
    )


def say_park(one: Holder) -> Order | None:
    job, spec = one.job, one.job.spec
    assert job.boundary is not None, "all stand after it"
    former = "" if spec.resumes is None else spec.resumes.folder.rpartition("/")[2]
    folder = f"{spec.park_dir}/{job.parking.name}"
    return Park(**to(job, one.worker), rank=one.rank, point=job.boundary, folder=folder, keep=former)


def say_leave(one: Holder) -> Order | None:
    return Leave(**to(one.job, one.worker), code=0)


SAID: dict[type[Order], Callable[[Holder], Order | None]] = {
    Assign: say_assign,
    Interrupt: say_interrupt,
    Halt: say_halt,
    Decide: say_decide,
    Replay: say_replay,
    Reconfigure: say_reconfigure,
    Restore: say_restore,
    Resume: say_resume,
    Park: say_park,
    Leave: say_leave,
}
