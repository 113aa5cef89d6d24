"""A bit flips in what one replica holds: found, its rank named and replaced, and the bits of the undisturbed run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.jobs import SCRIPTS, Finished, differences, run_job
from tests.support.twins import undisturbed

pytestmark = pytest.mark.timeout(300)

FAULTY = [str(SCRIPTS / "faulty.py")]
FLAGS = ["--nproc-per-node", "4", "--spares", "1"]


def run(work: Path, layout: str, every: int, *, step: int = 6) -> Finished:
    plan = [{"id": "flip", "ranks": [2], "step": step, "phase": "between", "how": "flip"}]
    (work / "flipped.json").write_text(json.dumps(plan))
    (work / "flipped-marks").mkdir()
    script = [*FAULTY, "--layout", layout, "--steps", str(step + 8), "--compare", str(every)]
    script += ["--plan", str(work / "flipped.json"), "--marks", str(work / "flipped-marks")]
    return run_job(work / "flipped", script, FLAGS)


def test_the_right_rank_is_named_and_replaced_and_no_bit_is_lost(tmp_path: Path) -> None:
    calm = undisturbed([*FAULTY, "--steps", "14", "--compare", "1"])  # no incident: nothing is found where nothing is
    done = run(tmp_path, "ddp", 1)
    assert done.code == 0, done.output[-3000:]
    (row,) = done.incidents()
    assert (row["ranks"], row["detector"], row["resolution"]) == ([2], "comparison of replicas", "clean")
    assert row["cause"].startswith("rank 2 differs from most of its replicas after step 6: ")
    assert " instead of " in row["cause"]
    # The digests of rank 2 show the flipped bit once, in the step that was made again.
    spoiled = differences(done, calm)
    assert spoiled == ["rank 2 differs at 6"]


def test_it_is_found_at_the_next_comparison(tmp_path: Path) -> None:
    done = run(tmp_path, "ddp", 5, step=11)  # before, ranks are looked at for other reasons
    assert done.code == 0, done.output[-3000:]
    (row,) = done.incidents()
    assert row["ranks"] == [2]
    assert "after step 15: " in row["cause"]
    last = {digests.pop() for (_, point), digests in done.digests.items() if point == "19"}
    assert len(last) == 4  # each rank has its own random state; what they share is compared by torchrelay itself


def test_two_that_differ_cannot_tell_who_is_right(tmp_path: Path) -> None:
    done = run(tmp_path, "hsdp", 1)
    assert done.code == 91
    assert "differ from one another after step 6" in done.output
    assert "nobody can tell who is right" in done.output
