"""`torchrelay attach` prints what the launcher would print, ends as the job ends, and finds the run's folder."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.support.api import TOKEN as SECRET
from tests.support.api import Port, play
from tests.support.brain import JOB, NODE, RecordingLink, train
from torchrelay.api.endpoint import TOKEN, Endpoint, write_endpoint
from torchrelay.cli.main import parser
from torchrelay.client.client import Denied
from torchrelay.client.runs import NotPossible
from torchrelay.launcher import attaching
from torchrelay.launcher.attaching import Attached, attach, find_folder
from torchrelay.orchestrator.core.rules import all_ended
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
        assert attach(tmp_path, None, 5.0) == 130
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
            attach(tmp_path, None, 0.2)
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
        monkeypatch.setattr(attaching.Attached, "follow", interrupted)
        assert attach(tmp_path, "train", 1.0) == 130
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
