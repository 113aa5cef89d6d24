"""Shards without a replica: real faults, all go back to their snapshots, and the bits of the undisturbed run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.matrix import run_cells, run_undisturbed
from tests.support.cells import Cell
from tests.support.jobs import SCRIPTS, differences, run_job
from tests.support.live import RANKS
from tests.support.snapshots_for_real import EVERY
from tests.support.twins import undisturbed

pytestmark = pytest.mark.timeout(600)
FAULTS = [Cell("kill", phase) for phase in ("forward", "backward", "gate", "update", "between")]
FAULTS += [Cell("stop", "backward"), Cell("kill", "backward", "restore")]
ALL = list(range(RANKS))


def test_faults_leave_no_trace_in_the_bits(tmp_path: Path) -> None:
    calm = run_undisturbed(FAULTS, seed=5, layout="fsdp")
    done = run_cells(tmp_path, "disturbed", FAULTS, seed=5, layout="fsdp")
    assert done.code == 0, done.output[-3000:]
    assert differences(done, calm) == []
    rows = done.incidents()
    assert len(rows) >= len(FAULTS) - 1  # the second fault of one belongs to the incident of the first
    assert {row["resolution"] for row in rows} <= {"rolled back", "clean"}
    assert all(0 <= row["steps_lost"] <= EVERY for row in rows), rows
    assert any(row["steps_lost"] for row in rows)


@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_all_ranks_are_lost_at_once_long_after_another_recovery(tmp_path: Path, layout: str) -> None:
    """Nobody is left to say how far they had come, and the newest snapshots are of steps after the last recovery."""
    plan: list[dict[str, Any]] = [
        {"id": "one", "ranks": [1], "step": 4, "phase": "backward", "how": "kill"},
        {"id": "all", "ranks": ALL, "step": 37, "phase": "forward", "how": "kill", "together": True},
    ]
    marks, plan_file = tmp_path / "marks", tmp_path / "plan.json"
    marks.mkdir()
    plan_file.write_text(json.dumps(plan))
    script = [str(SCRIPTS / "faulty.py"), "--layout", layout, "--steps", "45"]
    calm = undisturbed(script, world=RANKS)
    flags = ["--nproc-per-node", str(RANKS), "--spares", "1", "--slot-faults", "0"]
    done = run_job(tmp_path / "run", [*script, "--plan", str(plan_file), "--marks", str(marks)], flags, timeout_s=300)
    assert len(list(marks.iterdir())) == 1 + RANKS, done.output[-3000:]
    rows = done.incidents()
    assert done.code == (0 if layout == "fsdp" else 91), done.output[-3000:]
    if layout == "fsdp":
        assert differences(done, calm) == []
        assert rows[-1]["resolution"] == "rolled back"
        assert 0 < rows[-1]["steps_lost"] <= EVERY
    else:  # replicas keep no snapshots: that is said, and nothing begins anew in silence
        assert "every rank that held state is lost" in done.output
