"""`run.global_step` is the same number as in plain PyTorch wherever a script asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("strike", ["grad:25:1", "update:25:1"])
def test_it_is_that_of_plain_pytorch(tmp_path: Path, strike: str) -> None:
    verdict = disturbed(tmp_path, "numbered", strike=strike)
    assert verdict.fate is Fate.EQUAL, verdict
