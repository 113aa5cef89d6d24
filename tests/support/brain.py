"""An orchestrator for tests: in this process with links that only record, or as a process of its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import TypeVar

from tests.support.patience import longer
from torchrelay.api.endpoint import read_endpoint
from torchrelay.orchestrator.core.service import Orchestrator
from torchrelay.orchestrator.store.journal import Journal
from torchrelay.protocol.health.pulses import Beat, Sample
from torchrelay.protocol.messages.events import (
    JobSpec,
    JobSubmitted,
    NodeJoined,
    WorkerJoined,
    WorkerReady,
    WorkerReconfigured,
    WorkerResumed,
    WorkerSeen,
    WorkerStarted,
    WorkerWarm,
)
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.messages.orders import Assign, Order, Reconfigure, Resume, StartWorker
from torchrelay.protocol.model.roster import Worker
from torchrelay.protocol.succession.succession import VoterId
from torchrelay.wire.messages.channel import OrderFrame, ToAgent

JOB = JobId("job")
NODE = NodeId("node-0")
DEADLINE_S = 20.0
T = TypeVar("T")


def spec(**changes: object) -> JobSpec:
    values: dict[str, object] = {"job": JOB, "world_size": 2, "nproc_per_node": 2, "spares": 1, **changes}
    return JobSpec(**values)  # type: ignore[arg-type]


def wait_for(what: str, fact: Callable[[], T], deadline_s: float = DEADLINE_S) -> T:
    """Wait for a fact (something true); fails with its name."""
    until = time.monotonic() + longer(deadline_s)
    while True:
        value = fact()
        if value:
            return value
        assert time.monotonic() < until, f"{what}: not within {deadline_s} s"
        time.sleep(0.01)


async def until(what: str, fact: Callable[[], T], deadline_s: float = DEADLINE_S) -> T:
    """The same inside an event loop."""
    deadline = time.monotonic() + longer(deadline_s)
    while True:
        value = fact()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what}: not within {deadline_s} s"
        await asyncio.sleep(0.002)


class RecordingLink:
    """An agent's link that records what is said, and says nothing itself."""

    def __init__(self, node: NodeId = NODE, incarnation: str = "first") -> None:
        self.node = node
        self.incarnation = incarnation
        self.voter = VoterId("")
        self.sent: list[ToAgent] = []
        self.closed = ""

    def send(self, message: ToAgent) -> None:
        self.sent.append(message)

    def close(self, reason: str) -> None:
        self.closed = self.closed or reason

    def orders(self) -> list[Order]:
        """All orders so far, repetitions included."""
        return [order for message in self.sent if isinstance(message, OrderFrame) for order in message.each()]

    def joined(self, slots: int = 3, alive: Iterable[Worker] = ()) -> NodeJoined:
        """The fact that this node is there, with these of its workers alive."""
        seen = tuple(WorkerSeen(worker=w.worker, slot=w.slot, pid=w.pid, job=w.job) for w in alive)
        return NodeJoined(node=self.node, incarnation=self.incarnation, slots=slots, workers=seen)

    def beat(self, *samples: Sample) -> Beat:
        return Beat(node=self.node, incarnation=self.incarnation, samples=samples)


@asynccontextmanager
async def serving(folder: Path, source: Callable[[], int] = time.monotonic_ns) -> AsyncIterator[Orchestrator]:
    """An orchestrator in this process, serving. What its loop raises is raised at the end."""
    with closing(Journal(folder / "journal.db")) as journal:
        service = Orchestrator(journal, source=source)
        loop = asyncio.create_task(service.serve())
        try:
            yield service
        finally:
            service.end()
            await loop


class Node:
    """A node whose workers do at once what they are told, up to the step they are asked for."""

    def __init__(self, service: Orchestrator, link: RecordingLink) -> None:
        self.service, self.link = service, link
        self._heeded = 0
        self.known: set[Order] = set()

    def heed(self) -> None:
        """Answer the orders that are new."""
        orders = self.link.orders()
        for order in orders[self._heeded :]:
            if order not in self.known:
                self.known.add(order)
                self.obey(order)
        self._heeded = len(orders)

    def obey(self, order: Order) -> None:
        put = self.service.put
        match order:
            case StartWorker(node=node, worker=worker, slot=slot):
                put(WorkerStarted(worker=worker, node=node, slot=slot, pid=100 + slot, address="a", store="s"))
                put(WorkerWarm(worker=worker))
            case Assign(worker=worker, rank=rank, job=job, generation=generation, replacement=False):
                put(WorkerReady(job=job, generation=generation, worker=worker, rank=rank, point=None))
            case Reconfigure(worker=worker, rank=rank, job=job, generation=generation):
                put(WorkerReconfigured(job=job, generation=generation, worker=worker, rank=rank))
            case Resume(worker=worker, rank=rank, job=job, generation=generation):
                put(WorkerResumed(job=job, generation=generation, worker=worker, rank=rank))
                put(WorkerJoined(worker=worker, job=job, rank=rank))

    async def until_phase(self, phase: str) -> None:
        """Go along until the job is in this phase."""

        def there() -> bool:
            self.heed()
            job = self.service.cluster.jobs.get(JOB)
            return job is not None and job.phase == phase

        await until(f"phase {phase}", there)


async def train(service: Orchestrator, link: RecordingLink, **changes: object) -> Node:
    """Attach a node, submit a job, and go along until it trains."""
    await service.attach(link, link.joined())
    await service.put(JobSubmitted(spec=spec(**changes)))
    node = Node(service, link)
    await node.until_phase("running")
    return node


def sample(worker: str, rank: int, step: int, **changes: object) -> Sample:
    values: dict[str, object] = {
        "worker": WorkerId(worker), "rank": Rank(rank), "generation": Generation(1), "point": Point(step),
        "phase": WorkerPhase.COMPUTING, "phase_ms": 3, "step_ms": 12.5, "collectives": step, "beat_ms": 1,
        "process": "R", "cpu_ms": 100, **changes,
    }  # fmt: skip
    return Sample(**values)  # type: ignore[arg-type]


# ---------------------------------------------------------------- as a process


def start_process(run_dir: Path, *words: str) -> subprocess.Popen[str]:
    """An orchestrator process; wait for `listening` or for its end."""
    command = [sys.executable, "-m", "torchrelay.orchestrator", "--run-dir", str(run_dir), *words]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def listening(process: subprocess.Popen[str], run_dir: Path) -> str:
    """Its URL, once it can be reached."""

    def bound() -> str:
        assert process.poll() is None, process.communicate()[1]
        endpoint = read_endpoint(run_dir)
        return endpoint.url if endpoint is not None and endpoint.pid == process.pid else ""

    return wait_for("an orchestrator that listens", bound)
