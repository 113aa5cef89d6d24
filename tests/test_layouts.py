"""Models that are spread over the ranks: real faults and moves, and the bits of the undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cells import Cell
from tests.matrix import run_cells, run_undisturbed, verdict

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(600)]

KILLS = [Cell("kill", phase) for phase in ("forward", "backward", "gate", "update", "between", "section")]
OTHERS = [Cell("stop", "backward"), Cell("raise", "forward"), Cell("kill", "backward", "restore")]


def test_faults_in_hsdp_leave_no_trace_in_the_bits(tmp_path: Path) -> None:
    calm = run_undisturbed(tmp_path, "calm", KILLS + OTHERS, seed=5, layout="hsdp")
    done = run_cells(tmp_path, "disturbed", KILLS + OTHERS, seed=5, layout="hsdp")
    assert verdict(done, calm) == []
    assert len(done.incidents()) >= len(KILLS + OTHERS)
