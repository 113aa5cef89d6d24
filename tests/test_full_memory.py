"""/dev/shm is full: no agent dies of it, whoever can train trains on, and who cannot start is told why."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.brain import wait_for
from tests.mounts import kept_full, needs_mounts, seen_by, within
from tests.test_cli_local_run import TWO, LocalRun
from torchrelay.agent.workers.samples import Sampler
from torchrelay.protocol.messages.ids import Point, WorkerId, WorkerPhase
from torchrelay.wire.files.page import SIZE, Page, no_room, reserve

MEMORY = Path("/dev/shm")
W = WorkerId("w1")


class InLittleMemory(LocalRun):
    """A run of which /dev/shm is small."""

    size = "24m"

    def command(self) -> list[str]:
        return within(MEMORY, self.size, super().command())

    @property
    def memory(self) -> Path:
        assert self.process is not None
        return seen_by(self.process.pid, MEMORY)

    def agent_log(self) -> str:
        return (self.run_dir / "logs" / "agent-node-0.log").read_text()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[InLittleMemory]:
    run = InLittleMemory(tmp_path)
    yield run
    run.tidy()


jobs = [pytest.mark.slow, pytest.mark.jobs, pytest.mark.timeout(180), needs_mounts]


class TestJobs:
    pytestmark = jobs

    def test_a_spare_takes_over_while_the_memory_is_full(self, run: InLittleMemory) -> None:
        run.start(*TWO, "400", "0.01")
        run.until_spare()
        run.until_step(3)
        agent = run.agent().pid
        with kept_full(run.memory):
            run.rank(1).kill()
            wait_for("a refusal", lambda: "could not be started" in run.agent_log(), 60)
            code, _, err = run.end(120)
        assert code == 0, err
        assert "1 incident, resolved clean" in err
        assert f"process {agent}" not in err
        assert "its agent" not in err

    def test_without_a_spare_the_job_recovers_or_ends_with_the_reason(self, run: InLittleMemory) -> None:
        run.start("--nproc-per-node", "2", "--spare-wait", "2", "train.py", "400", "0.01")
        run.until_step(3)
        with kept_full(run.memory):
            run.rank(1).kill()
            code, _, err = run.end(120)
        assert "its agent" not in err
        assert code in (0, 90), err
        if code == 90:
            assert "no spare" in err
            assert "of shared memory, and /dev/shm/" in run.agent_log()

    def test_at_the_start_it_is_said_what_to_do(self, run: InLittleMemory) -> None:
        run.size = "8m"
        run.start(*TWO, "3", "0.01")
        code, _, err = run.end()
        assert code == 94
        assert "3 workers need 12.6 MB of shared memory, and /dev/shm" in err
        assert "remove what fills it" in err

    def test_if_it_fills_up_while_the_first_workers_start_the_reason_is_said(self, run: InLittleMemory) -> None:
        run.start(*TWO, "3", "0.01", FAKE_FILL="1")
        code, _, err = run.end()
        assert code == 94, err
        assert "of shared memory, and /dev/shm" in err


class TestPages:
    def test_all_memory_of_a_page_is_taken_when_it_is_made(self, tmp_path: Path) -> None:
        page = Page(tmp_path / "page", create=True)
        assert (tmp_path / "page").stat().st_blocks * 512 >= SIZE
        page.close()

    def test_a_page_that_does_not_fit_is_refused_with_the_reason(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("os.posix_fallocate", full)
        with pytest.raises(OSError, match="no room") as refusal:
            reserve(tmp_path / "page")
        assert refusal.value.errno == errno.ENOSPC
        assert (tmp_path / "page").stat().st_size == 0

    def test_room_for_many_is_told_beforehand(self, tmp_path: Path) -> None:
        assert no_room(tmp_path, 1) == ""
        assert "1000000000 workers need" in no_room(tmp_path, 1_000_000_000)

    @pytest.mark.parametrize("wrong", ["cut", "garbage", "phase"])
    def test_a_bad_page_is_complained_of_once_and_ends_nobody(
        self, tmp_path: Path, wrong: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        sampler = Sampler(tmp_path)
        page = Page(sampler.path(W), create=True)
        page.keep(Point(1), b"one")
        page.beat(1, 7, 1)
        first = sampler.sample(W, os.getpid(), None)
        assert first is not None
        assert first.collectives == 7
        match wrong:
            case "cut":
                os.truncate(page.path, 100)
            case "garbage":
                page.path.write_bytes(bytes(range(256)) * 20)
            case "phase":
                with page.path.open("r+b") as file:
                    file.seek(24)
                    file.write(struct.pack("<q", -5))
        for _ in range(2):
            seen = sampler.sample(W, os.getpid(), None)
            assert seen is not None
            assert seen.phase is WorkerPhase.BOOTING
        assert len(caplog.records) == 1
        assert len(sampler.records(W)) == (1 if wrong == "phase" else 0)
        sampler.remove(W)
