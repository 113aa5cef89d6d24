"""The orchestrator's end of an agent's connection: frames that are written at once, and connections that are no use."""

from __future__ import annotations

import asyncio
import struct
from typing import Any, cast

import pytest
from aiohttp import web

from torchrelay.orchestrator.core import agents
from torchrelay.orchestrator.core.agents import AgentConnection, as_binary
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.wire.messages.channel import Ack, Attach, Refused, decode_to_agent
from torchrelay.wire.messages.codec import WireError


class Transport:
    """What was written, and how much of it waits to be read."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.waiting, self.closing, self.aborted = 0, False, False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.aborted = True


def connection(transport: Transport) -> AgentConnection:
    attach = Attach(node=NodeId("node-0"), incarnation="a", slots=1)
    return AgentConnection(cast(web.WebSocketResponse, None), cast(asyncio.WriteTransport, transport), attach)


def unframed(frame: bytes) -> bytes:
    """The payload of a frame, read as RFC 6455 says (section 5.2)."""
    assert frame[0] == 0x82, "final, binary"
    size, at = frame[1], 2
    assert not size & 0x80, "a server does not mask"
    if size == 126:
        (size,), at = struct.unpack_from("!H", frame, 2), 4
    elif size == 127:
        (size,), at = struct.unpack_from("!Q", frame, 2), 10
    assert len(frame) == at + size
    return frame[at:]


@pytest.mark.parametrize(
    ("size", "head"), [(0, 2), (125, 2), (126, 4), (65_535, 4), (65_536, 10), (1 << 20, 10)]
)  # fmt: skip
def test_a_frame_has_the_shortest_head_that_its_size_allows(size: int, head: int) -> None:
    frame = as_binary(b"x" * size)
    assert len(frame) == head + size
    assert unframed(frame) == b"x" * size


def test_messages_are_written_at_once_and_in_order() -> None:
    transport = Transport()
    link = connection(transport)
    link.send(Ack(1))
    link.send(Ack(2))
    assert [decode_to_agent(unframed(frame)) for frame in transport.written] == [Ack(1), Ack(2)]


def test_after_the_end_nothing_more_is_said() -> None:
    transport = Transport()
    link = connection(transport)
    link.close("enough")
    link.send(Ack(1))
    assert link.closed
    assert not transport.written


def test_nothing_is_written_to_a_link_that_breaks() -> None:
    transport = Transport()
    transport.closing = True
    connection(transport).send(Ack(1))
    assert not transport.written


def test_an_agent_that_does_not_read_is_hung_up_on() -> None:
    transport = Transport()
    transport.waiting = agents.MAX_UNREAD + 1
    link = connection(transport)
    link.send(Ack(1))
    assert link.closed
    assert transport.aborted, "it would not read the end either"
    assert not transport.written


def test_a_message_that_is_too_large_ends_this_connection_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(message: Any) -> bytes:
        raise WireError(f"{type(message).__name__} is too large")

    transport = Transport()
    link = connection(transport)
    monkeypatch.setattr(agents, "encode", encode)
    link.send(Refused(reason="much"))
    assert link.closed
    assert not transport.aborted, "what was sent before is read"
