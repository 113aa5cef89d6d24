"""A script that goes on from its newest checkpoint meets its own on a replacement: told of `once`, or equal with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, disturbed, run_calm, run_case

pytestmark = pytest.mark.timeout(300)

SCRIPT = "own-checkpoint"


@pytest.mark.parametrize("mode", ["shrink", "offset"])
def test_it_is_told_what_to_write(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, SCRIPT, mode=mode, strike="grad:13:0")
    assert verdict.fate is Fate.REFUSED, verdict
    assert verdict.ran.code == 91, verdict
    assert 'start = torchrelay.once("start", load)' in verdict.reason, verdict
    assert "checkpoint.pt" in verdict.reason, verdict


@pytest.mark.parametrize("mode", ["shrink-once", "skip-once", "plain-once"])
def test_with_once_it_goes_on(tmp_path: Path, mode: str) -> None:
    verdict = disturbed(tmp_path, SCRIPT, mode=mode, strike="grad:13:0,after:15:1")
    assert verdict.fate is Fate.EQUAL, verdict


def test_after_a_restart_from_the_checkpoint_it_is_loaded_again(tmp_path: Path) -> None:
    calm = run_calm(tmp_path / "calm", SCRIPT, mode="skip-once")
    # The second kill leaves no spare state to go on from: both ranks at once.
    ran = run_case(
        tmp_path / "ran",
        SCRIPT,
        mode="skip-once",
        strike="after:13:0,after:13:1",
        flags=("--nproc-per-node", "2", "--max-restarts", "1"),
    )
    assert ran.code == 0, ran.output
    assert "fell back" in ran.resolutions, ran.resolutions
    ends = {key: value for key, value in ran.lines.items() if key[1] == "end"}
    assert ends == {key: value for key, value in calm.lines.items() if key[1] == "end"}
    assert ran.steps < calm.steps, "it counts from the checkpoint"
