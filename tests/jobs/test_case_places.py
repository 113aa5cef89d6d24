"""What a script knows of its place and of chance stays the rank's own, whichever process and slot has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cases.running import Fate, Ran, disturbed, migrate, run_case
from torchrelay.launcher.voice import HOW_TO_JOIN

pytestmark = pytest.mark.timeout(240)

DEVICES = {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}  # nobody looks whether they are there


@pytest.mark.parametrize("way", ["kill", "migrate"])
def test_somebody_is_local_rank_0_and_every_rank_has_its_slots_device(tmp_path: Path, way: str) -> None:
    how = {"strike": "grad:8:0"} if way == "kill" else {"drive": migrate(0)}
    verdict = disturbed(tmp_path, "gated-by-local-rank", env=DEVICES, **how)
    assert verdict.fate is Fate.EQUAL, verdict
    out = tmp_path / "disturbed" / "out"
    assert [(out / f"saved-{epoch}").read_text() for epoch in range(3)] == ["0"] * 3
    assert (out / "device-0").read_text().split() == ["GPU-a", "GPU-c"], "the spare's slot is the third"
    assert (out / "device-1").read_text().split() == ["GPU-b"]


def test_an_unseeded_split_is_the_same_on_a_replacement(tmp_path: Path) -> None:
    ran = run_case(tmp_path, "unseeded", strike="grad:8:1")
    assert (ran.code, ran.resolutions) == (0, ("clean",)), ran.output
    mine, other = ([json.loads(line) for line in splits(tmp_path, rank)] for rank in (1, 0))
    assert mine[0] == mine[1], "the replacement has split as its predecessor"
    assert mine[0] != other[0], "ranks draw differently, as under torchrun"


def splits(work: Path, rank: int) -> list[str]:
    return (work / "out" / f"split-{rank}").read_text().splitlines()


def test_a_script_that_does_not_join_is_told_in_its_first_step_and_once(tmp_path: Path) -> None:
    ran = run_case(tmp_path, "own-backend", mode="plain")
    assert ran.code == 0, ran.output
    told(ran)


def told(ran: Ran) -> None:
    first, last = ran.output.index(HOW_TO_JOIN), ran.output.index("train ended with 0")
    assert ran.output.count(HOW_TO_JOIN) == 1
    assert "it runs unprotected" in ran.output[:first]
    assert "it ran unprotected" in ran.output[first:last]
