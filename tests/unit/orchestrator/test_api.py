"""The orchestrator's port: what operators and agents may ask, and what strangers may not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from aiohttp import ClientSession, StreamReader

from tests.support.api import TOKEN, Agent, Port, play
from tests.support.brain import (
    JOB,
    NODE,
    RecordingLink,
    sample,
    spec,
    train,
    until,
)
from torchrelay.orchestrator.core import service as shell
from torchrelay.orchestrator.http import api
from torchrelay.orchestrator.store.journal import JournalUnavailable, read_history
from torchrelay.orchestrator.views.story import Kind, Moment
from torchrelay.protocol.messages.events import Event, JobSubmitted, NodeLost, WorkerExited, WorkerStarted
from torchrelay.protocol.messages.ids import WorkerId
from torchrelay.protocol.messages.orders import StartWorker
from torchrelay.wire.messages.channel import (
    AGENT_PATH,
    Ack,
    Attached,
    BeatFrame,
    EventFrame,
    OrderFrame,
    Refused,
)
from torchrelay.wire.messages.codec import encode


def exited(worker: str) -> WorkerExited:
    return WorkerExited(worker=WorkerId(worker), node=NODE, signal=9, cause="SIGKILL")


def refuse_to_write(*_: object) -> None:
    raise JournalUnavailable("journal.db: database or disk is full")


class TestStrangers:
    @pytest.mark.parametrize("header", [None, "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", TOKEN])
    @pytest.mark.parametrize("path", ["/v1/status", "/v1/events", AGENT_PATH, "/nowhere"])
    def test_without_the_token_there_is_nothing_to_see(self, tmp_path: Path, header: str | None, path: str) -> None:
        async def story(port: Port) -> None:
            headers = {} if header is None else {"Authorization": header}
            async with ClientSession(headers=headers) as stranger, stranger.get(port.url + path) as answer:
                assert answer.status == 401
                told = (await answer.json())["error"]
                assert "token" in told
                assert TOKEN not in told

        play(tmp_path, story)

    def test_whether_it_is_well_may_be_asked_by_anybody(self, tmp_path: Path) -> None:
        async def story(port: Port) -> None:
            async with ClientSession() as stranger, stranger.get(port.url + "/healthz") as answer:
                assert answer.status == 200

        play(tmp_path, story)


class TestLooking:
    def test_status_tells_step_phase_spares_and_incidents(self, tmp_path: Path) -> None:
        async def story(port: Port) -> None:
            link = RecordingLink()
            await train(port.service, link)
            port.service.beat(link, link.beat(sample("node-0.0.0", 0, 41), sample("node-0.1.1", 1, 40, step_ms=13.5)))
            whole = await port.get("/v1/status")
            (job,) = whole["jobs"]
            assert (job["phase"], job["step"], job["step_ms"], job["generation"]) == ("running", 41, 13.0, 1)
            assert job["spares"] == {"wanted": 1, "warm": 1, "starting": 0}
            assert job["incidents"] == {"total": 0, "eligible": 0, "clean": 0, "open": 0}
            assert job["joined"]
            assert job["outcome"] is None
            (node,) = whole["nodes"]
            assert (node["node"], node["alive"], node["slots"]) == ("node-0", True, 3)
            assert whole["degraded"] == ""

        play(tmp_path, story)

    def test_ranks_tell_who_holds_what_and_what_it_does(self, tmp_path: Path) -> None:
        async def story(port: Port) -> None:
            link = RecordingLink()
            await train(port.service, link)
            port.service.beat(link, link.beat(sample("node-0.1.1", 1, 40, process="T")))
            ranks = (await port.get(f"/v1/jobs/{JOB}/ranks"))["ranks"]
            assert [(row["rank"], row["worker"], row["pid"]) for row in ranks] == [
                (0, "node-0.0.0", 100),
                (1, "node-0.1.1", 101),
                (None, "node-0.2.2", 102),
            ]
            assert [row["state"] for row in ranks] == ["warm", "computing", "warm"]
            assert (ranks[1]["step"], ranks[1]["process"]) == (40, "T")

        play(tmp_path, story)

    def test_incidents_tell_every_decision_with_its_reason(self, tmp_path: Path) -> None:
        async def story(port: Port) -> None:
            await train(port.service, RecordingLink())
            await port.service.put(exited("node-0.1.1"))
            (incident,) = (await port.get(f"/v1/jobs/{JOB}/incidents"))["incidents"]
            assert incident["name"] == "I-1"
            assert incident["resolution"] == "open"
            assert incident["faults"][0]["cause"] == "SIGKILL"
            assert incident["faults"][0]["rank"] == 1
            assert any("moves to warm spare node-0.2.2" in told["text"] for told in incident["story"])
            assert await port.get("/v1/incidents/I-1") == incident

        play(tmp_path, story)

    def test_what_is_not_there_is_said_with_what_is(self, tmp_path: Path) -> None:
        async def story(port: Port) -> None:
            await train(port.service, RecordingLink())
            await port.service.put(exited("node-0.1.1"))
            assert "known: job" in (await port.get("/v1/jobs/jub/ranks", 404))["error"]
            assert "no incident 'I-7'" in (await port.get("/v1/incidents/I-7", 404))["error"]
            assert "number" in (await port.get("/v1/events?since=yesterday", 400))["error"]

        play(tmp_path, story)


class TestEventStream:
    async def read(self, port: Port, since: int, count: int) -> list[Moment]:
        found: list[Moment] = []
        async with port.session.get(f"{port.url}/v1/events?since={since}") as answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            async for line in answer.content:
                if line.startswith(b"data: "):
                    found.append(msgspec.json.decode(line[6:], type=Moment))
                    if len(found) == count:
                        break
        return found

    def test_it_begins_with_the_past_and_goes_on_as_it_happens(self, tmp_path: Path) -> None:
        async def story(port: Port) -> None:
            await train(port.service, RecordingLink())
            past = port.service.journal.last_seq
            reading = asyncio.create_task(self.read(port, 0, past + 1))
            await asyncio.sleep(0)
            await port.service.put(exited("node-0.1.1"))
            told = await reading
            assert [moment.seq for moment in told] == list(range(1, past + 2))
            assert told[-1].event == "WorkerExited"
            kinds = [note.kind for note in told[-1].notes]
            assert Kind.OPENED in kinds
            assert Kind.PHASE in kinds

        play(tmp_path, story)

    def test_a_reader_goes_on_where_it_was(self, tmp_path: Path) -> None:
        async def story(port: Port) -> None:
            await train(port.service, RecordingLink())
            assert [moment.seq for moment in await self.read(port, 4, 2)] == [5, 6]

        play(tmp_path, story)

    def test_private_state_is_not_shown(self, tmp_path: Path) -> None:
        async def story(port: Port) -> None:
            await train(port.service, RecordingLink())
            from torchrelay.protocol.messages.events import PrivateRecord
            from torchrelay.protocol.messages.ids import Point

            event = WorkerExited(worker=WorkerId("node-0.1.1"), node=NODE, private=(PrivateRecord(Point(3), b"rng"),))
            seq = await port.service.put(event)
            (moment,) = await self.read(port, seq - 1, 1)
            assert moment.facts["private"][0]["data"] == "3 bytes"

        play(tmp_path, story)

    def test_a_degraded_orchestrator_says_so_and_when_it_is_well_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shell, "REPEAT_S", 0.05)

        async def next_data(lines: StreamReader) -> str:
            assert await lines.readline() == b"event: degraded\n"
            return str(json.loads((await lines.readline()).removeprefix(b"data: ")))

        async def story(port: Port) -> None:
            async with port.session.get(f"{port.url}/v1/events") as answer:
                with monkeypatch.context() as full:
                    full.setattr(port.service.journal, "_write", refuse_to_write)
                    with pytest.raises(JournalUnavailable):
                        await port.service.put(JobSubmitted(spec=spec()))
                    assert "full" in await next_data(answer.content)
                await answer.content.readline()
                assert await next_data(answer.content) == ""

        play(tmp_path, story)

    def test_a_silent_stream_shows_that_it_is_alive(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(api, "KEEPALIVE_S", 0.05)

        async def story(port: Port) -> None:
            async with port.session.get(f"{port.url}/v1/events") as answer:
                assert (await answer.content.readline()).startswith(b":")

        play(tmp_path, story)


class TestOrdering:
    def test_a_job_is_submitted_once(self, tmp_path: Path) -> None:
        async def story(port: Port) -> None:
            assert (await port.post("/v1/jobs", spec(), 201))["phase"] == "starting"
            await port.post("/v1/jobs", spec(), 200)
            assert "another spec" in (await port.post("/v1/jobs", spec(spares=9), 409))["error"]
            assert list(port.service.cluster.jobs) == [JOB]

        play(tmp_path, story)

    @pytest.mark.parametrize(
        ("body", "told"),
        [
            ({"job": "../etc", "world_size": 1, "nproc_per_node": 1}, "use letters"),
            ({"job": "a", "world_size": 0, "nproc_per_node": 1}, "world_size is 0"),
            ({"job": "a", "world_size": 1, "nproc_per_node": 1, "spares": -1}, "spares is -1"),
            ({"job": "a", "world_size": "4", "nproc_per_node": 1}, "not a valid JobSpec"),
            ({"job": "a"}, "missing required field"),
            ({"job": "a", "world_size": 5, "nproc_per_node": 2, "nodes": 2}, "world_size is 5, but 2 nodes"),
            ([], "not a valid JobSpec"),
        ],
    )
    def test_nonsense_is_refused_in_words(self, tmp_path: Path, body: object, told: str) -> None:
        async def story(port: Port) -> None:
            assert told in (await port.post("/v1/jobs", body, 400))["error"]
            assert port.service.journal.last_seq == 0

        play(tmp_path, story)

    def test_a_cancelled_job_ends_with_130_and_the_reason(self, tmp_path: Path) -> None:
        async def story(port: Port) -> None:
            await port.post("/v1/jobs", spec(), 201)
            job = await port.post(f"/v1/jobs/{JOB}/cancel", {"reason": "the budget is spent"}, 202)
            assert job["outcome"] == {"code": 130, "reason": "the budget is spent"}

        play(tmp_path, story)

    def test_while_the_journal_cannot_be_written_it_can_only_be_looked_at(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def story(port: Port) -> None:
            with monkeypatch.context() as full:
                full.setattr(port.service.journal, "_write", refuse_to_write)
                assert "full" in (await port.post("/v1/jobs", spec(), 503))["error"]
                assert "full" in (await port.get("/v1/status"))["degraded"]
                assert "full" in (await port.get("/healthz", 503))["degraded"]
                async with ClientSession() as stranger, stranger.get(port.url + "/healthz") as answer:
                    told = (await answer.json())["degraded"]
                    assert ("nothing is decided" in told, "full" in told) == (True, False), "it names no path"
                async with port.session.get(port.url + AGENT_PATH) as answer:
                    assert answer.status == 503, "agents keep what they have to tell"

        play(tmp_path, story)


class TestAgents:
    def test_an_agent_attaches_hears_of_jobs_and_is_told_what_to_do_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shell, "REPEAT_S", 1e9)

        async def story(port: Port) -> None:
            await port.service.put(JobSubmitted(spec=spec()))
            async with port.agent() as agent:
                attached = await agent.hear(Attached)
                assert attached.jobs[0].spec == spec()
                assert len(attached.jobs[0].secret) == 32
                orders = (await agent.hear(OrderFrame)).orders
                assert {type(order) for order in orders} == {StartWorker}
            async with port.agent() as again:
                assert (await again.hear(OrderFrame)).orders == orders, "what still holds is said to who comes back"
            await until("the link to be gone", lambda: not port.service.connections)
            assert port.service.cluster.nodes[NODE].alive, "a lost connection proves nothing"

        play(tmp_path, story)

    def test_an_event_is_acknowledged_when_it_is_on_disk(self, tmp_path: Path) -> None:
        async def story(port: Port) -> None:
            await port.service.put(JobSubmitted(spec=spec()))
            async with port.agent() as agent:
                await agent.hear(OrderFrame)
                event = WorkerStarted(worker=WorkerId("node-0.0.0"), node=NODE, slot=0, pid=7)
                await agent.say(EventFrame(41, event))
                assert (await agent.hear(Ack)).seq == 41
                assert read_history(tmp_path / "journal.db").entries[-1].event == event

        play(tmp_path, story)

    @pytest.mark.parametrize(
        "event",
        [
            JobSubmitted(spec=spec(job="mine")),
            NodeLost(node=NODE, incarnation="first", reason="I say so"),
        ],
    )
    def test_an_agent_cannot_say_what_is_decided_here(self, tmp_path: Path, event: Event) -> None:
        async def story(port: Port) -> None:
            async with port.agent() as agent:
                await agent.hear(Attached)
                await agent.say(EventFrame(1, event))  # type: ignore[arg-type]
                await agent.until_closed()
            assert [type(entry.event).__name__ for entry in port.service.journal.entries()] == ["NodeJoined"]

        play(tmp_path, story)

    def test_another_version_is_refused_in_words(self, tmp_path: Path) -> None:
        async def story(port: Port) -> None:
            async with port.agent(version=99) as agent:
                assert "install the same torchrelay" in (await agent.hear(Refused)).reason
                await agent.until_closed()
            assert port.service.journal.last_seq == 0

        play(tmp_path, story)

    @pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x81\xa4type\xa3Foo", encode(Ack(3))])
    def test_garbage_ends_the_connection_and_changes_nothing(self, tmp_path: Path, garbage: bytes) -> None:
        async def story(port: Port) -> None:
            async with port.session.ws_connect(port.url + AGENT_PATH) as websocket:
                await websocket.send_bytes(garbage)
                await Agent(websocket).until_closed()
            assert port.service.journal.last_seq == 0

        play(tmp_path, story)

    def test_who_has_the_name_of_a_living_node_is_sent_away(self, tmp_path: Path) -> None:
        async def story(port: Port) -> None:
            async with port.agent() as first:
                await first.hear(Attached)
                await first.say(BeatFrame(RecordingLink().beat()))
                async with port.agent(incarnation="second") as second:
                    assert "another agent of node-0" in await second.until_closed()
                assert port.service.connections[NODE].incarnation == "first"

        play(tmp_path, story)
