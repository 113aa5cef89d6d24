"""Replicas that drift apart by what a script does to them are no replicas: said in the first steps, not at a fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed, run_case

pytestmark = pytest.mark.timeout(240)


def test_those_that_drift_are_refused_undisturbed(tmp_path: Path) -> None:
    ran = run_case(tmp_path, "drifts", mode="sum")
    assert ran.code == 93, ran.output[-2000:]
    assert ran.steps <= 10
    assert "count as replicas (of the shard all) hold different parameters" in ran.output


def test_one_that_puts_back_a_copy_is_as_undisturbed(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "drifts", mode="copy", strike="grad:25:1")
    assert verdict.fate is Fate.EQUAL, verdict
