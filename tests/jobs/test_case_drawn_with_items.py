"""What a script draws for an item, before its step, a replacement draws alike, wherever the generator is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed, migrate

pytestmark = pytest.mark.timeout(240)

CASE = "drawn-with-items"


@pytest.mark.parametrize("mode", ["global", "workers", "numpy", "after", "attribute", "python", "torch", "epoch"])
def test_it_is_as_undisturbed(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, CASE, mode=mode, strike="grad:25:1")
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize("mode", ["workers", "numpy"])
def test_and_on_the_target_of_a_move(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, CASE, mode=mode, drive=migrate(1))
    assert verdict.fate is Fate.EQUAL, verdict
