"""Case 1: state that scripts keep in attributes of samplers, datasets, modules and extras goes to a replacement."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed, migrate


@pytest.mark.parametrize("mode", ["numpy", "epochs", "in-place"])
def test_a_sampler_of_the_scripts_own_is_carried(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "own-sampler", mode=mode, strike="grad:13:1,grad:25:0")
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize("mode", ["python", "torch"])
def test_it_is_carried_in_a_move(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, "own-sampler", mode=mode, drive=migrate(1))
    assert verdict.fate is Fate.EQUAL, verdict


@pytest.mark.parametrize("strike", ["grad:10:1,after:11:0", "section:16:0,grad:17:1"])
def test_attributes_of_all_kinds_are_carried(tmp_path: Path, strike: str) -> None:
    verdict = disturbed(tmp_path, "own-attributes", strike=strike)
    assert verdict.fate is Fate.EQUAL, verdict


def test_a_second_loader_beside_the_loop_is_refused_in_the_second_step(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "second-loader", mode="beside", strike="grad:13:1")
    assert verdict.fate is Fate.REFUSED, verdict
    assert verdict.ran.code == 93, verdict
    assert verdict.ran.steps < 3, verdict
    assert "StackDataset" in verdict.reason, verdict


def test_one_within_an_item_is_let_be(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "second-loader", mode="within", strike="grad:13:1")
    assert verdict.fate is Fate.EQUAL, verdict


def test_a_loader_whose_state_does_not_tell_all_is_not_trusted(tmp_path: Path) -> None:
    verdict = disturbed(tmp_path, "forgetful-loader", strike="grad:15:1")
    assert verdict.fate is Fate.REFUSED, verdict
    assert (verdict.ran.code, verdict.ran.steps) == (91, 14), verdict
    assert "Forgetful" in verdict.reason, verdict
