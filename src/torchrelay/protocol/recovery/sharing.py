"""Sharing: no spare is left, and lost ranks go on in slots that others use, until there is room again.

The job shrinks in places, not in ranks: all ranks are there, each with its own samples, and every step sums what it
would have summed. So each layout keeps its bits, also those without a replica. See docs/decisions/0010.

A *guest* is a worker that was started in a slot in use. Whose slot is shared is read off the state: when the other
leaves or is lost, the guest has the slot to itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from torchrelay.protocol.messages.ids import NodeId, Rank
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.model.parts import Raised
from torchrelay.protocol.model.roster import Life, Worker, natural_key
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.placement.policy import DYING_MS, is_cordoned
from torchrelay.protocol.placement.taints import is_closed, taken_last

Place = tuple[NodeId, int]
# How often memory may not be enough for those who share a slot, before no slots are shared any more.
CRAMPED_BUDGET = 3
# As torch, CUDA's libraries, and the kernel's killer by way of the agent put it.
NO_MEMORY = ("outofmemoryerror:", "out of memory", "can't allocate memory", "alloc_failed")


def may_share(job: Job) -> bool:
    """Whether the job was submitted with leave to put several ranks into one slot, and has been started before."""
    first = job.phase is JobPhase.STARTING and job.attempts.starts == 0 and job.attempts.restarts == 0
    return job.spec.ranks_per_slot > 1 and not first and not too_cramped(job)


def too_cramped(job: Job) -> bool:
    """Whether the memory of a slot has turned out not to be enough for two."""
    return sum(raised.cramped for raised in job.exceptions.raised) >= CRAMPED_BUDGET


def out_of_memory(told: str) -> bool:
    """Whether an exception's signature, or the cause of an end, says that no memory was left, on device or host."""
    return told.startswith("MemoryError:") or any(words in told.lower() for words in NO_MEMORY)


def note_cramped(cluster: Cluster, worker: Worker, told: str) -> Cluster:
    """Memory was not enough for those who share a slot: when that has happened too often, none are shared any more."""
    job = cluster.jobs[worker.job]
    rank = worker.rank if worker.rank is not None else worker.incoming_for
    known = rank is None or any(entry.worker == worker.worker for entry in job.exceptions.raised)
    if known or rank is None or not out_of_memory(told) or not is_shared(cluster, worker):
        return cluster
    entry = Raised(worker.worker, rank, None, told, told, cluster.now_ms, True, cramped=True)
    return cluster.with_job(job.with_exceptions(raised=(*job.exceptions.raised[-63:], entry)))


def is_shared(cluster: Cluster, worker: Worker) -> bool:
    """Whether others run in the slot of this worker, or did when it came there."""
    if worker.guest:
        return True
    here = (worker.node, worker.slot)
    return len(living_in(cluster, *here)) > 1


def shares_with(cluster: Cluster, worker: Worker) -> Worker | None:
    """In whose slot this worker is a guest; None if it has a slot of its own, or others are guests in its slot."""
    if not worker.guest:  # the most frequent case by far
        return None
    here = (worker.node, worker.slot)
    host = min(
        living_in(cluster, *here),
        key=lambda one: (one.guest, natural_key(one.worker)),
        default=worker,
    )
    return None if host.worker == worker.worker else host


def living_in(cluster: Cluster, node: NodeId, slot: int) -> list[Worker]:
    """The workers in a slot, but for those whose end is awaited."""
    return [one for one in cluster.on_node(node) if one.slot == slot and one.life is not Life.FENCING]


def company(cluster: Cluster, job: Job, rank: Rank) -> int:
    """How many workers run in the slot of this rank: the fullest slot sets the pace."""
    holder = job.seats[rank].worker
    if holder is None:
        return 0
    worker = cluster.workers[holder]
    return sum(other.slot == worker.slot for other in cluster.on_node(worker.node))


def with_own_slot(cluster: Cluster, workers: Iterable[Worker]) -> list[Worker]:
    """Those that have a slot of their own."""
    return [worker for worker in workers if shares_with(cluster, worker) is None]


def soon_free(cluster: Cluster, job: Job) -> int:
    """Slots that come free in a moment, and can be used at once: all that runs there is being ended."""
    lives: dict[Place, list[Worker]] = {}
    for worker in cluster.workers.values():
        lives.setdefault((worker.node, worker.slot), []).append(worker)
    return sum(
        all(one.life is Life.FENCING and cluster.now_ms - one.since_ms < DYING_MS for one in there)
        and is_usable(cluster, job, place)
        and cluster.nodes[place[0]].proven
        for place, there in lives.items()
    )


def is_usable(cluster: Cluster, job: Job, place: Place) -> bool:
    """Whether something may be started in this slot."""
    node = cluster.nodes.get(place[0])
    strikes = cluster.strikes.get(place, ())
    return (
        node is not None
        and node.alive
        and not is_cordoned(job.spec, strikes, cluster.now_ms)
        and not is_closed(cluster, *place)
    )


def slots_to_share(
    cluster: Cluster, job: Job, count: int, apart: Callable[[NodeId], bool] = lambda _: True
) -> list[Place]:
    """Up to so many places for guests, the best first: where workers have come up before, with the
    fewest workers, spread over the nodes.

    `apart`: whether what would be on this node has a replica on another one.
    """
    if not may_share(job):
        return []
    load = Counter((one.node, one.slot) for one in cluster.workers.values() if one.life is not Life.FENCING)
    guests = Counter(one.node for one in cluster.workers.values() if one.guest and one.life is not Life.FENCING)
    open_to = [place for place in load if is_usable(cluster, job, place)]
    chosen: list[Place] = []
    while len(chosen) < count:
        able = [place for place in open_to if load[place] < job.spec.ranks_per_slot]
        if not able:
            break
        best = min(
            able,
            key=lambda place: (
                not cluster.nodes[place[0]].proven,
                load[place],
                taken_last(cluster, *place),
                not apart(place[0]),
                guests[place[0]],
                natural_key(place[0]),
                place[1],
            ),
        )
        chosen.append(best)
        load[best] += 1
        guests[best[0]] += 1
    return chosen


__all__ = [
    "company",
    "is_shared",
    "is_usable",
    "may_share",
    "note_cramped",
    "out_of_memory",
    "shares_with",
    "slots_to_share",
    "soon_free",
    "with_own_slot",
]
