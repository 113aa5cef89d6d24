"""Telling: the protocol core, event by event, with workers that answer as healthy ones do.

A `Stand` is what the teller knows of a worker: what it holds and where its main thread is. `answers` gives what a
healthy worker or agent says to an order; transcripts, exhaustive worlds and properties are all told with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import START, Generation, JobId, NodeId, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.model.moves import Move
from torchrelay.protocol.rules.cluster import EMPTY, Cluster, advance, orders

JOB = JobId("job")


class Stand(Struct, frozen=True):
    """Where a worker stands. `committed` None: it holds no state."""

    committed: Point | None = None
    phase: WorkerPhase = WorkerPhase.BOOTING
    pending: Point | None = None
    caught_up: Point | None = None
    shard: str = "all"
    keeps: bool = False  # copies of its wards' records

    def records(self, _: WorkerId) -> tuple[ev.PrivateRecord, ...]:
        """What its page holds: the point it committed last, and that of the gate it is in."""
        points = [self.committed, self.pending if self.phase is WorkerPhase.GATE else None]
        return tuple(ev.PrivateRecord(point, private(point)) for point in points if point is not None and point > START)


def private(point: Point) -> bytes:
    """The private state of any rank at a point, as told here."""
    return f"private at {point}".encode()


COMPUTING = WorkerPhase.COMPUTING


def training(point: Point) -> Stand:
    """It computes the step after `point`."""
    return Stand(point, COMPUTING, point.after_step())


# Commands are answered in the order in which a recovery gives them.
Kinds = tuple[type[od.Order], ...]


class Story:
    """A cluster with one job, and what its workers do."""

    def __init__(self) -> None:
        self.cluster: Cluster = EMPTY
        self.now_ms = 0
        self.stands: dict[WorkerId, Stand] = {}

    # ------------------------------------------------------------ looking

    @property
    def job(self) -> Job:
        return self.cluster.jobs[JOB]

    @property
    def move(self) -> Move:
        """The newest."""
        return self.job.moving.moves[-1]

    def holder(self, rank: int) -> WorkerId:
        worker = self.job.seats[Rank(rank)].worker
        assert worker is not None, f"rank {rank} is vacant"
        return worker

    def orders(self) -> list[od.Order]:
        """All that is to be done, in a fixed order."""
        return sorted(orders(self.cluster), key=place_of)

    # ------------------------------------------------------------ telling

    def hear(self, *events: ev.Event) -> None:
        for event in events:
            self.cluster = advance(self.cluster, event, self.now_ms)

    def wait(self, ms: int) -> None:
        """Time passes."""
        self.now_ms += ms
        self.hear(ev.Tick())

    def answer(self, kinds: Kinds = (), *, but: Iterable[int] = ()) -> None:
        """Do once what is ordered now, of these kinds or all; the holders of ranks in `but` do nothing."""
        idle = {self.job.seats[Rank(rank)].worker for rank in but}
        for order in self.orders():
            if (kinds and not isinstance(order, kinds)) or getattr(order, "worker", None) in idle:
                continue
            self.hear(*answers(order, self.stands))

    def settle(self) -> None:
        """Do what is ordered until nothing more happens."""
        for _ in range(50):
            before = self.cluster
            self.answer()
            if self.cluster == before:
                return
        raise AssertionError("healthy workers never come to rest")

    def settle_by(self, hear: Callable[[ev.Event], None]) -> None:
        """The same, with each answer heard by somebody who passes it on."""
        for _ in range(50):
            todo = self.orders()
            for order in todo:
                for event in answers(order, self.stands):
                    hear(event)
            if not todo:
                return
        raise AssertionError("healthy workers never come to rest")

    def train(self, point: Point) -> None:
        """All holders compute the step after `point`."""
        for seat in self.job.seats.values():
            if seat.worker is not None:
                shard = self.stands.get(seat.worker, Stand()).shard
                self.stands[seat.worker] = replace(training(point), shard=shard)

    def prove(self, point: Point) -> None:
        """Beats show that all ranks have committed this point."""
        self.hear(ev.PointCommitted(job=JOB, generation=self.job.generation, point=point))

    def lose(self, worker: WorkerId, *, code: int | None = None, signal: int | None = None) -> None:
        """A worker's process ends, and its page is read."""
        known = self.cluster.workers[worker]
        records = self.stands.get(worker, Stand()).records(worker)
        event = ev.WorkerExited(worker=worker, node=known.node, code=code, signal=signal, private=records)
        self.hear(event)


def submitted(*, ranks: int = 2, spares: int = 1, slots: int | None = None, **fields: Any) -> Story:
    """A job on one node that has joined."""
    story = Story()
    spec = ev.JobSpec(job=JOB, world_size=ranks, nproc_per_node=ranks, spares=spares, **fields)
    story.hear(ev.JobSubmitted(spec=spec))
    story.hear(ev.NodeJoined(node=NodeId("node-0"), incarnation="a", slots=slots or ranks + spares))
    return story


def running(point: Point = Point(3), **fields: Any) -> Story:
    """A job whose ranks compute the step after `point`."""
    story = submitted(**fields)
    story.settle()
    story.train(point)
    return story


def after_an_error(point: Point) -> Story:
    """A job in which the holder of rank 1 has raised, ended and been replaced; all compute the step after `point`."""
    story = running()
    story.hear(raised(story, 1))
    story.lose(story.holder(1), code=5)
    story.wait(300)
    story.settle()
    story.train(point)
    return story


def begun(cluster: Cluster) -> Cluster:
    """The same when all its workers have started, and those with a rank are connected and train."""
    for worker in list(cluster.workers.values()):
        event = ev.WorkerStarted(
            worker=worker.worker, node=worker.node, slot=worker.slot, pid=9, address="a", store="s"
        )
        cluster = advance(cluster, event, 0)
    seats = [(rank, seat.worker) for rank, seat in cluster.jobs[JOB].seats.items() if seat.worker is not None]
    answers: list[ev.Answer] = []
    first = Generation(1)
    answers += [ev.WorkerReady(job=JOB, generation=first, worker=w, rank=rank, point=None) for rank, w in seats]
    answers += [ev.WorkerReconfigured(job=JOB, generation=first, worker=w, rank=rank) for rank, w in seats]
    answers += [ev.WorkerResumed(job=JOB, generation=first, worker=w, rank=rank) for rank, w in seats]
    for answer in answers:
        cluster = advance(cluster, answer, 0)
    assert cluster.jobs[JOB].phase is JobPhase.RUNNING
    return cluster


def place_of(order: od.Order) -> tuple[int, str]:
    """Orders in the order of a recovery, then by worker."""
    kinds = (
        od.Fence, od.StartWorker, od.PassOn, od.Assign, od.Interrupt, od.Halt, od.Decide, od.Recall, od.Replay,
        od.Reconfigure, od.Restore, od.Resume, od.Park, od.Leave,
    )  # fmt: skip
    return kinds.index(type(order)), getattr(order, "worker", "")


# ---------------------------------------------------------------- what healthy workers and agents answer


def answers(order: od.Order, stands: dict[WorkerId, Stand]) -> tuple[ev.Event, ...]:
    """What an order is answered with; `stands` is brought up to date."""
    match order:
        case od.StartWorker(worker=worker, node=node, slot=slot):
            started = ev.WorkerStarted(
                worker=worker, node=node, slot=slot, pid=100 + slot, address=f"at:{worker}", store=f"store:{worker}"
            )
            return started, ev.WorkerWarm(worker=worker)
        case od.Fence(worker=worker, node=node):
            records = stands.get(worker, Stand()).records(worker)
            return (ev.WorkerExited(worker=worker, node=node, signal=9, cause="fenced", private=records),)
        case od.Leave(worker=worker, node=node, code=code):
            return (ev.WorkerExited(worker=worker, node=node, code=code, cause="left"),)
        case od.PassOn():
            return ()  # nobody but the script hears of it
        case od.Park(job=job, generation=generation, worker=worker, rank=rank, node=node, point=point):
            parked = ev.WorkerParked(
                job=job,
                generation=generation,
                worker=worker,
                rank=rank,
                node=node,
                point=point,
                size=1000,
                private="p",
                digest="d",
                torch="2",
                code="c",
            )
            return (parked,)
        case od.WorkerOrder():
            return worker_answers(order, stands)
    raise AssertionError(f"nobody knows how to answer {order}")


def worker_answers(order: Any, stands: dict[WorkerId, Stand]) -> tuple[ev.Event, ...]:
    """What a worker answers."""
    who: dict[str, Any] = {
        "job": order.job, "generation": order.generation, "worker": order.worker,
        "rank": getattr(order, "rank", Rank(0)),
    }  # fmt: skip
    stand = stands.get(order.worker, Stand())
    joined = ev.WorkerJoined(worker=order.worker, job=order.job, rank=who["rank"], shard=stand.shard)
    match order:
        case od.Assign(replacement=replacement):
            if order.examples:
                return joined, ev.WorkerPrepared(worker=order.worker, note="rehearsed a step")
            return (joined,) if replacement else (ev.WorkerReady(**who, point=None),)
        case od.Interrupt() | od.Halt():
            return (report(who, stand),)
        case od.Decide(point=point):
            stands[order.worker] = replace(stand, committed=point, phase=WorkerPhase.STOPPED, pending=None)
            return (ev.WorkerReady(**who, point=point, private=private(point) if order.hand_over else b""),)
        case od.Recall(ward=ward, point=point):
            kept = private(point) if stand.keeps else b""
            return (ev.RecordKept(**who, ward=ward, point=point, private=kept),)
        case od.Replay(point=point):
            stands[order.worker] = replace(stand, caught_up=point, phase=WorkerPhase.STOPPED)
            return (ev.WorkerReady(**who, point=point),)
        case od.Reconfigure():
            return (ev.WorkerReconfigured(**who, took_ms=1.0),)
        case od.Restore(point=point, sources=sources):
            stands[order.worker] = replace(stand, committed=point)
            taken = (sources[0].rank,)
            return (ev.StateRestored(**who, point=point, sources=taken, digest="d1", size=1000, took_ms=2.0),)
        case od.Resume(point=None) if stand.committed is not None:  # a move was called off: from where it is
            if stand.phase is WorkerPhase.STOPPED:
                stands[order.worker] = replace(training(stand.committed), shard=stand.shard)
            return (ev.WorkerResumed(**who),)
        case od.Resume(point=point):
            stands[order.worker] = replace(training(point or START), shard=stand.shard)
            return (ev.WorkerResumed(**who),) if point is not None else (ev.WorkerResumed(**who), joined)
    raise AssertionError(f"no worker knows how to answer {order}")


def report(who: dict[str, Any], stand: Stand) -> ev.WorkerReported:
    """Where a worker stands, as it says it."""
    holds = stand.committed is not None
    return ev.WorkerReported(
        **who,
        committed=stand.committed,
        phase=stand.phase,
        pending=stand.pending,
        caught_up=None if holds else stand.caught_up,
    )


# ---------------------------------------------------------------- what workers say unasked


def say(story: Story, event: type[ev.Event], rank: int, **fields: Any) -> ev.Event:
    """Something that the holder of a rank says, in the job's generation."""
    known: dict[str, Any] = {"job": JOB, "worker": story.holder(rank), "rank": Rank(rank)}
    if "generation" in event.__struct_fields__:
        known["generation"] = story.job.generation
    return event(**(known | fields))


def raised(story: Story, rank: int, **fields: Any) -> ev.Event:
    given = {"point": Point(3), "kind": "script", "signature": "E", "summary": "E"}
    return say(story, ev.WorkerRaised, rank, **(given | fields))
