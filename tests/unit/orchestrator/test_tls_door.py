"""The door with TLS: whoever has a pass of this job comes in, and nobody who is slow or strange keeps others out."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from aiohttp import ClientError, ClientSession, web

from torchrelay.api.endpoint import Endpoint
from torchrelay.launcher.following import Degraded, moments
from torchrelay.launcher.keeper import answers
from torchrelay.orchestrator.http.door import Door, Strangers
from torchrelay.wire.trust.authority import make_passes
from torchrelay.wire.trust.passes import Role, client_context, pass_of, server_context


@asynccontextmanager
async def opened(folder: Path, strangers: Strangers) -> AsyncIterator[int]:
    """A door of a job whose passes are in a folder; yields its port."""

    async def hello(request: web.Request) -> web.Response:
        strangers.welcome(request.transport)
        return web.Response(text="hello")

    app = web.Application()

    async def events(request: web.Request) -> web.Response:
        strangers.welcome(request.transport)
        return web.Response(text='event: degraded\ndata: "well"\n\n')

    app.add_routes([web.get("/", hello), web.get("/v1/events", events)])
    runner = web.AppRunner(app)
    await runner.setup()
    assert runner.server is not None
    door = Door(runner.server, strangers, server_context(pass_of(folder, Role.ORCHESTRATOR)))
    try:
        yield await door.open("127.0.0.1", 0)
    finally:
        await door.close()
        await runner.cleanup()


async def asked(port: int, folder: Path) -> str:
    context = client_context(pass_of(folder, Role.AGENT))
    where = f"https://127.0.0.1:{port}/"
    async with ClientSession() as session:
        answer = await session.get(where, ssl=context, server_hostname=Role.ORCHESTRATOR.server_name)
        return await answer.text()


def test_whoever_has_a_pass_comes_in_and_a_stranger_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_passes(tmp_path / "ours", "train")
    make_passes(tmp_path / "theirs", "train")

    async def story() -> None:
        async with opened(tmp_path / "ours", Strangers()) as port:
            for _ in range(20):
                with pytest.raises(ClientError):
                    await asked(port, tmp_path / "theirs")
            assert await asked(port, tmp_path / "ours") == "hello"

    with caplog.at_level(logging.WARNING, "torchrelay.orchestrator"):
        asyncio.run(story())
    assert [record.getMessage()[:39] for record in caplog.records] == ["refused a connection from 127.0.0.1: no"]


def test_a_crowd_that_says_nothing_keeps_nobody_out(tmp_path: Path) -> None:
    make_passes(tmp_path, "train")

    async def story() -> None:
        async with opened(tmp_path, Strangers()) as port:
            silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
            async with asyncio.timeout(10):
                assert await asked(port, tmp_path) == "hello"
            for one in silent:
                one.close()

    asyncio.run(story())


def test_a_door_that_is_closed_leaves_no_connection_behind(tmp_path: Path) -> None:
    """Not even one that has just been let in, and was not greeted yet."""
    make_passes(tmp_path, "train")

    async def story(turns: int) -> None:
        async with opened(tmp_path, Strangers()) as port:
            come = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
            for _ in range(turns):
                await asyncio.sleep(0)
        for one in come:
            with one, suppress(ConnectionResetError):
                one.settimeout(5)
                assert one.recv(1) == b"", "it is closed at the other end"

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for turns in range(12):
            asyncio.run(story(turns))
            gc.collect()


@pytest.mark.slow
def test_many_who_come_at_once_are_all_let_in(tmp_path: Path) -> None:
    make_passes(tmp_path, "train")

    async def story() -> None:
        async with opened(tmp_path, Strangers()) as port, asyncio.timeout(30):
            assert await asyncio.gather(*(asked(port, tmp_path) for _ in range(200))) == ["hello"] * 200

    asyncio.run(story())


def test_a_request_that_was_heard_before_the_arrival_makes_no_stranger() -> None:
    class End(asyncio.Transport):
        pass

    strangers, transport = Strangers(), End()
    strangers.welcome(transport)
    strangers.arrive(transport)
    assert len(strangers) == 0


def test_the_run_itself_comes_in_by_the_port_when_its_socket_is_gone(tmp_path: Path) -> None:
    """Else its keeper would kill an orchestrator that is well, again and again, and its story would not be told."""
    make_passes(tmp_path, "train")
    held = pass_of(tmp_path, Role.OPERATOR)

    async def story() -> None:
        async with opened(tmp_path, Strangers()) as port:
            gone = Endpoint(url=f"https://127.0.0.1:{port}", pid=1, socket=str(tmp_path / "gone"))
            assert await asyncio.to_thread(answers, gone, held)
            assert not await asyncio.to_thread(answers, gone)
            async with asyncio.timeout(10):
                async for moment in moments(lambda: gone, "", held):
                    assert moment == Degraded("well")
                    break

    asyncio.run(story())
