"""Accelerate and Lightning Fabric as they are: a replacement comes to the same bits. Only where these are installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("mode", "library"), [("accelerate", "accelerate"), ("seedable", "accelerate"), ("fabric", "lightning")]
)
def test_a_replacement_comes_to_the_same_bits(tmp_path: Path, mode: str, library: str) -> None:
    pytest.importorskip(library)
    verdict = disturbed(tmp_path, "prepared", mode=mode, strike="grad:5:1,after:14:0,grad:25:1")
    assert verdict.fate is Fate.EQUAL, verdict
