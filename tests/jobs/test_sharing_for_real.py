"""No spare is left: ranks share slots, and leave them again; real processes, and the bits of the undisturbed run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.jobs import differences, end_job, torchrelay
from tests.support.sharing_for_real import Job

pytestmark = pytest.mark.timeout(600)


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
        ("node-0", 0),
        ("node-0", 1),
        ("node-1", 0),
        ("node-1", 1),
    ]
    done = end_job(job.process, job.run_dir, timeout_s=240)
    assert done.code == 0, done.output[-3000:]
    assert differences(done, job.calm) == []
    kinds = [row["kind"] for row in done.incidents()]
    assert kinds == ["unplanned", "planned"]
