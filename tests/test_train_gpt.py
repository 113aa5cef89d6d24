"""The example script: the same bits with torchrelay and torchrun; checkpoints; and the demonstration around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.demo.bits import Trace, compare, read
from tests.jobs import run_job

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "train_gpt.py"
SHORT = ["--params", "tiny", "--epochs", "2", "--epoch-steps", "8", "--batch", "2", "--warmup", "4"]

pytestmark = [pytest.mark.slow, pytest.mark.jobs, pytest.mark.timeout(240)]


def run(*words: str) -> str:
    """Run a command as a user does, one thread a process; its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_ranks_that_hold_parts_of_the_model_go_on_from_its_checkpoint(layout: str, tmp_path: Path) -> None:
    script = [str(SCRIPT), *SHORT, "--layout", layout, "--checkpoint", str(tmp_path / "checkpoint.pt")]
    plain = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *script, "--log-every", "1"]
    first = run(*plain, "--epochs", "1")
    assert "step 8 " in first
    done = run_job(tmp_path / "run", [*script, "--log-every", "1"], ["--nproc-per-node", "2"])
    assert done.code == 0, done.output
    assert "step 8 " not in done.output
    assert "step 9 " in done.output
    assert "epoch 2 of 2" in done.output


def test_the_demonstration_holds(tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text("kill rank=1 step>=10 spares>=1\nstop rank=0 step>=30 spares>=1\n")
    words = [sys.executable, "-m", "examples.demo", "--epochs", "2", "--epoch-steps", "60", "--out", str(tmp_path)]
    words += ["--runs", str(tmp_path / "runs"), "--story", str(tmp_path / "story.txt")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "demo-report.json").read_text())
    assert report["bit_equal"] is True
    assert report["steps_lost"] == 0
    assert report["causes"] == ["kill", "stop"]
    assert [one["resolution"] for one in report["incidents"]] == ["clean"] * len(report["incidents"])
    assert report["compared"]["digests"] >= 4 * 120
    assert (tmp_path / "demo-report.png").stat().st_size > 10_000
