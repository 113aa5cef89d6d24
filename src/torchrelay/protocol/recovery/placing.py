"""Placing: which worker processes should be there, and who gets a rank, at the start of a job or when one is vacant."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from torchrelay.protocol.messages.events import Effect
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Rank, WorkerId
from torchrelay.protocol.model import facts
from torchrelay.protocol.model.incident import COMES_BACK, PARKS, Fault, Mark
from torchrelay.protocol.model.job import RECOVERING, Job, JobPhase
from torchrelay.protocol.model.moves import MoveState
from torchrelay.protocol.model.phases import enter_next, is_complete
from torchrelay.protocol.model.roster import Life, Node, Worker, natural_key
from torchrelay.protocol.model.state import Cluster, is_over
from torchrelay.protocol.model.table import Table
from torchrelay.protocol.placement.boundary import begin_generation, with_move
from torchrelay.protocol.placement.policy import DYING_MS, choose_spare, is_cordoned, slot_order
from torchrelay.protocol.placement.taints import effect_on, is_closed, taken_last
from torchrelay.protocol.recovery.ending import NO_SPARE, NO_STATE, end_job, fall_back
from torchrelay.protocol.recovery.rollback import all_vacant, finds, in_order, not_found, places_for, still_ending
from torchrelay.protocol.recovery.sharing import is_usable, may_share, shares_with, slots_to_share, soon_free

MOST_NAMED = 8  # ranks that a message names


def place_workers(cluster: Cluster, job_id: JobId) -> Cluster:
    """Keep processes in as many slots as the job wants; at a start, give out the ranks in the order of the slots."""
    job = cluster.jobs[job_id]
    if is_over(job):
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
    kept = {*cluster.strays.values(), *cluster.foreign.values()}
    free = [
        (node.node, slot)
        for node in cluster.nodes.values()
        if node.alive
        for slot in empty_slots(cluster, node)
        if (limit is None or slot < limit)
        and (node.node, slot) not in kept
        and not is_cordoned(job.spec, cluster.strikes.get((node.node, slot), ()), cluster.now_ms)
        and not is_closed(cluster, node.node, slot)
    ]
    hurry = job.phase in RECOVERING
    return sorted(
        free,
        key=lambda place: (
            taken_last(cluster, *place),
            hurry and not cluster.nodes[place[0]].proven,
            *slot_order(job.spec, *place),
        ),
    )


def empty_slots(cluster: Cluster, node: Node) -> list[int]:
    """The slots of a node in which no worker runs. Mostly all are in use: then nobody is asked where it runs."""
    if cluster.workers.size(facts.node_of, node.node) >= node.slots and not cluster.workers.any(facts.is_guest):
        return []  # only guests run where another does
    taken = {worker.slot for worker in cluster.on_node(node.node)}
    return [slot for slot in range(node.slots) if slot not in taken]


def fill_slots(cluster: Cluster, job: Job) -> Cluster:
    """One worker for each vacant rank and each spare that is wanted, as far as there is room.

    Starting a spare takes a core for a while. During a recovery the survivors have better uses for it, so spares are
    filled up again when training goes on.
    """
    if all_vacant(job) and still_ending(cluster, job):
        return cluster  # every rank comes back to its own slot, when that is free
    missing = spares_wanted(job) - count_usable_spares(cluster, job)
    if missing <= 0 and job.open_move is None and not all_vacant(job) and not job.resuming:
        return invite(cluster, job)  # as mostly: then nobody has to look which slots are free
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
    vacant = [rank for rank, _ in job.seats.where(facts.is_vacant)]
    move = job.open_move
    leaving = [] if move is None or not move.shares or move.state is not MoveState.PREPARING else move.ranks
    ranks = [*vacant, *(r for r in leaving if move is not None and r not in move.targets and r not in vacant)]
    if not ranks:
        return cluster
    able = [spare for spare in usable_spares(cluster, job) if not is_cold(cluster, spare)]
    short = len(ranks) - len(able) - soon_free(cluster, job)

    def apart(node: NodeId) -> bool:
        return all(outlives(cluster, job, rank, node) for rank in ranks)

    for place in slots_to_share(cluster, job, short, apart) if short > 0 else ():
        cluster = start(cluster, job, place, guest=True)
    return cluster


def spares_wanted(job: Job) -> int:
    """How many workers without a rank there should be now."""
    vacant = job.seats.count(facts.is_vacant)
    move = job.open_move
    if job.phase in RECOVERING:
        return vacant
    if move is None or move.state is MoveState.WAITING:
        return vacant + job.spec.spares
    # Spares are filled up again after the move: starting them takes from those who train.
    return vacant + sum(rank not in move.targets for rank in move.ranks)


def usable_spares(cluster: Cluster, job: Job) -> list[Worker]:
    """Spares that can be given a rank where they are. Those on a closed place are of no use."""
    return [spare for spare in cluster.spares(job.spec.job) if not is_closed(cluster, spare.node, spare.slot)]


def count_usable_spares(cluster: Cluster, job: Job) -> int:
    """How many there are."""
    if len(cluster.jobs) == 1 and not cluster.taints:
        return cluster.workers.count(facts.is_idle)
    return len(usable_spares(cluster, job))


def spare_for(
    cluster: Cluster, job: Job, rank: Rank, spares: list[Worker], near: NodeId | None = None
) -> tuple[Worker | None, str]:
    """The best of these spares for a rank, and why it is that one, or none. `near`: the node that the rank leaves."""
    return choose_spare(
        spares,
        rank,
        near=near,
        last=lambda worker: taken_last(cluster, worker.node, worker.slot),
        apart=apart_from(cluster, job, rank),
        host=lambda worker: shares_with(cluster, worker),
        cold=lambda worker: is_cold(cluster, worker),
    )


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
    here = False
    for other, seat in job.seats.group(facts.shard_of, shard) if shard else ():
        if other != rank and seat.worker is not None:
            if cluster.workers[seat.worker].node != node:
                return True
            here = True
    return not here  # nobody else has it: then no place is worse than another


def asked_nodes(cluster: Cluster, job: Job, free: list[tuple[NodeId, int]]) -> list[NodeId]:
    """Nodes with a free slot to which an open move wants to go, and where no spare is."""
    if job.resuming and job.phase is JobPhase.STARTING:
        return nodes_to_look_at(cluster, job, free)
    move = job.open_move
    if move is None or move.state is not MoveState.PREPARING:
        return []
    named = {move.to[rank] for rank in move.ranks if rank in move.to and rank not in move.targets}
    there = {spare.node for spare in usable_spares(cluster, job)}
    return sorted(named & {node for node, _ in free} - there, key=natural_key)


def nodes_to_look_at(cluster: Cluster, job: Job, free: list[tuple[NodeId, int]]) -> list[NodeId]:
    """Nodes that may have files of the parking, and where nobody is to find them, if those that are there lack some."""
    workers = cluster.of_job(job.spec.job)
    if not workers or any(worker.life is Life.STARTING for worker in workers) or not not_found(job):
        return []
    there = {worker.node for worker in workers}
    return sorted({node for node, _ in free} - there, key=natural_key)


def clear_out(cluster: Cluster, job: Job) -> Cluster:
    """End the spares on places that are to be left, and guests that nobody needs: they have nothing to lose."""
    move = job.open_move
    awaited = move is not None and move.shares and move.state is MoveState.PREPARING
    idle = job.phase is JobPhase.RUNNING and not awaited
    # Nothing is to be left where no taint lies: then it is about guests only, and there are few.
    fact = facts.is_idle if cluster.taints else facts.is_idle_guest
    for spare in [one for _, one in cluster.workers.where(fact) if one.job == job.spec.job]:
        unneeded = idle and shares_with(cluster, spare) is not None
        if spare.guest:  # the other may have been dead already: then this is a slot that has lost its worker
            unneeded = unneeded or not is_usable(cluster, job, (spare.node, spare.slot))
        if unneeded or effect_on(cluster, spare.node, spare.slot) is Effect.NO_EXECUTE:
            cluster = cluster.fence(spare.worker)
    return cluster


def awaits_nodes(cluster: Cluster, job: Job) -> bool:
    """Whether a job that starts for the first time has fewer nodes than it was submitted for."""
    first = job.phase is JobPhase.STARTING and job.attempts.starts == 0 and job.attempts.restarts == 0
    first = first or (job.phase is JobPhase.STARTING and job.resuming)
    return first and cluster.nodes.count(facts.is_alive) < job.spec.nodes


def seat_all(cluster: Cluster, job: Job) -> Cluster:
    """At a start: when all nodes are there and enough workers, every rank gets its worker at once."""
    if job.seats.count(facts.is_vacant) < len(job.seats):
        return cluster
    ending = [worker.worker for worker in cluster.fencing(job.spec.job)]
    if ending:  # two holders of one rank, though of two histories, could still write the same files
        return wait_for_room(cluster, job, f"waiting for the end of {', '.join(sorted(ending))}")
    if awaits_nodes(cluster, job):
        return cluster
    if count_usable_spares(cluster, job) < len(job.seats):
        return wait_for_places(cluster, job, count_usable_spares(cluster, job))
    able = sorted(
        usable_spares(cluster, job),
        key=lambda w: (w.guest, taken_last(cluster, w.node, w.slot), *slot_order(job.spec, w.node, w.slot), w.worker),
    )
    if job.resuming:
        return come_back(cluster, job, able)
    holders = list(zip(job.seats.items(), able, strict=False))
    for (rank, _), worker in holders:
        cluster = cluster.with_worker(replace(worker, rank=rank))
    seats = Table((rank, replace(seat, worker=one.worker, home=one.node)) for (rank, seat), one in holders)
    return cluster.with_job(replace(job, seats=seats, waiting_ms=None, why="workers are starting"))


def come_back(cluster: Cluster, job: Job, able: list[Worker]) -> Cluster:
    """A job that goes on from its parking: all ranks are taken as by those who go back to snapshots.

    Each where its file is, if there is room: somebody must be there to hand it out.
    """
    resumes, now = job.spec.resumes, cluster.now_ms
    assert resumes is not None, "it comes back from there"
    up = [worker for worker in able if worker.life is not Life.STARTING]
    places = near_files(job, up)
    if len(places) < len(job.seats) or missing_at(job, places):
        return await_files(cluster, job, able, missing_at(job, places))
    seats = Table((rank, replace(seat, home=places[rank][0], place=places[rank])) for rank, seat in job.seats.items())
    text = f"{COMES_BACK} {resumes.point}"
    job = begin_generation(replace(job, seats=seats, waiting_ms=None)).with_rollback(point=resumes.point)
    job = job.suffer(Fault(text, PARKS, job.moment(now)), now)
    incident = job.open_incident
    assert incident is not None, "it was opened just now"
    job = job.with_incident(replace(incident, kind="planned", eligible=False))
    return cluster.with_job(job.enter(JobPhase.AGREEING, now, text))


def near_files(job: Job, up: list[Worker]) -> dict[Rank, tuple[NodeId, int]]:
    """A place for each rank, as far as there are some: on a node that finds its file, if that has one left."""
    left: dict[NodeId, deque[tuple[NodeId, int]]] = {}
    for worker in up:
        left.setdefault(worker.node, deque()).append((worker.node, worker.slot))
    found: dict[Rank, tuple[NodeId, int]] = {}
    for anywhere in (False, True):
        for rank in job.seats:
            node = next((one for one in left if anywhere or finds(job, one, rank)), None)
            if rank not in found and node is not None:
                found[rank] = left[node].popleft()
                left = left if left[node] else {one: places for one, places in left.items() if one != node}
    return found


def missing_at(job: Job, places: dict[Rank, tuple[NodeId, int]]) -> list[Rank]:
    """The ranks whose files nobody finds who has one of these places."""
    nodes = {node for node, _ in places.values()}
    return not_found(job, nodes)


def await_files(cluster: Cluster, job: Job, able: list[Worker], missing: list[Rank]) -> Cluster:
    """Not all that is needed is there yet, or it will never be."""
    now = cluster.now_ms
    coming = [worker for worker in able if worker.life is Life.STARTING]
    if any(now - worker.since_ms < job.spec.ready_ms for worker in coming):
        why = f"waiting for {coming[0].worker} to come up, to go on from the parking"
        return cluster.with_job(replace(job, why=why, waiting_ms=None))
    if not missing:
        return end_job(cluster, job, NO_SPARE, f"cannot go on from its parking: {coming[0].worker} does not come up")
    assert job.spec.resumes is not None, "it comes back from there"
    names = ", ".join(map(str, missing[:MOST_NAMED])) + (" and more" if len(missing) > MOST_NAMED else "")
    nodes = ", ".join(dict.fromkeys(worker.node for worker in able))
    why = f"of rank {names} there is no file in {job.spec.resumes.folder} on any node with a rank ({nodes})"
    return end_job(cluster, job, NO_STATE, f"cannot go on from its parking: {why}", eligible=False)


def wait_for_places(cluster: Cluster, job: Job, there: int) -> Cluster:
    why = f"{len(job.seats)} ranks need as many workers; there are {there}: waiting for places"
    return wait_for_room(cluster, job, why)


def wait_for_room(cluster: Cluster, job: Job, why: str) -> Cluster:
    """Too few places at a start: say so, and end if it stays so. Fenced processes hold theirs for a moment."""
    waiting = job.waiting_ms if job.waiting_ms is not None else cluster.now_ms
    if cluster.now_ms - waiting >= job.spec.spare_wait_ms:
        return end_job(cluster, job, NO_SPARE, why)
    return cluster.with_job(replace(job, why=why, waiting_ms=waiting))


def wire_first(cluster: Cluster, job: Job) -> Cluster:
    """The first wiring, when every rank has asked for it."""
    if job.phase is not JobPhase.STARTING or not is_complete(job):
        return cluster
    return cluster.with_job(enter_next(job, cluster.now_ms, "all ranks ask to be wired"))


# ---------------------------------------------------------------- vacant ranks

# They are given to spares, once their former holders are known to have ended.


def acquire_ranks(cluster: Cluster, job: Job) -> Cluster | None:
    """Give each vacant rank to a spare, once its former holder is known to have ended. None if nothing changed."""
    if all_vacant(job):
        return reseat(cluster, job)
    for rank, _ in list(job.seats.where(facts.is_vacant)):
        stuck = undying(cluster, job, rank)
        if stuck:
            return wait_for_spare(cluster, job, stuck)
        if cluster.still_held(job.spec.job, rank) or held_back(cluster, job, rank):
            continue
        target = target_of(cluster, job, rank)
        if target is not None:
            return inherit(cluster, job, rank, target)
        spares = with_its_file(job, rank, usable_spares(cluster, job))
        spare, reason = spare_for(cluster, job, rank, spares, near=last_node(job, rank))
        if spare is not None:
            return take(cluster, job.tell(cluster.now_ms, reason), rank, spare.worker)
        room = give_way(cluster, job, rank) or dismiss_outgoing_workers(cluster, job)
        return room or wait_for_spare(cluster, job, reason)
    return None


def with_its_file(job: Job, rank: Rank, spares: list[Worker]) -> list[Worker]:
    """In a job that comes back from its parking: those on nodes that find the file of this rank, if there are any."""
    if not job.resuming:
        return spares
    return [spare for spare in spares if finds(job, spare.node, rank)] or spares


def reseat(cluster: Cluster, job: Job) -> Cluster | None:
    """All go back to a snapshot: every rank is taken again, where it was. None if that has to wait."""
    for worker in still_ending(cluster, job):
        if cluster.now_ms - worker.since_ms >= DYING_MS:
            return wait_for_spare(cluster, job, f"{worker.worker} cannot be ended: waiting")
        return None
    places = places_for(job, usable_spares(cluster, job))
    missing = len(job.seats) - len(places)
    if missing:
        return wait_for_spare(cluster, job, f"{missing} of {len(job.seats)} ranks have no place to begin anew")
    for rank, name in sorted(places.items()):
        cluster = take(cluster, cluster.jobs[job.spec.job], rank, name)
    return cluster


def target_of(cluster: Cluster, job: Job, rank: Rank) -> Worker | None:
    """The target that a move has appointed for this rank, if it can be used."""
    move = job.open_move
    worker = None if move is None else cluster.workers.get(move.targets.get(rank, WorkerId("")))
    if worker is None or worker.life is Life.FENCING or is_closed(cluster, worker.node, worker.slot):
        return None
    # When the point is decided nobody is asked any more; one that was told of another can not come there.
    strayed = job.phase is JobPhase.PREPARING and worker.brought not in (None, job.resume_point)
    return None if strayed else worker


def inherit(cluster: Cluster, job: Job, rank: Rank, target: Worker) -> Cluster:
    """The rank's holder was lost while its target was being prepared: that is the best of all spares.

    One that is prepared may have been told where to go: it is asked how far it was brought, like a survivor.
    """
    move = job.open_move
    assert move is not None, "a move has appointed it"
    text = f"rank {rank} moves to {target.worker} on {target.node}, the target of {move.name}"
    job = with_move(job, replace(move, targets=move.targets.drop(rank))).tell(cluster.now_ms, text)
    cluster = cluster.with_worker(replace(target, incoming_for=None))
    cluster = take(cluster, job, rank, target.worker)
    if not target.prepared and not target.shard:
        return cluster
    job = cluster.jobs[job.spec.job]
    seat = replace(job.seats[rank], joined=True, shard=target.shard or job.seats[rank].shard)
    if target.prepared and job.phase is JobPhase.AGREEING:
        seat = replace(seat, assigned_in=Generation(job.generation - 1))
    return cluster.with_job(job.with_seat(rank, seat))


def give_way(cluster: Cluster, job: Job, rank: Rank) -> Cluster | None:
    """A rank is lost and there is no spare: targets of a move, whose ranks are well, make room. None if there are none.

    A target has taken on the identity of its rank, and can have no other: a new worker is started in its place.
    """
    move = job.open_move
    targets = [] if move is None else [t for t in move.targets.values() if t in cluster.workers]
    if move is None or not targets:
        return None
    for target in targets:
        cluster = cluster.fence(target)
    text = f"gives way: rank {rank} is lost, and there is no other room"
    move = replace(move, targets=Table()).enter(MoveState.WAITING, cluster.now_ms, text)
    return cluster.with_job(with_move(job, move).tell(cluster.now_ms, f"{move.name} {text}"))


def undying(cluster: Cluster, job: Job, rank: Rank) -> str:
    """Why a vacant rank cannot be given away for long: a former holder does not end, whatever is done. Else empty."""
    outgoing = cluster.workers.get(job.seats[rank].outgoing or WorkerId(""))
    former = [worker for worker in cluster.fencing(job.spec.job) if worker.rank == rank]
    for worker in former if outgoing is None or outgoing in former else [outgoing, *former]:
        if cluster.now_ms - worker.since_ms >= DYING_MS:
            return f"rank {rank}'s last holder {worker.worker} cannot be ended: waiting"
    return ""


def held_back(cluster: Cluster, job: Job, rank: Rank) -> bool:
    """Whether a spare must wait: the last holder raised, and others may be about to raise the same."""
    times = [raised.at_ms for raised in job.exceptions.raised if raised.rank == rank and not raised.cramped]
    return bool(times) and cluster.now_ms - max(times) < job.spec.raise_grace_ms


def last_node(job: Job, rank: Rank) -> NodeId | None:
    """Where the rank was until it was lost."""
    incident = job.open_incident
    assert incident is not None, "a rank is vacant in an incident only"
    return next((fault.node for fault in reversed(incident.faults) if fault.rank == rank), None)


def take(cluster: Cluster, job: Job, rank: Rank, worker: WorkerId) -> Cluster:
    """A spare takes a rank."""
    now = cluster.now_ms
    seat = replace(job.seats[rank], worker=worker, replacement=True, assigned_in=job.generation, assigned_ms=now)
    job = replace(job.with_seat(rank, seat), waiting_ms=None)
    if not job.seats.any(facts.is_vacant):
        job = job.mark(Mark.ACQUIRED, now)
    return cluster.with_worker(replace(cluster.workers[worker], rank=rank)).with_job(job)


def wait_for_spare(cluster: Cluster, job: Job, reason: str) -> Cluster | None:
    now = cluster.now_ms
    if job.waiting_ms is None:
        return cluster.with_job(replace(job, waiting_ms=now, why=reason).tell(now, reason))
    if now - job.waiting_ms >= job.spec.spare_wait_ms:
        waited = f"{reason} for {(now - job.waiting_ms) / 1000:.0f} s, in vain"
        return fall_back(cluster, job, waited, NO_SPARE)
    return None


def dismiss_outgoing_workers(cluster: Cluster, job: Job) -> Cluster | None:
    """A rank is lost and there is no spare: outgoing workers whose ranks have their state make room."""
    done = [rank for rank, seat in job.seats.where(facts.has_outgoing) if seat.holds is not None]
    if not done:
        return None
    for rank in done:
        seat = job.seats[rank]
        assert seat.outgoing is not None, "just asked"
        cluster = cluster.fence(seat.outgoing)
        job = job.with_seat(rank, replace(seat, outgoing=None))
    return cluster.with_job(job)
