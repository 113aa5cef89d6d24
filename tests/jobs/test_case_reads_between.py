"""What a script changes between two steps and then reads is the same on a replacement, which comes to it in the middle.

The state that it reads comes from a rank that has gone through all of that, and perhaps done more.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("mode", ["eval", "norm", "rate", "freeze", "told", "moments", "zeroes"])
def test_it_is_read_as_it_was(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "reads-between", mode=mode, strike="late:10:0,late:12:1")
    assert verdict.fate is Fate.EQUAL, verdict


def test_gradients_are_not_there_and_are_not_taken_for_none(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "reads-between", mode="gradient", strike="late:10:0")
    assert verdict.fate is Fate.REFUSED, verdict
    assert verdict.ran.code == 91, verdict
    assert "reads gradients between two steps" in verdict.reason, verdict


def test_a_buffer_that_steps_register_is_named(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "reads-between", mode="buffer", strike="late:10:0")
    assert verdict.fate is Fate.REFUSED, verdict
    assert verdict.ran.code == 93, verdict
    assert "model has model.5.seen only on the source" in verdict.reason, verdict
    assert "make it before protect()" in verdict.reason, verdict
