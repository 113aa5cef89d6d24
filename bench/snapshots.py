"""Snapshots: what one adds to ten steps of FSDP2 without a replica.

    make bench NAME=snapshots

snapshot_time_ratio   upper 95 % bound of the median of the paired differences, as a ratio to the steps without (pairs
                      that follow one another share a window: they are not quite independent)
snapshot_cpu_ratio    the same of the workers' CPU time
standing_time_ratio   what a job with snapshots takes longer in steps in which there is none than a job without any (the
                      upper bound; two jobs of the same code differ by 1 to 2 % by themselves)
snapshot_copies       bytes in all snapshot stores when all is settled, over the bytes of all shards: each is kept on
                      its own node and on another, in two versions

4 ranks on two virtual nodes, 4 M parameters with Adam's state. A job takes a snapshot every 20 steps. The ten steps
from one on are compared with the mean of the ten before and the ten behind them: of the same job, because two jobs are
not alike; where their processes and memory happen to lie tells in every step. A second job, without snapshots, takes
turns with it, 100 steps at a time; the first 11 of a turn are left out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from figures import finish, progress
from overhead import HERE, Side, differences, ratio_bound

WINDOW = 10  # steps that are compared together
EVERY = 2 * WINDOW  # steps between two snapshots
TURN = 10 * WINDOW
FIRST = 1  # the first snapshot is taken before the step after this one
SHARDS = 3 * 4 * 1024 * (1024 + 1) * 4  # bytes: parameters and two moments of four layers, in float32


@dataclass
class Windows:
    """Seconds of a window, in pairs: with a snapshot, and the mean of its neighbours without."""

    ours: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)

    def add(self, turn: list[float]) -> None:
        """The steps of a turn."""
        windows = [sum(turn[at : at + WINDOW]) for at in range(FIRST, len(turn) - WINDOW + 1, WINDOW)]
        for n in range(2, len(windows) - 1, 2):
            self.ours.append(windows[n])
            self.beside.append((windows[n - 1] + windows[n + 1]) / 2)


@dataclass
class Job:
    """One of the two jobs, and what it took."""

    side: Side
    time: Windows = field(default_factory=Windows)
    cpu: Windows = field(default_factory=Windows)

    def run(self, turn: int) -> None:
        """Let it do a turn, and note what each step took: the longest of all ranks, and the CPU time of all."""
        self.side.run_block(turn)
        rows = self.side.rows(turn)
        steps = [max(step) / 1e9 for step in zip(*(row[3] for row in rows), strict=True)]
        used = [sum(step) / 1e9 for step in zip(*(row[4] for row in rows), strict=True)]
        if turn:  # the first is a warm-up
            self.time.add(steps)
            self.cpu.add(used)


def start(name: str, work: Path, every: int, turns: int) -> Job:
    """Start one of the two jobs; it idles until its first turn."""
    folder = work / name
    folder.mkdir()
    script = [str(HERE / "blocks.py"), "--size", "4m", "--layout", "fsdp", "--steps", str(TURN), "--each"]
    script += ["--blocks", str(turns), "--folder", str(folder), "--snapshots", str(every)]
    words = ["-m", "torchrelay.cli.main", "run", "--nodes", "2", "--nproc-per-node", "2", "--quiet"]
    words += ["--run-dir", str(work / f"run-{name}")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(work)}
    log = (work / f"{name}.log").open("wb")
    process = subprocess.Popen([sys.executable, *words, *script], env=environment, stdout=log, stderr=log)
    return Job(Side(name, process, folder))


def runs() -> set[Path]:
    """Where the runs on this machine have their memory."""
    return set(Path("/dev/shm").glob("torchrelay-run-*"))


def snapshot_stores(others: set[Path]) -> dict[Path, int]:
    """Complete snapshots of our two jobs, not of these other runs, and the bytes of memory that each takes."""
    found = [path for run in runs() - others for path in run.glob("*/snapshots/[0-9]*")]
    return {path: path.stat().st_blocks * 512 for path in found}


def expect_newest(turn: int, kept: Iterable[Path]) -> None:
    """That the last snapshot of this turn is where the windows take it to be."""
    newest = max((int(path.name.split(".")[2]) for path in kept), default=0)
    expected = (turn + 1) * TURN - EVERY + FIRST
    if newest != expected:
        raise SystemExit(f"turn {turn}: the newest snapshot is of step {newest}, that of step {expected} was expected")


def compare(work: Path, turns: int) -> tuple[Job, Job, float]:
    """The jobs with and without snapshots in turns, and how many copies of the shards lay in memory at the end."""
    others = runs()
    ours, none = jobs = [start("with", work, EVERY, turns), start("without", work, 0, turns)]
    copies = 0.0
    try:
        for turn in range(turns):
            for job in jobs if turn % 2 else reversed(jobs):
                job.run(turn)
            if turn < turns - 1:  # behind its last a job may have ended, and its snapshots with it
                kept = snapshot_stores(others)
                expect_newest(turn, kept)
                copies = sum(kept.values()) / SHARDS
            progress(f"turn {turn + 1} of {turns}")
        for job in jobs:
            job.side.process.wait(60)
    finally:
        for job in jobs:
            if job.side.process.poll() is None:
                job.side.process.terminate()
                job.side.process.wait(30)
    return ours, none, copies


def bound_and_middle(ours: list[float], plain: list[float]) -> tuple[float, float]:
    """1 + the upper bound, and 1 + the median, of the paired differences over the plain median."""
    return ratio_bound(ours, plain), 1 + statistics.median(differences(ours, plain)) / statistics.median(plain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=11, help="of each job, 100 steps each; the first is a warm-up")
    parser.add_argument("--short", action="store_true", help="2 turns")
    options = parser.parse_args()
    turns = 2 if options.short else options.turns
    if turns < 2:
        parser.error(f"--turns {turns}: at least 2 are needed, as the first is a warm-up")
    work = Path(tempfile.mkdtemp(prefix="torchrelay-bench-"))
    try:
        ours, none, copies = compare(work, turns)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    time_bound, time_middle = bound_and_middle(ours.time.ours, ours.time.beside)
    cpu_bound, cpu_middle = bound_and_middle(ours.cpu.ours, ours.cpu.beside)
    standing_bound, standing_middle = bound_and_middle(ours.time.beside, none.time.beside)
    figures = {
        "snapshot_time_ratio": time_bound,
        "snapshot_time_ratio_p50": time_middle,
        "snapshot_cpu_ratio": cpu_bound,
        "snapshot_cpu_ratio_p50": cpu_middle,
        "no_snapshot_time_ratio_p50": bound_and_middle(none.time.ours, none.time.beside)[1],
        "standing_time_ratio": standing_bound,
        "standing_time_ratio_p50": standing_middle,
        "snapshot_copies": copies,
        "step_s": statistics.median(ours.time.beside) / WINDOW,
    }
    finish("snapshots", figures, pairs=len(ours.time.ours), every=WINDOW)


if __name__ == "__main__":
    main()
