"""Rollback: a shard has no living holder, and all ranks begin anew from their newest snapshots of one point.

A snapshot is a copy of a rank's state and private record in the memory of its own node, and one on another node (see
ARCHITECTURE.md). It outlives the worker. Who trains on cannot go back: an update cannot be undone, nor a loop of a
script. So all holders end, workers in the same slots take over as replacements do, and bring the script to that point.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from operator import itemgetter

from msgspec.structs import replace

from torchrelay.protocol.messages.events import Snapshot, WorkerStarted
from torchrelay.protocol.messages.ids import START, JobId, NodeId, Point, Rank, WorkerId
from torchrelay.protocol.model import facts
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.model.parts import Attempts
from torchrelay.protocol.model.roster import Life, Seat, Worker
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.model.table import Table
from torchrelay.protocol.placement.boundary import begin_generation
from torchrelay.protocol.placement.policy import ROLL_BUDGET, is_cordoned
from torchrelay.protocol.placement.taints import is_closed
from torchrelay.protocol.recovery.ending import drop_move

# ---------------------------------------------------------------- what is kept


def note_kept(cluster: Cluster, name: JobId, node: NodeId, kept: tuple[Snapshot, ...] | None) -> Cluster:
    """Somebody on this node has said which snapshots lie there: that is all there are now."""
    job = cluster.jobs[name]
    known = cluster.nodes.get(node)
    if kept is None or known is None or not known.alive:
        return cluster
    kept = tuple(one for one in kept if one.restarts == job.attempts.restarts)
    if job.rollback.kept.get(node, ()) == kept:
        return cluster
    return cluster.with_job(job.with_rollback(kept=job.rollback.kept.put(node, kept)))


def not_there(job: Job, node: NodeId, rank: Rank, point: Point) -> Job:
    """This node does not have it, whatever was said before."""
    if comes_back_to(job, point) and finds(job, node, rank):
        job = without_found(job, node, rank)
    left = tuple(one for one in job.rollback.kept.get(node, ()) if (one.rank, one.point) != (rank, point))
    return job if left == job.rollback.kept.get(node, ()) else job.with_rollback(kept=job.rollback.kept.put(node, left))


def forget_kept(cluster: Cluster, node: NodeId) -> Cluster:
    """The node is lost with its memory."""
    for job in cluster.jobs.values():
        if node in job.rollback.kept:
            cluster = cluster.with_job(job.with_rollback(kept=job.rollback.kept.drop(node)))
            job = cluster.jobs[job.spec.job]
        if job.parking.found is not None:
            cluster = cluster.with_job(job.with_parking(found=job.parking.found.drop(node)))
    return cluster


def newest_common(cluster: Cluster, job: Job) -> Point | None:
    """The newest point of which there is a snapshot of every rank, where a worker can be; None if there is none.

    If possible where one can be at once, and not only when a taint is gone.
    """
    if job.resuming:  # there is nothing else yet
        assert job.spec.resumes is not None, "it comes back from there"
        return None if not_found(job) else job.spec.resumes.point
    for closed_too in (False, True):
        nodes = [node for node in job.rollback.kept if has_room(cluster, job, node, closed_too=closed_too)]
        # Not from beyond where the job is: that is of steps which were made again since.
        here = job.resume_point
        told = [one for node in nodes for one in job.rollback.kept[node] if here is None or one.point <= here]
        points: dict[Rank, set[Point]] = {rank: set() for rank in job.seats}
        for one in told:
            points.get(one.rank, set()).add(one.point)
        common = set.intersection(*points.values())
        if common:
            return max(common)
    return None


def within_reach(cluster: Cluster, job: Job) -> Job:
    """What lies on nodes without any worker, though all ranks are taken, is not to be had."""
    holders = [cluster.workers[seat.worker].node for seat in job.seats.values() if seat.worker is not None]
    if len(holders) < len(job.seats):
        return job
    kept = Table((node, kept) for node, kept in job.rollback.kept.items() if node in holders)
    return job.with_rollback(kept=kept)


def has_room(cluster: Cluster, job: Job, name: NodeId, *, closed_too: bool) -> bool:
    """Whether a slot of this node may be used: somebody must be there to hand out what lies in its memory."""
    node = cluster.nodes[name]
    strikes = [(slot, cluster.strikes.get((name, slot), ())) for slot in range(node.slots)]
    return node.alive and any(
        not is_cordoned(job.spec, of_slot, cluster.now_ms) and (closed_too or not is_closed(cluster, name, slot))
        for slot, of_slot in strikes
    )


def nodes_with(job: Job, rank: Rank, point: Point) -> set[NodeId]:
    """The nodes in whose memory this snapshot lies."""
    kept = {node for node, some in job.rollback.kept.items() if Snapshot(rank, point, job.attempts.restarts) in some}
    return kept | nodes_with_parked(job, rank, point)


def nodes_with_parked(job: Job, rank: Rank, point: Point) -> set[NodeId]:
    """The nodes that find the files of this rank, in a job that comes back from its parking."""
    found = job.parking.found or Table()
    return {node for node in found if finds(job, node, rank)} if comes_back_to(job, point) else set()


def is_somewhere(job: Job, rank: Rank, point: Point) -> bool:
    """Whether some node has this snapshot, or finds the files of this rank."""
    if comes_back_to(job, point):
        return not not_found(job, ranks=(rank,))
    return bool(nodes_with(job, rank, point))


def comes_back_to(job: Job, point: Point) -> bool:
    return job.resuming and job.spec.resumes is not None and job.spec.resumes.point == point


def finds_its_own(cluster: Cluster, job: Job, rank: Rank) -> Worker | None:
    """The holder of a rank that comes back, if its node finds the rank's files, and nothing was wrong with them yet.

    Where all share a folder every node finds the files of all: then each holder reads its own.
    """
    seat, point = job.seats[rank], job.rollback.point
    if seat.worker is None or point is None or not comes_back_to(job, point) or seat.failed or seat.distrusted:
        return None
    worker = cluster.workers[seat.worker]
    up = worker.life in (Life.STARTED, Life.WARM) and worker.worker not in seat.asked_buddies
    return worker if up and finds(job, worker.node, rank) else None


def finds(job: Job, node: NodeId, rank: Rank) -> bool:
    """Whether the files of this rank lie where this node can read them."""
    found = job.parking.found or Table()
    ranks = found.get(node, ())
    return ranks is None or rank in ranks


def finds_all(ranks: tuple[Rank, ...] | None) -> bool:
    return ranks is None


def not_found(job: Job, nodes: Iterable[NodeId] | None = None, ranks: Iterable[Rank] | None = None) -> list[Rank]:
    """The ranks, all or these, whose files none of these nodes has found; None: no node at all."""
    found = job.parking.found or Table()
    if found.any(finds_all) if nodes is None else any(finds_all(found.get(node, ())) for node in nodes):
        return []
    there = {rank for node in (found if nodes is None else nodes) for rank in found.get(node, ()) or ()}
    return [rank for rank in (job.seats if ranks is None else ranks) if rank not in there]


def without_found(job: Job, node: NodeId, rank: Rank) -> Job:
    """What was said to be found there cannot be read."""
    found = job.parking.found or Table()
    ranks = found.get(node, ())
    left = tuple(one for one in (job.seats if ranks is None else ranks) if one != rank)
    return job.with_parking(found=found.put(node, left))


def note_found(cluster: Cluster, name: JobId, event: WorkerStarted) -> Cluster:
    """A worker that has come up says what its node finds of the parking that the job comes back from."""
    job = cluster.jobs[name]
    found = job.parking.found
    if found is None or event.node in found:
        return cluster
    return cluster.with_job(job.with_parking(found=found.put(event.node, None if event.all_parked else event.parked)))


def parked_before(job: Job) -> Job:
    """A job that begins; if it comes back from a parking, it has trained."""
    resumes = job.spec.resumes
    if resumes is None:
        return job
    job = job.with_parking(found=Table()).with_rollback(every=resumes.every, buddies=resumes.buddies)
    attempts = Attempts(trained=True, restarts=resumes.restarts)
    return replace(job, attempts=attempts, once=Table(resumes.once), why="waiting for nodes, to go on from its parking")


# ---------------------------------------------------------------- going back


def roll_back(cluster: Cluster, job: Job, reason: str) -> Cluster | None:
    """All ranks begin anew from the newest snapshots that all have; None if that is not possible, or no use."""
    point = newest_common(cluster, job)
    if point is None or point <= START:
        return None
    reached = max(point, job.resume_point or START)
    times = rolls_to(job, reached)
    if times > ROLL_BUDGET:
        return None
    now = cluster.now_ms
    furthest = max(reached, job.rollback.furthest)
    here = max(reached, job.rollback.point or START)  # or on the way back to there, still
    seats = Table((rank, emptied(cluster, job, rank)) for rank in job.seats)
    for worker in cluster.of_job(job.spec.job):
        if worker.rank is not None:  # what it leaves in its page is of steps that are made again
            cluster = cluster.fence(worker.worker).disown(worker.worker)
        elif worker.incoming_for is not None:
            cluster = cluster.fence(worker.worker)
    text = f"all go back to the snapshots of {point}: {reason}"
    job = begin_generation(drop_move(job, now, text))
    job = replace(job, seats=seats, resume_point=None, boundary=None, waiting_ms=None)
    job = job.with_rollback(point=point, furthest=furthest, times=times)
    incident = job.open_incident
    assert incident is not None, "somebody was lost"
    job = job.with_incident(replace(incident, lost=incident.lost + here.step - point.step))
    return cluster.with_job(job.enter(JobPhase.AGREEING, now, text))


def rolls_to(job: Job, reached: Point) -> int:
    """How often in a row it has gone back, with this time, and never come further than before."""
    return job.rollback.times + 1 if reached <= job.rollback.furthest else 1


def why_not_back(cluster: Cluster, job: Job) -> str:
    """Why nobody goes back to snapshots that are there; empty if there are none, or nothing speaks against it."""
    point = newest_common(cluster, job)
    if point is None or point <= START or rolls_to(job, max(point, job.resume_point or START)) <= ROLL_BUDGET:
        return ""
    back = job.rollback
    return f"; {back.times} times in a row all went back to snapshots, and came no further than {back.furthest}"


def emptied(cluster: Cluster, job: Job, rank: Rank) -> Seat:
    """The seat of a rank that begins anew, where the last holder was that has trained: there its snapshots lie."""
    seat = job.seats[rank]
    worker = None if seat.worker is None else cluster.workers.get(seat.worker)
    lost = worker is None or (seat.replacement and seat.place is not None)
    place = seat.place if lost or worker is None else (worker.node, worker.slot)
    return Seat(shard=seat.shard, home=seat.home, place=place)


# ---------------------------------------------------------------- taking the ranks again


def still_ending(cluster: Cluster, job: Job) -> list[Worker]:
    """Former holders that may still run: nobody takes a rank before all of them have ended."""
    return cluster.fencing(job.spec.job)


def all_vacant(job: Job) -> bool:
    """Whether the ranks are still to be taken again."""
    return job.rollback.point is not None and job.seats.count(facts.is_vacant) == len(job.seats)


def in_order(job: Job, free: list[tuple[NodeId, int]]) -> tuple[list[tuple[NodeId, int]], int]:
    """Free slots, those first to which a rank is to come back, then others on such nodes; and how many of the first."""
    wanted = {seat.place for seat in job.seats.values() if seat.worker is None and seat.place is not None}
    nodes = {node for node, _ in wanted}
    ordered = sorted(free, key=lambda place: (place not in wanted, place[0] not in nodes))
    return ordered, sum(place in wanted for place in free)


def places_for(job: Job, spares: list[Worker]) -> dict[Rank, WorkerId]:
    """Which spare takes which rank: in the slot where the rank was, else on its node, else any."""
    found: dict[Rank, WorkerId] = {}
    taken: set[WorkerId] = set()
    closer: tuple[Callable[[NodeId, int], Hashable], ...] = (
        lambda node, slot: (node, slot),
        lambda node, _: node,
        lambda _, __: None,
    )
    for place_of in closer:
        left: dict[Hashable, deque[WorkerId]] = {}
        for spare in sorted(spares, key=lambda one: one.worker):
            if spare.worker not in taken:
                left.setdefault(place_of(spare.node, spare.slot), deque()).append(spare.worker)
        for rank, seat in job.seats.items():
            # A rank without a place takes what is left in the end.
            here = place_of(*seat.place) if seat.place is not None else None
            if rank not in found and left.get(here):
                found[rank] = left[here].popleft()
                taken.add(found[rank])
    return found


# ---------------------------------------------------------------- the snapshots, while all come back


def keepers_of(cluster: Cluster, job: Job, rank: Rank, *, tried: bool = False) -> list[tuple[Rank, Worker]]:
    """Holders of ranks on nodes where this rank's snapshot lies: on its own node first."""
    assert job.rollback.point is not None, "asked of a job that goes back"
    itself = finds_its_own(cluster, job, rank)
    if itself is not None:
        return [(rank, itself)]
    nodes = nodes_with(job, rank, job.rollback.point)
    seat = job.seats[rank]
    own = None if seat.worker is None else cluster.workers[seat.worker].node
    found: list[tuple[Rank, Worker]] = []
    for other, worker in holders_on(cluster, job, nodes):
        if worker.life not in (Life.STARTED, Life.WARM):
            continue
        if other in seat.distrusted or (other in seat.failed and not tried):
            continue
        if all(worker.node != known.node for _, known in found):  # one for each copy
            found.append((other, worker))
    return sorted(found, key=lambda keeper: (keeper[1].node != own, keeper[0]))


def may_come(cluster: Cluster, job: Job, rank: Rank) -> bool:
    """Whether somebody may still hand out this rank's record, or its state: a node has it, and is to have a worker."""
    assert job.rollback.point is not None, "asked of a job that goes back"
    if finds_its_own(cluster, job, rank) is not None:
        return True
    asked = job.seats[rank].asked_buddies
    for node in nodes_with(job, rank, job.rollback.point):
        there = holders_on(cluster, job, [node])
        if any(worker.worker not in asked for _, worker in there):
            return True
        if job.seats.any(facts.is_vacant) and not there:
            return True
    return False


def is_out_of_reach(cluster: Cluster, job: Job, rank: Rank) -> bool:
    """Whether nobody hands out what a node has of this rank, nor will: all ranks are taken, and none is there."""
    return not keepers_of(cluster, job, rank, tried=True) and not may_come(cluster, job, rank)


def holders_on(cluster: Cluster, job: Job, nodes: Iterable[NodeId]) -> list[tuple[Rank, Worker]]:
    """The ranks that are held on these nodes, in order, and by whom."""
    there = (worker for node in nodes for worker in cluster.on_node(node))
    held = ((worker.rank, worker) for worker in there if worker.job == job.spec.job and worker.rank is not None)
    return sorted(((rank, worker) for rank, worker in held if job.is_held_by(worker.worker, rank)), key=itemgetter(0))
