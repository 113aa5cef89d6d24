"""What a step changes before its update and after it, and what begins to change in the very step that is cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed, migrate

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize(
    ("mode", "strike"),
    [
        ("count", "tail:12:1,grad:16:0"), ("rows", "tail:12:1"), ("sums", "tail:12:1"), ("count-late", "tail:17:0"),
        ("sums-late", "tail:17:0"), ("count-cut", "grad:14:1"), ("sums-cut", "grad:14:1"),
    ],
)  # fmt: skip
def test_it_is_as_undisturbed(tmp_path: Path, mode: str, strike: str) -> None:
    verdict = disturbed(tmp_path, "before-and-after", mode=mode, strike=strike)
    assert verdict.fate is Fate.EQUAL, verdict


def test_what_is_too_large_to_be_put_back_is_refused(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "before-and-after", mode="large-cut", strike="grad:14:1")
    assert verdict.fate is Fate.REFUSED, verdict
    assert "is changed where it lies by a step" in verdict.reason, verdict


def test_and_on_the_target_of_a_move(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "before-and-after", mode="count", drive=migrate(1, at=12))
    assert verdict.fate is Fate.EQUAL, verdict
