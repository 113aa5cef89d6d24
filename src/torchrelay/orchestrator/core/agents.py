"""Agents: the orchestrator's end of the channel, and how late it hears what is said there. And that of heirs.

Each connection belongs to one agent; see `wire.messages.channel`.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

from aiohttp import WSMsgType, web
from msgspec import Struct

from torchrelay.orchestrator.core.service import Orchestrator
from torchrelay.orchestrator.core.traffic import Lateness
from torchrelay.orchestrator.store.journal import JournalUnavailable, Unwritable
from torchrelay.orchestrator.store.output import Output
from torchrelay.protocol.messages.events import (
    CollectiveFailed,
    Event,
    NodeJoined,
    OnceRecorded,
    ParkFailed,
    ReconfigureFailed,
    RecordKept,
    ReplicasDiffer,
    RestoreFailed,
    StateRestored,
    TaintCleared,
    TaintSet,
    WorkerExited,
    WorkerFinished,
    WorkerJoined,
    WorkerParked,
    WorkerPrepared,
    WorkerRaised,
    WorkerReady,
    WorkerReconfigured,
    WorkerReported,
    WorkerResumed,
    WorkerStarted,
    WorkerWarm,
    age_event,
)
from torchrelay.protocol.messages.ids import SAFE_ID, NodeId
from torchrelay.protocol.succession.succession import Place
from torchrelay.wire.files.launch import FILE
from torchrelay.wire.messages.channel import (
    VERSION,
    Ack,
    Attach,
    Attached,
    BeatFrame,
    EventFrame,
    EventsFrame,
    Facts,
    NetworkFrame,
    OutputFrame,
    Refused,
    ToAgent,
    ToOrchestrator,
    Vote,
    decode_to_orchestrator,
)
from torchrelay.wire.messages.codec import MAX_MESSAGE, WireError, encode
from torchrelay.wire.messages.inheritance import PIECE, Bequest, Holds, Inherit, Part, Piece, decode_from_heir
from torchrelay.wire.messages.pathnews import SOURCE
from torchrelay.wire.messages.prompt import resume_soon
from torchrelay.wire.trust.passes import Role, pass_of

log = logging.getLogger("torchrelay.orchestrator")

ATTACH_S = 10.0  # how long a new connection may take to say who it is
# An agent that reads so slowly that so many bytes wait for it is disconnected; it comes back.
MAX_UNREAD = 64 << 20
FINAL_BINARY = 0x82
# Another version computes other bits, or does not understand what it is sent.
MUST_BE_THE_SAME = ("torch", "torchrelay")
MOST_REMARKS = 16
MORE_REMARKS = "further machines differ, too: the orchestrator's log names them"

# What an agent may tell. Everything else is decided here, and who claims it is not an agent of ours.
TELLABLE: tuple[type[Event], ...] = (
    WorkerStarted, WorkerWarm, WorkerJoined, WorkerExited, WorkerRaised, CollectiveFailed, ReplicasDiffer,
    OnceRecorded, WorkerReported,
    WorkerReady, WorkerReconfigured, ReconfigureFailed, StateRestored, RestoreFailed, WorkerResumed, WorkerFinished,
    WorkerPrepared, RecordKept, WorkerParked, ParkFailed, TaintSet, TaintCleared,
)  # fmt: skip


class Line:
    """One connection. What is sent is written at once, or waits in the socket's buffer: nobody waits for a slow one,
    and to tell thousands costs little more than thousands of system calls. `node`: at its other end."""

    over = "connection closed"  # what is logged then

    def __init__(self, socket: web.WebSocketResponse, transport: asyncio.WriteTransport, node: NodeId) -> None:
        self.node = node
        self._socket = socket
        self._transport = transport
        self._most = MAX_UNREAD
        self._reason = ""
        self._ended = asyncio.Event()

    @property
    def closed(self) -> bool:
        """Whether nothing that still arrives counts: what was lost before it must come first."""
        return bool(self._reason)

    def write(self, frame: Callable[[], bytes]) -> None:
        """Write a message; never waits, never fails. After `close` nothing more is said."""
        if self._reason or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > self._most:
            self.close("it does not read what it is sent")
            self._transport.abort()  # it would not read the end either
            return
        try:
            self._transport.write(frame())
        except WireError as error:
            self.close(str(error))

    def close(self, reason: str) -> None:
        """End the connection after what was sent before. Who is at its other end comes back if it can."""
        if not self._reason:
            self._reason = reason
            self._ended.set()

    async def end(self) -> None:
        """Wait until the connection is to be closed, and close it."""
        await self._ended.wait()
        log.info("%s: %s: %s", self.node, self.over, self._reason)
        await self._socket.close(message=self._reason.encode()[:120])


class AgentConnection(Line):
    """One connection of one agent."""

    def __init__(self, socket: web.WebSocketResponse, transport: asyncio.WriteTransport, attach: Attach) -> None:
        super().__init__(socket, transport, attach.node)
        self.incarnation = attach.incarnation
        self.voter = attach.voter
        self._written = 0  # the last event that is in the journal and not acknowledged yet

    def send(self, message: ToAgent) -> None:
        """As `write`."""
        self.write(lambda: frame_of(message))

    def acknowledge(self, seq: int) -> None:
        """This event and those before it are in the journal. What is written in one go is acknowledged in one."""
        if not self._written:
            asyncio.get_running_loop().call_soon(self._acknowledge_all)
        self._written = max(seq, self._written)

    def _acknowledge_all(self) -> None:
        self.send(Ack(self._written))
        self._written = 0


_last: tuple[ToAgent, bytes] | None = None


def frame_of(message: ToAgent) -> bytes:
    """Its frame. What is said to all agents, one after the other, is encoded once. Raises `WireError`."""
    global _last
    if _last is None or _last[0] is not message:
        _last = message, as_binary(encode(message))
    return _last[1]


def as_binary(data: bytes) -> bytes:
    """One message as a WebSocket frame of a server: final, binary, not masked (RFC 6455, section 5.2)."""
    size = len(data)
    if size < 126:
        return struct.pack("!BB", FINAL_BINARY, size) + data
    if size < 1 << 16:
        return struct.pack("!BBH", FINAL_BINARY, 126, size) + data
    return struct.pack("!BBQ", FINAL_BINARY, 127, size) + data


def is_from_here(transport: asyncio.BaseTransport) -> bool:
    """Whether who is at the other end is on this machine."""
    ours, theirs = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
    return isinstance(ours, tuple) and isinstance(theirs, tuple) and ours[0] == theirs[0]


class Sameness:
    """What the machines of a run have in common: the first one that attached is what the others are compared with."""

    def __init__(self) -> None:
        self._first: tuple[NodeId, Facts] | None = None
        self._differing: dict[NodeId, str] = {}

    @property
    def remarks(self) -> tuple[str, ...]:
        """What differs, for people."""
        found = tuple(self._differing.values())
        return found if len(found) <= MOST_REMARKS else (*found[:MOST_REMARKS], MORE_REMARKS)

    def compare(self, node: NodeId, facts: Facts | None) -> str:
        """Why this machine cannot be one of them; empty if it can. What differs otherwise becomes a remark."""
        self._differing.pop(node, None)
        if facts is None:
            return ""
        if self._first is None or self._first[0] == node:
            self._first = node, facts
            return ""
        first, known = self._first
        differ = facts.differing(known)
        found = {
            name: f"{name} is {printable(ours)} on {node} and {printable(theirs)} on {first}"
            for name, ours, theirs in differ
        }
        if refused := [text for name, text in found.items() if name in MUST_BE_THE_SAME]:
            return f"{', '.join(refused)}: install the same on all machines"
        if found:
            self._differing[node] = ", ".join(found.values())
            log.warning("%s", self._differing[node])
        return ""


def printable(text: str) -> str:
    """What an agent says of itself, as it may stand on a terminal."""
    return text if text.isprintable() else ascii(text)


async def serve_agent(
    request: web.Request, service: Orchestrator, output: Output | None = None, sameness: Sameness | None = None
) -> web.StreamResponse:
    """One connection, from `Attach` to its end. Whatever is not a message of an agent ends it.

    `output`: where lines of workers on other machines go. `sameness`: what these machines have in common.
    """
    if service.degraded:
        raise web.HTTPServiceUnavailable(text=service.degraded)
    socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE, compress=False)
    await socket.prepare(request)
    resume_soon(socket.get_extra_info("socket"))
    try:
        async with asyncio.timeout(ATTACH_S):
            attach = decode_to_orchestrator(await socket.receive_bytes())
    except (TimeoutError, TypeError, WireError) as error:
        log.warning("connection from %s said no Attach: %s", request.remote, error)
        await socket.close()
        return socket
    refusal = refuse(attach)
    taken = isinstance(attach, Attach) and service.occupied(attach.node, attach.incarnation)  # refused by `converse`
    if isinstance(attach, Attach) and not refusal and sameness is not None and not taken:
        refusal = sameness.compare(attach.node, attach.facts)
    if refusal or not isinstance(attach, Attach):
        log.warning("connection from %s refused: %s", request.remote, refusal)
        await socket.send_bytes(encode(Refused(reason=refusal)))
        await socket.close()
        return socket
    if request.transport is None:
        return socket  # it is gone already
    connection = AgentConnection(socket, request.transport, attach)
    if service.heirs is not None and is_from_here(request.transport):
        service.heirs.own.add(attach.node)
    ending = asyncio.create_task(connection.end())
    try:
        await converse(socket, connection, attach, service, output)
    except (WireError, JournalUnavailable, Unwritable) as error:
        log.warning("%s: disconnected: %s", connection.node, error)
    finally:
        service.detach(connection)
        connection.close("the connection is gone")
        await ending
    return socket


def refuse(attach: object) -> str:
    """Why this is no agent that we could talk to; empty if it is."""
    if not isinstance(attach, Attach):
        return f"the first message was {type(attach).__name__}, not Attach"
    if attach.version != VERSION:
        return f"the agent speaks version {attach.version}, the orchestrator {VERSION}: install the same torchrelay"
    if not SAFE_ID.fullmatch(attach.node):
        return f"{printable(attach.node[:100])} is no name for a node: use letters, digits, '.', '_' and '-'"
    if attach.voter and attach.voter.rpartition(".")[0] != attach.node:
        return f"{printable(attach.voter[:100])} is not the name under which {attach.node} votes"
    return "" if attach.slots > 0 else "a node needs at least one slot"


async def converse(
    socket: web.WebSocketResponse,
    connection: AgentConnection,
    attach: Attach,
    service: Orchestrator,
    output: Output | None = None,
) -> None:
    """Welcome an agent and hear it until the connection ends."""
    if service.occupied(attach.node, attach.incarnation):
        connection.close(f"another agent of {attach.node} is attached and alive: give each node a name of its own")
        return
    taints = service.cluster.taints.values()
    tainted = tuple((one.slot, one.key) for one in taints if (one.node, one.source) == (attach.node, SOURCE))
    connection.send(
        Attached(
            jobs=tuple(service.terms(job.spec) for job in service.cluster.jobs.values()),
            beat_ms=service.failure_detector.beat_ms,
            lease=service.journal.lease,
            journal=service.journal.name,
            tainted=tainted,
            printed=() if output is None else output.printed(attach.node),
        )
    )
    joined = NodeJoined(node=attach.node, incarnation=attach.incarnation, slots=attach.slots, workers=attach.workers)
    # It is heard from now on, and not only when that is written: its vote may be what everything waits for.
    service.attach(connection, joined).add_done_callback(partial(welcome, service, connection, len(attach.workers)))
    lateness = Lateness()
    async for raw in socket:
        if connection.closed:
            return
        if raw.type is not WSMsgType.BINARY:
            raise WireError(f"a frame of type {raw.type.name}")
        hear_message(connection, service, output, lateness, decode_to_orchestrator(raw.data))


def welcome(service: Orchestrator, connection: AgentConnection, workers: int, written: asyncio.Future[int]) -> None:
    """Its node is in the journal, or cannot be."""
    if written.cancelled():
        return
    if (error := written.exception()) is not None:
        connection.close(str(error))
        return
    service.remind(connection)
    log.info("%s attached as %s with %d workers", connection.node, connection.incarnation, workers)


def hear_message(
    connection: AgentConnection,
    service: Orchestrator,
    output: Output | None,
    lateness: Lateness,
    message: ToOrchestrator,
) -> None:
    """One message after `Attach`."""
    match message:
        case EventFrame() as frame:
            hear_agent(connection, service, frame, lateness.of(frame.sent_ms))
        case EventsFrame() as frame:
            late_ms = lateness.of(frame.sent_ms)
            for each in frame.each():
                hear_agent(connection, service, each, late_ms)
        case BeatFrame(beat, sent_ms):
            lateness.of(sent_ms)
            service.beat(connection, beat)
        case NetworkFrame(news):
            service.show_network(connection, news)
        case OutputFrame() as frame:
            if output is not None:
                output.write(connection.node, frame)  # what is no worker's log is left out
        case Vote() as vote:
            if service.heirs is not None and vote.voter == connection.voter:
                service.heirs.hear_vote(vote)
        case Attach():
            raise WireError("Attach said twice")


def hear_agent(connection: AgentConnection, service: Orchestrator, frame: EventFrame, late_ms: int) -> None:
    """One event. It is not awaited: the acknowledgement follows when it is on disk, the next event may come first."""
    event = frame.event
    if not isinstance(event, TELLABLE):
        raise WireError(f"an agent does not say {type(event).__name__}")
    if isinstance(event, TaintSet | TaintCleared) and event.node != connection.node:
        raise WireError(f"the agent of {connection.node} speaks of a taint of {event.node}")
    service.take(age_event(event, late_ms), partial(acknowledge, connection, frame.seq))


def acknowledge(connection: AgentConnection, seq: int, told: int | Exception) -> None:
    if isinstance(told, int):
        connection.acknowledge(seq)


# ---------------------------------------------------------------- heirs

# The head's end of the connection to an heir, which gets the journal and what else an orchestrator needs.


class HeirConnection(Line):
    """One heir."""

    over = "no more copies"

    def __init__(self, socket: web.WebSocketResponse, transport: asyncio.WriteTransport, place: Place) -> None:
        super().__init__(socket, transport, place.node)
        self.place = place

    def bequeath(self, bequest: Bequest, whole: bytes) -> None:
        """The journal as it is. It may be large, and is read as fast as the other end can write it down."""
        self._most += len(whole)
        self.send(bequest)
        for begin in range(0, len(whole), PIECE):
            self.send(Piece(whole[begin : begin + PIECE]))

    def send(self, message: Bequest | Piece | Part) -> None:
        """As `write`."""
        self.write(lambda: as_binary(encode(message)))


class Estate(Struct, frozen=True):
    """What an orchestrator has besides its journal. `slurm_job`: see `Bequest`; `launcher`, too."""

    run_dir: Path
    slurm_job: int = 0
    launcher: NodeId = NodeId("")


async def serve_heir(request: web.Request, service: Orchestrator, estate: Estate) -> web.StreamResponse:
    """One connection, from `Inherit` to its end. Whoever was not appointed gets nothing."""
    socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE, compress=False)
    await socket.prepare(request)
    resume_soon(socket.get_extra_info("socket"))
    heirs = service.heirs
    try:
        async with asyncio.timeout(ATTACH_S):
            said = decode_from_heir(await socket.receive_bytes())
    except (TimeoutError, TypeError, WireError) as error:
        log.warning("connection from %s said no Inherit: %s", request.remote, error)
        await socket.close()
        return socket
    known = heirs is not None and isinstance(said, Inherit) and heirs.known(said.node, said.copy, said.key)
    if heirs is None or not isinstance(said, Inherit) or not known or request.transport is None:
        log.warning("connection from %s refused: nobody has appointed it", request.remote)
        await socket.close()
        return socket
    connection = HeirConnection(socket, request.transport, Place(said.node, said.copy))
    ending = asyncio.create_task(connection.end())
    try:
        connection.bequeath(*bequest_of(service, estate))
        heirs.join(connection, service.journal.part, said.key)
        async for raw in socket:
            if raw.type is not WSMsgType.BINARY:
                raise WireError(f"a frame of type {raw.type.name}")
            held = decode_from_heir(raw.data)
            if not isinstance(held, Holds):
                raise WireError("Inherit said twice")
            if held.url and not connection.place.url:
                connection.place = Place(said.node, said.copy, held.url)
            heirs.hear_held(connection, held.part)
    except WireError as error:
        log.warning("%s: disconnected: %s", said.node, error)
    finally:
        heirs.leave(connection)
        connection.close("the connection is gone")
        await ending
    return socket


def bequest_of(service: Orchestrator, estate: Estate) -> tuple[Bequest, bytes]:
    """What an heir gets, and the journal as it is at this moment."""
    whole = service.journal.whole()
    bequest = Bequest(
        passes={role.value: pass_of(estate.run_dir, role).read_text() for role in Role},
        launch=(estate.run_dir / FILE).read_bytes(),
        part=service.journal.part,
        size=len(whole),
        patience_s=service.patience_s,
        slurm_job=estate.slurm_job,
        launcher=estate.launcher,
    )
    return bequest, whole
