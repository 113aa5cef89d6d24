"""Standing orders from state to state: what is said anew follows from what has changed.

`speech.standing_orders` reads all orders off a state. Here they are kept by whom they are for, and after an event only
those are read again that what changed can have changed: in a job of thousands of ranks most events are about one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from msgspec import Struct

from torchrelay.protocol.messages.ids import JobId, NodeId, Rank
from torchrelay.protocol.messages.orders import Order
from torchrelay.protocol.model import facts
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.model.roster import Seat
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.rules.speech import (
    Wiring,
    rank_orders,
    side_orders,
    stray_orders,
    wiring_of,
    worker_orders,
)

NOBODY = Cluster()
Changed = tuple[Rank, Seat | None, Seat | None]  # a seat as it was, and as it is
Key = tuple[str, Hashable, Hashable]  # for whom: what kind it is, and its names
STRAYS: Key = ("strays", None, None)


class _Frame(Struct, frozen=True):
    """What the orders of every rank of a job depend on, beside its own seat and worker."""

    parts: tuple[object, ...]
    wiring: Wiring | None


class StandingOrders:
    """Of one orchestrator."""

    def __init__(self) -> None:
        self._cluster = NOBODY
        self._frames: dict[JobId, _Frame] = {}
        self._said: dict[Key, tuple[Order, ...]] = {}

    def __iter__(self) -> Iterator[Order]:
        for some in self._said.values():
            yield from some

    def of_node(self, node: NodeId) -> Iterator[Order]:
        """All that stands for one node."""
        there = self._cluster.on_node(node)
        keys: dict[Key, None] = {STRAYS: None}
        keys |= {("worker", worker.worker, None): None for worker in there}
        keys |= {("rank", worker.job, worker.rank): None for worker in there}
        keys |= {("side", job, None): None for job in self._cluster.jobs}
        for key in keys:
            yield from (order for order in self._said.get(key, ()) if order.node == node)

    def clear(self) -> None:
        """Nothing is to be done any more."""
        self.__init__()  # type: ignore[misc]

    def follow(self, cluster: Cluster) -> list[Order]:
        """Read off what stands now, and return what did not stand before."""
        before, self._cluster = self._cluster, cluster
        fresh: list[Order] = []
        if cluster.strays is not before.strays:
            fresh += self._set(STRAYS, stray_orders(cluster))
        moved: dict[JobId, set[Rank]] = {}
        rewired: set[JobId] = set()
        for worker, was, now in cluster.workers.differences(before.workers):
            fresh += self._set(("worker", worker, None), () if now is None else worker_orders(now))
            for one in (was, now):
                if one is not None and one.rank is not None:
                    moved.setdefault(one.job, set()).add(one.rank)
                    if was is None or now is None or (was.node, was.store) != (now.node, now.store):
                        rewired.add(one.job)
        for name, job in cluster.jobs.items():
            fresh += self._follow_job(cluster, job, before.jobs.get(name), moved.get(name, set()), name in rewired)
        return fresh

    def _follow_job(
        self, cluster: Cluster, job: Job, before: Job | None, ranks: set[Rank], rewired: bool
    ) -> list[Order]:
        name = job.spec.job
        fresh = list(self._set(("side", name, None), side_orders(cluster, job)))
        if before is job and not ranks and not rewired:
            return fresh  # what changed is of another job, or a spare
        known = self._frames.get(name)
        parts = frame_of(job)
        changed: list[Changed] = []
        connects = job.phase is JobPhase.RECONFIGURING
        anew = before is None or known is None or known.parts != parts
        if before is not None and not anew:
            changed = list(job.seats.differences(before.seats))
            anew = connects and (rewired or reseated(changed))
        if anew or known is None:
            known = self._frames[name] = _Frame(parts, wiring_of(cluster, job))
        else:
            ranks |= {rank for rank, _, _ in changed} | {rank for rank, _ in in_need(job)}
            ranks |= {rank for rank, _, _ in job.once.differences(before.once)} if before is not None else set()
        seats = job.seats
        for rank, seat in seats.items() if anew else [(rank, seats[rank]) for rank in ranks & seats.keys()]:
            fresh += self._set(("rank", name, rank), rank_orders(cluster, job, rank, seat, known.wiring))
        return fresh

    def _set(self, key: Key, some: Iterable[Order]) -> Iterable[Order]:
        """Put these in the place of what stood for it; what is new."""
        orders, before = tuple(some), self._said.get(key, ())
        if orders == before:
            return ()
        if orders:
            self._said[key] = orders
        else:
            del self._said[key]
        return [order for order in orders if order not in before] if before else orders


def frame_of(job: Job) -> tuple[object, ...]:
    """What is the same for all ranks, and may change what each is to do."""
    move = job.open_move
    return (
        job.spec,
        job.phase,
        job.generation,
        job.resume_point,
        job.boundary,
        job.asks,
        job.signals.fresh,
        job.stop is not None,
        job.attempts.restarts,
        job.rollback.point,
        job.rollback.kept if job.rollback.point is not None else None,
        None if move is None else move.targets,
    )


def reseated(changed: Iterable[Changed]) -> bool:
    """Whether ranks have changed hands: then all are connected in another way."""
    pairs = ((was, now) for _, was, now in changed)
    return any(
        was is None or now is None or (was.worker, was.replacement) != (now.worker, now.replacement)
        for was, now in pairs
    )


def in_need(job: Job) -> Iterator[tuple[Rank, Seat]]:
    """Ranks whose orders name others as sources: these may have changed."""
    if job.resume_point is None or job.phase not in (JobPhase.PREPARING, JobPhase.RECONFIGURING):
        return iter(())
    return job.seats.where(facts.holds_nothing)
