"""`torchrelay attach` prints what the launcher would print, ends as the job ends, and finds the run's folder."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.support.api import TOKEN as SECRET
from tests.support.api import Port, play
from tests.support.brain import JOB, NODE, RecordingLink, train, until
from torchrelay.api.endpoint import TOKEN, Endpoint, write_endpoint
from torchrelay.api.shown import Place
from torchrelay.cli.launch import attach as module
from torchrelay.cli.launch.attach import Attached, find_folder, follow
from torchrelay.cli.main import parser
from torchrelay.client.client import Denied
from torchrelay.client.runs import NotPossible
from torchrelay.launcher.following import FarLines, Over, Reach
from torchrelay.orchestrator.core.rules import all_ended
from torchrelay.orchestrator.store.output import Reader
from torchrelay.protocol.messages.events import WorkerExited
from torchrelay.protocol.messages.ids import WorkerId
from torchrelay.wire.trust.trust import write_token

Said = pytest.CaptureFixture[str]


async def begun(port: Port, folder: Path) -> None:
    """A job of two ranks, which have printed a line each."""
    write_token(folder / TOKEN, SECRET)
    write_endpoint(folder, Endpoint(url=port.url, pid=1))
    (folder / "logs").mkdir()
    for rank in range(2):
        (folder / "logs" / f"rank-{rank}.log").write_text(f"hello from {rank}\n")
    await train(port.service, RecordingLink())


async def ended(port: Port) -> None:
    """The job is cancelled, and its workers and agents end."""
    await port.post(f"/v1/jobs/{JOB}/cancel", {"reason": "enough"}, 202)
    for place in range(3):
        worker = WorkerId(f"node-0.{place}.{place}")
        await port.service.put(WorkerExited(worker=worker, node=NODE, signal=15, cause="SIGTERM"))
    assert all_ended(port.service.cluster)
    await asyncio.sleep(0.3)
    port.service.begin_shutdown("the job has ended")
    port.service.detach(port.service.connections[NODE])


def attached(folder: Path, job: str | None = None) -> Attached:
    return Attached(None, folder, job, 20.0)


class TestFollowing:
    def test_lines_and_incidents_are_printed_and_the_code_is_the_jobs(self, tmp_path: Path, capsys: Said) -> None:
        out = ""

        async def story(port: Port) -> None:
            nonlocal out
            await begun(port, tmp_path)
            following = asyncio.create_task(attached(tmp_path).follow())
            said = ""
            while "Ctrl-C" not in said:
                await asyncio.sleep(0.05)
                new = capsys.readouterr()
                said, out = said + new.err, out + new.out
            assert "job on the launcher's machine: running" in said
            assert "Ctrl-C leaves it alone" in said
            await port.service.put(WorkerExited(worker=WorkerId("node-0.1.1"), node=NODE, signal=9, cause="SIGKILL"))
            with (tmp_path / "logs" / "rank-1.log").open("a") as log:
                log.write("later\x1b[2J\n")
            await asyncio.sleep(0.5)
            await ended(port)
            assert await following == 130

        play(tmp_path, story, tmp_path)
        last, err = capsys.readouterr()
        assert sorted((out + last).splitlines()) == ["[0] hello from 0", "[1] hello from 1", "[1] later?[2J"]
        assert "I-1: " in err
        assert "job ended with 130: enough" in err
        assert f"torchrelay report --run-dir {tmp_path}" in err

    def test_of_a_job_that_has_just_ended_the_summary_is_told(self, tmp_path: Path, capsys: Said) -> None:
        async def story(port: Port) -> None:
            await begun(port, tmp_path)
            await port.post(f"/v1/jobs/{JOB}/cancel", {"reason": "enough"}, 202)
            following = asyncio.create_task(attached(tmp_path).follow())
            await asyncio.sleep(0.5)
            await ended(port)
            assert await following == 130

        play(tmp_path, story, tmp_path)
        assert "it has ended with 130" in capsys.readouterr().err

    def test_when_nobody_answers_any_more_the_journal_tells(self, tmp_path: Path, capsys: Said) -> None:
        async def story(port: Port) -> None:
            await begun(port, tmp_path)
            await ended(port)

        play(tmp_path, story, tmp_path)
        assert follow(tmp_path, None, 5.0) == 130
        assert "the run ended at" in (said := capsys.readouterr().err)
        assert "job ended with 130: enough" in said

    def test_a_run_that_nobody_decides_about_is_waited_for(
        self, tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("torchrelay.client.heads.LOOK_S", 0.05)

        async def story(port: Port) -> None:
            await begun(port, tmp_path)

        play(tmp_path, story, tmp_path)
        with pytest.raises(NotPossible, match=r"no orchestrator has acted for 0.2 s"):
            follow(tmp_path, None, 0.2)
        assert "no orchestrator acts at the moment" in capsys.readouterr().err

    def test_a_job_that_is_not_there_is_refused_in_words(self, tmp_path: Path) -> None:
        async def story(port: Port) -> None:
            await begun(port, tmp_path)
            with pytest.raises(Denied, match="no job named 'jub'; known: job"):
                await attached(tmp_path, "jub").follow()

        play(tmp_path, story, tmp_path)

    def test_ctrl_c_says_that_the_job_goes_on(
        self, tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def interrupted(_: Attached) -> int:
            raise KeyboardInterrupt

        (tmp_path / "journal.db").touch()
        monkeypatch.setattr(module.Attached, "follow", interrupted)
        assert follow(tmp_path, "train", 1.0) == 130
        assert "train goes on: `torchrelay attach` finds it again" in capsys.readouterr().err


class TestFinding:
    def test_the_newest_run_is_found_here_or_on_a_node_that_has_a_copy(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(NotPossible, match="name one with --run-dir, or with --url and --ca") as told:
            find_folder(None, tmp_path)
        assert told.value.code == 2
        nodes = tmp_path / f"torchrelay-{os.getuid()}"
        copy, own = nodes / "train-abc" / "m3" / "heir", Path("torchrelay-runs") / "train"
        for folder, age_s in ((own, 200), (copy, 100)):
            folder.mkdir(parents=True)
            for name in ("journal.db", "job.json"):
                (folder / name).touch()
                os.utime(folder / name, (1e9 - age_s, 1e9 - age_s))
        nodes.chmod(0o700)
        assert find_folder(None, tmp_path) == copy
        os.utime(own / "job.json", (1e9, 1e9))
        assert find_folder(None, tmp_path) == own
        nodes.chmod(0o777)
        os.utime(own / "job.json", (1e8, 1e8))
        assert find_folder(None, tmp_path) == own, "what others may write is not trusted"

    def test_a_folder_without_a_journal_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(NotPossible, match="not a run's folder"):
            find_folder(tmp_path)

    def test_the_words_of_the_verb(self) -> None:
        given = parser("attach").parse_args(["attach", "--url", "https://m3:1", "--ca", "viewer.pem", "-j", "train"])
        assert (given.job, given.patience, given.run_dir) == ("train", 600.0, None)


class Teller:
    """An orchestrator that tells what stands in some logs. `cut`: it ends the stream after so many events."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.over, self.cut = False, 0
        self.url = ""
        folder.mkdir()

    def add(self, text: str) -> None:
        with (self.folder / "rank-0.log").open("a") as log:
            log.write(f"{text}\n")

    async def tell(self, request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"X-Torchrelay-Logs": self.name})
        await stream.prepare(request)
        reader = Reader(self.folder, msgspec.json.decode(await request.read(), type=list[Place]))
        sent = 0
        while not self.cut or sent < self.cut:
            over = self.over
            for lines in reader.read(1 << 20):
                await stream.write(b"data: " + msgspec.json.encode(lines) + b"\n\n")
                sent += 1
            if over:
                await stream.write(b"event: over\ndata: 5\n\n")
                break
            await asyncio.sleep(0.01)
        return stream


def test_lines_come_once_whatever_ends_in_between_and_wherever_they_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrelay.launcher.following.HERE_S", 0.05)
    found: list[str] = []

    async def story() -> None:
        tellers = [Teller(tmp_path / name, name) for name in ("one", "other")]
        servers = []
        for teller in tellers:
            app = web.Application()
            app.add_routes([web.get("/v1/lines", teller.tell)])
            servers.append(TestServer(app))
            await servers[-1].start_server()
            teller.url = str(servers[-1].make_url("")).rstrip("/")
        one, other = tellers
        one.cut = 1
        here = [one]
        reach = Reach(lambda: Endpoint(url=here[0].url, pid=1), "trt_x")
        following = asyncio.create_task(take(FarLines(reach), found))
        for number in range(3):
            one.add(f"one {number}")
            await until("it comes", lambda number=number: len(found) == number + 1)  # type: ignore[misc]
        one.cut = 0
        other.add("other 0")
        here[0] = other  # although the first is still there
        await until("it comes", lambda: len(found) == 4)
        here[0] = one
        one.add("one 3")
        await until("it comes", lambda: len(found) == 5)
        here[0] = other
        other.over = True
        other.add("other 1")
        assert await following == 5
        for server in servers:
            await server.close()

    asyncio.run(asyncio.wait_for(story(), 30))
    assert found == ["one 0", "one 1", "one 2", "other 0", "one 3", "other 1"]


async def take(lines: FarLines, found: list[str]) -> int:
    async for each in lines.follow():
        if isinstance(each, Over):
            return each.left
        found += each.lines
    return -1
