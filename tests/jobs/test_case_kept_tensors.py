"""Tensors that a step keeps, and that others take the place of, go to a replacement, and nothing else is written to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("mode", ["window", "begin", "rows", "twice", "hidden", "variable"])
def test_a_replacement_goes_on_with_the_tensors_of_its_predecessor(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "kept-tensors", mode=mode, strike="grad:22:1,after:40:0")
    assert verdict.fate is Fate.EQUAL, verdict


def test_a_long_row_of_them_is_told_too(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "kept-tensors", mode="long", strike="grad:22:1,after:90:0")
    assert verdict.fate is Fate.EQUAL, verdict
