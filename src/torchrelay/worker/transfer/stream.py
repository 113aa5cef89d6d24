"""Stream: one connection between two workers. Proof of the secret first, then messages and memory, with deadlines.

    client                                                   server
    (TLS between machines, see `tls`)                 <->
    Hello(nonce, generation)                          ->
                                                      <-     Challenge(nonce, proof)
    Ask(proof, what, point)                           ->
                                                      <-     Answer: waiting, ..., refused or serving
                                                      <-     head, then its digest; or of a state:

    want "state"                                      <-     head (on one machine: where the tensors lie)
    SEND, READ or TAKE                                ->
                                                      <-     SEND: the tensors' bytes, then the digest of all
                                                             READ: see `neighbour`
    want "slices", or "state" and then TAKE           <-     the head's digest
    which bytes of the tensors, again and again       ->
                                                      <-     these bytes, then their digest

Who has proved nothing can make us read a handshake and 4 KB and wait a few seconds, no more. Without TLS the stream is
proved at its start and no more, and its digest is no seal: it stays on one machine, or on a network that is trusted.
"""

from __future__ import annotations

import os
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Iterator

import msgspec
from msgspec import Struct

from torchrelay.protocol.messages.ids import Generation, Point
from torchrelay.worker.tensors.digest import Digest
from torchrelay.worker.transfer.tls import REMEDY, Tls, TlsSocket, kernel_time

VERSION = 5
SMALL = 4096  # bytes of a message of one who has not proved anything
CHUNK = 1 << 20  # bytes moved and hashed at once
SEND, READ, TAKE = b"s", b"r", b"t"  # how a state is wanted: sent, read from memory, or taken slice by slice
_LENGTH = struct.Struct("!I")
_RANGE = struct.Struct("!QQ")

PLAIN = "plain"  # what proofs are bound to without TLS
_TLS = (b"\x15\x03", b"\x16\x03")  # how its alerts and handshakes begin

View = memoryview
Filled = Callable[[], None] | None
Connected = socket.socket | TlsSocket


class StreamBroken(ConnectionError):
    """The connection is of no use any more; the message says why."""


class Hello(Struct, frozen=True, tag=True):
    """The client's first word."""

    version: int
    generation: Generation
    nonce: bytes


class Challenge(Struct, frozen=True, tag=True):
    """The server proves that it knows the secret, and asks for the same."""

    nonce: bytes
    proof: bytes


class Ask(Struct, frozen=True, tag=True, omit_defaults=True):
    """The client proves the same of itself, and says what it wants.

    `want`: "record", "state", "slices", "example" or "lane <purpose> <rank>".

    Or "shelve <rank> <restarts>", to give a snapshot, and "snapshot <rank> <restarts>", to get one: `snapshot_upload`.

    `machine`, `pid`: who it is, for a source on the same machine; empty if it can only take what is sent.
    """

    proof: bytes
    want: str
    point: Point
    machine: str = ""
    pid: int = 0


class Waiting(Struct, frozen=True, tag=True):
    """What was asked for is not there yet; said again and again, as a sign of life."""


class RefusedAnswer(Struct, frozen=True, tag=True):
    """It will not be given."""

    reason: str


class Serving(Struct, frozen=True, tag=True, omit_defaults=True):
    """It follows: `head` bytes (the record, or the state's manifest); `body` bytes of tensors belong to it.

    `pid`: of the source, if the tensors may be read out of its memory, where they lie in `places` pieces.
    """

    generation: Generation
    point: Point
    head: int
    body: int
    pid: int = 0
    places: int = 0


Message = Hello | Challenge | Ask | Waiting | RefusedAnswer | Serving


def server_context(binding: str, generation: Generation) -> str:
    """What the server's proof is for. `binding`: to this connection, see `Stream`."""
    return f"torchrelay transfer {VERSION} {binding} server {generation}"


def client_context(
    binding: str, generation: Generation, want: str, point: Point, machine: str = "", pid: int = 0
) -> str:
    """What the client's proof is for; the request is part of it."""
    asked = f"{generation} {want} {point.step} {point.section} {machine} {pid}"
    return f"torchrelay transfer {VERSION} {binding} client {asked}"


class Stream:
    """A connected TCP socket, which it owns. One thread uses it; any thread may `cut` it.

    stall_s     how long no byte may come or go before the peer counts as stalled
    deadline    monotonic time in seconds after which nothing may take longer
    binding     of proofs to this connection: the fingerprint of the server's certificate, if there is one
    """

    def __init__(self, connected: socket.socket, *, stall_s: float, deadline: float) -> None:
        self._socket: Connected = connected
        self.binding = PLAIN
        self._deadline = deadline
        self._stall_s = stall_s
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.settimeout(None)
        _mine.add(connected)
        self.allow(stall_s, deadline)

    def allow(self, stall_s: float, deadline: float) -> None:
        """Set other limits from now on."""
        self._stall_s, self._deadline = stall_s, deadline
        # By the kernel and not by Python's timeouts: there is then no poll before each system call.
        limit_calls(self._socket, max(0.001, min(stall_s, deadline - time.monotonic())))

    def encrypt(self, tls: Tls, *, server_side: bool, within_s: float) -> None:
        """Shake hands, before anything else is said. Raises `StreamBroken`."""
        connected = self._socket
        assert isinstance(connected, socket.socket), "it is encrypted once"
        shake_hands = tls.serve if server_side else tls.call
        try:
            self._socket, fingerprint = shake_hands(connected, min(self._deadline, time.monotonic() + within_s))
        except OSError as error:
            raise StreamBroken(f"no TLS with the peer: {error.strerror or error}") from error
        self.binding = f"tls {fingerprint}"
        self.allow(self._stall_s, self._deadline)

    # ------------------------------------------------------------ messages

    def send(self, message: Message) -> None:
        """Send a message. Raises `StreamBroken`."""
        payload = msgspec.msgpack.encode(message)
        self.send_bytes(_LENGTH.pack(len(payload)) + payload)

    def receive(self, limit: int = SMALL) -> Message:
        """The next message, of at most `limit` bytes. Raises `StreamBroken`."""
        head = bytes(self.receive_bytes(_LENGTH.size))
        (length,) = _LENGTH.unpack(head)
        if length > limit:
            if head[:2] in _TLS:
                raise StreamBroken(f"the peer speaks TLS, and we do not: {REMEDY}")
            raise StreamBroken(f"a message of {length} bytes was announced, at most {limit} are read")
        try:
            return self._decoder.decode(self.receive_bytes(length))
        except msgspec.DecodeError as error:
            raise StreamBroken(f"a message that is none of ours: {error}") from error

    def send_range(self, start: int, stop: int) -> None:
        """Ask for these bytes of the tensors. Raises `StreamBroken`."""
        self.send_bytes(_RANGE.pack(start, stop))

    def receive_range(self) -> tuple[int, int]:
        """Which bytes are asked for: from where, up to where. Raises `StreamBroken`."""
        start, stop = _RANGE.unpack(self.receive_bytes(_RANGE.size))
        return start, stop

    # ------------------------------------------------------------ memory

    def send_bytes(self, data: bytes | View) -> None:
        """Send all of it."""
        self._check_time()
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise self._unsent(error) from error

    def _unsent(self, error: OSError) -> StreamBroken:
        if isinstance(error, BlockingIOError):
            return StreamBroken(f"the peer has not read for {self._stall_s:.1f} s")
        return StreamBroken(f"the peer closed the connection: {error.strerror or error}")

    def send_file(self, file: int, start: int, count: int) -> None:
        """Send so many bytes of an open file, from `start` on; without TLS by the kernel and without a copy of them."""
        memory = memoryview(bytearray(min(count, CHUNK) if isinstance(self._socket, TlsSocket) else 0))
        while count > 0:
            self._check_time()
            try:
                if memory:
                    sent = os.preadv(file, [memory[: min(count, CHUNK)]], start)
                    self._socket.sendall(memory[:sent])
                else:
                    sent = os.sendfile(self._socket.fileno(), file, start, min(count, CHUNK))
            except OSError as error:
                raise self._unsent(error) from error
            if sent == 0:
                raise StreamBroken("the file is shorter than it was")
            start, count = start + sent, count - sent

    def receive_bytes(self, count: int) -> bytearray:
        """Exactly so many bytes."""
        data = bytearray(count)
        self._fill(memoryview(data))
        return data

    def receive_into(self, view: View) -> None:
        """Fill this memory."""
        self._fill(view)

    def send_views(self, views: Iterable[View], digest: Digest) -> None:
        """Send memory as it lies and add it to the digest; small views are gathered first."""
        for group, _ in _grouped((view, None) for view in views):
            piece = group[0] if len(group) == 1 else memoryview(b"".join(group))
            digest.add(piece)
            self.send_bytes(piece)

    def receive_views(
        self, views: Iterable[tuple[View, Filled]], digest: Digest, progress: Callable[[int], None]
    ) -> None:
        """Fill memory in order, add what it holds then to the digest, and tell how many bytes came."""
        for piece in cut_views(views):
            self._fill(piece.memory)
            progress(piece.land(digest))

    def _fill(self, view: View) -> None:
        while view:
            self._check_time()
            try:
                # All of it in one call: every return takes the interpreter's lock from the thread that trains. A peer
                # that falls silent in the middle is noticed by the next call: after one to two times the limit.
                count = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise StreamBroken(f"no byte came for {self._stall_s:.1f} s") from None
            except OSError as error:
                raise StreamBroken(f"the connection broke: {error.strerror or error}") from error
            if count == 0:
                raise StreamBroken("the peer closed the connection")
            view = view[count:]

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise StreamBroken("the time for it is over")

    # ------------------------------------------------------------ the end

    def cut(self) -> None:
        """From any thread: whoever sends or receives here fails at once. The socket stays until `close`."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is closed already

    def release(self) -> Connected:
        """The socket, without limits: it is the caller's from here on."""
        limit_calls(self._socket, 0)
        return self._socket

    def close(self) -> None:
        """Close it. By the thread that uses it, so that the descriptor's number is not reused under it."""
        self._socket.close()


def limit_calls(connected: Connected, seconds: float) -> None:
    """How long one system call may wait; 0: for ever."""
    packed = kernel_time(seconds)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)


class Piece:
    """Memory that is filled at once: one slice, or several small views by way of a buffer."""

    def __init__(self, views: list[View], filled: list[Callable[[], None]]) -> None:
        self._views = views
        self._filled = filled
        self.memory = views[0] if len(views) == 1 else memoryview(bytearray(sum(map(len, views))))

    def land(self, digest: Digest) -> int:
        """It is filled: bring it to where it belongs, add what lies there to the digest. Returns how many bytes."""
        if len(self._views) > 1:
            _scatter(self.memory, self._views)
        for view in self._views:
            digest.add(view)
        for call in self._filled:
            call()
        return len(self.memory)


def cut_views(views: Iterable[tuple[View, Filled]], most: int = CHUNK) -> Iterator[Piece]:
    """The same memory in the same order, in pieces: slices of at most so many bytes, or small views together."""
    return (Piece(group, filled) for group, filled in _grouped(views, most))


def _grouped(
    views: Iterable[tuple[View, Filled]], most: int = CHUNK
) -> Iterator[tuple[list[View], list[Callable[[], None]]]]:
    """The same memory in the same order: one slice of at most so many bytes, or several views of `CHUNK` together."""
    group: list[View] = []
    filled: list[Callable[[], None]] = []
    size = 0
    for view, call in views:
        if group and size + len(view) > CHUNK:
            yield group, filled
            group, filled, size = [], [], 0
        start = 0
        while len(view) - start > most:
            yield [view[start : start + most]], []
            start += most
        group.append(view[start:])
        size += len(view) - start
        if call is not None:
            filled.append(call)
    if group:
        yield group, filled


def _scatter(data: View, views: Iterable[View]) -> None:
    at = 0
    for view in views:
        view[:] = data[at : at + len(view)]
        at += len(view)


# ---------------------------------------------------------------- forked children

# A child that the script forks (a DataLoader's worker) holds copies of our sockets: a peer would not see them close
# when the rank ends, and would wait at a port that nobody serves.
_mine: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_children(listening: socket.socket) -> None:
    """Close this socket, too, in children that are forked."""
    _mine.add(listening)


def _close_in_child() -> None:
    for one in list(_mine):
        one.close()


os.register_at_fork(after_in_child=_close_in_child)
