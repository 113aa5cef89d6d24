"""Real faults in real workers, inside collectives: the run with faults ends in the same bits as the run without."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.matrix import verdict
from tests.support.faults import faulty, planned
from tests.support.jobs import run_job
from tests.support.twins import undisturbed

pytestmark = pytest.mark.timeout(900)


def test_a_survivor_that_does_not_come_out_of_its_collective_is_replaced_too(tmp_path: Path) -> None:
    calm = undisturbed(faulty("--steps", "12"))
    killed = {"id": "killed", "ranks": [1], "step": 6, "phase": "backward", "how": "kill"}
    stuck = {"id": "stuck", "ranks": [2], "step": 6, "phase": "cut", "how": "stick"}
    flags = ["--nproc-per-node", "4", "--spares", "2"]
    done = run_job(tmp_path / "run", faulty("--steps", "12", *planned(tmp_path, killed, stuck)), flags)
    assert verdict(done, calm) == []
    (incident,) = done.incidents()
    assert incident["ranks"] == [1, 2]
    assert any("does not come out of its call for 3." in text for text in incident["story"]), "others have its shard"
    assert incident["pause_ms"] < 20_000
