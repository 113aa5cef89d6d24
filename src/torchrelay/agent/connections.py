"""Connections of this node's workers: the unix socket on which they call, and what they have said of themselves."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import structs

from torchrelay.agent.workers.forks import Child
from torchrelay.agent.workers.processes import Processes
from torchrelay.protocol.messages.events import OnceRecorded, WorkerJoined, WorkerSeen, WorkerStarted, WorkerWarm
from torchrelay.protocol.messages.ids import Generation, JobId, Rank, WorkerId
from torchrelay.protocol.messages.orders import Assign, PassOn, WorkerOrder
from torchrelay.wire.messages.codec import WireError, encode
from torchrelay.wire.messages.framing import Closed, frame, read_frame, write_frame
from torchrelay.wire.messages.worker_frames import Attended, FromWorker, Welcome, decode_from_worker

logger = logging.getLogger(__name__)

# How long a caller may be unknown: its forkserver says its number within a millisecond of its birth.
KNOWN_WITHIN_S = 5.0
# Orders to a worker that does not read (it is stopped) are dropped beyond this; they are repeated anyway.
MAX_UNREAD = 4 << 20
_ATTENDED = frame(encode(Attended()))


@dataclass
class Known:
    """What a worker has said of itself, and what it was told."""

    address: str = ""
    store: str = ""
    warm: bool = False
    job: JobId | None = None
    rank: Rank | None = None
    generation: Generation = Generation(0)


@dataclass
class WorkerConnection:
    """One worker's connection."""

    child: Child
    writer: asyncio.StreamWriter
    welcomed: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)


class WorkerConnections:
    """Serves the workers of one node.

    `welcome` makes a worker's Welcome; it may wait until it is known. `on_event` is called with each event.
    """

    def __init__(
        self,
        path: Path,
        processes: Processes,
        *,
        welcome: Callable[[Child], Awaitable[Welcome]],
        on_event: Callable[[FromWorker], None],
    ) -> None:
        self.path = path
        self._processes = processes
        self._welcome = welcome
        self._on_event = on_event
        self._connections: dict[WorkerId, WorkerConnection] = {}
        self._known: dict[WorkerId, Known] = {}
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen. A socket file that an earlier agent left is replaced."""
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))
        os.chmod(self.path, 0o600)

    async def close(self) -> None:
        """Hang up on everybody."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections.values()):
            connection.writer.close()
        self.path.unlink(missing_ok=True)

    def pass_on(self, order: WorkerOrder) -> bool:
        """Give a worker its order; False, and dropped, if it is not connected or does not read."""
        connection = self._connections.get(order.worker)
        if connection is None or not connection.welcomed or connection.writer.is_closing():
            return False
        if connection.writer.transport.get_write_buffer_size() > MAX_UNREAD:
            return False
        known = self._known.setdefault(order.worker, Known())
        known.job = order.job
        known.generation = max(known.generation, order.generation)
        if isinstance(order, Assign):
            known.rank = order.rank
        connection.writer.write(frame(encode(order)))
        return True

    def say(self, order: PassOn) -> None:
        """Tell a worker of a signal that is passed on to it, if it is connected."""
        connection = self._connections.get(order.worker)
        if connection is not None and connection.welcomed and not connection.writer.is_closing():
            connection.writer.write(frame(encode(order)))

    def attend(self) -> None:
        """Tell all workers that the orchestrator is there."""
        for connection in self._connections.values():
            # One that does not read has not forgotten the last time either.
            writer = connection.writer
            if connection.welcomed and not writer.is_closing() and not writer.transport.get_write_buffer_size():
                writer.write(_ATTENDED)

    def rank_of(self, worker: WorkerId) -> Rank | None:
        known = self._known.get(worker)
        return known.rank if known is not None else None

    def seen(self, child: Child) -> WorkerSeen:
        """A worker as an orchestrator should adopt it."""
        known = self._known.get(child.worker, Known())
        return WorkerSeen(
            worker=child.worker,
            slot=child.slot,
            pid=child.pid,
            warm=known.warm,
            job=known.job or child.job,
            rank=known.rank,
            generation=known.generation,
            address=known.address,
            store=known.store,
        )

    async def last_words(self, worker: WorkerId, deadline_s: float) -> None:
        """Wait until all that an ended worker has written is heard: what it said comes before its end."""
        connection = self._connections.get(worker)
        if connection is not None:
            try:
                async with asyncio.timeout(deadline_s):
                    await connection.done.wait()
            except TimeoutError:
                logger.warning("the link of %s stays open after its end: something inherited it", worker)
                connection.writer.close()

    def forget(self, worker: WorkerId) -> None:
        self._known.pop(worker, None)

    # ------------------------------------------------------------ one worker

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            child = await self._identify(writer)
            if child is not None:
                await self._converse(child, reader, writer)
        finally:
            writer.close()

    async def _identify(self, writer: asyncio.StreamWriter) -> Child | None:
        """Who calls, by what the kernel says: only processes that our forkserver has started."""
        peer: socket.socket = writer.get_extra_info("socket")
        pid, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        child = await self._processes.child_of(pid, KNOWN_WITHIN_S) if uid == os.getuid() else None
        if child is None:
            logger.warning("hung up on process %d of user %d: not a worker of ours", pid, uid)
        return child

    async def _converse(self, child: Child, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = WorkerConnection(child, writer)
        before = self._connections.get(child.worker)
        if before is not None:
            before.writer.close()  # it has called again: the older connection is dead
        self._connections[child.worker] = connection
        try:
            await write_frame(writer, encode(await self._welcome(child)))
            connection.welcomed = True
            while True:
                self._hear(child, decode_from_worker(await read_frame(reader)))
        except Closed:
            pass  # it ended, or calls again
        except WireError as error:
            logger.warning("hung up on worker %s: %s", child.worker, error)
        finally:
            connection.done.set()
            if self._connections.get(child.worker) is connection:
                del self._connections[child.worker]

    def _hear(self, child: Child, event: FromWorker) -> None:
        known = self._known.setdefault(child.worker, Known())
        if not isinstance(event, OnceRecorded) and event.worker != child.worker:
            raise WireError(f"speaks for {event.worker}")
        match event:
            case WorkerStarted():
                if (event.pid, event.slot) != (child.pid, child.slot):
                    raise WireError(f"says that it is process {event.pid} in slot {event.slot}")
                known.address, known.store = event.address, event.store
                event = structs.replace(event, job=child.job)  # a worker does not say for whom it runs
            case WorkerWarm():
                known.warm = True
            case WorkerJoined():
                known.job, known.rank = event.job, event.rank
            case _:
                pass
        self._on_event(event)
