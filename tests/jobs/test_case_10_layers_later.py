"""Layers that are frozen, trained or given to the optimizer after DDP was made: carried, or refused at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed, migrate

pytestmark = pytest.mark.timeout(300)

SCRIPT = "layers-later"


@pytest.mark.parametrize("mode", ["before", "flag", "group", "freeze", "skipped"])
def test_a_replacement_comes_to_the_same_bits(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, SCRIPT, mode=mode, strike="grad:5:0,grad:12:1,after:16:0")
    assert verdict.fate is Fate.EQUAL, verdict


def test_a_move_after_the_change_comes_to_the_same_bits(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, SCRIPT, mode="group", drive=migrate(1))
    assert verdict.fate is Fate.EQUAL, verdict


def test_what_ddp_does_not_average_is_refused_at_once(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, SCRIPT, mode="wrapped", strike="grad:12:1")
    assert verdict.fate is Fate.REFUSED, verdict
    assert verdict.ran.steps == 8
    assert "backbone.weight is trained, but it was frozen when DDP was made" in verdict.reason, verdict
