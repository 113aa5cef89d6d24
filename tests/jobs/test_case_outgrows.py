"""What was small and plain is carried; when it has outgrown that, a fault ends the job with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("mode", ["counter", "dict", "lazy", "fields", "named", "rows"])
def test_as_long_as_it_is_small_it_goes_on(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "outgrows", mode=mode, strike="grad:15:1")
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize("mode", ["counter", "dict", "lazy", "fields", "named", "rows"])
def test_when_it_has_outgrown_that_it_is_refused(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "outgrows", mode=mode, strike="grad:42:1")
    assert verdict.fate is Fate.REFUSED, verdict
    assert "in the course of the training" in verdict.reason, verdict
