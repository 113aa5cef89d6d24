"""Objects that a script makes when their name comes up are carried with all that they hold, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("mode", ["logger", "along", "dict", "default", "list"])
def test_meters_go_on(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "meters", mode=mode, strike="grad:15:1,grad:27:0")
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize("strike", ["grad:7:1", "grad:9:1"])
def test_one_that_a_step_makes_is_made_once(tmp_path: Path, strike: str) -> None:
    verdict = disturbed(tmp_path, "meters", mode="inside", strike=strike)
    assert verdict.fate is Fate.EQUAL, verdict


def test_what_cannot_be_made_again_is_refused(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "meters", mode="handle", strike="grad:15:1")
    assert verdict.fate is Fate.REFUSED, verdict
    assert "kept of epoch_of() entries come up in the course of the training" in verdict.reason, verdict
