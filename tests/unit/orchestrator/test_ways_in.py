"""How agents, verbs and the follower of a run come to its orchestrator, and whom they do not listen to."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from torchrelay.agent.__main__ import address_book
from torchrelay.api.endpoint import ENDPOINT, Endpoint, read_endpoint, write_endpoint
from torchrelay.cli.launch.run import take_folder
from torchrelay.client.asking import NoAnswer, ask
from torchrelay.launcher.following import JOURNAL_HEADER, moments
from torchrelay.orchestrator.store.journal import Journal
from torchrelay.orchestrator.views.story import Moment


def where(run_dir: Path, host: str) -> str:
    return address_book(argparse.Namespace(url=None, endpoint=run_dir / ENDPOINT, host=host))()


class TestAgents:
    def test_one_of_this_machine_comes_by_the_socket_and_one_with_a_network_by_its_link(self, tmp_path: Path) -> None:
        inside = tmp_path / "orchestrator"
        write_endpoint(tmp_path, Endpoint(url="http://127.0.0.1:9", pid=1, socket=str(inside)))
        assert where(tmp_path, "127.0.0.1") == "http://127.0.0.1:9", "nobody is there"
        inside.touch()
        assert where(tmp_path, "127.0.0.1") == f"unix:{inside}"
        assert where(tmp_path, "10.1.0.3") == "http://127.0.0.1:9", "its link may be cut, and that is to count"


class TestAsking:
    @pytest.mark.parametrize("there", [True, False])
    def test_the_socket_is_asked_if_somebody_listens_there_and_else_the_port(self, tmp_path: Path, there: bool) -> None:
        async def story() -> None:
            async def tell(request: web.Request) -> web.Response:
                return web.Response(text="inside" if request.transport is not None and not request.remote else "port")

            app = web.Application()
            app.add_routes([web.get("/", tell)])
            server = TestServer(app)
            await server.start_server()
            inside = tmp_path / "orchestrator"
            if there:
                await web.UnixSite(server.runner, str(inside)).start()  # type: ignore[arg-type]
            else:
                inside.touch()  # left by one that was killed
            url = str(server.make_url("")).rstrip("/")
            answer = await asyncio.to_thread(ask, url, "GET", "/", {}, b"", 5.0, str(inside))
            assert answer == (200, b"inside" if there else b"port")
            await server.close()

        asyncio.run(asyncio.wait_for(story(), 30))

    def test_nobody_anywhere_is_no_answer(self, tmp_path: Path) -> None:
        with pytest.raises((NoAnswer, ConnectionError)):
            ask("http://127.0.0.1:9", "GET", "/", {}, b"", 1.0, str(tmp_path / "none"))


class TestFollowing:
    def test_the_story_of_another_journal_is_not_ours(self) -> None:
        """An orchestrator that has begun anew tells of a job of the same name, with higher numbers."""
        names = iter(["ours", "another", "ours"])

        async def tell(request: web.Request) -> web.StreamResponse:
            name = next(names)
            stream = web.StreamResponse(headers={JOURNAL_HEADER: name})
            await stream.prepare(request)
            moment = Moment(seq=int(request.query["since"]) + 1, at_ms=1, at=name, event="Tick", facts={})
            await stream.write(b"data: " + msgspec.json.encode(moment) + b"\n\n")
            return stream

        async def story() -> None:
            app = web.Application()
            app.add_routes([web.get("/v1/events", tell)])
            server = TestServer(app)
            await server.start_server()
            endpoint = Endpoint(url=str(server.make_url("")).rstrip("/"), pid=1)
            told = []
            async for moment in moments(lambda: endpoint, "trt_x"):
                assert isinstance(moment, Moment)
                told.append((moment.seq, moment.at))
                if len(told) == 2:
                    break
            assert told == [(1, "ours"), (2, "ours")]
            await server.close()

        asyncio.run(asyncio.wait_for(story(), 30))


def test_a_run_in_a_folder_whose_journal_was_removed_begins_its_own(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    take_folder(run_dir, None)
    Journal(run_dir / "journal.db").close()
    write_endpoint(run_dir, Endpoint(url="http://127.0.0.1:9", pid=1, journal="the one before"))
    for part in run_dir.glob("journal.db*"):
        part.unlink()
    take_folder(run_dir, None)
    assert read_endpoint(run_dir) is None
    Journal(run_dir / "journal.db").close()
