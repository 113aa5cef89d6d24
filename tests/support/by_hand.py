"""A stage on which the test itself is the orchestrator: it gives each order by hand, and hears what is answered.

Orders are repeated until the next generation, as the core repeats them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from tests.support.stage import JOB, NODE, Actor, Stage
from torchrelay.protocol.messages.events import (
    Answer,
    Event,
    JobSpec,
    StateRestored,
    Tick,
    WorkerExited,
    WorkerFinished,
    WorkerJoined,
    WorkerReady,
    WorkerReconfigured,
    WorkerReported,
    WorkerResumed,
    WorkerStarted,
)
from torchrelay.protocol.messages.ids import Generation, Point, Rank, WorkerId
from torchrelay.protocol.messages.orders import (
    Assign,
    Decide,
    Halt,
    Interrupt,
    Leave,
    Reconfigure,
    Replay,
    Restore,
    Resume,
    Source,
    StartWorker,
    Verdict,
    WorkerOrder,
)
from torchrelay.wire.messages.codec import encode
from torchrelay.wire.messages.worker_frames import Attended

A = TypeVar("A", bound=Answer)


@dataclass
class Due:
    """An order that is repeated from time to time."""

    actor: Actor
    order: WorkerOrder
    said_s: float = 0.0


class ByHand(Stage):
    """Workers by rank, as the test places them."""

    def __init__(self, folder: Path, argv: list[str], *, world: int = 4, **options: Any) -> None:
        self.world = world
        self.generation = Generation(0)
        self.holders: dict[int, Actor] = {}
        self.due: list[Due] = []
        spec = JobSpec(job=JOB, world_size=world, nproc_per_node=world)
        self.pretended: Any = SimpleNamespace(spec=spec, phase="by hand", why="", outcome=None)
        super().__init__(folder, argv, world=world, spares=0, **options)
        self.repeat_s = 0.1

    @property
    def job(self) -> Any:
        return self.pretended

    def actor(self, rank: int) -> Actor:
        return self.holders[rank]

    def take(self, event: Event) -> None:
        if not isinstance(event, Tick):
            self.events.append(event)

    def _say_orders(self) -> None:
        now = time.monotonic()
        if now - self._repeated >= 0.5:
            self._repeated = now
            for actor in self.actors.values():
                if actor.link is not None:
                    self._tell(actor, encode(Attended()))
        for due in self.due:
            if now - due.said_s >= self.repeat_s and due.actor.link is not None:
                due.said_s = now
                self._tell(due.actor, encode(due.order))

    # ------------------------------------------------------------ orders

    def new_generation(self) -> Generation:
        """What was ordered is not repeated any more."""
        self.generation = Generation(self.generation + 1)
        self.due.clear()
        return self.generation

    def order(self, kind: type[WorkerOrder], rank: int, actor: Actor | None = None, **fields: Any) -> None:
        """Give an order, to the holder of the rank or to somebody else."""
        to = actor or self.holders[rank]
        if kind is not Leave:
            fields.setdefault("rank", Rank(rank))
        order = kind(node=NODE, worker=to.worker, job=JOB, generation=self.generation, **fields)
        self.due.append(Due(to, order))
        self._say_orders()

    def order_all(self, kind: type[WorkerOrder], *, but: Iterable[int] = (), **fields: Any) -> None:
        for rank in sorted(set(self.holders) - set(but)):
            self.order(kind, rank, **fields)

    # ------------------------------------------------------------ answers

    def answers(self, kind: type[A], generation: int | None = None) -> dict[WorkerId, A]:
        """The last answer of this kind of each worker in a generation (now: the current one)."""
        wanted = self.generation if generation is None else generation
        return {event.worker: event for event in self.of(kind) if event.generation == wanted}

    def await_answers(self, kind: type[A], actors: Iterable[Actor] | None = None) -> dict[int, A]:
        """Wait until these workers (all holders) have answered in this generation; their answers by rank."""
        wanted = [actor.worker for actor in (self.holders.values() if actors is None else actors)]
        self.until(lambda: set(wanted) <= set(self.answers(kind)), f"{kind.__name__} of {wanted}", 40)
        return {int(answer.rank): answer for worker, answer in self.answers(kind).items() if worker in wanted}

    def started(self, actor: Actor) -> WorkerStarted:
        return next(event for event in self.of(WorkerStarted) if event.worker == actor.worker)

    def source(self, actor: Actor, rank: int) -> Source:
        return Source(rank=Rank(rank), address=self.started(actor).address)

    def await_end(self, actor: Actor) -> WorkerExited:
        self.until(lambda: actor.ended, f"the end of {actor.worker}", 20)
        return next(event for event in self.of(WorkerExited) if event.worker == actor.worker)

    # ------------------------------------------------------------ the course of a job

    def spawn(self) -> Actor:
        """One more worker process, which has called."""
        worker = WorkerId(f"w{len(self.actors)}")
        self._start(StartWorker(node=NODE, worker=worker, slot=len(self.actors), job=JOB))
        actor = self.actors[worker]
        self.until(lambda: any(event.worker == worker for event in self.of(WorkerStarted)), f"{worker} has called")
        return actor

    def train(self) -> None:
        """The first start: all ranks join, and train in generation 1."""
        self.new_generation()
        self.holders = {rank: self.spawn() for rank in range(self.world)}
        for rank in self.holders:
            self.assign(rank, replacement=False)
        self.await_answers(WorkerReady)
        self.reconfigure()
        self.order_all(Resume, point=None)
        self.await_answers(WorkerResumed)
        self.until(lambda: len(self.of(WorkerJoined)) == self.world, "all have joined")

    def assign(self, rank: int, actor: Actor | None = None, *, replacement: bool = True) -> None:
        self.order(
            Assign,
            rank,
            actor,
            world_size=self.world,
            local_world_size=self.world,
            local_rank=rank,
            replacement=replacement,
        )

    def reconfigure(self) -> None:
        """All holders connect."""
        store = self.started(self.holders[0]).store
        self.order_all(Reconfigure, store=store)
        self.await_answers(WorkerReconfigured)

    def halt(self) -> dict[int, WorkerReported]:
        """A new generation in which nothing is wrong; the reports."""
        self.new_generation()
        self.order_all(Halt, reason="a test")
        return self.await_answers(WorkerReported)

    def interrupt(self, *, but: Iterable[int] = ()) -> dict[int, WorkerReported]:
        """A new generation in which something is wrong."""
        self.new_generation()
        self.order_all(Interrupt, but=but, reason="a test")
        return self.await_answers(WorkerReported, [self.holders[rank] for rank in set(self.holders) - set(but)])

    def stand_at(self, boundary: Point, outgoing: int | None = None) -> dict[int, WorkerReady]:
        """All go on to the boundary, and stop behind it."""
        for rank in self.holders:
            self.order(Decide, rank, verdict=Verdict.GO_ON, point=boundary, hand_over=rank == outgoing)
        return self.await_answers(WorkerReady)

    def resume(self, point: Point | None) -> None:
        self.order_all(Resume, point=point)
        self.await_answers(WorkerResumed)

    def prepare(self, rank: int) -> Actor:
        """A worker that has joined as the replacement of this rank."""
        target = self.spawn()
        self.assign(rank, target)
        self.until(lambda: any(event.worker == target.worker for event in self.of(WorkerJoined)), "the target joins")
        return target

    def bring(self, target: Actor, rank: int, point: Point, private: bytes, sources: tuple[Source, ...]) -> None:
        """The target comes to the safepoint after this point."""
        self.order(Replay, rank, target, point=point, private=private, sources=sources)
        self.await_answers(WorkerReady, [target])

    def restore(self, rank: int, point: Point, sources: tuple[Source, ...]) -> StateRestored:
        self.order(Restore, rank, point=point, sources=sources)
        return self.await_answers(StateRestored, [self.holders[rank]])[rank]

    def finish(self) -> None:
        """All come to the end of the script, and leave."""
        self.await_answers(WorkerFinished)
        self.order_all(Leave, code=0)
        for actor in self.holders.values():
            assert self.await_end(actor).code == 0, self.all_logs()


def boundary_of(reports: dict[int, WorkerReported]) -> Point:
    """The furthest that anybody has committed or is on the way to."""
    points = [point for report in reports.values() for point in (report.committed, report.pending) if point is not None]
    return max(points)


class Marks:
    """Where the ranks of tests/scripts/halting.py wait."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def hold(self, place: str, step: int, *ranks: int) -> Callable[[], bool]:
        """These ranks will wait there; the result tells whether they do."""
        names = [f"{place}-{step}-rank-{rank}" for rank in ranks]
        for name in names:
            (self.folder / f"hold-{name}").touch()
        return lambda: all((self.folder / f"at-{name}").exists() for name in names)

    def release(self) -> None:
        """Nobody waits anywhere any more."""
        for path in self.folder.glob("hold-*"):
            path.unlink()
