"""A stage for workers: real worker processes, and the protocol core in the test's process for agent and orchestrator.

The test moves it: `pump` takes in what has happened and says what is due; `until` pumps until a fact is true.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import secrets
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.support.patience import longer
from tests.support.stacks import stacks, tell_when_asked
from torchrelay.agent.workers.forkserver import reseed
from torchrelay.protocol.messages.events import (
    Event,
    JobSpec,
    JobSubmitted,
    NodeJoined,
    Tick,
    WorkerExited,
    WorkerHung,
    WorkerStarted,
)
from torchrelay.protocol.messages.ids import JobId, NodeId, Rank, WorkerId
from torchrelay.protocol.messages.orders import Fence, Order, StartWorker, WorkerOrder
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.rules.cluster import EMPTY, advance, orders
from torchrelay.wire.files.launch import PRELOAD
from torchrelay.wire.files.page import Page, Status
from torchrelay.wire.messages.codec import WireError, encode
from torchrelay.wire.messages.framing import Closed, FrameSocket
from torchrelay.wire.messages.worker_frames import Attended, Welcome, decode_from_worker

JOB, NODE = JobId("staged"), NodeId("node-0")
REPEAT_S = 0.5
E = TypeVar("E", bound=Event)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # it counts when torch is imported, which the forkserver does
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(list(PRELOAD))


def become_worker(env: Mapping[str, str], argv: Sequence[str], log: str) -> None:
    """In the child: what the agent's forkserver does before it calls `run_worker`."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    tell_when_asked(Path(log).with_suffix(".stacks"))
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(env)
    multiprocessing.set_start_method(None, force=True)  # its parent's would be inherited
    sys.argv = list(argv)
    path = env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [os.getcwd(), *(folder for folder in path if folder and folder not in sys.path)]
    reseed()
    from torchrelay.worker.bootstrap.main import run_worker

    run_worker()


@dataclass
class Actor:
    """One worker process."""

    worker: WorkerId
    slot: int
    process: Any
    page: Path
    link: FrameSocket | None = None
    said: dict[type[Order], Order] = field(default_factory=dict)
    ended: bool = False

    @property
    def pid(self) -> int:
        pid = self.process.pid
        assert isinstance(pid, int)
        return pid


def send_signal(actor: Actor, number: int) -> None:
    """Nothing if it has ended."""
    try:
        if not actor.ended:
            os.kill(actor.pid, number)
    except ProcessLookupError:
        pass  # its end has not been seen yet


class Stage:
    """A job on one pretended node."""

    def __init__(
        self,
        folder: Path,
        argv: Sequence[str],
        *,
        world: int = 4,
        spares: int = 1,
        slots: int | None = None,
        env: Mapping[str, str] | None = None,
        patience_s: float = 30.0,
        **spec: Any,
    ) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.digests = folder / "digests"
        self.logs.mkdir(parents=True)
        self._argv = list(argv)
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHRELAY_DIGESTS": str(self.digests), **(env or {})}
        self._patience_s = patience_s
        self.secret = secrets.token_bytes(32)
        self.cluster = EMPTY
        self.actors: dict[WorkerId, Actor] = {}
        self.events: list[Event] = []
        self.orders: list[WorkerOrder] = []
        self.deaf: Callable[[Event], bool] = lambda _: False  # events that get lost on their way
        self.attending = True  # whether workers are told that the orchestrator is there
        self.hold: Callable[[Order], bool] = lambda _: False  # orders that are not to be passed on
        self._sockets = Path(f"/dev/shm/torchrelay-stage-{os.getpid()}-{secrets.token_hex(3)}")
        self._sockets.mkdir(mode=0o700)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._sockets / "agent"))
        self._listener.listen(64)
        self._repeated = 0.0
        self.repeat_s = REPEAT_S
        self.unfenced: set[WorkerId] = set()  # whose fencing takes its time
        job = JobSpec(job=JOB, world_size=world, nproc_per_node=world, spares=spares, slot_faults=0, **spec)
        self.take(JobSubmitted(spec=job))
        self.take(NodeJoined(node=NODE, incarnation="first", slots=slots if slots is not None else world + spares))

    # ------------------------------------------------------------ what a test looks at

    @property
    def job(self) -> Job:
        return self.cluster.jobs[JOB]

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def actor(self, rank: int) -> Actor:
        worker = self.job.seats[Rank(rank)].worker
        assert worker is not None, f"rank {rank} is vacant"
        return self.actors[worker]

    def status(self, rank: int) -> Status | None:
        """The page of a rank's holder."""
        try:
            return self.page(self.actor(rank))
        except (FileNotFoundError, ValueError):
            return None

    def page(self, actor: Actor) -> Status:
        page = Page(actor.page)
        try:
            return page.status()
        finally:
            page.close()

    def step(self, rank: int = 0) -> int:
        status = self.status(rank)
        return -1 if status is None else status.step

    def log(self, name: str) -> str:
        path = self.logs / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def all_logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.logs.glob("*.log")))

    def points(self, rank: int) -> dict[str, set[str]]:
        """point -> digests, as the rank's holders wrote them."""
        found: dict[str, set[str]] = {}
        path = self.digests / f"rank-{rank}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else []:
            if line.endswith("}"):
                row = json.loads(line)
                found.setdefault(row["point"], set()).add(row["digest"])
        return found

    # ------------------------------------------------------------ what a test does

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        send_signal(self.actor(rank), number)

    def send(self, actor: Actor, number: int) -> None:
        send_signal(actor, number)

    def lose(self, rank: int, evidence: str) -> None:
        """What the failure detector would say of a worker that hangs."""
        self.take(WorkerHung(worker=self.actor(rank).worker, evidence=evidence))

    def until(self, fact: Callable[[], Any], what: str, deadline_s: float = 60.0) -> Any:
        """Pump until a fact is true; fail, naming it, if it is not in time or if the job ends before."""
        deadline = time.monotonic() + longer(deadline_s)
        while not (found := fact()):
            over = self.job.phase is JobPhase.ENDED
            if over or time.monotonic() > deadline:
                why = f"the job ended: {self.job.outcome}" if over else f"not within {deadline_s} s"
                raise AssertionError(f"{what}: {why}\n{self._all_there_is()}")
            self.pump(0.005)
        return found

    def end(self, deadline_s: float = 120.0) -> int:
        """Pump to the job's end; its exit code."""
        deadline = time.monotonic() + longer(deadline_s)
        while self.job.phase is not JobPhase.ENDED:
            assert time.monotonic() < deadline, f"no end: {self._all_there_is()}"
            self.pump(0.05)
        assert self.job.outcome is not None
        return self.job.outcome.code

    def pump(self, wait_s: float) -> None:
        """Take in what has happened, and say what is due."""
        self._say_orders()
        waited = self._waited_for()
        ready = multiprocessing.connection.wait(list(waited), timeout=wait_s)
        for thing in ready:
            waited[thing]()
        for actor in list(self.actors.values()):
            while actor.link is not None and actor.link.pending():
                self._hear(actor)
        self.take(Tick())

    def take(self, event: Event) -> None:
        if not isinstance(event, Tick):
            self.events.append(event)
        self.cluster = advance(self.cluster, event, time.monotonic_ns() // 1_000_000)
        self._say_orders()

    def close(self) -> None:
        for actor in self.actors.values():
            send_signal(actor, signal.SIGKILL)
            actor.process.join(10)
            if actor.link is not None:
                actor.link.close()
        self._listener.close()
        shutil.rmtree(self._sockets)  # pages and snapshots of those that were killed

    # ------------------------------------------------------------ the world

    def _all_there_is(self) -> str:
        """For who must find out why something did not come about."""
        told = stacks([actor.pid for actor in self.actors.values() if not actor.ended], self.logs)
        return f"{self.job.phase}: {self.job.why}\n{self.all_logs()}\n{told}"

    def _waited_for(self) -> dict[Any, Callable[[], None]]:
        waited: dict[Any, Callable[[], None]] = {self._listener: self._accept}
        for actor in self.actors.values():
            if actor.link is not None:
                waited[actor.link] = lambda actor=actor: self._hear(actor)  # type: ignore[misc]
            elif not actor.ended:
                # Its end is told when all it said is heard; who never called has nothing to say.
                waited[actor.process.sentinel] = lambda actor=actor: self._bury(actor)  # type: ignore[misc]
        return waited

    def _say_orders(self) -> None:
        now = time.monotonic()
        again = now - self._repeated >= self.repeat_s
        if again:
            self._repeated = now
            if self.attending:
                for linked in self.actors.values():
                    if linked.link is not None:
                        self._tell(linked, encode(Attended()))
        for order in sorted(orders(self.cluster), key=repr):
            match order:
                case StartWorker():
                    self._start(order)
                case Fence():
                    actor = self.actors.get(order.worker)
                    if actor is not None and order.worker not in self.unfenced:
                        send_signal(actor, signal.SIGKILL)
                case WorkerOrder():
                    self._pass_on(order, again)

    def _pass_on(self, order: WorkerOrder, again: bool) -> None:
        actor = self.actors.get(order.worker)
        if actor is None or actor.link is None or self.hold(order):
            return
        if again or actor.said.get(type(order)) != order:
            actor.said[type(order)] = order
            self.orders.append(order)
            self._tell(actor, encode(order))

    def _tell(self, actor: Actor, message: bytes) -> None:
        assert actor.link is not None
        try:
            actor.link.send(message, 1.0)
        except Closed:
            pass  # its end will be seen
        except TimeoutError:  # half a message may be out: the worker calls again when it comes to it
            actor.link.close()
            actor.link = None

    def _start(self, order: StartWorker) -> None:
        if order.worker in self.actors:
            return
        page = self._sockets / f"{order.worker}.page"
        env = {
            **self._env, "TORCHRELAY_WORKER": order.worker, "TORCHRELAY_AGENT_SOCKET": str(self._sockets / "agent"),
            "TORCHRELAY_PAGE": str(page), "TORCHRELAY_JOB": JOB, "TORCHRELAY_NODE": NODE,
            "TORCHRELAY_SLOT": str(order.slot), "TORCHRELAY_LOGS": str(self.logs), "GLOO_SOCKET_IFNAME": "lo",
            "WORLD_SIZE": str(self.job.spec.world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
        }  # fmt: skip
        log = self.logs / f"{order.worker}.log"
        process = forks.Process(target=become_worker, args=(env, self._argv, str(log)))
        process.start()
        self.actors[order.worker] = Actor(order.worker, order.slot, process, page)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid = struct.unpack("3i", credentials)[0]
        actor = next(actor for actor in self.actors.values() if actor.pid == pid)
        if actor.link is not None:
            actor.link.close()
        actor.link = FrameSocket(connection)
        actor.said.clear()
        welcome = Welcome(
            job=JOB,
            worker=actor.worker,
            node=NODE,
            slot=actor.slot,
            host="127.0.0.1",
            secret=self.secret,
            patience_s=self._patience_s,
            logs=str(self.logs),
        )
        actor.link.send(encode(welcome))

    def _hear(self, actor: Actor) -> None:
        if actor.link is None:  # it did not read, see `_tell`
            return
        try:
            data = actor.link.receive(0)
            if data is None:
                return
            event: Event = decode_from_worker(data)
        except (Closed, WireError):
            actor.link.close()
            actor.link = None
            return
        if isinstance(event, WorkerStarted):
            assert (event.pid, event.slot) == (actor.pid, actor.slot)
        if not self.deaf(event):
            self.take(event)

    def _bury(self, actor: Actor) -> None:
        actor.process.join(10)
        actor.ended = True
        code = actor.process.exitcode
        whole = actor.page.exists() and actor.page.stat().st_size > 0  # else it was killed while it made it
        page = Page(actor.page) if whole else None
        private = page.records() if page is not None else ()
        ended = WorkerExited(
            worker=actor.worker,
            node=NODE,
            code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            private=private,
        )
        self.take(ended)


Bits = dict[int, dict[str, set[str]]]


def bits(stage: Stage, ranks: Iterable[int] = range(4)) -> Bits:
    """The digest of everything at each point of each rank: one, however often the point was reached."""
    found = {rank: stage.points(rank) for rank in ranks}
    assert all(len(digests) == 1 for points in found.values() for digests in points.values()), found
    return found
