"""Gradients of one network lie there while another one is trained: what reads them reads what it would have read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed, migrate

pytestmark = pytest.mark.timeout(240)

CASE = "stale-gradients"


@pytest.mark.parametrize(
    ("mode", "strike"),
    [
        ("gan", "grad:26:1"), ("gan", "grad:3:0,grad:27:1"), ("clip", "grad:2:1"), ("clip", "grad:26:1,grad:41:0"),
        ("clip", "grad:27:1"), ("log", "grad:26:0"),
    ],
)  # fmt: skip
def test_it_is_as_undisturbed(tmp_path: Path, mode: str, strike: str) -> None:
    verdict = disturbed(tmp_path, CASE, mode=mode, strike=strike)
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize("mode", ["gan", "clip"])
def test_and_on_the_target_of_a_move(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, CASE, mode=mode, drive=migrate(1))
    assert verdict.fate is Fate.EQUAL, verdict


def test_a_replacement_does_not_read_them_between_two_steps(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, CASE, mode="log", strike="grad:27:1")
    assert verdict.fate is Fate.REFUSED, verdict
    assert "the script reads gradients between two steps" in verdict.reason, verdict
