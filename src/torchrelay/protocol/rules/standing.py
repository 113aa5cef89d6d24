"""Standing orders from state to state: what is said anew follows from what has changed.

`speech.standing_orders` reads all orders off a state. Here they are kept by whom they are for, and after an event only
those are read again that what changed can have changed: in a job of thousands of ranks most events are about one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from msgspec import Struct

from torchrelay.protocol.messages.ids import JobId, NodeId, Rank
from torchrelay.protocol.messages.orders import Interrupts, Order
from torchrelay.protocol.model import facts
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.model.roster import Seat
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.rules.speech import (
    Holders,
    Wiring,
    begins_with_interrupts,
    followed,
    holders_of,
    interrupts,
    rank_orders,
    side_orders,
    stray_orders,
    wiring_of,
    worker_orders,
)

K = TypeVar("K")
V = TypeVar("V")
NOBODY = Cluster()
Changed = tuple[Rank, Seat | None, Seat | None]  # a seat as it was, and as it is
Key = tuple[str, str]  # for whom, if not for the holder of a rank: what kind it is, and its name
STRAYS: Key = ("strays", "")


class _Frame(Struct, frozen=True):
    """What the orders of every rank of a job depend on, beside its own seat and worker."""

    parts: tuple[object, ...]
    wiring: Wiring | None
    round: int  # the one in which it began, see `due`


class StandingOrders:
    """Of one orchestrator."""

    def __init__(self) -> None:
        self._cluster = NOBODY
        self._frames: dict[JobId, _Frame] = {}
        self._said: dict[Key, tuple[Order, ...]] = {}
        self._round = 0  # how often it was asked what is to be said again
        self._holders: dict[JobId, Holders] = {}
        self._told: dict[JobId, dict[Rank, tuple[Order, ...] | Interrupts]] = {}

    def __iter__(self) -> Iterator[Order]:
        for some in self._said.values():
            yield from some
        for told in self._told.values():
            for rank, orders in told.items():
                yield from said_to(rank, orders)

    def due(self, every: int = 1) -> list[Order]:
        """The orders to repeat now. Called at a fixed interval, of which `every` lie between two repetitions.

        What a phase asks of the holders of ranks is not repeated at once, as it is still under way. It is repeated one
        to two intervals after it was said, so that a lost order costs little time, and after that with the rest.
        """
        self._round += 1
        found: list[Order] = []
        if self._round % every == 0:
            found += [order for some in self._said.values() for order in some]
        for job, told in self._told.items():
            age = self._round - self._frames[job].round
            if age == 2 or (age > 1 and age % every == 0):
                found += [order for rank, orders in told.items() for order in said_to(rank, orders)]
        return found

    def of_node(self, node: NodeId) -> Iterator[Order]:
        """All that stands for one node."""
        there = self._cluster.on_node(node)
        keys: dict[Key, None] = {STRAYS: None}
        keys |= {("worker", worker.worker): None for worker in there}
        keys |= {("side", job): None for job in self._cluster.jobs}
        for key in keys:
            yield from (order for order in self._said.get(key, ()) if order.node == node)
        for job, rank in dict.fromkeys((worker.job, worker.rank) for worker in there if worker.rank is not None):
            orders = said_to(rank, self._told.get(job, {}).get(rank, ()))
            yield from (order for order in orders if order.node == node)

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
            fresh += self._set(("worker", worker), () if now is None else worker_orders(now))
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
        fresh = list(self._set(("side", name), side_orders(cluster, job)))
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
            known = self._frames[name] = _Frame(parts, wiring_of(cluster, job), self._round)
        else:
            ranks |= {rank for rank, _, _ in changed} | {rank for rank, _ in in_need(job)}
            ranks |= {rank for rank, _, _ in job.once.differences(before.once)} if before is not None else set()
        told = self._told.setdefault(name, {})
        left: Iterable[Rank] = job.seats if anew else ranks & job.seats.keys()
        if anew and before is not None and begins_with_interrupts(before, job):
            every = interrupts(self._holders_of(cluster, job), job)
            fresh += every
            told = self._told[name] = {rank: one for one in every for rank, _ in one.holders}
            left = [rank for rank, _ in job.seats.where(facts.is_replacement)]
        elif anew and job.phase is JobPhase.RUNNING:
            self._holders[name] = holders_of(cluster, job)
        for rank in left:
            orders = tuple(rank_orders(cluster, job, rank, job.seats[rank], known.wiring))
            fresh += new_in(orders, said_to(rank, told.get(rank, ())))
            put(told, rank, orders)
        return fresh

    def _holders_of(self, cluster: Cluster, job: Job) -> Holders:
        known = self._holders.get(job.spec.job)
        return holders_of(cluster, job) if known is None else followed(known, cluster, job)

    def _set(self, key: Key, some: Iterable[Order]) -> Iterable[Order]:
        """Put these in the place of what stood for it; what is new."""
        orders, before = tuple(some), self._said.get(key, ())
        put(self._said, key, orders)
        return new_in(orders, before)


def said_to(rank: Rank, told: tuple[Order, ...] | Interrupts) -> tuple[Order, ...]:
    """What was said to the holder of a rank, alone or with others."""
    return (told.of_rank(rank),) if isinstance(told, Interrupts) else told


def put(said: dict[K, V], key: K, some: V) -> None:
    """Keep what stands; of nothing there is no entry."""
    if some:
        said[key] = some
    else:
        said.pop(key, None)


def new_in(some: tuple[Order, ...], before: tuple[Order, ...]) -> Iterable[Order]:
    return [order for order in some if order not in before] if before else some


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
        job.parking.name,
        job.parking.found,
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
