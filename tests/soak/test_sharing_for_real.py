"""No spare is left: ranks share slots, and leave them again; real processes, and the bits of the undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import differences, end_job
from tests.support.sharing_for_real import Job

pytestmark = pytest.mark.timeout(600)


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
