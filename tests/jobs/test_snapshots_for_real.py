"""Shards without a replica: real faults, all go back to their snapshots, and the bits of the undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.matrix import run_cells, run_undisturbed
from tests.support.cells import Cell
from tests.support.jobs import differences
from tests.support.snapshots_for_real import EVERY

pytestmark = pytest.mark.timeout(600)
FAULTS = [Cell("kill", phase) for phase in ("forward", "backward", "gate", "update", "between")]
FAULTS += [Cell("stop", "backward"), Cell("kill", "backward", "restore")]


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
