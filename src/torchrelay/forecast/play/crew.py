"""Crew: what agents and workers answer to the core's orders, and how long each takes to.

They are healthy: whatever goes wrong is a fault, and comes from the engine. Times are those of `Phases`, drawn anew for
each generation, and put where the ledger measures them: between the marks that a phase's name stands for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from torchrelay.forecast.inputs.settings import Settings
from torchrelay.forecast.play.cutout import CutOut
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import Generation, NodeId, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.model.job import BEFORE_CUTOVER
from torchrelay.protocol.placement.buddies import COPIES

Later = tuple[float, ev.Event]  # seconds from now, and what is said then
EXIT_S = 0.1  # until the end of a killed process is seen
RECALL_S = 0.05  # until a buddy has handed out a record: the beginning of `acquire`, if that takes as long


class Crew:
    """All workers and agents of a job that the core is shown."""

    def __init__(self, settings: Settings, cut: CutOut, chance: np.random.Generator) -> None:
        self.settings = settings
        self.cut = cut
        self.chance = chance
        self.step = 1  # the last step that was committed by all
        self.new: dict[
            WorkerId, tuple[Point | None, Point | None]
        ] = {}  # replacements: what each holds, and where it was brought
        self.since: dict[NodeId, int] = {}  # the step from which a node has had its rank
        self._drawn: tuple[Generation, dict[str, float]] = (Generation(-1), {})
        self._coming: dict[str, float] = {}
        self._recalled: tuple[Generation, dict[Rank, float]] = (Generation(-1), {})

    def phase(self, name: str) -> float:
        """How long this phase takes in this generation, in seconds."""
        generation = self.cut.job.generation
        if self._drawn[0] != generation:
            drawn = self._coming or self.settings.phases.draw(self.chance, move=self.moves())
            self._drawn = (generation, drawn)
            self._coming = {}
        return self._drawn[1].get(name, 0.0)

    def moves(self) -> bool:
        """Whether what is under way is a move, and no recovery from a failure."""
        incident = self.cut.job.open_incident
        return incident is not None and incident.kind != "unplanned"

    def foresee(self) -> dict[str, float]:
        """The phases of the generation to come: the time until a fault is heard of is one of them."""
        self._coming = self._coming or self.settings.phases.draw(self.chance)
        return self._coming

    # ------------------------------------------------------------ agents

    def answer(self, order: od.Order) -> Iterator[Later]:
        """What an order leads to."""
        match order:
            case od.StartWorker(worker=worker, node=node, slot=slot):
                warm = 3600 * self.settings.costs.warm_h
                yield (
                    0.5 * warm,
                    ev.WorkerStarted(
                        worker=worker, node=node, slot=slot, pid=1, address=f"at:{worker}", store=f"on:{worker}"
                    ),
                )
                yield warm, ev.WorkerWarm(worker=worker)
            case od.Fence(worker=worker, node=node):
                yield EXIT_S, self.ended(worker, node, signal=9, cause="fenced")
            case od.Leave(worker=worker, node=node):
                yield EXIT_S, ev.WorkerExited(worker=worker, node=node, code=0)
            case od.WorkerOrder():
                yield from self.worker_answer(order)

    def ended(self, worker: WorkerId, node: NodeId, **how: Any) -> ev.WorkerExited:
        """The end of a process, with what its page and its node's memory held."""
        held = self.holds(worker)
        known = self.cut.cluster.workers.get(worker)
        records = (ev.PrivateRecord(held, b"private"),) if held is not None and known and known.rank is not None else ()
        return ev.WorkerExited(worker=worker, node=node, private=records, kept=self.kept(worker), **how)

    def holds(self, worker: WorkerId) -> Point | None:
        return self.new[worker][0] if worker in self.new else Point(self.step)

    def kept(self, worker: WorkerId) -> tuple[ev.Snapshot, ...] | None:
        """The snapshots in the memory of a worker's node: its own, and that of whom it is the buddy."""
        every = self.settings.snapshot_steps
        known = self.cut.cluster.workers.get(worker)
        if not every or known is None or known.rank is None:
            return None
        last = self.step // every * every
        if last <= 0 or self.since.get(known.node, 0) >= last:
            return ()
        mine = self.cut.whole(known.rank)
        wards = [Rank(dense) for dense, whole in enumerate(self.cut.shown) if self.buddy(whole, 1) == mine]
        return tuple(ev.Snapshot(rank, Point(last), self.cut.job.attempts.restarts) for rank in (known.rank, *wards))

    def buddy(self, whole: int, step: int) -> int:
        return (whole + step) % self.cut.layout.nodes

    # ------------------------------------------------------------ workers

    def worker_answer(self, order: Any) -> Iterator[Later]:
        """What a worker says, in the order in which a recovery asks."""
        who: dict[str, Any] = {"job": order.job, "generation": order.generation, "worker": order.worker,
                               "rank": getattr(order, "rank", Rank(0))}  # fmt: skip
        match order:
            case od.Assign():
                yield from self.assigned(order, who)
            case od.Interrupt():
                yield self.reporting(order.rank), self.report(who)
            case od.Halt():
                yield 0.1, self.report(who)
            case od.Decide(point=point, hand_over=hand_over):
                took = self.settings.step_s if self.cut.job.phase in BEFORE_CUTOVER else 0.0
                private = b"private" if hand_over else b""
                yield took, ev.WorkerReady(**who, point=point, private=private)
            case od.Recall(ward=ward, point=point):
                private = b"private" if self.has_record(order.rank, ward) else b""
                yield self.recalling(ward), ev.RecordKept(**who, ward=ward, point=point, private=private)
            case od.Replay(point=point):
                self.new[order.worker] = (None, point)
                yield self.acquiring(order.rank), ev.WorkerReady(**who, point=point)
            case od.Reconfigure():
                yield self.reconfiguring(), ev.WorkerReconfigured(**who)
            case od.Restore(point=point, sources=sources):
                took = self.reconfiguring() + self.phase("restore")
                yield took, ev.StateRestored(**who, point=point, sources=(sources[0].rank,), digest="same", size=1)
            case od.Resume(point=point):
                yield self.phase("resume"), ev.WorkerResumed(**who)
                if point is None:
                    yield self.phase("resume"), self.joined(who)

    def assigned(self, order: od.Assign, who: dict[str, Any]) -> Iterator[Later]:
        if order.examples:  # the target of a move: it rehearses
            self.new[order.worker] = (None, None)
            warm = 3600 * self.settings.costs.warm_h
            yield warm, self.joined(who)
            yield warm, ev.WorkerPrepared(worker=order.worker)
        elif order.replacement:
            self.new[order.worker] = (None, None)
            yield 0.0, self.joined(who)
        else:  # all start again: the program comes up
            costs = self.settings.costs
            yield 3600 * costs.startup_h, ev.Tick()  # from here on it reads its checkpoint
            yield 3600 * (costs.startup_h + costs.restore_h), ev.WorkerReady(**who, point=None)

    def joined(self, who: dict[str, Any]) -> ev.WorkerJoined:
        shard = self.cut.shard(self.cut.whole(who["rank"]))
        return ev.WorkerJoined(
            worker=who["worker"],
            job=who["job"],
            rank=who["rank"],
            shard=shard,
            snapshot_every=self.settings.snapshot_steps,
        )

    def reporting(self, rank: Rank) -> float:
        """The first survivor ends `interrupt`; the last one ends `agree`."""
        first = min((dense for dense, seat in self.cut.job.seats.items() if seat.worker is not None), default=rank)
        return self.phase("interrupt") + (0.0 if rank == first else self.phase("agree"))

    def recalling(self, ward: Rank) -> float:
        """`acquire` is measured from the verdict on, and so holds the search for the record of a lost rank."""
        spent = (self.cut.cluster.now_ms - self.cut.job.phase_ms) / 1000
        took = max(0.0, min(RECALL_S, self.phase("acquire") - spent))
        self.recalled()[ward] = spent + took
        return took

    def acquiring(self, rank: Rank) -> float:
        """What is left of the phase when the record is there."""
        return max(0.0, self.phase("acquire") - self.recalled().get(rank, 0.0))

    def recalled(self) -> dict[Rank, float]:
        """For how long after the verdict the record of a rank was looked for, in this generation, in seconds."""
        if self._recalled[0] != self.cut.job.generation:
            self._recalled = (self.cut.job.generation, {})
        return self._recalled[1]

    def reconfiguring(self) -> float:
        """A move has its cutover besides."""
        if self.moves():
            return self.phase("stand") + self.phase("cutover") + self.phase("reconfigure")
        return self.phase("reconfigure")

    def report(self, who: dict[str, Any]) -> ev.WorkerReported:
        worker = who["worker"]
        held, brought = self.new.get(worker, (Point(self.step), None))
        running = held is not None and held == Point(self.step)
        return ev.WorkerReported(
            **who,
            committed=held,
            phase=WorkerPhase.COMPUTING if running else WorkerPhase.STOPPED,
            pending=held.after_step() if running and held is not None else None,
            caught_up=brought if held is None else None,
            kept=self.kept(worker),
        )

    def has_record(self, asked: Rank, ward: Rank) -> bool:
        """Whether this rank keeps a copy of the other's private record: as a buddy of the whole job's ring."""
        whole, mine = self.cut.whole(ward), self.cut.whole(asked)
        if self.cut.job.rollback.point is not None:
            return mine in (whole, self.buddy(whole, 1))
        return any(self.buddy(whole, step) == mine for step in range(1, COPIES + 1))

    def heard(self, event: ev.Event) -> None:
        """What an answer changes in the one who gives it, once it is given."""
        if isinstance(event, ev.StateRestored) and event.worker in self.new:
            self.new[event.worker] = (event.point, None)

    def resumed(self) -> None:
        """All train: replacements are like others from now on."""
        for worker in self.new:
            known = self.cut.cluster.workers.get(worker)
            if known is not None and known.rank is not None:
                self.since[known.node] = self.step
        targets = {worker.worker for worker in self.cut.cluster.workers.values() if worker.incoming_for is not None}
        self.new = {name: what for name, what in self.new.items() if name in targets}
