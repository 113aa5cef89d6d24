"""Bequest: the head's end of the connection to an heir, which gets the journal and what else an orchestrator needs."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from aiohttp import WSMsgType, web

from torchrelay.orchestrator.core.agents import ATTACH_S, MAX_UNREAD, as_binary
from torchrelay.orchestrator.core.service import Orchestrator
from torchrelay.protocol.succession.succession import Place
from torchrelay.wire.files.launch import FILE
from torchrelay.wire.messages.codec import MAX_MESSAGE, WireError, encode
from torchrelay.wire.messages.inheritance import PIECE, Bequest, Holds, Inherit, Part, Piece, decode_from_heir
from torchrelay.wire.messages.prompt import resume_soon
from torchrelay.wire.trust.passes import Role, pass_of

log = logging.getLogger("torchrelay.orchestrator")


class HeirConnection:
    """One heir. What is sent is written at once, or waits in the socket's buffer."""

    def __init__(self, socket: web.WebSocketResponse, transport: asyncio.WriteTransport, place: Place) -> None:
        self.place = place
        self._socket = socket
        self._transport = transport
        self._most = MAX_UNREAD
        self._reason = ""
        self._ended = asyncio.Event()

    def bequeath(self, bequest: Bequest, whole: bytes) -> None:
        """The journal as it is. It may be large, and is read as fast as the other end can write it down."""
        self._most += len(whole)
        self.send(bequest)
        for begin in range(0, len(whole), PIECE):
            self.send(Piece(whole[begin : begin + PIECE]))

    def send(self, message: Bequest | Piece | Part) -> None:
        """Write a message; never waits, never fails. After `close` nothing more is said."""
        if self._reason or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > self._most:
            self.close("it does not read what it is sent")
            self._transport.abort()
            return
        try:
            self._transport.write(as_binary(encode(message)))
        except WireError as error:
            self.close(str(error))

    def close(self, reason: str) -> None:
        """End the connection."""
        if not self._reason:
            self._reason = reason
            self._ended.set()

    async def end(self) -> None:
        """Wait until the connection is to be closed, and close it."""
        await self._ended.wait()
        log.info("%s: no more copies: %s", self.place.node, self._reason)
        await self._socket.close(message=self._reason.encode()[:120])


async def serve_heir(
    request: web.Request, service: Orchestrator, run_dir: Path, slurm_job: int = 0
) -> web.StreamResponse:
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
        connection.bequeath(*bequest_of(service, run_dir, slurm_job))
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


def bequest_of(service: Orchestrator, run_dir: Path, slurm_job: int) -> tuple[Bequest, bytes]:
    """What an heir gets, and the journal as it is at this moment."""
    whole = service.journal.whole()
    bequest = Bequest(
        passes={role.value: pass_of(run_dir, role).read_text() for role in Role},
        launch=(run_dir / FILE).read_bytes(),
        part=service.journal.part,
        size=len(whole),
        patience_s=service.patience_s,
        slurm_job=slurm_job,
    )
    return bequest, whole
