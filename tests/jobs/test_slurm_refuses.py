"""A Slurm that does not start what it is asked to: the run says so, ends, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)

HANGS = "exec sleep 1000"
REFUSES = 'echo "srun: error: Unable to create step for job 4711: Job has already completed" >&2; exit 1'
PRINTS_NONSENSE = 'echo "\\033[2J no agent"; exit 0'
IS_DEAF = "trap '' TERM; while :; do sleep 1; done"


def run(folder: Path, srun: str) -> subprocess.CompletedProcess[str]:
    """`torchrelay run` in a job of two nodes, with this program in place of srun."""
    (folder / "bin").mkdir()
    (folder / "bin" / "srun").write_text(f"#!/bin/sh\n{srun}\n")
    (folder / "bin" / "srun").chmod(0o755)
    (folder / "train.py").write_text("print('never run')\n")
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-2]", "PATH": path}
    words = ["run", "--run-dir", str(folder / "run"), "--host", "127.0.0.1", "--join-timeout", "3", "train.py"]
    return subprocess.run(
        [sys.executable, "-P", "-m", "torchrelay.cli.main", *words],
        env={**os.environ, **job},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def left(folder: Path) -> list[str]:
    """Processes that have this folder in their command line."""
    told = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in told.splitlines() if str(folder) in line]


@pytest.mark.parametrize(
    ("srun", "said"),
    [
        (HANGS, "within 3 s (--join-timeout), n1, n2 have not joined, see"),
        (IS_DEAF, "within 3 s (--join-timeout), n1, n2 have not joined, see"),
        (REFUSES, "Unable to create step for job 4711"),
        (PRINTS_NONSENSE, "its agent cannot run"),
    ],
)
def test_it_is_said_and_the_run_ends(tmp_path: Path, srun: str, said: str) -> None:
    done = run(tmp_path, srun)
    assert done.returncode == 94, done.stderr
    assert said in done.stderr
    assert "\033" not in done.stderr
    assert left(tmp_path) == []
