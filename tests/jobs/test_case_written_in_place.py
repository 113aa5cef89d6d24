"""Arrays in variables whose elements are written are carried if they are small; else a replacement is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed, migrate

pytestmark = pytest.mark.timeout(240)

CASE = "written-in-place"


@pytest.mark.parametrize("mode", ["numpy", "torch", "alias", "buffer", "held"])
def test_it_is_as_undisturbed(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, CASE, mode=mode, strike="grad:25:1")
    assert verdict.fate is Fate.EQUAL, verdict


def test_and_on_the_target_of_a_move(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, CASE, mode="torch", drive=migrate(1))
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize("mode", ["large-numpy", "large-torch", "large-view", "large-list"])
def test_large_ones_are_refused(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, CASE, mode=mode, strike="grad:25:1")
    assert verdict.fate is Fate.REFUSED, verdict
    assert "hard of main() changes in the course of the training" in verdict.reason, verdict
