"""Tls: what goes from worker to worker of several machines is encrypted, and nobody stands between them.

Whether it is, both sides know from their own agents; nothing is negotiated, so nobody can talk them out of it.

The server shows a certificate that it has made for itself, and the client checks neither name nor authority. In its
place both HMAC proofs are made over the certificate's fingerprint: the server's own, and the one that the client
was shown. TLS 1.3 has a server sign the handshake, so whoever stands between the two must show a certificate of which
it has the key. That is another one, the server's proof does not match it, and the client leaves before it has said
anything but a nonce. This is channel binding by the server's certificate (`tls-server-end-point`, RFC 5929).

Tickets are off: each connection has a handshake, and a key, of its own. The end of a connection says nothing: lengths
come first and digests last, so one that breaks off is never taken for a state.

TLS is done in memory, between buffers, and the socket stays ours: its limits are the kernel's as without TLS, and
several records come and go with one system call.
"""

from __future__ import annotations

import errno
import socket
import ssl
import struct
import time

from torchrelay.wire.trust.trust import fingerprint_of

PIECE = 128 << 10  # bytes that go between the socket and TLS at once: they stay in the processor's cache
SMALL = 4 << 10  # the same for short messages
RECORD = 17 << 10  # bytes that a record has at most, and more
OVERHEAD = 256  # what TLS adds to so many bytes, and more
MOST_GREETING = 64 << 10  # bytes that are read of a handshake
ALERT = b"\x15\x03\x03\x00\x02\x02\x46"  # "protocol version": what OpenSSL does not say to who speaks no TLS at all
REMEDY = "all agents must be of one run, either with --plain-transfer or without"
_LIMIT = struct.Struct("@ll")  # seconds and microseconds, as the kernel has them
_NONE = 0.0  # no limit

View = memoryview


class Tls:
    """One process's certificate, and how it talks to others. Any thread may use it."""

    def __init__(self) -> None:
        """Raises `OSError`."""
        from torchrelay.wire.trust.authority import use_own_certificate  # slow to import, and not needed without TLS

        self._server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._client.check_hostname = False
        self._client.verify_mode = ssl.CERT_NONE  # the proofs are over the certificate's fingerprint
        for context in (self._server, self._client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.options |= ssl.OP_NO_TICKET
        self._server.num_tickets = 0
        self.fingerprint = use_own_certificate(self._server)

    def serve(self, connected: socket.socket, deadline: float) -> tuple[TlsSocket, str]:
        """The server's side of a handshake: the encrypted connection, and our fingerprint. Raises `OSError`."""
        made = TlsSocket(connected, self._server, server_side=True)
        made.shake_hands(deadline)
        return made, self.fingerprint

    def call(self, connected: socket.socket, deadline: float) -> tuple[TlsSocket, str]:
        """The client's side: the encrypted connection, and the fingerprint that we were shown. Raises `OSError`."""
        made = TlsSocket(connected, self._client, server_side=False)
        made.shake_hands(deadline)
        return made, fingerprint_of(made.certificate())


class TlsSocket:
    """A connected TCP socket with TLS over it, and the calls of a socket that streams and lanes make.

    As with a socket: `BlockingIOError` if nothing has moved for as long as SO_RCVTIMEO or SO_SNDTIMEO say, 0 bytes at
    the end of the connection. One thread at a time uses it; any thread may `shutdown` it.
    """

    def __init__(self, connected: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._socket = connected
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._room = memoryview(bytearray(SMALL))
        self._limit_s = _NONE

    # ------------------------------------------------------------ the handshake

    def shake_hands(self, deadline: float) -> None:
        """Raises `OSError` if there is no TLS at the other end, or it is not done in time (monotonic seconds)."""
        came = 0
        try:
            while not self._is_done():
                left = deadline - time.monotonic()
                if left <= 0 or came > MOST_GREETING:
                    raise _refused("its handshake takes too long")
                self.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, kernel_time(max(0.001, left)))
                count = self._take_in()
                if not count:
                    raise _refused("it has closed the connection in the handshake")
                came += count
        except BlockingIOError:
            raise _refused("its handshake takes too long") from None
        except (ConnectionResetError, BrokenPipeError) as error:
            raise _refused("it has closed the connection in the handshake") from error

    def _is_done(self) -> bool:
        """Go on with the handshake. False: more must come first."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            if not self._outgoing.pending:
                self._outgoing.write(ALERT)
            raise _refused(f"its handshake is not TLS 1.3 ({_reason(error)})") from error
        finally:
            self._flush()
        return True

    def certificate(self) -> bytes:
        """What the other end has shown, as DER."""
        shown = self._tls.getpeercert(binary_form=True)
        assert shown is not None, "a server shows its certificate"
        return shown

    # ------------------------------------------------------------ bytes

    def recv_into(self, view: View, nbytes: int = 0, flags: int = 0) -> int:
        """As a socket's: bytes that are there; with MSG_WAITALL all that are wanted, or as many as come in time."""
        size = nbytes or len(view)
        if len(self._room) < min(size, PIECE):
            self._room = memoryview(bytearray(min(size, PIECE) + OVERHEAD))
        whole = bool(flags & socket.MSG_WAITALL)
        until = time.monotonic() + self._limit_s if self._limit_s else float("inf")
        read, came = self._tls.read, 0
        while came < size:
            try:
                count = read(size - came, view[came:size])
            except ssl.SSLWantReadError:
                if came and (not whole or time.monotonic() > until):
                    break
                if time.monotonic() > until:
                    raise BlockingIOError(errno.EAGAIN, "no whole record came in time") from None
                if not self._take_in(size - came if whole else 0):
                    break
            except ssl.SSLZeroReturnError:
                break
            except ssl.SSLError as error:
                raise ConnectionAbortedError(
                    errno.ECONNABORTED, f"what came is not what was sent ({_reason(error)})"
                ) from error
            else:
                came += int(count)
                if not count or not whole:
                    break
        return came

    def _take_in(self, certain: int = 0) -> int:
        """More of what the other end has sent; returns how many bytes, 0 at the end of the connection.

        `certain`: so many bytes are to come in any case. Encrypted they are not fewer, but for a part of a record that
        TLS has already. If they fill the room, all of it comes with one system call.
        """
        fills = certain - RECORD - self._incoming.pending >= len(self._room)
        count = self._socket.recv_into(self._room, 0, socket.MSG_WAITALL if fills else 0)
        if count:
            self._incoming.write(self._room[:count])
        return count

    def sendall(self, data: bytes | bytearray | View) -> None:
        """As a socket's. Without data: send what `send_now` has left."""
        self._flush()
        left = memoryview(data)
        while left:
            self._encrypt(left[:PIECE])
            self._flush()
            left = left[PIECE:]

    def send_now(self, data: bytes) -> bytes | None:
        """Send as much as there is room for without waiting. None: all of it; else what `sendall` shall be given."""
        if self._outgoing.pending:
            return data
        self._encrypt(memoryview(data))
        made = self._outgoing.read()
        try:
            sent = self._socket.send(made, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        self._outgoing.write(made[sent:])
        return b"" if self._outgoing.pending else None

    def _encrypt(self, left: View) -> None:
        while left:
            left = left[self._tls.write(left) :]  # a record

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._socket.sendall(self._outgoing.read())

    # ------------------------------------------------------------ the socket

    def fileno(self) -> int:
        """The descriptor; -1 when it is closed."""
        return self._socket.fileno()

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """As a socket's."""
        self._socket.setsockopt(level, option, value)
        if (level, option) == (socket.SOL_SOCKET, socket.SO_RCVTIMEO):
            assert isinstance(value, bytes), "a time is packed"
            seconds, microseconds = _LIMIT.unpack(value)
            self._limit_s = seconds + microseconds / 1e6

    def getsockopt(self, level: int, option: int) -> int:
        """As a socket's."""
        return self._socket.getsockopt(level, option)

    def shutdown(self, how: int) -> None:
        """As a socket's: whoever waits here fails at once."""
        self._socket.shutdown(how)

    def close(self) -> None:
        """As a socket's."""
        self._socket.close()


def kernel_time(seconds: float) -> bytes:
    """As SO_RCVTIMEO and SO_SNDTIMEO take it; 0: no limit."""
    return _LIMIT.pack(int(seconds), int(seconds % 1 * 1_000_000))


def _refused(why: str) -> ConnectionRefusedError:
    return ConnectionRefusedError(errno.ECONNREFUSED, f"{why}: {REMEDY}")


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
