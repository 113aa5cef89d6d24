"""Players for the scale bench: agents without workers, over the real wire.

Each plays one node with its slots. It answers every order at once, as a worker that has nothing to do would. What it
costs a real agent to run workers is not in here: the bench asks what the orchestrator can carry.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import aiohttp

from torchrelay.protocol.health.pulses import Beat, Sample
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Point, Rank, WorkerId, WorkerPhase
from torchrelay.wire.messages.channel import (
    AGENT_PATH,
    Ack,
    Attach,
    Attached,
    BeatFrame,
    EventsFrame,
    OrderFrame,
    Pace,
    decode_to_agent,
)
from torchrelay.wire.messages.codec import encode

JOB = JobId("scale")
STEP_S = 0.5  # a step of the job that is played


@dataclass
class Played:
    """A worker that a player makes believe."""

    slot: int
    pid: int
    rank: Rank | None = None
    generation: Generation = Generation(0)
    fresh: bool = False  # a replacement: it holds nothing until it is restored
    point: Point | None = None
    answered: set[tuple[object, ...]] = field(default_factory=set)


@dataclass
class World:
    """What all players of one process share: how far the job is, and what was seen. Times are `time.monotonic`."""

    nodes: int
    slots: int
    began_s: float = 0.0  # when training went on; 0: it stands
    at: Point = Point(0)
    seen: dict[tuple[str, int], list[float]] = field(default_factory=dict)  # an order's kind -> how many, first, last
    frames: int = 0
    events: int = 0
    repeats: int = 0
    reconnects: int = 0

    def point(self) -> Point:
        """The last point that all have committed."""
        steps = (time.monotonic() - self.began_s) / STEP_S if self.began_s else 0
        return Point(self.at.step + int(steps))

    def note(self, order: od.Order, now_s: float) -> None:
        known = self.seen.setdefault((type(order).__name__, getattr(order, "generation", 0)), [0, now_s, now_s])
        known[0] += 1
        known[2] = now_s


class Player:
    """One node."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.node = NodeId(f"node-{number}")
        self.number = number
        self.incarnation = f"played-{number}-{os.getpid()}"
        self.workers: dict[WorkerId, Played] = {}
        self.ended: set[WorkerId] = set()
        self.attached = False
        self.lost = False
        self._beat_s = 0.5
        self._seq = 0
        self._unacknowledged: dict[int, bytes] = {}
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def play(self, session: aiohttp.ClientSession, url: str, token: str) -> None:
        """Be there until the node is lost."""
        while not self.lost:
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                await self._connect(session, url, token)
            self._socket, self.attached = None, False
            if not self.lost:
                self.world.reconnects += 1
                await asyncio.sleep(0.5)

    async def _connect(self, session: aiohttp.ClientSession, url: str, token: str) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        async with session.ws_connect(url + AGENT_PATH, headers=headers, max_msg_size=1 << 26) as socket:
            seen = tuple(
                ev.WorkerSeen(
                    worker=name, slot=one.slot, pid=one.pid, warm=True, job=JOB, rank=one.rank,
                    generation=one.generation, address="127.0.0.1:1", store="127.0.0.1:2",
                )
                for name, one in self.workers.items()
            )  # fmt: skip
            attach = Attach(node=self.node, incarnation=self.incarnation, slots=self.world.slots, workers=seen)
            await socket.send_bytes(encode(attach))
            self._socket = socket
            for seq in sorted(self._unacknowledged):
                await socket.send_bytes(self._unacknowledged[seq])
            async for raw in socket:
                now_s = time.monotonic()
                self.world.frames += 1
                await self._hear(raw.data, now_s)
                if self.lost:
                    return

    async def _hear(self, data: bytes, now_s: float) -> None:
        match decode_to_agent(data):
            case Attached(beat_ms=beat_ms):
                self.attached, self._beat_s = True, beat_ms / 1000
            case Pace(beat_ms):
                self._beat_s = beat_ms / 1000
            case Ack(seq):
                for known in [one for one in self._unacknowledged if one <= seq]:
                    del self._unacknowledged[known]
            case OrderFrame() as frame:
                told: list[ev.Event] = []
                for order in frame.each():
                    self.world.note(order, now_s)
                    told += self._obey(order)
                if told:
                    await self.tell(*told)

    async def tell(self, *events: ev.Event) -> None:
        """Say them together, and keep them until they are acknowledged."""
        first, self._seq = self._seq + 1, self._seq + len(events)
        self.world.events += len(events)
        data = encode(EventsFrame(first, events, time.monotonic_ns() // 1_000_000))  # type: ignore[arg-type]
        self._unacknowledged[self._seq] = data
        if self._socket is not None and not self._socket.closed:
            with suppress(ConnectionError):
                await self._socket.send_bytes(data)

    # ------------------------------------------------------------ orders

    def _obey(self, order: od.Order) -> Iterator[ev.Event]:
        if isinstance(order, od.StartWorker):
            yield from self._start(order)
        elif isinstance(order, od.Fence):
            self.ended.add(order.worker)
            if self.workers.pop(order.worker, None) is not None:
                yield ev.WorkerExited(worker=order.worker, node=self.node, signal=9, cause="fenced")
        elif isinstance(order, od.WorkerOrder) and order.worker in self.workers:
            worker = self.workers[order.worker]
            key = (type(order), order.generation, getattr(order, "ward", None))
            if key in worker.answered:
                self.world.repeats += 1  # what was said before is on its way, or lies in the inbox
                return
            worker.answered.add(key)
            worker.generation = max(worker.generation, order.generation)
            if worker.rank is None:
                worker.rank = getattr(order, "rank", None)
            yield from self._answer(order, worker)

    def _start(self, order: od.StartWorker) -> Iterator[ev.Event]:
        if order.worker in self.ended or order.worker in self.workers:
            return
        pid = 10_000 + self.number * self.world.slots + order.slot
        self.workers[order.worker] = Played(order.slot, pid)
        yield ev.WorkerStarted(
            worker=order.worker, node=self.node, slot=order.slot, pid=pid, address="127.0.0.1:1", store="127.0.0.1:2"
        )
        yield ev.WorkerWarm(worker=order.worker)

    def _answer(self, order: od.WorkerOrder, worker: Played) -> Iterator[ev.Event]:
        rank = worker.rank if worker.rank is not None else Rank(0)
        who: dict[str, Any] = {
            "job": order.job, "generation": order.generation, "worker": order.worker, "rank": rank,
        }  # fmt: skip
        match order:
            case od.Assign(replacement=replacement, examples=examples):
                worker.fresh = replacement
                yield ev.WorkerJoined(worker=order.worker, job=order.job, rank=rank)
                if examples:  # the target of a move
                    yield ev.WorkerPrepared(worker=order.worker)
                if not replacement:
                    worker.point = Point(0)
                    yield ev.WorkerReady(**who, point=None)
            case od.Interrupt() | od.Halt():
                stands = None if worker.fresh else self.world.point()
                pending = None if stands is None else stands.after_step()
                yield ev.WorkerReported(**who, committed=stands, phase=WorkerPhase.COMPUTING, pending=pending)
            case od.Decide(point=point, hand_over=hand_over):
                yield ev.WorkerReady(**who, point=point, private=b"private" if hand_over else b"")
            case od.Recall(ward=ward, point=point):
                yield ev.RecordKept(**who, ward=ward, point=point, private=b"private")
            case od.Replay(point=point):
                yield ev.WorkerReady(**who, point=point)
            case od.Reconfigure():
                yield ev.WorkerReconfigured(**who)
            case od.Restore(point=point, sources=sources):
                worker.fresh = False
                yield ev.StateRestored(**who, point=point, sources=(sources[0].rank,), digest="x", size=1 << 20)
            case od.Resume():
                yield ev.WorkerResumed(**who)

    # ------------------------------------------------------------ what happens to it

    async def beat(self) -> None:
        """A sign of life as often as the orchestrator wants it."""
        await asyncio.sleep((self.number % 50) / 100)
        while not self.lost:
            if self._socket is not None and self.attached and not self._socket.closed:
                beat = Beat(node=self.node, incarnation=self.incarnation, samples=tuple(self._samples()))
                with suppress(ConnectionError):
                    await self._socket.send_bytes(encode(BeatFrame(beat, time.monotonic_ns() // 1_000_000)))
            await asyncio.sleep(self._beat_s)

    def _samples(self) -> Iterator[Sample]:
        at = self.world.point()
        for name, one in self.workers.items():
            yield Sample(
                worker=name,
                rank=one.rank,
                generation=one.generation,
                point=at if one.rank is not None else None,
                phase=WorkerPhase.COMPUTING,
                phase_ms=10,
                step_ms=1000 * STEP_S,
                collectives=at.step,
                beat_ms=3,
                process="R",
                cpu_ms=int(time.monotonic() * 900) % 1_000_000_000,
            )

    async def kill(self, slot: int) -> None:
        """The worker in this slot ends, and leaves its page."""
        name = next(name for name, one in self.workers.items() if one.slot == slot and one.rank is not None)
        self.workers.pop(name)
        self.ended.add(name)
        at = self.world.point()
        private = (ev.PrivateRecord(at, b"p"), ev.PrivateRecord(at.after_step(), b"p"))
        await self.tell(ev.WorkerExited(worker=name, node=self.node, signal=9, cause="SIGKILL", private=private))

    async def echo(self) -> None:
        """All its workers tell that their collective failed, as those of a lost peer do."""
        said = [
            ev.CollectiveFailed(
                worker=name, job=JOB, rank=one.rank, generation=one.generation, summary="connection closed by peer"
            )
            for name, one in self.workers.items()
            if one.rank is not None
        ]
        if said:
            await self.tell(*said)

    async def vanish(self) -> None:
        """The node is gone with all that ran there."""
        self.lost = True
        if self._socket is not None:
            await self._socket.close()


class Troupe:
    """The players of one process, and what the bench asks of them."""

    def __init__(self, world: World, numbers: range) -> None:
        self.world = world
        self.players = {number: Player(world, number) for number in numbers}

    async def act(self, pipe: Connection, url: str, token: str) -> None:
        """Play until told to stop."""
        loop = asyncio.get_running_loop()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            tasks: list[asyncio.Task[None]] = []
            for player in self.players.values():
                tasks.append(asyncio.create_task(player.play(session, url, token)))
                tasks.append(asyncio.create_task(player.beat()))
                if len(tasks) % 64 == 0:
                    await asyncio.sleep(0.02)
            stopped = False
            while not stopped:
                word, *more = await loop.run_in_executor(None, pipe.recv)
                answer = await self._asked(word, more)
                pipe.send(answer)
                stopped = word == "stop"
            for task in tasks:
                task.cancel()

    async def _asked(self, word: str, more: list[Any]) -> object:
        known: dict[str, Callable[[], object]] = {
            "attached": lambda: sum(one.attached for one in self.players.values()),
            "seen": lambda: self.world.seen,
            "counts": lambda: (self.world.frames, self.world.events, self.world.repeats, self.world.reconnects),
            "stop": lambda: None,
        }
        if word in known:
            return known[word]()
        if word == "stand":  # at the same point in all processes
            self.world.at, self.world.began_s = Point(more[0]), 0.0
        elif word == "train":
            self.world.began_s = more[0]
        elif word == "kill":
            for number, slot in more[0]:
                if number in self.players:
                    await self.players[number].kill(slot)
        elif word == "echo":
            for player in self.players.values():
                await player.echo()
        elif word == "vanish":
            for number in more[0]:
                if number in self.players:
                    await self.players[number].vanish()
        return time.monotonic()


def perform(pipe: Connection, url: str, token: str, numbers: range, nodes: int, slots: int) -> None:
    """The process."""
    asyncio.run(Troupe(World(nodes, slots), numbers).act(pipe, url, token))
