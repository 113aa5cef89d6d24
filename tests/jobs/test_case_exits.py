"""A script that ends itself because of a fault is not taken at its word; for its own reasons it may."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed, run_calm, run_case

pytestmark = pytest.mark.timeout(240)


def test_an_exit_because_of_a_fault_is_made_again_as_a_step(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "exits", mode="caught", strike="grad:25:1")
    assert verdict.fate is Fate.EQUAL, verdict


def test_an_exit_of_the_scripts_own_ends_the_job_with_its_code(tmp_path: Path) -> None:
    ran = run_case(tmp_path, "exits", mode="own", strike="grad:25:1")
    assert ran.code == 3, ran.output[-2000:]


def test_a_child_that_the_script_forks_ends_as_in_plain_python(tmp_path: Path) -> None:
    calm = run_calm(tmp_path / "calm", "exits", mode="caught")
    verdict = disturbed(tmp_path, "exits", mode="child", strike="grad:25:1", calm=calm)
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize(("mode", "code"), [("logs", 1), ("leaves", 3)])
def test_an_error_between_two_steps_on_one_rank_is_the_scripts_own(tmp_path: Path, mode: str, code: int) -> None:
    """Also on the replacement, which has run none of the steps before it."""
    ran = run_case(tmp_path, "exits", mode=mode)
    assert ran.code == code, ran.output[-2000:]
    assert "the script's own error, on two workers that held rank 1" in ran.reason
    assert "takes over a rank in the middle of a turn" not in ran.reason.splitlines()[-1]


def test_a_rank_that_ends_before_protect_keeps_nobody_waiting(tmp_path: Path) -> None:
    ran = run_case(tmp_path, "exits", mode="early")
    assert ran.code == 1, ran.output[-2000:]
    assert "Connection closed by peer" in ran.output
    assert "3 starts ended before anything was committed" in ran.reason
