"""A loop of the script's own around the step: goes on for ever and is found again, or is refused in the first steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed, migrate, run_case

pytestmark = pytest.mark.timeout(300)

SCRIPT = "own-while-loop"


@pytest.mark.parametrize("mode", ["committed", "metrics", "epochs"])
def test_a_replacement_comes_to_the_same_bits(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, SCRIPT, mode=mode, strike="grad:30:1,after:43:0")
    assert verdict.fate is Fate.EQUAL, verdict


def test_a_move_comes_to_the_same_bits(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, SCRIPT, mode="break", drive=migrate(1))
    assert verdict.fate is Fate.EQUAL, verdict


def test_it_has_no_end(tmp_path: Path) -> None:
    ran = run_case(tmp_path, SCRIPT, mode="metrics", env={"STEPS": "4500", "PAUSE": "0"})
    assert ran.code == 0, ran.output


def test_a_counter_is_refused_in_the_first_steps(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, SCRIPT, mode="counter", strike="grad:30:1")
    assert verdict.fate is Fate.REFUSED, verdict
    assert "run.steps(n)" in verdict.reason, verdict
