"""/dev/shm is full: no agent dies of it, whoever can train trains on, and who cannot start is told why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.brain import wait_for
from tests.support.cli_local_run import TWO, LocalRun
from tests.support.mounts import kept_full, needs_mounts, seen_by, within

MEMORY = Path("/dev/shm")


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
        run.start(*TWO, "1500", "0.01")  # so many that it still trains when another spare is to be started
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
