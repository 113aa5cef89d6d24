"""Calm: an hour of a job with which nothing is wrong, but that does what detectors take for a hang.

    make bench NAME=calm ARGS="--minutes 60"

false_alarms   incidents; there should be none
steps, saves   what was done meanwhile: steps, and checkpoints that rank 0 saved for 20 s while all others waited
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import finish, progress
from torchrelay.client.client import Client

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="torchrelay-bench-"))
    run_dir = work / "run"
    words = [sys.executable, "-m", "torchrelay.cli.main", "run", "--nproc-per-node", "4", "--spares", "1", "--quiet"]
    words += ["--run-dir", str(run_dir), str(HERE / "calm_worker.py"), "--minutes", str(options.minutes)]
    process = subprocess.Popen([*words, "--folder", str(work)], env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        begin = time.monotonic()
        while process.poll() is None:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                seen = len(Client.of(run_dir).incidents())
                minutes = (time.monotonic() - begin) / 60
                progress(f"{minutes:.1f} of {options.minutes:g} minutes: {seen} incidents, {steps(work)} steps")
        ledger = run_dir / "ledger.jsonl"
        incidents = [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []
        figures = {
            "false_alarms": len(incidents), "exit_code": process.returncode, "minutes": options.minutes,
            "steps": steps(work), "saves": saves(work),
        }  # fmt: skip
        finish("calm", figures, incidents=incidents)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)
        shutil.rmtree(work, ignore_errors=True)
    sys.exit(1 if incidents or process.returncode else 0)


def steps(work: Path) -> int:
    told = work / "rank-0"
    return int(told.read_text() or 0) if told.exists() else 0


def saves(work: Path) -> int:
    told = work / "saves"
    return len(told.read_text()) if told.exists() else 0


if __name__ == "__main__":
    main()
