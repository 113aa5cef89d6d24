"""A script that ends itself because of a fault is not taken at its word; for its own reasons it may."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed, run_case

pytestmark = pytest.mark.timeout(240)


def test_an_exit_because_of_a_fault_is_made_again_as_a_step(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "exits", mode="caught", strike="grad:25:1")
    assert verdict.fate is Fate.EQUAL, verdict


def test_an_exit_of_the_scripts_own_ends_the_job_with_its_code(tmp_path: Path) -> None:
    ran = run_case(tmp_path, "exits", mode="own", strike="grad:25:1")
    assert ran.code == 3, ran.output[-2000:]
