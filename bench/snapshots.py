"""Snapshots: FSDP2 without a replica, with a snapshot every 10 steps against none, taking turns block by block.

    make bench NAME=snapshots

snapshot_time_ratio   upper 95 % bound of the median of the paired differences, as a ratio to the step without
snapshot_cpu_ratio    the same of CPU time, of the whole process tree; it varies less with what else the machine does
snapshot_copies       bytes that lie on all shelves when all is settled, over the bytes of all shards: each is kept on
                      its own node and on another, in two versions

4 ranks on two virtual nodes, 4 M parameters with Adam's state; each block of 10 steps has one snapshot.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from figures import finish, progress
from overhead import HERE, Side, differences, ratio_bound

EVERY = 10
SHARDS = 3 * 4 * 1024 * (1024 + 1) * 4  # bytes: parameters and two moments of four layers, in float32


def start(name: str, work: Path, every: int, blocks: int) -> Side:
    """Start one of the two jobs; it idles until its first block."""
    folder = work / name
    folder.mkdir()
    script = [str(HERE / "blocks.py"), "--size", "4m", "--layout", "fsdp", "--steps", str(EVERY)]
    script += ["--blocks", str(blocks), "--folder", str(folder), "--snapshots", str(every)]
    words = ["-m", "torchrelay.cli.main", "run", "--nodes", "2", "--nproc-per-node", "2", "--quiet"]
    words += ["--run-dir", str(work / f"run-{name}")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(work)}
    log = (work / f"{name}.log").open("wb")
    process = subprocess.Popen([sys.executable, *words, *script], env=environment, stdout=log, stderr=log)
    return Side(name, process, folder)


def ratio(ours: list[float], plain: list[float]) -> float:
    """1 + the median of the paired differences over the plain median."""
    return 1 + statistics.median(differences(ours, plain)) / statistics.median(plain)


def on_shelves() -> int:
    """Bytes of memory in complete snapshots of running jobs of this user."""
    found = Path("/dev/shm").glob("torchrelay-run-*/*/snapshots/[0-9]*")
    return sum(path.stat().st_blocks * 512 for path in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=41)
    parser.add_argument("--short", action="store_true", help="7 blocks")
    options = parser.parse_args()
    blocks = 7 if options.short else options.blocks
    work = Path(tempfile.mkdtemp(prefix="torchrelay-bench-"))
    sides = [start("with", work, EVERY, blocks), start("without", work, 0, blocks)]
    took: dict[str, list[float]] = {"with": [], "without": []}
    used: dict[str, list[float]] = {"with": [], "without": []}
    before, copies = on_shelves(), 0
    try:
        for block in range(blocks):
            for side in sides if block % 2 else reversed(sides):
                step_s, _, cpu_s = side.run_block(block)
                if block:
                    took[side.name].append(step_s)
                    used[side.name].append(cpu_s)
            copies = on_shelves() - before
            progress(f"block {block + 1} of {blocks}")
        for side in sides:
            side.process.wait(60)
    finally:
        for side in sides:
            if side.process.poll() is None:
                side.process.terminate()
                side.process.wait(30)
        shutil.rmtree(work, ignore_errors=True)
    figures = {
        "snapshot_time_ratio": ratio_bound(took["with"], took["without"]),
        "snapshot_time_ratio_p50": ratio(took["with"], took["without"]),
        "snapshot_cpu_ratio": ratio_bound(used["with"], used["without"]),
        "snapshot_cpu_ratio_p50": ratio(used["with"], used["without"]),
        "snapshot_copies": copies / SHARDS,
        "step_s": statistics.median(took["without"]),
    }
    finish("snapshots", figures, blocks=blocks, every=EVERY)


if __name__ == "__main__":
    main()
