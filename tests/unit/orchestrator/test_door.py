"""The door and the log: whoever has no token costs little, whatever they do, and shuts nobody out."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
from aiohttp import web

from tests.support.brain import until
from torchrelay.orchestrator.http import door as doors
from torchrelay.orchestrator.http.door import LONGEST, MOST, STRANGERS, WITHIN_S, Brief, Door, Strangers


@asynccontextmanager
async def standing() -> AsyncIterator[tuple[Door, int]]:
    """A door with a server behind it that welcomes whoever asks for /known."""

    async def known(request: web.Request) -> web.Response:
        strangers.welcome(request.transport)
        return web.Response(text="come in")

    strangers = Strangers()
    app = web.Application()
    app.add_routes([web.get("/known", known)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    assert runner.server is not None
    door = Door(runner.server, strangers)
    try:
        yield door, await door.open("127.0.0.1", 0)
    finally:
        await door.close()
        await runner.cleanup()


class Flood:
    """Connections that say nothing; one that the peer has ended stays in the list."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.open: list[socket.socket] = []

    def grow(self, number: int) -> None:
        for _ in range(number):
            connection = socket.socket()
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", self.port))
            self.open.append(connection)

    def close(self) -> None:
        for connection in self.open:
            connection.close()


@contextmanager
def flood(port: int) -> Iterator[Flood]:
    found = Flood(port)
    try:
        yield found
    finally:
        found.close()


async def come_in(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /known HTTP/1.1\r\nHost: here\r\n\r\n")
    assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"come in"), 20)
    return reader, writer


def test_strangers_are_few_and_others_get_in_between_them() -> None:
    async def story() -> None:
        async with standing() as (door, port):
            _, early = await come_in(port)
            with flood(port) as crowd:
                for _ in range(10):
                    crowd.grow(40)
                    await asyncio.sleep(0.01)
                    assert len(door.strangers) <= STRANGERS
                await until("a crowd", lambda: len(door.strangers) >= STRANGERS - 1)
                _, late = await come_in(port)
                assert not early.transport.is_closing()
                early.write(b"GET /known HTTP/1.1\r\nHost: here\r\n\r\n")
                late.close()
                early.close()

    asyncio.run(asyncio.wait_for(story(), 60))


def test_one_who_says_nothing_is_shown_out_and_one_with_a_token_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "SILENCE_S", 1.0)

    async def story() -> None:
        async with standing() as (door, port):
            reader, writer = await come_in(port)
            with flood(port) as crowd:
                crowd.grow(3)
                await until("three strangers", lambda: len(door.strangers) == 3)
                await until("no stranger", lambda: len(door.strangers) == 0)
            writer.write(b"GET /known HTTP/1.1\r\nHost: here\r\n\r\n")
            assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"come in"), 20)
            writer.close()

    asyncio.run(asyncio.wait_for(story(), 60))


def test_without_descriptors_it_makes_room_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with standing() as (door, port):
            with flood(port) as crowd:
                crowd.grow(30)
                await until("strangers", lambda: len(door.strangers) == 30)
                soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
                used = len(os.listdir("/proc/self/fd"))
                crowd.grow(20)  # they wait in the listener's queue
                resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2, hard))
                try:
                    await asyncio.sleep(1.0)
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            _, writer = await come_in(port)
            writer.close()

    asyncio.run(asyncio.wait_for(story(), 60))
    assert sum("no room for another connection" in line for line in caplog.messages) <= 1
    assert not any("out of system resource" in line for line in caplog.messages)


class TestBrief:
    @pytest.fixture
    def now(self) -> list[float]:
        return [0.0]

    @pytest.fixture
    def log(self, now: list[float]) -> Iterator[logging.Logger]:
        logger, brief = logging.getLogger("aiohttp.test-server"), Brief(lambda: now[0])
        logger.addFilter(brief)
        yield logger
        logger.removeFilter(brief)

    def test_a_bad_request_is_a_short_line(self, log: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
        try:
            raise web.HTTPBadRequest(reason="x" * 131_072)
        except web.HTTPBadRequest:
            log.exception("Error handling request from %s", "127.0.0.1")
        assert [len(line) <= LONGEST for line in caplog.text.splitlines()[1:]] == []
        assert len(caplog.text) < LONGEST + 100

    def test_a_peer_breaks_no_line(self, log: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
        log.error("Error: %s", "a\nb\x1b[31m")
        assert caplog.messages == [r"Error: a\nb\x1b[31m"]

    def test_an_error_of_ours_keeps_the_end_of_its_trace(
        self, log: logging.Logger, caplog: pytest.LogCaptureFixture
    ) -> None:
        try:
            raise AssertionError("two owners")
        except AssertionError:
            log.exception("Error handling request")
        assert "AssertionError: two owners" in caplog.text
        assert "test_door.py" in caplog.text

    def test_so_many_in_a_minute_and_then_how_many_were_left_out(
        self, log: logging.Logger, caplog: pytest.LogCaptureFixture, now: list[float]
    ) -> None:
        for _ in range(1000):
            log.error("again")
        assert len(caplog.messages) == MOST
        now[0] += WITHIN_S
        log.error("again")
        assert caplog.messages[-1] == f"again ({1000 - MOST} lines like this were left out before)"
