"""The lease: two orchestrators never both act, whatever the file lock says."""

from __future__ import annotations

import asyncio
import fcntl
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.support.brain import RecordingLink, serving, spec, until
from tests.support.lease import an_uplink
from torchrelay.orchestrator.store.journal import (
    Call,
    Journal,
    JournalRefused,
    JournalUnavailable,
    Superseded,
    read_history,
)
from torchrelay.protocol.messages.events import JobSubmitted, NodeJoined, Tick
from torchrelay.protocol.messages.ids import NodeId, WorkerId
from torchrelay.protocol.messages.orders import Fence
from torchrelay.wire.messages.channel import AGENT_PATH, Attached, OrderFrame
from torchrelay.wire.messages.codec import encode

CALL = Call(wall_ms=1, who="ann@desk", call="drain", what="node-1")


class TestJournal:
    def test_each_orchestrator_raises_it(self, tmp_path: Path) -> None:
        for lease in (1, 2, 3):
            with closing(Journal(tmp_path / "journal.db")) as journal:
                assert journal.lease == lease
        assert read_history(tmp_path / "journal.db").lease == 3

    def test_one_that_was_replaced_writes_nothing_any_more(self, tmp_path: Path) -> None:
        with closing(Journal(tmp_path / "journal.db")) as old:
            old.append(Tick(), 1)
            with closing(Journal(tmp_path / "journal.db", take_over=True)) as new:
                for write in (
                    lambda: old.append(Tick(), 2),
                    lambda: old.anchor(2, 2),
                    lambda: old.remember({}),
                    lambda: old.note(CALL),
                    old.check_lease,
                ):
                    with pytest.raises(Superseded, match=r"lease 1 of .* another .* holds it now \(lease 2\)"):
                        write()
                assert new.append(Tick(), 5) == 2
        assert [entry.at_ms for entry in read_history(tmp_path / "journal.db").entries] == [1, 5]

    def test_without_being_asked_to_nobody_takes_over(self, tmp_path: Path) -> None:
        with closing(Journal(tmp_path / "journal.db")) as journal:
            with pytest.raises(JournalRefused, match="in use by another"):
                Journal(tmp_path / "journal.db")
            journal.check_lease()

    def test_where_there_are_no_locks_the_lease_is_enough(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_locks(*_: object) -> None:
            raise OSError(37, "No locks available")

        monkeypatch.setattr(fcntl, "flock", no_locks)
        with closing(Journal(tmp_path / "journal.db")) as old, closing(Journal(tmp_path / "journal.db")) as new:
            new.append(Tick(), 1)
            with pytest.raises(Superseded):
                old.append(Tick(), 2)

    def test_a_call_and_its_event_are_written_together_or_not_at_all(self, tmp_path: Path) -> None:
        with closing(Journal(tmp_path / "journal.db")) as journal:
            journal.append(Tick(), 1)
            journal.append(Tick(), 2, CALL)
            journal._db.execute("CREATE TRIGGER full BEFORE INSERT ON audit BEGIN SELECT RAISE(ABORT, 'full'); END")
            with pytest.raises(JournalUnavailable, match="full"):
                journal.append(Tick(), 3, CALL)
            assert journal.append(Tick(), 4) == 3
            assert [(call.who, call.call, call.seq) for call in journal.calls()] == [("ann@desk", "drain", 2)]
        assert [entry.at_ms for entry in read_history(tmp_path / "journal.db").entries] == [1, 2, 4]

    def test_a_journal_of_the_older_format_is_read_and_brought_up_to_date(self, tmp_path: Path) -> None:
        path = tmp_path / "journal.db"
        with closing(Journal(path)) as journal:
            journal.append(Tick(), 7)
        (tmp_path / "journal.mark").unlink()
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.executescript("DROP TABLE audit; DELETE FROM about; PRAGMA user_version = 1;")
        history = read_history(path)
        assert (len(history.entries), history.calls, history.lease) == (1, (), 0)
        with closing(Journal(path)) as journal:
            assert (journal.lease, journal.last_seq) == (1, 1)
            journal.append(Tick(), 8, CALL)
        assert read_history(path).calls[0].seq == 2


class TestUplink:
    def test_orders_of_a_lower_lease_are_not_passed_on(self) -> None:
        """An orchestrator that gives them after its welcome was replaced is left at once."""
        order = Fence(node=NodeId("node-0"), worker=WorkerId("w"))
        connections = []

        async def serve(request: web.Request) -> web.WebSocketResponse:
            socket = web.WebSocketResponse()
            await socket.prepare(request)
            await socket.receive()
            connections.append(socket)
            for message in (Attached(lease=3), OrderFrame((order,), 3), OrderFrame((order, order), 2)):
                await socket.send_bytes(encode(message))
            await socket.receive()
            return socket

        async def story() -> None:
            app = web.Application()
            app.add_routes([web.get(AGENT_PATH, serve)])
            server = TestServer(app)
            await server.start_server()
            heard: list[object] = []
            uplink = an_uplink(lambda: str(server.make_url("")), lambda: "trt_x", heard.append)
            running = asyncio.create_task(uplink.run())
            await until("a second connection", lambda: len(connections) > 1)
            assert {type(message) for message in heard} == {Attached, OrderFrame}
            assert {message.lease for message in heard if isinstance(message, OrderFrame)} == {3}
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            await server.close()

        asyncio.run(asyncio.wait_for(story(), 30))


class TestService:
    def test_a_stale_one_says_nothing_more_and_ends(self, tmp_path: Path) -> None:
        async def story() -> None:
            async with serving(tmp_path) as service:
                link = RecordingLink()
                await service.attach(link, link.joined())
                await service.put(JobSubmitted(spec=spec()))
                assert link.orders()
                with closing(Journal(tmp_path / "journal.db", take_over=True)):
                    said = len(link.sent)
                    await until("the end", lambda: service.over)
                assert "lease 2" in service.superseded
                assert link.sent[said:] == []
                assert link.closed
                service.begin_shutdown("too late")
                assert link.sent[said:] == []

        asyncio.run(asyncio.wait_for(story(), 30))

    def test_what_a_stale_one_hears_is_not_acknowledged(self, tmp_path: Path) -> None:
        async def story() -> None:
            async with serving(tmp_path) as service:
                with closing(Journal(tmp_path / "journal.db", take_over=True)):
                    with pytest.raises(JournalUnavailable, match="another orchestrator"):
                        await service.put(NodeJoined(node=NodeId("node-0"), incarnation="a", slots=1))
                    assert not service.cluster.nodes

        asyncio.run(asyncio.wait_for(story(), 30))
