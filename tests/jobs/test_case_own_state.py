"""What each rank keeps of its own in state= goes to its replacement as it was; another rank's never does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed, migrate

pytestmark = pytest.mark.timeout(240)

CASE = "own-state"


@pytest.mark.parametrize(
    ("mode", "strike"),
    [
        ("meter", "grad:25:1"), ("dict", "grad:25:1,grad:41:0"), ("dict", "grad:3:1"), ("tensor", "grad:25:1"),
        ("array", "grad:25:1"), ("buffer", "grad:25:1"), ("inside", "grad:25:1"), ("late", "grad:110:1"),
    ],
)  # fmt: skip
def test_it_is_as_undisturbed(tmp_path: Path, mode: str, strike: str) -> None:
    verdict = disturbed(tmp_path, CASE, mode=mode, strike=strike)
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize("mode", ["meter", "tensor"])
def test_and_on_the_target_of_a_move(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, CASE, mode=mode, drive=migrate(1))
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize(
    ("mode", "strike", "words"),
    [
        ("large", "grad:25:1", "state['kept'] is each rank's own, and has more than 16,384 bytes"),
        ("inside", "update:25:1", "state['kept'] is each rank's own and changes after optimizer.step()"),
        ("late", "grad:80:1", "differ"),
    ],
    ids=["large", "inside", "late"],
)
def test_what_cannot_be_told_is_refused(tmp_path: Path, mode: str, strike: str, words: str) -> None:
    verdict = disturbed(tmp_path, CASE, mode=mode, strike=strike)
    assert verdict.fate in (Fate.REFUSED, Fate.LATE), verdict
    assert words in verdict.reason, verdict
