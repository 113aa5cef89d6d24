"""A replacement that decides otherwise near the end, by what nobody can carry, does not end as if all were well.

That it happens cannot be prevented. It is found by the next comparison of replicas, at the latest when all have ended.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed

pytestmark = pytest.mark.timeout(240)

CASE, STRIKE = "late-decision", "grad:25:1"


@pytest.mark.parametrize(("mode", "after"), [("atomic", 60), ("early", 56)])
def test_it_is_found_before_what_is_saved_at_the_end(tmp_path: Path, mode: str, after: int) -> None:
    verdict = disturbed(tmp_path, CASE, mode=mode, strike=STRIKE)
    assert verdict.fate is Fate.LATE, verdict
    assert verdict.ran.code == 91, verdict
    assert f"ranks 0, 1 differ from one another after step {after}" in verdict.reason, verdict


def test_it_is_found_without_a_section_at_the_end(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, CASE, mode="bare", strike=STRIKE)
    assert verdict.fate is Fate.LATE, verdict
    assert verdict.ran.code == 91, verdict
    assert "ranks 0, 1 hold different parameters when the script ended" in verdict.reason, verdict


def test_what_a_rank_does_to_its_model_after_the_last_step_is_its_own(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, CASE, mode="own-end", strike=STRIKE)
    assert verdict.fate is Fate.EQUAL, verdict
