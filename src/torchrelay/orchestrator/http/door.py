"""Door: the TCP port of the orchestrator, and what is logged of those who come to it.

Whoever connects is a stranger until a request has brought the token.

Anybody on the machine can connect. Strangers are few at a time, the oldest makes room for the next, and none stays
longer than a moment: no crowd of them takes the descriptors that agents and operators need, or fills the log.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

log = logging.getLogger("torchrelay.orchestrator")

STRANGERS = 64  # at a time
SILENCE_S = 5.0  # within this time a stranger must have shown the token
SLOW_S = 0.5  # for a handshake, when there is a crowd
CROWDED_S = 0.002  # between two strangers when they are many: others are to be heard as well
NO_ROOM_S = 0.2  # before another one is let in, when the process has no descriptor left
SWEEP_S = 0.5
BACKLOG = 256
COMPLAIN_S = 60.0  # between two lines in the log about a crowd
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Strangers:
    """Those who are connected and have not shown the token, the oldest first."""

    def __init__(self) -> None:
        self.since: dict[asyncio.BaseTransport, float] = {}
        self.shown_out = 0
        self._welcomed = WeakSet[asyncio.BaseTransport]()

    def __len__(self) -> int:
        return len(self.since)

    def arrive(self, transport: asyncio.BaseTransport) -> None:
        """It is connected. A request that came together with the end of the handshake may have been heard before."""
        if transport in self._welcomed:
            return
        self.since[transport] = asyncio.get_running_loop().time()

    def welcome(self, transport: asyncio.BaseTransport | None) -> None:
        """This one has shown the token, and may stay."""
        if transport is not None:
            self._welcomed.add(transport)
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
    """One listening port. `protocol` makes the server's end of a connection; `tls` asks for certificates first."""

    def __init__(
        self, protocol: Callable[[], asyncio.Protocol], strangers: Strangers, tls: ssl.SSLContext | None = None
    ) -> None:
        self.strangers = strangers
        self._protocol = protocol
        self._tls = tls
        self._greeting: dict[asyncio.Task[None], float] = {}  # without a certificate so far, and since when
        self._tasks: list[asyncio.Task[None]] = []
        self._socket: socket.socket | None = None
        self._held = False
        self._complained_s = -COMPLAIN_S
        self._refused_s: dict[str, float] = {}

    async def open(self, host: str, port: int, held: int | None = None) -> int:
        """Listen; returns the port. Raises OSError.

        `held`: the descriptor of a socket that whoever started us has bound, and holds while we are away.
        """
        if held is None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        else:
            self._socket, self._held = socket.socket(fileno=os.dup(held)), True
            # The ends of its connections linger for a minute: the next run may bind this port in spite of them.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.listen(BACKLOG)
        self._socket.setblocking(False)
        self._tasks = [asyncio.create_task(self._let_in(self._socket)), asyncio.create_task(self._look_after())]
        bound: int = self._socket.getsockname()[1]
        return bound

    async def close(self) -> None:
        tasks = [*self._tasks, *self._greeting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            if self._held:  # closing it here does not refuse anybody, and nobody else may have it until we end
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._socket = None
        self.strangers.make_room(0)

    async def _let_in(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno in NO_ROOM:
                    self.strangers.make_room(STRANGERS // 2)
                    self._complain(f"no room for another connection ({error.strerror})")
                await asyncio.sleep(NO_ROOM_S)
                continue
            try:
                await self._receive(connection, str(address[0]))
            except asyncio.CancelledError:
                connection.close()
                raise

    async def _receive(self, connection: socket.socket, host: str) -> None:
        """Greet a newcomer, or see to it that somebody does."""
        if len(self.strangers) >= STRANGERS:
            self.strangers.make_room(STRANGERS - 1)
            await asyncio.sleep(CROWDED_S)
        if self._tls is None:
            await self._greet(connection, host, None)
            return
        await asyncio.sleep(0)  # to accept what waits does not let the others have their turn
        await self._make_room_to_greet()
        greeting = asyncio.create_task(self._greet(connection, host, self._tls))
        self._greeting[greeting] = asyncio.get_running_loop().time()

        def over(task: asyncio.Task[None]) -> None:
            self._greeting.pop(task, None)
            if task.cancelled():  # perhaps before it began
                connection.close()

        greeting.add_done_callback(over)

    async def _make_room_to_greet(self) -> None:
        """Thousands of agents may come at once, and each is quick: only who is slow makes room for the next."""
        now_s = asyncio.get_running_loop().time
        while len(self._greeting) >= STRANGERS:
            oldest, since_s = next(iter(self._greeting.items()))
            if now_s() - since_s > SLOW_S:
                oldest.cancel()
            await asyncio.sleep(CROWDED_S)

    async def _greet(self, connection: socket.socket, host: str, tls: ssl.SSLContext | None) -> None:
        """Let one in; with TLS only if it shows a certificate of this job, within a moment."""
        loop = asyncio.get_running_loop()
        patience: dict[str, Any] = {}
        if tls is not None:
            patience = {"ssl": tls, "ssl_handshake_timeout": SILENCE_S, "ssl_shutdown_timeout": SILENCE_S}
        try:
            transport, _ = await loop.connect_accepted_socket(self._protocol, connection, **patience)
        except asyncio.CancelledError:
            connection.close()
            raise
        except OSError as error:
            self._refused(host, error)
            connection.close()
        else:
            self.strangers.arrive(transport)

    def _refused(self, host: str, error: OSError) -> None:
        """Whoever has no certificate of this job: said once in a while for each host."""
        if self._tls is None:
            return
        now_s = asyncio.get_running_loop().time()
        if now_s - self._refused_s.get(host, -COMPLAIN_S) < COMPLAIN_S:
            return
        self._refused_s.pop(host, None)
        if len(self._refused_s) >= STRANGERS:
            del self._refused_s[next(iter(self._refused_s))]  # the one that was heard of longest ago
        self._refused_s[host] = now_s
        why = getattr(error, "verify_message", "") or getattr(error, "reason", "") or str(error) or type(error).__name__
        log.warning("refused a connection from %s: no certificate of this job (%s)", host, ascii(why)[1:-1][:LONGEST])

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


# ---------------------------------------------------------------- what libraries log of it

# What libraries log of single requests costs a short line each, and so many lines in a minute at most.
#
# A peer without a token can make them log as often as it likes: with a traceback, and with all that it has sent.

SOURCES = ("aiohttp.server", "aiohttp.web", "aiohttp.websocket", "aiohttp.internal", "asyncio")
LONGEST = 200  # characters of a line
TRACE = 4_000  # characters of the trace of an error that is our own, from its end
MOST, WITHIN_S = 20, 60.0


class Brief(logging.Filter):
    """For the loggers of libraries. `clock` in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._begun_s = -WITHIN_S
        self._said = 0
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = self._clock()
        if now_s - self._begun_s >= WITHIN_S:
            self._begun_s, self._said = now_s, 0
        if self._said >= MOST:
            self._left_out += 1
            return False
        self._said += 1
        text = one_line(record)
        if self._left_out:
            text += f" ({self._left_out} lines like this were left out before)"
            self._left_out = 0
        record.msg, record.args, record.exc_info, record.exc_text = text, None, None, None
        return True


def one_line(record: logging.LogRecord) -> str:
    """What it says, and the error that it tells of; of an error of ours its trace, too."""
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    text = ascii(record.getMessage())[1:-1]
    if error is not None:
        text += f": {type(error).__name__}: {ascii(str(error))[1:-1]}"
    text = text[:LONGEST]
    if error is not None and record.exc_info and not type(error).__module__.startswith("aiohttp"):
        text += "\n" + logging.Formatter().formatException(record.exc_info)[-TRACE:]
    return text


def be_brief() -> None:
    """From now on, in this process."""
    brief = Brief()
    for name in SOURCES:
        logging.getLogger(name).addFilter(brief)
