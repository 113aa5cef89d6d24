"""A stage for the agent: a real agent process, workers without torch, and an orchestrator that says what it is told."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from aiohttp import WSMsgType, web
from msgspec import structs

from torchrelay.protocol.health.pulses import Beat, Sample
from torchrelay.protocol.messages.events import Event, JobSpec, WorkerExited, WorkerJoined, WorkerStarted, WorkerWarm
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Rank, WorkerId
from torchrelay.protocol.messages.orders import AnyOrder, Assign, Fence, Interrupt, StartWorker
from torchrelay.wire.files.launch import Launch, write_launch
from torchrelay.wire.files.procfs import ProcessGone, all_processes, read_stat
from torchrelay.wire.messages.channel import (
    AGENT_PATH,
    Ack,
    Attach,
    Attached,
    BeatFrame,
    EventFrame,
    EventsFrame,
    JobTerms,
    NetworkFrame,
    OrderFrame,
    ToAgent,
    decode_to_orchestrator,
)
from torchrelay.wire.messages.codec import encode
from torchrelay.wire.messages.pathnews import NetworkNews
from torchrelay.wire.trust.trust import new_token, write_token

ROOT = Path(__file__).parents[2]
NODE = NodeId("node-0")
JOB = JobId("a-job")
G1 = Generation(1)
SECRET = b"the secret of a job, 32 bytes...."
DEADLINE_S = 20.0
BEAT_MS = 20
E = TypeVar("E", bound=Event)


def spec() -> JobSpec:
    return JobSpec(job=JOB, world_size=4, nproc_per_node=4)


def assign(worker: str, rank: int = 2) -> Assign:
    return Assign(
        node=NODE,
        worker=WorkerId(worker),
        job=JOB,
        generation=G1,
        rank=Rank(rank),
        world_size=4,
        local_world_size=4,
        local_rank=rank,
        replacement=False,
    )


def interrupt(worker: str, reason: str) -> Interrupt:
    return Interrupt(node=NODE, worker=WorkerId(worker), job=JOB, generation=G1, rank=Rank(2), reason=reason)


async def until(fact: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait for a fact; fail, naming it, if it does not come true."""
    deadline = time.monotonic() + deadline_s
    while not fact():
        assert time.monotonic() < deadline, f"waited {deadline_s} s in vain: {what}"
        await asyncio.sleep(0.002)


def lives(pid: int) -> bool:
    try:
        return read_stat(pid).state != "Z"
    except ProcessGone:
        return False


def offspring(pid: int) -> Iterator[int]:
    """All descendants of a process."""
    for child, stat in list(all_processes()):
        if stat.parent == pid:
            yield child
            yield from offspring(child)


class Conductor:
    """An orchestrator that only listens, acknowledges, and says what it is told to."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.attaches: list[Attach] = []
        self.events: list[Event] = []
        self.frames: list[EventFrame] = []
        self.heard_ns: list[int] = []
        self.beats: list[Beat] = []
        self.news: list[NetworkNews] = []
        self.acknowledge = True
        self.answer: ToAgent = Attached(jobs=(JobTerms(spec=spec(), secret=SECRET, patience_s=11.0),), beat_ms=BEAT_MS)
        self.port = 0
        self._socket: web.WebSocketResponse | None = None
        self._transport: asyncio.Transport | None = None
        self._runner: web.AppRunner | None = None

    async def open(self) -> None:
        app = web.Application()
        app.router.add_get(AGENT_PATH, self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Vanish, as an orchestrator that is killed does."""
        if self._transport is not None:
            self._transport.abort()  # no goodbye
        if self._runner is not None:
            await self._runner.cleanup()
        self._socket = None

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            raise web.HTTPUnauthorized
        self._transport = request.transport
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        first = decode_to_orchestrator(await socket.receive_bytes())
        assert isinstance(first, Attach)
        self.attaches.append(first)
        await socket.send_bytes(encode(self.answer))
        self._socket = socket
        async for frame in socket:
            assert frame.type is WSMsgType.BINARY
            await self._hear(socket, frame.data)
        return socket

    async def _hear(self, socket: web.WebSocketResponse, data: bytes) -> None:
        message = decode_to_orchestrator(data)
        if isinstance(message, BeatFrame):
            self.beats.append(message.beat)
        elif isinstance(message, NetworkFrame):
            self.news.append(message.news)
        elif isinstance(message, EventFrame | EventsFrame):
            frames = [message] if isinstance(message, EventFrame) else list(message.each())
            self.heard_ns += [time.monotonic_ns()] * len(frames)
            self.frames += frames
            self.events += [frame.event for frame in frames]
            if self.acknowledge:
                await socket.send_bytes(encode(Ack(frames[-1].seq)))

    async def say(self, message: ToAgent) -> None:
        assert self._socket is not None, "the agent is attached"
        await self._socket.send_bytes(encode(message))

    def of(self, kind: type[E], worker: str | None = None) -> list[E]:
        """All events of one kind, of one worker if named."""
        return [e for e in self.events if isinstance(e, kind) and worker in (None, getattr(e, "worker", None))]


class Stage:
    """One agent and its orchestrator, in a folder."""

    def __init__(self, folder: Path, function: str, args: tuple[str, ...], linger_s: float) -> None:
        self.run_dir = folder / "run"
        self.sockets = folder / "s"
        self.logs = self.run_dir / "logs"
        self.run_dir.mkdir(mode=0o700)
        self.sockets.mkdir(mode=0o700)
        self.linger_s = linger_s
        self.conductor = Conductor(new_token())
        write_token(self.run_dir / "token", self.conductor.token)
        self.write_launch(function, args)
        self.agent: asyncio.subprocess.Process | None = None
        self.options: tuple[str, ...] = ()
        self.program: tuple[str, ...] = ("-m", "torchrelay.agent")

    def write_launch(self, function: str, args: tuple[str, ...] = (), preload: tuple[str, ...] | None = None) -> None:
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OPERATORS": "own"}
        launch = Launch(
            script="train.py",
            args=args,
            cwd=str(self.run_dir),
            env=env,
            nproc_per_node=4,
            preload=preload if preload is not None else ("tests.support.fake_workers",),
            function=f"tests.support.fake_workers:{function}",
        )
        write_launch(self.run_dir, launch)

    async def start_agent(self) -> asyncio.subprocess.Process:
        with (self.run_dir / "agent.log").open("ab") as log:
            self.agent = await asyncio.create_subprocess_exec(
                sys.executable,
                *self.program,
                "--node",
                NODE,
                "--slots",
                "5",
                "--url",
                f"http://127.0.0.1:{self.conductor.port}",
                "--token-file",
                str(self.run_dir / "token"),
                "--run-dir",
                str(self.run_dir),
                "--folder",
                str(self.sockets),
                "--linger",
                str(self.linger_s),
                *self.options,
                stderr=log,
                stdout=log,
                start_new_session=True,
            )
        return self.agent

    async def attached(self, times: int = 1) -> None:
        await until(lambda: len(self.conductor.attaches) >= times, f"attached {times} times\n{self.agent_log()}")

    async def order(self, *orders: AnyOrder) -> None:
        await self.conductor.say(OrderFrame(orders))

    async def start(self, worker: str, slot: int = 0) -> None:
        await self.order(StartWorker(node=NODE, worker=WorkerId(worker), slot=slot, job=JOB))

    async def fence(self, worker: str) -> None:
        await self.order(Fence(node=NODE, worker=WorkerId(worker)))

    async def heard(self, kind: type[E], worker: str | None = None, count: int = 1) -> E:
        """The newest event of this kind, once there are `count`."""
        name = f"{count} {kind.__name__} of {worker}"
        await until(lambda: len(self.conductor.of(kind, worker)) >= count, f"{name}\n{self.agent_log()}")
        return self.conductor.of(kind, worker)[-1]

    async def ended(self, worker: str, count: int = 1) -> WorkerExited:
        return await self.heard(WorkerExited, worker, count)

    async def says(self, worker: str, text: str) -> str:
        """The worker's log, once it holds this text."""
        await until(lambda: text in self.log(worker), f"{worker} says {text!r}; it said {self.log(worker)!r}")
        return self.log(worker)

    def log(self, worker: str) -> str:
        path = self.logs / f"{worker}.log"
        return path.read_text() if path.exists() else ""

    def agent_log(self) -> str:
        path = self.run_dir / "agent.log"
        return path.read_text() if path.exists() else ""

    async def working(self, worker: str = "w1", slot: int = 0) -> int:
        """Start a worker that talks, and give it rank 2; its process id."""
        await self.start(worker, slot)
        started = await self.heard(WorkerStarted, worker)
        await self.heard(WorkerWarm, worker)
        await self.order(assign(worker))
        await self.heard(WorkerJoined, worker)
        return started.pid

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Those of the newest beat."""
        return self.conductor.beats[-1].samples if self.conductor.beats else ()

    @property
    def pid(self) -> int:
        """The agent's."""
        assert self.agent is not None
        return self.agent.pid

    async def kill_agent(self) -> list[int]:
        """SIGKILL the agent; what it had started."""
        assert self.agent is not None
        family = list(offspring(self.agent.pid))
        self.agent.kill()
        await self.agent.wait()
        return family

    async def end(self) -> int:
        """End the agent in order; its exit code."""
        assert self.agent is not None
        if self.agent.returncode is None:
            self.agent.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            return await self.agent.wait()

    async def strike(self) -> None:
        """After a test: end everything, whatever state it is in, and see that nothing is left."""
        left: list[int] = []
        if self.agent is not None and self.agent.returncode is None:
            left = list(offspring(self.agent.pid))
            self.agent.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await self.agent.wait()
            except TimeoutError:
                self.agent.kill()
                await self.agent.wait()
        await self.conductor.close()
        alive = [pid for pid in left if lives(pid)]
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
        assert alive == [], f"left running\n{self.agent_log()}"


def on_stage(
    function: str, *args: str, linger_s: float = 0.0, options: tuple[str, ...] = (), beat_ms: int = BEAT_MS
) -> Callable[[Callable[[Stage], Awaitable[None]]], Callable[[Path], None]]:
    """A test told as a story on a stage: `async def test_...(stage)`."""

    def direct(story: Callable[[Stage], Awaitable[None]]) -> Callable[[Path], None]:
        async def play(folder: Path) -> None:
            async with staged(folder, function, *args, linger_s=linger_s, options=options, beat_ms=beat_ms) as stage:
                await story(stage)

        def test(tmp_path: Path) -> None:
            asyncio.run(play(tmp_path))

        test.__name__ = test.__qualname__ = story.__name__
        test.__module__ = story.__module__
        return test

    return direct


@asynccontextmanager
async def staged(
    folder: Path,
    function: str,
    *args: str,
    linger_s: float = 0.0,
    options: tuple[str, ...] = (),
    beat_ms: int = BEAT_MS,
) -> AsyncIterator[Stage]:
    """An agent, attached, whose workers run `tests.support.fake_workers:<function>` with these arguments."""
    stage = Stage(folder, function, args, linger_s)
    stage.options = options
    assert isinstance(stage.conductor.answer, Attached)
    stage.conductor.answer = structs.replace(stage.conductor.answer, beat_ms=beat_ms)
    await stage.conductor.open()
    try:
        await stage.start_agent()
        await stage.attached()
        yield stage
    finally:
        await stage.strike()
