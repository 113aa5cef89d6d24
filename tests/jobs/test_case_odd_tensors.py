"""Tensors of other kinds than most: one that stays is let be, one that changes goes to a replacement or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed

pytestmark = pytest.mark.timeout(240)
STRIKE = "grad:12:1,after:20:0"


@pytest.mark.parametrize(
    "mode",
    [
        "graph", "graph-csr", "graph-nested", "expanded", "complex", "quarter", "conjugated", "anew", "multiplier",
        "parameter", "trained-anew", "multiplier-kept", "parameter-kept", "gradient-next", "points", "points-many",
        "late-parameter",
    ],
)  # fmt: skip
def test_it_is_as_undisturbed(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "odd-tensors", mode=mode, strike=STRIKE)
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("sparse", "with other data than the lost one"), ("csr", "with other data than the lost one"),
        ("nested", "with other data than the lost one"), ("late-sparse", "with other data than the lost one"),
        ("late-large", "with other data than the lost one"),
    ],
)  # fmt: skip
def test_or_refused(tmp_path: Path, mode: str, why: str) -> None:
    verdict = disturbed(tmp_path, "odd-tensors", mode=mode, strike=STRIKE)
    assert verdict.fate is Fate.REFUSED, verdict
    assert why in verdict.reason, verdict
