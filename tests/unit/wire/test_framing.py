"""Frames over a stream, however it is cut into pieces, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.wire.messages.codec import WireError
from torchrelay.wire.messages.framing import Closed, FrameSocket, frame, read_frame, write_frame


@pytest.fixture
def raw_and_framed() -> Iterator[tuple[socket.socket, FrameSocket]]:
    """A plain socket, and frames at its other end."""
    raw, other = socket.socketpair()
    framed = FrameSocket(other, limit=1 << 20)
    with raw:
        yield raw, framed
        framed.close()


Ends = tuple[socket.socket, FrameSocket]


def test_a_frame_is_its_length_and_its_payload() -> None:
    assert frame(b"abc") == b"\0\0\0\x03abc"


def test_frames_arrive_one_by_one_however_they_are_sent(raw_and_framed: Ends) -> None:
    raw, framed = raw_and_framed
    raw.sendall(frame(b"one") + frame(b"") + frame(b"three"))
    assert [framed.receive(1), framed.receive(1), framed.receive(1)] == [b"one", b"", b"three"]


@given(st.lists(st.binary(max_size=50), max_size=5), st.lists(st.integers(1, 20), max_size=20))
def test_no_cut_of_the_stream_changes_the_frames(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(frame(payload) for payload in payloads)
    raw, other = socket.socketpair()
    framed = FrameSocket(other)
    got: list[bytes] = []
    with raw:
        for cut in [*cuts, len(stream)]:
            raw.sendall(stream[:cut])
            stream = stream[cut:]
            while (payload := framed.receive(0)) is not None:
                got.append(payload)
        framed.close()
    assert got == payloads


def test_a_timeout_in_the_middle_of_a_frame_loses_nothing(raw_and_framed: Ends) -> None:
    raw, framed = raw_and_framed
    whole = frame(b"slowly")
    for byte in whole[:-1]:
        raw.sendall(bytes([byte]))
        assert framed.receive(0) is None
    raw.sendall(whole[-1:])
    assert framed.receive(0) == b"slowly"


def test_a_timeout_is_kept(raw_and_framed: Ends) -> None:
    begin = time.monotonic()
    assert raw_and_framed[1].receive(0.05) is None
    assert 0.04 < time.monotonic() - begin < 2


def test_pending_says_whether_a_frame_waits_inside(raw_and_framed: Ends) -> None:
    raw, framed = raw_and_framed
    raw.sendall(frame(b"one") + frame(b"two"))
    assert not framed.pending()
    assert framed.receive(1) == b"one"
    assert framed.pending()
    assert framed.receive(0) == b"two"
    assert not framed.pending()


def test_an_end_between_frames_is_a_goodbye(raw_and_framed: Ends) -> None:
    raw, framed = raw_and_framed
    raw.sendall(frame(b"bye"))
    raw.close()
    assert framed.receive(1) == b"bye"
    with pytest.raises(Closed):
        framed.receive(1)


@pytest.mark.parametrize("cut", [1, 3, 4, 6])
def test_an_end_inside_a_frame_is_an_error(raw_and_framed: Ends, cut: int) -> None:
    raw, framed = raw_and_framed
    raw.sendall(frame(b"abc")[:cut])
    raw.close()
    with pytest.raises(WireError, match="inside a frame"):
        framed.receive(1)


def test_an_announced_giant_is_refused_before_it_is_read(raw_and_framed: Ends) -> None:
    raw, framed = raw_and_framed
    raw.sendall(struct.pack("!I", (1 << 20) + 1))
    with pytest.raises(WireError, match="1048577 bytes announced"):
        framed.receive(1)


def test_a_giant_is_not_sent(raw_and_framed: Ends) -> None:
    with pytest.raises(WireError, match="are sent"):
        raw_and_framed[1].send(bytes((1 << 20) + 1))


def test_several_threads_may_send(raw_and_framed: Ends) -> None:
    raw, framed = raw_and_framed
    reader = FrameSocket(raw)
    texts = [bytes([number]) * 100_000 for number in range(8)]
    threads = [threading.Thread(target=framed.send, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    got = [reader.receive(10) for _ in texts]
    for thread in threads:
        thread.join()
    assert sorted(part or b"" for part in got) == texts


def test_a_peer_that_does_not_read_is_given_up_on(raw_and_framed: Ends) -> None:
    _, framed = raw_and_framed
    with pytest.raises(TimeoutError):
        framed.send(bytes(1 << 20), timeout_s=0.05)  # more than the kernel keeps for it
    with pytest.raises(Closed):
        framed.send(b"more", timeout_s=0.05)


def test_a_peer_that_is_gone_is_said_to_be(raw_and_framed: Ends) -> None:
    raw, framed = raw_and_framed
    raw.close()
    with pytest.raises(Closed):
        framed.send(b"hello")


def test_close_wakes_who_waits(raw_and_framed: Ends) -> None:
    _, framed = raw_and_framed
    heard: list[type] = []

    def wait() -> None:
        try:
            framed.receive()
        except Closed as error:
            heard.append(type(error))

    thread = threading.Thread(target=wait)
    thread.start()
    framed.close()
    framed.close()
    thread.join(10)
    assert heard == [Closed]
    with pytest.raises(Closed):
        framed.receive(1)


def test_a_child_that_abandons_a_connection_leaves_it_to_its_parent(raw_and_framed: Ends) -> None:
    raw, framed = raw_and_framed
    copy = FrameSocket(socket.socket(fileno=os.dup(framed.fileno())))  # what fork leaves in a child
    copy.abandon()
    framed.send(b"still here")
    assert FrameSocket(raw).receive(1) == b"still here"


# ---------------------------------------------------------------- asyncio


def stream_of(data: bytes, limit: int = 1 << 20) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=limit)
    reader.feed_data(data)
    reader.feed_eof()
    return reader


def test_asyncio_reads_the_same_frames() -> None:
    async def story() -> None:
        reader = stream_of(frame(b"one") + frame(b"") + frame(b"x" * 100_000))
        assert await read_frame(reader) == b"one"
        assert await read_frame(reader) == b""
        assert await read_frame(reader) == b"x" * 100_000
        with pytest.raises(Closed):
            await read_frame(reader)

    asyncio.run(story())


@pytest.mark.parametrize("cut", [1, 3, 4, 6])
def test_asyncio_tells_a_cut_from_a_goodbye(cut: int) -> None:
    async def story() -> None:
        with pytest.raises(WireError, match="inside a frame"):
            await read_frame(stream_of(frame(b"abc")[:cut]))

    asyncio.run(story())


def test_asyncio_refuses_a_giant() -> None:
    async def story() -> None:
        with pytest.raises(WireError, match="announced"):
            await read_frame(stream_of(struct.pack("!I", 11)), limit=10)

    asyncio.run(story())


def test_asyncio_and_threads_understand_each_other() -> None:
    async def story() -> None:
        raw, other = socket.socketpair()
        framed = FrameSocket(other)
        reader, writer = await asyncio.open_unix_connection(sock=raw)
        await write_frame(writer, b"to a thread")
        assert await asyncio.to_thread(framed.receive, 5) == b"to a thread"
        await asyncio.to_thread(framed.send, b"to a task")
        assert await read_frame(reader) == b"to a task"
        framed.close()
        with pytest.raises(Closed):
            await read_frame(reader)
        with pytest.raises(Closed):
            await write_frame(writer, b"too late")
        writer.close()

    asyncio.run(story())
