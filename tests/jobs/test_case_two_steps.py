"""Two step functions take turns: a number that an iterator counts is found out when it is used again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed


@pytest.mark.parametrize("mode", ["other", "again"])
def test_a_number_of_the_scripts_own_is_refused(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "two-steps", mode=mode, strike="grad:20:1")
    assert verdict.fate is Fate.REFUSED, verdict
    assert "numbers of main()[0] is an iterator that is gone on with" in verdict.reason, verdict


def test_one_that_counts_by_what_was_committed_is_right(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "two-steps", mode="kept", strike="grad:20:1,grad:31:0")
    assert verdict.fate is Fate.EQUAL, verdict
