"""Placing: which worker processes should be there, and who gets a rank at the start of a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torchrelay.protocol.messages.events import Effect
from torchrelay.protocol.messages.ids import JobId, NodeId, Rank, WorkerId
from torchrelay.protocol.model.job import RECOVERING, Job, JobPhase
from torchrelay.protocol.model.moves import MoveState
from torchrelay.protocol.model.roster import Life, Worker, natural
from torchrelay.protocol.model.state import Cluster, over
from torchrelay.protocol.placement.policy import choose_spare, cordoned, slot_order
from torchrelay.protocol.placement.taints import closed, effect_on, taken_last
from torchrelay.protocol.recovery.ending import NO_SPARE, end
from torchrelay.protocol.recovery.rollback import all_vacant, in_order, still_ending
from torchrelay.protocol.recovery.sharing import may_share, shares_with, slots_to_share, soon_free, usable


def place(cluster: Cluster, job_id: JobId) -> Cluster:
    """Keep processes in as many slots as the job wants; at a start, give out the ranks in the order of the slots."""
    job = cluster.jobs[job_id]
    if over(job):
        return cluster
    cluster = fill_slots(clear_out(cluster, job), job)
    if job.phase is JobPhase.STARTING:
        cluster = seat_all(cluster, cluster.jobs[job_id])
        cluster = wire_first(cluster, cluster.jobs[job_id])
    return cluster


def free_slots(cluster: Cluster, job: Job) -> list[tuple[NodeId, int]]:
    """Slots of living nodes without a process, that may be used, in the order in which ranks fill them.

    During a recovery those come first on whose nodes workers have come up before.
    """
    # Until all nodes are there, each gets no more than its share: the first would take all ranks.
    limit = job.spec.nproc_per_node if awaits_nodes(cluster, job) else None
    taken = {(worker.node, worker.slot) for worker in cluster.workers.values()}
    taken |= {*cluster.strays.values(), *cluster.foreign.values()}
    free = [
        (node.node, slot)
        for node in cluster.nodes.values()
        if node.alive
        for slot in range(node.slots if limit is None else min(limit, node.slots))
        if (node.node, slot) not in taken
        and not cordoned(job.spec, cluster.strikes.get((node.node, slot), ()), cluster.now_ms)
        and not closed(cluster, node.node, slot)
    ]
    hurry = job.phase in RECOVERING
    return sorted(
        free,
        key=lambda place: (
            taken_last(cluster, *place), hurry and not cluster.nodes[place[0]].proven, *slot_order(job.spec, *place)
        ),
    )  # fmt: skip


def fill_slots(cluster: Cluster, job: Job) -> Cluster:
    """One worker for each vacant rank and each spare that is wanted, as far as there is room.

    Starting a spare takes a core for a while. During a recovery the survivors have better uses for it, so spares are
    filled up again when training goes on.
    """
    if all_vacant(job) and still_ending(cluster, job):
        return cluster  # every rank comes back to its own slot, when that is free
    missing = spares_wanted(job) - len(usable_spares(cluster, job))
    free = free_slots(cluster, job)
    if all_vacant(job):
        free, wanted = in_order(job, free)
        missing = max(missing, wanted)
    # Where a rank wants to go to a certain node, a spare elsewhere does not help.
    places = [next(place for place in free if place[0] == node) for node in asked_nodes(cluster, job, free)]
    others = [place for place in free if place not in places]
    for place in places + others[: max(0, missing - len(places))]:
        cluster = start(cluster, job, place)
    return invite(cluster, job)


def start(cluster: Cluster, job: Job, place: tuple[NodeId, int], *, guest: bool = False) -> Cluster:
    """A new worker in this slot."""
    node, slot = place
    name = WorkerId(f"{node}.{slot}.{cluster.born}")
    worker = Worker(name, node, slot, job.spec.job, Life.STARTING, cluster.now_ms, guest=guest)
    return replace(cluster.with_worker(worker), born=cluster.born + 1)


def invite(cluster: Cluster, job: Job) -> Cluster:
    """Start guests for ranks that have no place, nor will have one in a moment, if the job may share slots."""
    if not may_share(job):
        return cluster
    vacant = [rank for rank, seat in job.seats.items() if seat.worker is None]
    move = job.open_move
    leaving = [] if move is None or not move.shares or move.state is not MoveState.PREPARING else move.ranks
    ranks = [*vacant, *(r for r in leaving if move is not None and r not in move.targets and r not in vacant)]
    able = [spare for spare in usable_spares(cluster, job) if not is_cold(cluster, spare)]
    short = len(ranks) - len(able) - soon_free(cluster, job)

    def apart(node: NodeId) -> bool:
        return all(outlives(cluster, job, rank, node) for rank in ranks)

    for place in slots_to_share(cluster, job, short, apart) if short > 0 else ():
        cluster = start(cluster, job, place, guest=True)
    return cluster


def spares_wanted(job: Job) -> int:
    """How many workers without a rank there should be now."""
    vacant = sum(seat.worker is None for seat in job.seats.values())
    move = job.open_move
    if job.phase in RECOVERING:
        return vacant
    if move is None or move.state is MoveState.WAITING:
        return vacant + job.spec.spares
    # Spares are filled up again after the move: starting them takes from those who train.
    return vacant + sum(rank not in move.targets for rank in move.ranks)


def usable_spares(cluster: Cluster, job: Job) -> list[Worker]:
    """Spares that can be given a rank where they are. Those on a closed place are of no use."""
    return [spare for spare in cluster.spares(job.spec.job) if not closed(cluster, spare.node, spare.slot)]


def spare_for(
    cluster: Cluster, job: Job, rank: Rank, spares: list[Worker], near: NodeId | None = None
) -> tuple[Worker | None, str]:
    """The best of these spares for a rank, and why it is that one, or none. `near`: the node that the rank leaves."""
    return choose_spare(
        spares, rank, near=near, last=lambda worker: taken_last(cluster, worker.node, worker.slot),
        apart=apart_from(cluster, job, rank), host=lambda worker: shares_with(cluster, worker),
        cold=lambda worker: is_cold(cluster, worker),
    )  # fmt: skip


def is_cold(cluster: Cluster, worker: Worker) -> bool:
    """Whether a worker is to start where none has come up yet: nobody knows how long that takes."""
    node = cluster.nodes.get(worker.node)
    return worker.life is Life.STARTING and node is not None and not node.proven


def apart_from(cluster: Cluster, job: Job, rank: Rank) -> Callable[[Worker], bool]:
    """Whether the shard of this rank outlives the node of a spare that takes it: a replica is on another one."""
    return lambda spare: outlives(cluster, job, rank, spare.node)


def outlives(cluster: Cluster, job: Job, rank: Rank, node: NodeId) -> bool:
    """Whether the shard of this rank is on another node than this one, too."""
    shard = job.seats[rank].shard
    holders = [seat.worker for other, seat in job.seats.items() if other != rank and seat.shard == shard != ""]
    return {cluster.workers[worker].node for worker in holders if worker is not None} != {node}


def asked_nodes(cluster: Cluster, job: Job, free: list[tuple[NodeId, int]]) -> list[NodeId]:
    """Nodes with a free slot to which an open move wants to go, and where no spare is."""
    move = job.open_move
    if move is None or move.state is not MoveState.PREPARING:
        return []
    named = {move.to[rank] for rank in move.ranks if rank in move.to and rank not in move.targets}
    there = {spare.node for spare in usable_spares(cluster, job)}
    return sorted(named & {node for node, _ in free} - there, key=natural)


def clear_out(cluster: Cluster, job: Job) -> Cluster:
    """End the spares on places that are to be left, and guests that nobody needs: they have nothing to lose."""
    move = job.open_move
    awaited = move is not None and move.shares and move.state is MoveState.PREPARING
    idle = job.phase is JobPhase.RUNNING and not awaited
    for spare in cluster.spares(job.spec.job):
        unneeded = idle and shares_with(cluster, spare) is not None
        if spare.guest:  # the other may have been dead already: then this is a slot that has lost its worker
            unneeded = unneeded or not usable(cluster, job, (spare.node, spare.slot))
        if unneeded or effect_on(cluster, spare.node, spare.slot) is Effect.NO_EXECUTE:
            cluster = cluster.fence(spare.worker)
    return cluster


def awaits_nodes(cluster: Cluster, job: Job) -> bool:
    """Whether a job that starts for the first time has fewer nodes than it was submitted for."""
    first = job.phase is JobPhase.STARTING and job.starts == 0 and job.restarts == 0
    return first and sum(node.alive for node in cluster.nodes.values()) < job.spec.nodes


def seat_all(cluster: Cluster, job: Job) -> Cluster:
    """At a start: when all nodes are there and enough workers, every rank gets its worker at once."""
    if any(seat.worker is not None for seat in job.seats.values()):
        return cluster
    ending = [worker.worker for worker in cluster.of_job(job.spec.job) if worker.life is Life.FENCING]
    if ending:  # two holders of one rank, though of two histories, could still write the same files
        return wait_for_room(cluster, job, f"waiting for the end of {', '.join(sorted(ending))}")
    if awaits_nodes(cluster, job):
        return cluster
    able = sorted(
        usable_spares(cluster, job),
        key=lambda w: (w.guest, taken_last(cluster, w.node, w.slot), *slot_order(job.spec, w.node, w.slot), w.worker),
    )
    if len(able) < len(job.seats):
        why = f"{len(job.seats)} ranks need as many workers; there are {len(able)}: waiting for places"
        return wait_for_room(cluster, job, why)
    for number, worker in enumerate(able[: len(job.seats)]):
        rank = Rank(number)
        cluster = cluster.with_worker(replace(worker, rank=rank))
        job = job.with_seat(rank, replace(job.seats[rank], worker=worker.worker, home=worker.node))
    return cluster.with_job(replace(job, waiting_ms=None, why="workers are starting"))


def wait_for_room(cluster: Cluster, job: Job, why: str) -> Cluster:
    """Too few places at a start: say so, and end if it stays so. Fenced processes hold theirs for a moment."""
    waiting = job.waiting_ms if job.waiting_ms is not None else cluster.now_ms
    if cluster.now_ms - waiting >= job.spec.spare_wait_ms:
        return end(cluster, job, NO_SPARE, why)
    return cluster.with_job(replace(job, why=why, waiting_ms=waiting))


def wire_first(cluster: Cluster, job: Job) -> Cluster:
    """The first wiring, when every rank has asked for it."""
    if not all(seat.ready for seat in job.seats.values()):
        return cluster
    return cluster.with_job(job.enter(JobPhase.RECONFIGURING, cluster.now_ms, "all ranks ask to be wired"))
