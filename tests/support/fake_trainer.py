"""A worker that trains nothing, without torch, but keeps to the protocol: steps, gate, recovery, end.

`tests.support.fake_trainer:train` as a launch's function. The gate is a file with one counter per rank: a step is
committed when all ranks have entered it, as with a real all-reduce.
Arguments: STEPS SECONDS_PER_STEP [never-join | exit=CODE].
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from torchrelay.protocol.messages.events import (
    Event,
    StateRestored,
    WorkerFinished,
    WorkerJoined,
    WorkerRaised,
    WorkerReady,
    WorkerReconfigured,
    WorkerReported,
    WorkerResumed,
    WorkerStarted,
    WorkerWarm,
)
from torchrelay.protocol.messages.ids import START, Generation, JobId, NodeId, Point, WorkerId, WorkerPhase
from torchrelay.protocol.messages.orders import (
    Assign,
    Decide,
    Interrupt,
    Leave,
    Reconfigure,
    Replay,
    Restore,
    Resume,
    Verdict,
)
from torchrelay.wire.files.output import announce
from torchrelay.wire.files.page import Page
from torchrelay.wire.messages.codec import encode
from torchrelay.wire.messages.framing import Closed, FrameSocket
from torchrelay.wire.messages.worker_frames import ToWorker, Welcome, decode_to_worker

PATIENCE_S = 60.0
POLL_S = 0.002


class Trainer:
    """One life of one worker."""

    def __init__(self, steps: int, step_s: float, rest: list[str]) -> None:
        self.steps, self.step_s, self.rest = steps, step_s, rest
        self.me = WorkerId(os.environ["TORCHRELAY_WORKER"])
        self.job = JobId(os.environ["TORCHRELAY_JOB"])
        self.page = Page(Path(os.environ["TORCHRELAY_PAGE"]), create=True)
        self.point: Point | None = None
        self.entered = 0  # the step whose gate this worker has entered
        self.generation = Generation(0)
        self.training = False
        self.finished = False
        self.assigned: Assign | None = None
        self.gates = self.open_gates()
        self.link = self.connect()

    def open_gates(self) -> mmap.mmap:
        path = Path(os.environ["TORCHRELAY_LOGS"]) / "gates"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, 4096)
        return mmap.mmap(descriptor, 4096)

    def connect(self) -> FrameSocket:
        until = time.monotonic() + PATIENCE_S
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(os.environ["TORCHRELAY_AGENT_SOCKET"])
                link = FrameSocket(connection)
                assert isinstance(decode_to_worker(link.receive(PATIENCE_S) or b""), Welcome)
                break
            except OSError:
                assert time.monotonic() < until, "no agent"
                time.sleep(0.01)
        slot, node = int(os.environ["TORCHRELAY_SLOT"]), NodeId(os.environ["TORCHRELAY_NODE"])
        link.send(encode(WorkerStarted(worker=self.me, node=node, slot=slot, pid=os.getpid(), address="a", store="s")))
        link.send(encode(WorkerWarm(worker=self.me)))
        return link

    # ------------------------------------------------------------ steps

    def live(self) -> None:
        while True:
            self.page.beat(time.monotonic_ns(), self.entered, self.generation)
            busy = self.training and not self.finished
            try:
                data = self.link.receive(POLL_S if busy else 0.05)
            except Closed:
                self.link = self.connect()
                continue
            if data is not None:
                self.obey(decode_to_worker(data))
            elif busy:
                self.train()

    def train(self) -> None:
        assert self.point is not None, "a worker trains from a point"
        assert self.assigned is not None, "a worker trains with a rank"
        now = time.monotonic_ns()
        if self.entered == self.point.step:
            time.sleep(self.step_s)
            self.entered += 1
            self.page.keep(Point(self.entered), b"private of %d" % self.entered)
            self.page.enter(WorkerPhase.GATE, now)
            struct.pack_into("<q", self.gates, 8 * self.assigned.rank, self.entered)
        counters = struct.unpack_from(f"<{self.assigned.world_size}q", self.gates)
        if min(counters) >= self.entered:
            self.commit(Point(self.entered))

    def commit(self, point: Point) -> None:
        self.point = point
        self.page.commit(point, WorkerPhase.COMPUTING, time.monotonic_ns(), int(self.step_s * 1e9))
        print("step", point.step, flush=True)
        if "loud" in self.rest:
            print("." * 2000, flush=True)
            subprocess.run(["sh", "-c", "echo a child prints, too"], check=True)
        if point.step >= self.steps:
            self.finish()

    def finish(self) -> None:
        for word in self.rest:
            if word.startswith("flood="):
                line = "x" * 99 + "\n"
                for _ in range(int(word.removeprefix("flood="))):
                    sys.stdout.write(line * 10_000)
                print("LAST LINE")
            if word.startswith("exit="):
                self.fail(int(word.removeprefix("exit=")))
        self.finished = True
        self.answer(WorkerFinished)

    def fail(self, code: int) -> None:
        assert self.assigned is not None, "a worker fails with a rank"
        raised = WorkerRaised(
            worker=self.me,
            job=self.job,
            rank=self.assigned.rank,
            point=self.point,
            kind="script",
            signature="exit",
            summary=f"SystemExit: {code}",
        )
        self.link.send(encode(raised))
        sys.exit(code)

    # ------------------------------------------------------------ orders

    def answer(self, kind: Callable[..., Event], **values: object) -> None:
        assert self.assigned is not None
        event = kind(job=self.job, generation=self.generation, worker=self.me, rank=self.assigned.rank, **values)
        self.link.send(encode(event))

    def obey(self, order: ToWorker) -> None:
        if isinstance(order, Leave):
            sys.exit(order.code)
        if isinstance(order, Welcome) or not hasattr(order, "generation") or order.generation < self.generation:
            return
        self.generation = order.generation
        match order:
            case Assign():
                self.take(order)
            case Interrupt():
                self.report()
            case Decide(verdict=verdict, point=point):
                if verdict is Verdict.ROLL_FORWARD and self.point != point:
                    self.commit(point)
                self.answer(WorkerReady, point=self.point)
            case Replay(point=point):
                self.answer(WorkerReady, point=point)
            case Reconfigure():
                self.answer(WorkerReconfigured)
            case Restore(point=point, sources=sources):
                self.point = point
                self.answer(StateRestored, point=point, sources=(sources[0].rank,), digest="d1" * 16, size=4_000_000)
            case Resume(point=point):
                self.resume(point)

    def take(self, order: Assign) -> None:
        if self.assigned is not None:
            return
        self.assigned = order
        assert announce(order.rank)
        print("rank", order.rank, "is", self.me, flush=True)
        if "never-join" in self.rest:
            self.finish()
        elif order.replacement:
            self.link.send(encode(WorkerJoined(worker=self.me, job=self.job, rank=order.rank)))
        else:
            self.answer(WorkerReady, point=None)

    def report(self) -> None:
        gate = self.training and self.point is not None and self.entered > self.point.step
        pending = Point(self.entered) if gate else None
        phase = WorkerPhase.GATE if gate else WorkerPhase.COMPUTING
        self.training = False
        self.answer(WorkerReported, committed=self.point, phase=phase, pending=pending)

    def resume(self, point: Point | None) -> None:
        assert self.assigned is not None
        if point is None and self.point is None:
            self.point = START
            self.link.send(encode(WorkerJoined(worker=self.me, job=self.job, rank=self.assigned.rank)))
            self.page.commit(START, WorkerPhase.BETWEEN, time.monotonic_ns(), 0)
        assert self.point is not None
        self.entered = self.point.step
        struct.pack_into("<q", self.gates, 8 * self.assigned.rank, self.entered)
        self.training = True
        self.page.enter(WorkerPhase.COMPUTING, time.monotonic_ns())
        self.answer(WorkerResumed)
        if self.finished:
            self.answer(WorkerFinished)


def train() -> None:
    """The worker's function."""
    Trainer(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]).live()
