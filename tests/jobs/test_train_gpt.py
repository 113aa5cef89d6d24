"""The example script: the same bits with torchrelay and torchrun; checkpoints; and the demonstration around it."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.demo.bits import Trace, compare, read
from tests.support.jobs import ask_until, end_job, run_job, start_job, torchrelay
from tests.support.patience import longer
from tests.support.train_gpt import ROOT, SCRIPT, SHORT, run

pytestmark = pytest.mark.timeout(700)


def losses_of(folder: Path) -> Trace:
    return read(folder / "no digests", folder)


def test_the_bits_are_those_of_plain_pytorch(tmp_path: Path) -> None:
    script = [str(SCRIPT), *SHORT, "--losses"]
    run(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *script, str(tmp_path / "plain"))
    done = run_job(tmp_path / "run", [*script, str(tmp_path / "ours")], ["--nproc-per-node", "2"])
    assert done.code == 0, done.output
    plain, ours = losses_of(tmp_path / "plain"), losses_of(tmp_path / "ours")
    assert compare(plain, ours).differences == ()
    assert len(plain.losses) == 2 * 16
    assert len(plain.parameters) == 2
    assert len(done.digests) >= 2 * 16


@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "tp", "pp"])
def test_it_trains_in_all_of_its_layouts(tmp_path: Path, layout: str) -> None:
    script = [str(SCRIPT), *SHORT, "--epochs", "1", "--layout", layout]
    done = run_job(tmp_path / "run", script, ["--nproc-per-node", "4"])
    assert done.code == 0, done.output[-3000:]
    assert "epoch 1 of 1" in done.output


def test_one_process_alone_trains_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPT), *SHORT, "--checkpoint", str(tmp_path / "checkpoint.pt"), "--log-every", "1"]
    first = run(*words[:-2], "--losses", str(tmp_path / "losses"), *words[-2:])
    assert "step 1 " in first
    assert "epoch 2 of 2" in first
    last = json.loads((tmp_path / "losses" / "rank-0.jsonl").read_text().splitlines()[-1])
    assert len(last["parameters"]) == 64
    more = run(*words, "--epochs", "3")
    assert "step 16 " not in more
    assert "step 17 " in more
    assert "epoch 3 of 3" in more


def test_its_steps_are_numbered_without_a_jump_though_a_replacement_finds_the_jobs_own_checkpoint(
    tmp_path: Path,
) -> None:
    """Rank 0 is killed in the second epoch, when the checkpoint on disk is newer than what the job began with."""
    script = [str(SCRIPT), *SHORT, "--epoch-steps", "40", "--checkpoint", str(tmp_path / "checkpoint.pt")]
    run_dir = tmp_path / "run"
    job = start_job(run_dir, [*script, "--log-every", "1"], ["--nproc-per-node", "2", "--spares", "1"])
    out = tmp_path / "run.out"
    ask_until(job, run_dir, "the second epoch", lambda _: "step 44 " in out.read_text(), deadline_s=120)
    struck = torchrelay("chaos", "kill", "--rank", "0", "--yes", "--run-dir", str(run_dir))
    assert struck.returncode == 0, struck.stdout + struck.stderr
    done = end_job(job, run_dir, timeout_s=120)
    assert done.code == 0, done.output
    assert [one["resolution"] for one in done.incidents()] == ["clean"]
    logged = [int(number) for number in re.findall(r"^(?:\[\d\] )?step (\d+) ", done.output, re.MULTILINE)]
    # A step that was logged may be logged again, by the replacement; none is left out, and none comes after the last.
    assert all(after - before in (0, 1) for before, after in itertools.pairwise(logged)), logged
    assert (logged[0], logged[-1]) == (1, 80)


def test_the_demonstration_holds(tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text("kill rank=1 step>=10 spares>=1\nstop rank=0 step>=30 spares>=1\n")
    words = [sys.executable, "-m", "examples.demo", "--epochs", "2", "--epoch-steps", "60", "--out", str(tmp_path)]
    words += ["--runs", str(tmp_path / "runs"), "--story", str(tmp_path / "story.txt")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=longer(600))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "demo-report.json").read_text())
    assert report["bit_equal"] is True
    assert report["steps_lost"] == 0
    assert report["causes"] == ["kill", "stop"]
    assert [one["resolution"] for one in report["incidents"]] == ["clean"] * len(report["incidents"])
    assert report["compared"]["digests"] >= 4 * 120
    assert (tmp_path / "demo-report.png").stat().st_size > 10_000
