"""What a script hangs on objects of torch's own goes to a replacement, or is refused; a step made again finds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed, migrate

pytestmark = pytest.mark.timeout(240)

CARRIED = [
    "list-layer", "own-hook", "tensor-schedule", "generator-loader", "number-group", "counter-activation",
    "window-model", "nested-loss", "array-parameter", "rebound-optimizer", "later-layer", "tuple-hook",
    "numpy-optimizer", "list-group", "nested-schedule", "tensor-group", "list-loader",
]  # fmt: skip


@pytest.mark.parametrize("mode", CARRIED)
def test_it_is_carried(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "hung", mode=mode, strike="grad:20:1,after:25:0")
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("large-loss", "is too large to be carried"), ("replaced-hook", "was kept from one step for the next"),
        ("iterator-loader", "is an iterator that is gone on with"), ("own-schedule", "cannot be carried"),
        ("generator-group", "cannot be carried"),
    ],
)  # fmt: skip
def test_or_refused(tmp_path: Path, mode: str, why: str) -> None:
    verdict = disturbed(tmp_path, "hung", mode=mode, strike="grad:20:1")
    assert verdict.fate is Fate.REFUSED, verdict
    assert why in verdict.reason, verdict


def test_and_on_the_target_of_a_move(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "hung", mode="tensor-group", drive=migrate(1))
    assert verdict.fate is Fate.EQUAL, verdict


def test_options_that_are_each_ranks_own_are_refused_at_once(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "hung", mode="number-option", strike="grad:20:1")
    assert verdict.fate is Fate.REFUSED, verdict
    assert "hold different options of their optimizers" in verdict.reason, verdict
