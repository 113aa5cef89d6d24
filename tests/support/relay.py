"""A relay between a client and a state server that spoils what the server says, for tests of transfers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from torchrelay.protocol.messages.ids import Rank
from torchrelay.protocol.messages.orders import Source
from torchrelay.worker.transfer.transfer import StateServer


class Relay:
    """Stands between a client and a server, and spoils what the server says. When the server ends, it stays open."""

    def __init__(self, server: StateServer, spoil: Callable[[bytes, int], bytes | None]) -> None:
        """`spoil`: what is passed on for a piece at this offset; None closes the connection, b"" passes nothing."""
        host, port = server.address.rsplit(":", 1)
        self._server = (host, int(port))
        self._spoil = spoil
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listening]
        self.source = Source(Rank(5), f"127.0.0.1:{self._listening.getsockname()[1]}")
        self.passed = 0
        self._threads = [threading.Thread(target=self._run, daemon=True)]
        self._threads[0].start()

    def _run(self) -> None:
        try:
            client, _ = self._listening.accept()
            server = socket.create_connection(self._server)
            self._sockets += [client, server]
            self._threads.append(threading.Thread(target=self._pass_on, args=(client, server), daemon=True))
            self._threads[-1].start()
            while piece := server.recv(1 << 16):
                spoiled = self._spoil(piece, self.passed)
                self.passed += len(piece)
                if spoiled is None:
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(spoiled)
        except OSError:
            pass  # the test is over, or the client has left

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        try:
            while piece := client.recv(1 << 16):
                server.sendall(piece)
        except OSError:
            pass

    def close(self) -> None:
        for one in self._sockets:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            one.close()
        for thread in self._threads:
            thread.join(10)


def flip(position: int) -> Callable[[bytes, int], bytes | None]:
    """One bit of the byte at this position of what the server says."""

    def spoil(piece: bytes, offset: int) -> bytes:
        if not offset <= position < offset + len(piece):
            return piece
        changed = bytearray(piece)
        changed[position - offset] ^= 0x10
        return bytes(changed)

    return spoil


MakeRelay = Callable[[Callable[[bytes, int], bytes | None]], Relay]


@contextmanager
def relays(server: StateServer) -> Iterator[MakeRelay]:
    """Make relays to this server; they are closed at the end."""
    with ExitStack() as stack:

        def make(spoil: Callable[[bytes, int], bytes | None]) -> Relay:
            one = Relay(server, spoil)
            stack.callback(one.close)
            return one

        yield make
