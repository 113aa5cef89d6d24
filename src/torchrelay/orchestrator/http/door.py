"""Door: the TCP port of the orchestrator. Whoever connects is a stranger until a request has brought the token.

Anybody on the machine can connect. Strangers are few at a time, the oldest makes room for the next, and none stays
longer than a moment: no crowd of them takes the descriptors that agents and operators need, or fills the log.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

log = logging.getLogger("torchrelay.orchestrator")

STRANGERS = 64  # at a time
SILENCE_S = 5.0  # within this time a stranger must have shown the token
CROWDED_S = 0.002  # between two strangers when they are many: others are to be heard as well
NO_ROOM_S = 0.2  # before another one is let in, when the process has no descriptor left
SWEEP_S = 0.5
COMPLAIN_S = 60.0  # between two lines in the log about a crowd
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Strangers:
    """Those who are connected and have not shown the token, the oldest first."""

    def __init__(self) -> None:
        self.since: dict[asyncio.BaseTransport, float] = {}
        self.shown_out = 0

    def __len__(self) -> int:
        return len(self.since)

    def arrive(self, transport: asyncio.BaseTransport) -> None:
        self.since[transport] = asyncio.get_running_loop().time()

    def welcome(self, transport: asyncio.BaseTransport | None) -> None:
        """This one has shown the token, and may stay."""
        if transport is not None:
            self.since.pop(transport, None)

    def make_room(self, left: int) -> None:
        """The oldest go, until so many are left."""
        self._forget_gone()
        for transport in list(self.since)[: max(0, len(self.since) - left)]:
            self._show_out(transport)

    def part_with_silent(self) -> None:
        """Whoever has stayed too long goes."""
        self._forget_gone()
        late = asyncio.get_running_loop().time() - SILENCE_S
        for transport in [one for one, since in self.since.items() if since < late]:
            self._show_out(transport)

    def _forget_gone(self) -> None:
        for transport in [one for one in self.since if one.is_closing()]:
            del self.since[transport]

    def _show_out(self, transport: asyncio.BaseTransport) -> None:
        del self.since[transport]
        self.shown_out += 1
        if isinstance(transport, asyncio.WriteTransport):
            transport.abort()


class Door:
    """One listening port. `protocol` makes the server's end of a connection."""

    def __init__(self, protocol: Callable[[], asyncio.Protocol], strangers: Strangers) -> None:
        self.strangers = strangers
        self._protocol = protocol
        self._tasks: list[asyncio.Task[None]] = []
        self._socket: socket.socket | None = None
        self._complained_s = -COMPLAIN_S

    async def open(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=256)
        self._socket.setblocking(False)
        self._tasks = [asyncio.create_task(self._let_in(self._socket)), asyncio.create_task(self._look_after())]
        bound: int = self._socket.getsockname()[1]
        return bound

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
        self.strangers.make_room(0)

    async def _let_in(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno in NO_ROOM:
                    self.strangers.make_room(STRANGERS // 2)
                    self._complain(f"no room for another connection ({error.strerror})")
                await asyncio.sleep(NO_ROOM_S)
                continue
            if len(self.strangers) >= STRANGERS:
                self.strangers.make_room(STRANGERS - 1)
                await asyncio.sleep(CROWDED_S)
            try:
                transport, _ = await loop.connect_accepted_socket(self._protocol, connection)
            except OSError:
                connection.close()
            else:
                self.strangers.arrive(transport)

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.strangers.part_with_silent()
            if self.strangers.shown_out >= STRANGERS:
                self._complain("many connections that show no token")

    def _complain(self, what: str) -> None:
        """One line now and then, however many they are."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._complained_s < COMPLAIN_S:
            return
        log.warning("%s: %d were closed so far", what, self.strangers.shown_out)
        self._complained_s = now_s
