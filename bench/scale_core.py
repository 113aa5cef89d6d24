"""The core alone, in process, in jobs of 256 to 16,384 ranks: what one event costs in peace, and a whole recovery.

No wire and no journal: `advance`, and the orders that follow (`StandingOrders`). All that is asked of workers is
answered at once. CPU time of this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.rules.cluster import EMPTY, advance
from torchrelay.protocol.rules.standing import StandingOrders

JOB = JobId("scale")
SLOTS = 8
HERE = Point(5)


class Core:
    """The core of an orchestrator, with so many nodes."""

    def __init__(self, nodes: int) -> None:
        self.cluster, self.standing = EMPTY, StandingOrders()
        self.now_ms = 0
        self.cpu_s = 0.0
        joined = [ev.NodeJoined(node=NodeId(f"node-{n}"), incarnation="a", slots=SLOTS) for n in range(nodes)]
        spec = ev.JobSpec(job=JOB, world_size=(nodes - 1) * SLOTS, nproc_per_node=SLOTS, nodes=nodes, spares=SLOTS)
        self.work(self.hear([*joined, ev.JobSubmitted(spec=spec)]))

    def hear(self, events: Sequence[ev.Event]) -> list[od.Order]:
        """What is said anew after events that come together."""
        self.now_ms += 10
        begun = time.process_time()
        for number, event in enumerate(events, 1):
            self.cluster = advance(self.cluster, event, self.now_ms, more=number < len(events))
        fresh = self.standing.follow(self.cluster)
        self.cpu_s += time.process_time() - begun
        return list(od.singly(fresh))

    def work(self, fresh: list[od.Order]) -> None:
        """Carry out what is ordered until nothing more is."""
        while fresh:
            told = [event for order in fresh for event in answers(order)]
            if not told:
                return
            fresh = self.hear(told)

    def kill(self, rank: int) -> None:
        """A rank is lost, and the job recovers."""
        worker = self.cluster.jobs[JOB].seats[Rank(rank)].worker
        assert worker is not None, "all ranks are held"
        private = (ev.PrivateRecord(HERE, b"private"),)
        node = self.cluster.workers[worker].node
        self.work(self.hear([ev.WorkerExited(worker=worker, node=node, signal=9, cause="SIGKILL", private=private)]))
        assert self.cluster.jobs[JOB].phase is JobPhase.RUNNING


def answers(order: od.Order) -> Iterator[ev.Event]:
    """What a healthy worker, or its agent, says to an order."""
    match order:
        case od.StartWorker(worker=worker, node=node, slot=slot):
            yield ev.WorkerStarted(worker=worker, node=node, slot=slot, pid=1, address="a:1", store="a:2")
            yield ev.WorkerWarm(worker=worker)
        case od.Fence(worker=worker, node=node):
            yield ev.WorkerExited(worker=worker, node=node, signal=9, cause="fenced")
        case od.Assign(replacement=replacement, generation=generation, worker=worker, rank=rank):
            yield ev.WorkerJoined(worker=worker, job=JOB, rank=rank)
            if not replacement:
                yield ev.WorkerReady(job=JOB, generation=generation, worker=worker, rank=rank, point=None)
        case od.WorkerOrder(generation=generation, worker=worker):
            yield from answer(order, generation, worker)


def answer(order: od.WorkerOrder, generation: Generation, worker: WorkerId) -> Iterator[ev.Event]:
    match order:
        case od.Interrupt(rank=rank):
            yield ev.WorkerReported(
                job=JOB,
                generation=generation,
                worker=worker,
                rank=rank,
                committed=HERE,
                phase=WorkerPhase.COMPUTING,
                pending=HERE.after_step(),
            )
        case od.Decide(rank=rank, point=point) | od.Replay(rank=rank, point=point):
            yield ev.WorkerReady(job=JOB, generation=generation, worker=worker, rank=rank, point=point)
        case od.Reconfigure(rank=rank):
            yield ev.WorkerReconfigured(job=JOB, generation=generation, worker=worker, rank=rank)
        case od.Restore(rank=rank, point=point, sources=sources):
            yield ev.StateRestored(
                job=JOB,
                generation=generation,
                worker=worker,
                rank=rank,
                point=point,
                sources=(sources[0].rank,),
                digest="d",
                size=1,
            )
        case od.Resume(rank=rank):
            yield ev.WorkerResumed(job=JOB, generation=generation, worker=worker, rank=rank)


def timed(act: Callable[[], object]) -> float:
    """CPU milliseconds."""
    begun = time.process_time()
    act()
    return 1000 * (time.process_time() - begun)


def measure(nodes: int, kills: int) -> dict[str, float]:
    """One size. `event_ms`: something that is said of one rank while all train; `tick_ms`: time passes."""
    core = Core(nodes)
    ranks = len(core.cluster.jobs[JOB].seats)
    core.kill(1)  # what is found once is found
    before = core.cpu_s
    for number in range(kills):
        core.kill((number * 37 + 3) % ranks)
    recovery_ms = 1000 * (core.cpu_s - before) / kills

    def say() -> None:
        rank = Rank((core.now_ms * 7) % ranks)
        core.hear([ev.OnceRecorded(job=JOB, rank=rank, name="saved", value=b"1")])

    return {
        "ranks": ranks,
        "recovery_ms": recovery_ms,
        "event_ms": median(timed(say) for _ in range(200)),
        "tick_ms": median(timed(lambda: core.hear([ev.Tick()])) for _ in range(200)),
    }
