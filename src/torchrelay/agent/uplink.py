"""Uplink: the agent's connection to the orchestrator. Tries for ever; no event is lost on the way."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from torchrelay.agent.allegiance import Allegiance
from torchrelay.protocol.health.pulses import Beat
from torchrelay.protocol.messages.events import Event, OnceRecorded, RecordKept, WorkerExited, WorkerReady, age_event
from torchrelay.protocol.succession.succession import Succession
from torchrelay.wire.messages.channel import (
    AGENT_PATH,
    Ack,
    Ask,
    Attach,
    Attached,
    BeatFrame,
    EventFrame,
    EventsFrame,
    Known,
    NetworkFrame,
    Note,
    OrderFrame,
    OutputFrame,
    Pace,
    Refused,
    ToAgent,
    Vote,
    decode_to_agent,
)
from torchrelay.wire.messages.codec import MAX_MESSAGE, WireError, encode
from torchrelay.wire.messages.prompt import resume_soon
from torchrelay.wire.trust.passes import Role

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
HANDSHAKE_S = 5.0
# A peer that answers no ping for half of this is gone, although its connection says otherwise.
PING_S = 10.0
PINGED_BEATS = 4  # the same in beats, where another orchestrator may take its place
UNIX = "unix:"  # in place of a URL: the path of a socket
UNAUTHORIZED = (401, 403)
MOST_OUTPUT = 64  # frames of output that wait to be sent, before no more are made
MOST_TOGETHER = 64  # events in one frame
BULKY = (WorkerExited, RecordKept, OnceRecorded)  # they have bytes of the script's: each goes alone


class Rejected(RuntimeError):
    """The orchestrator does not take this agent: a wrong token, another version, a node that is there already."""


class Lost(ConnectionError):
    """The connection ended."""


@dataclass(frozen=True, slots=True)
class Kept:
    """An event until it is acknowledged. `at_ns`: when it happened, or when it was told."""

    seq: int
    event: Event
    at_ns: int

    def aged(self, now_ns: int) -> Event:
        """The event, so much later as it has waited here."""
        return age_event(self.event, (now_ns - self.at_ns) // 1_000_000)


def framed(some: Sequence[Kept], now_ns: int) -> bytes:
    """One frame for events that follow one another."""
    events, sent_ms = tuple(kept.aged(now_ns) for kept in some), now_ns // 1_000_000
    if len(events) == 1:
        return encode(EventFrame(some[0].seq, events[0], sent_ms))  # type: ignore[arg-type]  # only events of the union
    return encode(EventsFrame(some[0].seq, events, sent_ms))  # type: ignore[arg-type]


def together(kept: Iterable[Kept]) -> Iterator[list[Kept]]:
    """Events in the order in which they were told, those in one list that go in one frame."""
    some: list[Kept] = []
    for one in kept:
        if some and (is_bulky(one.event) or is_bulky(some[-1].event) or len(some) == MOST_TOGETHER):
            yield some
            some = []
        some.append(one)
    if some:
        yield some


def is_bulky(event: Event) -> bool:
    return isinstance(event, BULKY) or (isinstance(event, WorkerReady) and bool(event.private))


class Uplink:
    """Connects, attaches, sends events and beats, and hands down what the orchestrator says.

    where       the orchestrator's URL, or `unix:PATH`; asked before every attempt, as it may come back elsewhere
    attach      makes the Attach for a new connection
    beat        makes the beat that is due
    on_message  is called, from the event loop, with everything but Ack and Refused
    on_acked    is called with every event once it is in the journal
    allegiance  which orchestrator is obeyed
    tls         what is shown to it, and asked of it, at an https URL
    vote        answers a head that proposes, and a candidate that asks; None: this agent is no voter
    found       is called when an orchestrator has welcomed us
    silent      is called when nothing came back from where an orchestrator may be
    told        is called with what is known where nobody acts, or acts any more
    may_move    whether another orchestrator may take this one's place
    handshake_s  how long an orchestrator may take to answer
    door_s      how long to wait where one may become head
    """

    def __init__(
        self,
        *,
        where: Callable[[], str],
        token: Callable[[], str],
        attach: Callable[[], Attach],
        beat: Callable[[], Beat],
        on_message: Callable[[ToAgent], None],
        on_acked: Callable[[Event], None],
        allegiance: Allegiance | None = None,
        tls: ssl.SSLContext | None = None,
        vote: Callable[[Note | Ask], Vote] | None = None,
        found: Callable[[], None] = lambda: None,
        silent: Callable[[], None] = lambda: None,
        told: Callable[[Succession], None] = lambda _: None,
        may_move: Callable[[], bool] = lambda: False,
        handshake_s: Callable[[], float] = lambda: HANDSHAKE_S,
        door_s: Callable[[], float] = lambda: HANDSHAKE_S,
    ) -> None:
        self._vote = vote
        self._found = found
        self._silent, self._told = silent, told
        self._may_move = may_move
        self._handshake_s, self._door_s = handshake_s, door_s
        self._heard = 0  # frames
        self._votes: deque[Vote] = deque()
        self._where = where
        self._token = token
        self._attach = attach
        self._beat = beat
        self._on_message = on_message
        self._on_acked = on_acked
        self._kept: deque[Kept] = deque()
        self._seq = 0
        self._sent = 0  # the newest number sent on this connection
        self._news: NetworkFrame | None = None  # the newest that was not sent
        self._beat_s = 0.5
        self._more = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        # Cleared by chaos: as if no packet came through, in either direction.
        self.open = asyncio.Event()
        self.open.set()
        self.connected = False
        self._ever = False
        self._trouble = ""
        self.allegiance = allegiance or Allegiance()
        self._tls = tls
        self._output: deque[OutputFrame] = deque()

    def tell(self, event: Event, at_ns: int | None = None) -> None:
        """Send an event; keep it, and send it again if need be, until it is acknowledged."""
        self._seq += 1
        self._kept.append(Kept(self._seq, event, time.monotonic_ns() if at_ns is None else at_ns))
        self._empty.clear()
        self._more.set()

    def show(self, news: NetworkFrame) -> None:
        """Send what is for people to see. Only the newest: who was away does not need what was before."""
        self._news = news
        self._more.set()

    def print(self, frame: OutputFrame) -> None:
        """Send lines of a worker. They are not kept: the log holds them, and `Attached` says what has come of it."""
        self._output.append(frame)
        self._more.set()

    def takes_output(self) -> bool:
        """Whether lines would be sent soon: what comes otherwise stays in its log, and is read later."""
        return self.connected and len(self._output) < MOST_OUTPUT

    def beat_s(self) -> float:
        """Seconds between two beats, as the orchestrator wants it."""
        return self._beat_s

    def waiting(self) -> tuple[Event, ...]:
        """The events that are not acknowledged yet, oldest first."""
        return tuple(kept.event for kept in self._kept)

    async def flush(self, deadline_s: float) -> bool:
        """Wait until all events are acknowledged; False at the deadline, or if there is no connection.

        Lines that were to be printed have gone out by then.
        """
        try:
            async with asyncio.timeout(deadline_s if self.connected else 0):
                while self._output:  # it has no acknowledgement
                    self._more.set()
                    await asyncio.sleep(0)
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Keep connected, for ever. Raises `Rejected` if the orchestrator has never taken us and will not."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self.open.wait()
                url, connector = way_to(self._where(), self._tls)
                async with aiohttp.ClientSession(connector=connector) as session:
                    await self._connect(session, url)
            except Rejected as error:
                if not self._ever:
                    raise
                self._complain(str(error))
            except (aiohttp.ClientError, OSError, TimeoutError, WireError, ValueError) as error:
                self._complain(f"{type(error).__name__}: {error}")
            pause_s = FIRST_PAUSE_S if self.connected else min(2 * pause_s, LONGEST_PAUSE_S)
            self.connected = False
            await asyncio.sleep(pause_s)

    def _complain(self, trouble: str) -> None:
        """Say it once, not with every attempt."""
        if self.connected:
            logger.warning("lost the orchestrator: %s", trouble)
        elif trouble != self._trouble:
            logger.warning("cannot reach the orchestrator: %s", trouble)
        self._trouble = trouble

    async def _connect(self, session: aiohttp.ClientSession, url: str) -> None:
        """One connection, from its beginning to its end. Always raises in the end."""
        headers = {"Authorization": f"Bearer {self._token()}"}
        try:
            async with self._answering(self._handshake_s()):
                socket = await session.ws_connect(
                    url,
                    headers=headers,
                    heartbeat=PING_S,
                    autoping=False,
                    max_msg_size=MAX_MESSAGE,
                    server_hostname=Role.ORCHESTRATOR.server_name if url.startswith("https:") else None,
                )
        except aiohttp.WSServerHandshakeError as error:
            if error.status in UNAUTHORIZED:
                raise Rejected(f"{url} does not accept our token (status {error.status})") from error
            raise
        async with socket:
            resume_soon(socket.get_extra_info("socket"))
            await socket.send_bytes(encode(self._attach()))
            self._votes.clear()
            async with asyncio.timeout(HANDSHAKE_S if self._vote is None else self._door_s()):
                first = await self._wait_at_the_door(socket)
            if isinstance(first, Refused):
                raise Rejected(first.reason)
            if not isinstance(first, Attached):
                raise WireError(f"expected Attached, not {type(first).__name__}")
            self.allegiance.accept(first.journal, first.lease)
            logger.info("attached to %s (lease %d)", url, first.lease)
            self.connected = self._ever = True
            self._trouble = ""
            self._found()
            self._beat_s = first.beat_ms / 1000
            self._sent = 0  # all that is not acknowledged goes out again
            came = {one.log for one in first.printed}  # what was not sent of these is read again from where they are
            self._output = deque(frame for frame in self._output if frame.upto.log not in came)
            self._on_message(first)
            await self._talk(socket)

    @asynccontextmanager
    async def _answering(self, limit_s: float) -> AsyncIterator[None]:
        """Whoever does not answer within this time is silent. Raises TimeoutError."""
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            self._silent()
            raise

    async def _wait_at_the_door(self, socket: aiohttp.ClientWebSocketResponse) -> ToAgent:
        """The first message that is no question of a candidate, or of a head that has not begun to act."""
        while isinstance(message := await self._receive(socket), Note | Ask | Known):
            if isinstance(message, Known):
                self._told(message.succession)
            elif self._vote is not None:
                await socket.send_bytes(encode(self._vote(message)))
        return message

    async def _talk(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Send and receive until either ends."""
        sending = asyncio.create_task(self._send(socket))
        hearing = asyncio.create_task(self._hear(socket))
        listening = asyncio.create_task(self._listen_for_silence(socket))
        try:
            done, _ = await asyncio.wait((sending, hearing, listening), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (sending, hearing, listening):
                task.cancel()
            await asyncio.gather(sending, hearing, listening, return_exceptions=True)

    async def _listen_for_silence(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Where another one may take its place, it answers soon, or is lost. Raises `Lost`."""
        while True:
            half_s = PINGED_BEATS * self._beat_s / 2
            await asyncio.sleep(half_s)
            if self._may_move():
                before = self._heard
                await socket.ping()
                await asyncio.sleep(half_s)
                if self._heard == before:
                    raise Lost(f"the orchestrator has not answered for {half_s:g} s")

    async def _receive(self, socket: aiohttp.ClientWebSocketResponse) -> ToAgent:
        """The next message; raises as `message_in`."""
        while True:
            frame = await socket.receive()
            self._heard += 1
            if frame.type is aiohttp.WSMsgType.PING:
                await socket.pong(frame.data)
            elif frame.type is not aiohttp.WSMsgType.PONG:
                return message_in(socket, frame)

    async def _send(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        due = time.monotonic()
        while True:
            await self.open.wait()
            self._more.clear()
            for some in list(together(kept for kept in self._kept if kept.seq > self._sent)):
                await socket.send_bytes(framed(some, time.monotonic_ns()))
                self._sent = some[-1].seq
            while self._votes:
                await socket.send_bytes(encode(self._votes.popleft()))
            if self._news is not None:
                news, self._news = self._news, None
                await socket.send_bytes(encode(news))
            while self._output:
                await socket.send_bytes(encode(self._output.popleft()))
            if time.monotonic() >= due:
                await socket.send_bytes(encode(BeatFrame(self._beat(), time.monotonic_ns() // 1_000_000)))
                due = time.monotonic() + self._beat_s
            try:
                async with asyncio.timeout(max(0.0, due - time.monotonic())):
                    await self._more.wait()
            except TimeoutError:
                pass  # a beat is due

    async def _hear(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            message = await self._receive(socket)
            await self.open.wait()
            match message:
                case Ack(seq=seq):
                    self._acked(seq)
                case Pace(beat_ms=beat_ms):
                    self._beat_s = beat_ms / 1000
                case Refused(reason=reason):
                    raise Rejected(reason)
                case Known(succession=known):
                    self._told(known)
                case Note() | Ask():
                    if self._vote is not None:
                        self._votes.append(self._vote(message))
                        self._more.set()
                case OrderFrame(lease=lease):
                    self.allegiance.check(lease)
                    self._on_message(message)
                case _:
                    self._on_message(message)

    def _acked(self, seq: int) -> None:
        while self._kept and self._kept[0].seq <= seq:
            self._on_acked(self._kept.popleft().event)
        if not self._kept:
            self._empty.set()


def way_to(where: str, tls: ssl.SSLContext | None = None) -> tuple[str, aiohttp.BaseConnector]:
    """The URL of the agents' channel, and what leads there."""
    if where.startswith(UNIX):
        return "http://localhost" + AGENT_PATH, aiohttp.UnixConnector(where.removeprefix(UNIX))
    return where.rstrip("/") + AGENT_PATH, aiohttp.TCPConnector() if tls is None else aiohttp.TCPConnector(ssl=tls)


def message_in(socket: aiohttp.ClientWebSocketResponse, frame: aiohttp.WSMessage) -> ToAgent:
    """What was said. Raises `Lost` when the connection ends, `WireError` for what is no message."""
    if frame.type is aiohttp.WSMsgType.BINARY:
        return decode_to_agent(frame.data)
    if frame.type is aiohttp.WSMsgType.TEXT:
        raise WireError("the orchestrator sent text, not a message")
    raise Lost(f"the orchestrator closed the connection ({frame.type.name}, code {socket.close_code})")
