"""What a script does between two calls that are both committed is done by a replacement with the state, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed, migrate

pytestmark = pytest.mark.timeout(240)

CASE = "before-a-section"


@pytest.mark.parametrize(
    ("mode", "strike"),
    [
        ("save", "grad:31:0"), ("save", "grad:41:0"), ("save", "eval:30:0"), ("norm", "grad:31:1"),
        ("norm", "grad:25:1"), ("final", "end:0:0"), ("clip", "grad:31:1"), ("clip", "grad:25:0,grad:41:1"),
        ("begin", "grad:25:0"), ("two", "grad:32:1"), ("draw", "grad:31:1"), ("draw-two", "grad:33:1"),
        ("rate-head", "grad:25:1"), ("rate-own", "grad:25:1"), ("rate-two", "grad:27:1"), ("rate-loops", "grad:23:1"),
    ],
)  # fmt: skip
def test_it_is_as_undisturbed(tmp_path: Path, mode: str, strike: str) -> None:
    verdict = disturbed(tmp_path, CASE, mode=mode, strike=strike)
    assert verdict.fate is Fate.EQUAL, verdict


def test_and_on_the_target_of_a_move(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, CASE, mode="save", drive=migrate(0))
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize(
    ("mode", "strike", "words"),
    [
        ("begin", "grad:31:0", "the script reads the state of an optimizer between two calls, after 29"),
        ("two", "grad:33:1", "the script reads the state between two calls, after 31"),
        ("swap", "eval:30:1", "the script changes parameters between two steps, and reads them there"),
        ("swap", "grad:31:1", "the script changes parameters between two steps, and reads them there"),
        ("loads", "grad:31:1", "the script reads the state between two calls, after 30"),
    ],
)
def test_what_nobody_has_is_not_read(tmp_path: Path, mode: str, strike: str, words: str) -> None:
    verdict = disturbed(tmp_path, CASE, mode=mode, strike=strike)
    assert verdict.fate is Fate.REFUSED, verdict
    assert words in verdict.reason, verdict
