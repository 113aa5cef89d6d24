"""What an epoch has collected is carried in a variable; a comprehension, or sum(), is not entered in the middle."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed

pytestmark = pytest.mark.timeout(240)

WORDS = "a comprehension, or sum() or its like, goes through a loop of batches"


@pytest.mark.parametrize("mode", ["list", "set", "dict", "nested", "wrapped", "sum", "star", "map", "reduce"])
def test_what_is_collected_out_of_sight_is_refused_at_the_fault(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "collected", mode=mode, strike="grad:15:1")
    assert verdict.fate is Fate.REFUSED, verdict
    assert verdict.ran.code == 91, verdict
    assert WORDS in verdict.reason, verdict
    assert "Write `for` over the loop, and collect in a variable" in verdict.reason, verdict


@pytest.mark.parametrize("mode", ["plain", "next"])
def test_a_loop_of_the_script_that_adds_up_is_entered_in_the_middle(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "collected", mode=mode, strike="grad:15:1")
    assert verdict.fate is Fate.EQUAL, verdict
