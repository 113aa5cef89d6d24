"""No spare is left: ranks share slots, and leave them again; real processes, and the bits of the undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.jobs import SCRIPTS, differences, end_job, start_job, torchrelay, wait_until
from tests.twins import undisturbed
from torchrelay.api.shown import JobStatus, RankStatus
from torchrelay.client.client import Away, Client, Denied

pytestmark = [pytest.mark.slow, pytest.mark.jobs, pytest.mark.timeout(600)]

FLAGS = ["--nodes", "2", "--nproc-per-node", "2", "--oversubscribe", "2", "--slot-faults", "0"]


class Job:
    """A job of 4 ranks on 2 nodes of 2 slots, without a spare."""

    def __init__(self, folder: Path, layout: str, steps: int) -> None:
        script = [str(SCRIPTS / "faulty.py"), "--layout", layout, "--steps", str(steps)]
        self.calm = undisturbed(script)
        self.run_dir = folder / "run"
        self.process: subprocess.Popen[str] = start_job(self.run_dir, [*script, "--pace", "0.1"], FLAGS)

    def look(self) -> JobStatus | None:
        assert self.process.poll() is None, (self.run_dir.parent / "run.out").read_text()[-3000:]
        try:
            return Client.of(self.run_dir).job()
        except (Away, Denied):
            return None

    def until(self, sharing: int, steps: int = 5) -> JobStatus:
        """Wait until so many ranks share slots, and have trained together for some steps."""
        seen: list[JobStatus] = []

        def holds() -> bool:
            job = self.look()
            if job is None or job.phase != "running" or job.move is not None or len(job.sharing) != sharing:
                seen.clear()
                return False
            seen.append(job)
            return (job.step or 0) >= (seen[0].step or 0) + steps

        wait_until(f"{sharing} that share slots", holds, deadline_s=120)
        return seen[-1]

    def ranks(self) -> dict[int, RankStatus]:
        return {row.rank: row for row in Client.of(self.run_dir).view_ranks().ranks if row.rank is not None}

    def say(self, *words: str) -> None:
        done = torchrelay(*words, "--yes", "--run-dir", str(self.run_dir))
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "layout", ["hsdp", pytest.param("ddp", marks=pytest.mark.soak), pytest.param("fsdp", marks=pytest.mark.soak)]
)
def test_a_killed_rank_shares_a_slot_until_its_own_is_back(tmp_path: Path, layout: str) -> None:
    job = Job(tmp_path, layout, steps=240)
    job.until(0)
    job.say("taint", "node-1/1", "cordon:NoSchedule", "--reason", "nobody is to come here")
    pid = job.ranks()[3].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    (shared,) = job.until(1).sharing
    guest = job.ranks()[shared]
    assert (guest.node, guest.slot) != ("node-1", 1)
    assert guest.shares_with is not None
    page = torchrelay("status", "--run-dir", str(job.run_dir)).stdout
    assert f"rank {shared} in the slots of others, until there is room" in page
    job.say("untaint", "node-1/1", "cordon")
    job.until(0)
    assert sorted((row.node, row.slot) for row in job.ranks().values()) == [
        ("node-0", 0), ("node-0", 1), ("node-1", 0), ("node-1", 1)
    ]  # fmt: skip
    done = end_job(job.process, job.run_dir, timeout_s=240)
    assert done.code == 0, done.output[-3000:]
    assert differences(done, job.calm) == []
    kinds = [row["kind"] for row in done.incidents()]
    assert kinds == ["unplanned", "planned"]


@pytest.mark.soak
def test_a_drained_node_is_left_without_a_spare_and_taken_again(tmp_path: Path) -> None:
    job = Job(tmp_path, "ddp", steps=120)
    job.until(0)
    job.say("drain", "node-1", "--reason", "new disks")
    job.until(2)
    assert {row.node for row in job.ranks().values()} == {"node-0"}
    job.say("undrain", "node-1")
    job.until(0)
    done = end_job(job.process, job.run_dir, timeout_s=240)
    assert done.code == 0, done.output[-3000:]
    assert differences(done, job.calm) == []
    assert [row["resolution"] for row in done.incidents()] == ["clean", "clean"]
    assert [row["steps_lost"] for row in done.incidents()] == [0, 0]
