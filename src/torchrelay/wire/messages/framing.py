"""Framing: messages on a byte stream, each as four bytes of length (big endian) and then its payload.

`FrameSocket` is for threads; `read_frame` and `write_frame` are for asyncio. All three agree on the end of a stream:
`Closed` between two frames is an ordinary goodbye, and a `WireError` inside one says that the peer was cut off.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
import threading
import time

from torchrelay.wire.messages.codec import MAX_MESSAGE, WireError

_LENGTH = struct.Struct("!I")


class Closed(ConnectionError):
    """The peer closed the connection between two frames, or we did."""


def frame(payload: bytes, limit: int = MAX_MESSAGE) -> bytes:
    """The bytes of one frame. Raises `WireError` if the payload is larger than `limit` bytes."""
    if len(payload) > limit:
        raise WireError(f"frame of {len(payload)} bytes, at most {limit} are sent")
    return _LENGTH.pack(len(payload)) + payload


class FrameSocket:
    """Frames over a connected stream socket, which it owns from then on.

    One thread receives; any thread may send. A `receive` that times out loses nothing: the next one goes on where it
    stopped.
    """

    def __init__(self, connected: socket.socket, limit: int = MAX_MESSAGE) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._limit = limit
        self._buffer = bytearray()
        self._sending = threading.Lock()
        self._open = True

    def fileno(self) -> int:
        """The descriptor, for `select`; -1 when closed. Ask `pending()` too: a frame may have been read already."""
        return self._socket.fileno()

    def pending(self) -> bool:
        """Whether a whole frame waits in the buffer, so that `receive` answers without reading."""
        return self._take(peek=True) is not None

    def send(self, payload: bytes, timeout_s: float | None = None) -> None:
        """Send one frame. Raises `Closed` if the peer is gone, and `TimeoutError` (and closes) if it does not read."""
        data = memoryview(frame(payload, self._limit))
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._sending:
            while data:
                try:
                    data = data[self._socket.send(data) :]
                except BlockingIOError:
                    if not self._wait(select.POLLOUT, deadline):
                        self.close()  # half a frame is out: the stream is of no use any more
                        raise TimeoutError(f"the peer has not read a frame for {timeout_s} s") from None
                except OSError as error:
                    raise Closed(f"the peer closed the connection: {error}") from error

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """The next frame's payload; None if none was complete within `timeout_s`. Raises `Closed`, `WireError`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            payload = self._take()
            if payload is not None:
                return payload
            try:
                chunk = self._socket.recv(1 << 18)
            except BlockingIOError:
                if not self._wait(select.POLLIN, deadline):
                    return None
                continue
            except OSError as error:
                raise Closed(f"the connection is closed: {error}") from error
            if not chunk:
                if self._buffer:
                    raise WireError(f"the peer closed the connection inside a frame ({len(self._buffer)} bytes of it)")
                raise Closed("the peer closed the connection")
            self._buffer += chunk

    def close(self) -> None:
        """Close; whoever waits in `receive` or `send` gets `Closed`. May be called twice and from any thread."""
        if self._open:
            self._open = False
            try:
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that polls this socket; close alone does not
            except OSError:
                pass  # the peer was faster
            self._socket.close()

    def abandon(self) -> None:
        """In a forked child: close this copy of the descriptor, and leave the connection to the parent."""
        self._open = False
        os.close(self._socket.detach())

    def _take(self, peek: bool = False) -> bytes | None:
        length = _checked_length(self._buffer, self._limit)
        if length is None or len(self._buffer) < _LENGTH.size + length:
            return None
        if peek:
            return b""
        payload = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
        del self._buffer[: _LENGTH.size + length]
        return payload

    def _wait(self, what: int, deadline: float | None) -> bool:
        """Wait until the socket can be read or written; False at the deadline. Raises `Closed` if we closed it."""
        if not self._open:
            raise Closed("this end is closed")
        left_ms = None if deadline is None else max(0.0, (deadline - time.monotonic()) * 1000)
        poll = select.poll()  # not select.select: a training process may hold more than 1024 descriptors
        try:
            poll.register(self._socket, what)
        except ValueError:  # closed by another thread in this very moment
            raise Closed("this end is closed") from None
        return bool(poll.poll(left_ms))


def _checked_length(buffer: bytearray, limit: int) -> int | None:
    if len(buffer) < _LENGTH.size:
        return None
    length: int = _LENGTH.unpack_from(buffer)[0]
    if length > limit:
        raise WireError(f"frame of {length} bytes announced, at most {limit} are read")
    return length


async def read_frame(reader: asyncio.StreamReader, limit: int = MAX_MESSAGE) -> bytes:
    """The next frame's payload. Raises `Closed` at the stream's end, `WireError` inside a frame or above `limit`."""
    try:
        head = await reader.readexactly(_LENGTH.size)
        length = _checked_length(bytearray(head), limit)
        assert length is not None, "a whole head has a length"
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        if len(error.partial) == 0 and error.expected == _LENGTH.size:
            raise Closed("the peer closed the connection") from None
        raise WireError(f"the peer closed the connection inside a frame ({len(error.partial)} bytes of it)") from None
    except ConnectionError as error:
        raise Closed(f"the connection is closed: {error}") from error


async def write_frame(writer: asyncio.StreamWriter, payload: bytes, limit: int = MAX_MESSAGE) -> None:
    """Send one frame and wait until the peer keeps up. Raises `Closed` if it is gone."""
    writer.write(frame(payload, limit))
    try:
        await writer.drain()
    except ConnectionError as error:
        raise Closed(f"the peer closed the connection: {error}") from error
