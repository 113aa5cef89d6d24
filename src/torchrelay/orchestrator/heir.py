"""Heir: a process on another node than the head's. It copies the journal, and waits in its doorway to become head."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import ssl
from collections.abc import Callable
from pathlib import Path

import aiohttp
from msgspec import Struct

from torchrelay.api.endpoint import JOURNAL
from torchrelay.orchestrator.doorway import Doorway, at_the_door, url_of, wait_or_give_way
from torchrelay.orchestrator.store.parts import SUCCESSION, Copy, Row
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.succession.head import Head
from torchrelay.protocol.succession.succession import CopyId, Place, Succession
from torchrelay.wire.files.launch import FILE
from torchrelay.wire.messages.codec import MAX_MESSAGE, WireError, encode
from torchrelay.wire.messages.inheritance import HEIR_PATH, Bequest, Holds, Inherit, Part, Piece, ToHeir, decode_to_heir
from torchrelay.wire.messages.prompt import resume_soon
from torchrelay.wire.trust.passes import Role, client_context, parse_pass, pass_of, read_pass, write_pass

log = logging.getLogger("torchrelay.orchestrator")

COME_S = 30.0  # for the whole journal
PING_S = 10.0
FORSAKEN_S = 900.0  # without a head, and without anybody at the door


class NoBequest(Exception):
    """The head gives nothing: it has gone, or has appointed another one."""


class Terms(Struct, frozen=True):
    """What an heir is told by its agent."""

    node: NodeId
    copy: CopyId
    key: str
    url: str  # the head's
    held: Path  # the run's pass for agents
    host: str  # to listen on
    port: int
    run_dir: Path

    def __repr__(self) -> str:
        return f"Terms(node={self.node!r})"  # a key must not reach a log


class Inherited(Struct, frozen=True):
    """What it needs to act."""

    head: Head
    former: NodeId | None  # the node of the head that was lost
    port: int
    patience_s: float
    slurm_job: int
    launcher: NodeId


class Stream:
    """The connection to the head. Only one who may still become head follows it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self.over = False

    async def receive(self) -> ToHeir:
        """The next message. Raises `NoBequest`, `WireError`."""
        frame = await self._socket.receive()
        if frame.type is not aiohttp.WSMsgType.BINARY:
            raise NoBequest(f"the head closed the connection ({frame.type.name}: {frame.extra or frame.data or ''})")
        return decode_to_heir(frame.data)

    async def say(self, message: Inherit | Holds) -> None:
        await self._socket.send_bytes(encode(message))

    async def whole(self) -> tuple[Bequest, bytes]:
        """The journal as it was when the head began to send it."""
        bequest = await self.receive()
        if not isinstance(bequest, Bequest):
            raise WireError(f"expected Bequest, not {type(bequest).__name__}")
        data = bytearray()
        while len(data) < bequest.size:
            piece = await self.receive()
            if not isinstance(piece, Piece) or not piece.data:
                raise WireError(f"expected a piece of the journal, not {type(piece).__name__}")
            data += piece.data
        if len(data) != bequest.size:
            raise WireError(f"{len(data)} bytes of a journal of {bequest.size} came")
        return bequest, bytes(data)

    async def follow(self, copy: Copy, learn: Callable[[Succession], None]) -> None:
        """Write each part, and say so; until the connection ends, or this one asks for a lease itself."""
        while not self.over:
            part = await self.receive()
            if self.over:
                return
            if not isinstance(part, Part):
                raise WireError(f"expected a part of the journal, not {type(part).__name__}")
            rows = tuple(Row(kind, values) for kind, values in part.rows)
            copy.write(part.number, rows)
            if any(row.kind == "about" and row.values[0] == SUCCESSION for row in rows):
                known = copy.succession()
                assert known is not None, "it was just written"
                learn(known)
            await self.say(Holds(part=part.number))


async def inherit(terms: Terms) -> Inherited:
    """Copy the journal, and wait until this one is head. Raises `NoBequest`, `Superseded`, `WireError`, OSError."""
    context, token = client_context(terms.held), read_pass(terms.held).token
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session:
        socket = await connect(session, terms.url, context)
        async with socket:
            stream = Stream(socket)
            async with asyncio.timeout(COME_S):
                await stream.say(Inherit(node=terms.node, copy=terms.copy, key=terms.key))
                bequest, whole = await stream.whole()
            settle(bequest, terms.run_dir)
            copy = Copy(terms.run_dir / JOURNAL, whole, bequest.part)
            try:
                head, former, port = await stand_ready(terms, stream, copy)
            finally:
                copy.close()
    return Inherited(head, former, port, bequest.patience_s, bequest.slurm_job, bequest.launcher)


async def connect(session: aiohttp.ClientSession, url: str, context: ssl.SSLContext) -> aiohttp.ClientWebSocketResponse:
    """To the head. Raises `NoBequest`."""
    try:
        async with asyncio.timeout(COME_S):
            socket = await session.ws_connect(
                url + HEIR_PATH,
                ssl=context,
                heartbeat=PING_S,
                max_msg_size=MAX_MESSAGE,
                server_hostname=Role.ORCHESTRATOR.server_name,
            )
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise NoBequest(f"{url} cannot be reached: {error}") from error
    resume_soon(socket.get_extra_info("socket"))
    return socket


def settle(bequest: Bequest, run_dir: Path) -> None:
    """The passes and what is run, as in the head's own folder. Raises `WireError`, `TrustError`, OSError."""
    for role in Role:
        if role.value not in bequest.passes:
            raise WireError(f"no pass for the {role} came")
        write_pass(pass_of(run_dir, role), parse_pass(bequest.passes[role.value], "the head"))
    path = run_dir / FILE
    path.touch(mode=0o600)
    path.write_bytes(bequest.launch)


async def stand_ready(terms: Terms, stream: Stream, copy: Copy) -> tuple[Head, NodeId | None, int]:
    """Follow the head, and wait in the doorway to become it. Returns whose place it has taken, and its port, too."""
    known = copy.succession()
    if known is None:
        raise WireError("the journal that came does not say who may take its place")

    def begin(_: int) -> None:
        stream.over, doorway.follows = True, False

    doorway = Doorway(Place(terms.node, terms.copy), known, begin)
    doorway.follows = True
    async with at_the_door(doorway, terms.run_dir, terms.host, terms.port, elsewhere=True) as port:
        await stream.say(Holds(part=copy.part, url=url_of(terms.host, port)))
        following = asyncio.create_task(follow(stream, copy, doorway))
        try:
            head = await wait_or_give_way(doorway, terms.run_dir, FORSAKEN_S)
            return head, doorway.former, port
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def follow(stream: Stream, copy: Copy, doorway: Doorway) -> None:
    """Follow the head until it is gone."""
    try:
        await stream.follow(copy, doorway.learn)
    except (NoBequest, WireError, ValueError, OSError, sqlite3.Error) as error:
        log.warning("no more parts of the journal: %s", error)
    stream.over, doorway.follows = True, False
