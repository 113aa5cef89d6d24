"""The runner of case scripts: what it says of a run beside an undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed, migrate


@pytest.mark.timeout(240)
def test_the_control_is_equal_after_a_kill_and_a_move(tmp_path: Path) -> None:
    killed = disturbed(tmp_path / "kill", "control", strike="grad:9:1,after:20:0")
    assert killed.fate is Fate.EQUAL, killed
    assert len(killed.calm.lines) == 2 * (40 * 2 + 1), sorted(killed.calm.lines)
    moved = disturbed(tmp_path / "move", "control", drive=migrate(1))
    assert moved.fate is Fate.EQUAL, moved
