"""Overhead: DDP with torchrelay against plain DDP under torchrun, taking turns block by block in one run.

    make bench NAME=overhead

step_time_ratio_4m   upper 95 % bound of the paired differences, as a ratio to the plain step
cpu_time_ratio_4m    the same of CPU time, of the whole process tree: workers, agent, orchestrator against torchrun
tiny_added_over_allreduce   what a step of a tiny model takes longer, over one bare all-reduce of 4 bytes
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from figures import finish, progress, upper_bound_of_mean
from steps import wait_for

HERE = Path(__file__).parent
RANKS = 4


@dataclass
class Side:
    """One of the two jobs: its process, its folder, and the CPU time it has used."""

    name: str
    process: subprocess.Popen[bytes]
    folder: Path

    def cpu_s(self) -> float:
        """CPU seconds of the whole tree, children that have ended included."""
        total = 0.0
        root = psutil.Process(self.process.pid)
        for process in [root, *root.children(recursive=True)]:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return total

    def rows(self, block: int) -> list[list[float]]:
        """What the ranks wrote of a block: [block, ns of a step, ns of an all-reduce]."""
        found: list[list[float]] = []
        for path in sorted(self.folder.glob("rank-*.jsonl")):
            for line in path.read_text().splitlines():
                row = json.loads(line) if line.endswith("]") else [-1]
                if row[0] == block:
                    found.append(row)
        return found

    def run_block(self, block: int) -> tuple[float, float, float]:
        """Let it do a block. Returns (seconds of a step, seconds of an all-reduce, CPU seconds of the block)."""
        before = self.cpu_s()
        (self.folder / f"go-{block}").write_text("")
        wait_for(f"block {block} of {self.name}", lambda: len(self.rows(block)) == RANKS, 300)
        used = self.cpu_s() - before
        rows = self.rows(block)
        return max(row[1] for row in rows) / 1e9, statistics.median(row[2] for row in rows) / 1e9, used


def start(name: str, work: Path, size: str, steps: int, blocks: int) -> Side:
    """Start one of the two jobs; it idles until its first block."""
    folder = work / f"{name}-{size}"
    folder.mkdir()
    script = [str(HERE / "blocks.py"), "--size", size, "--steps", str(steps), "--blocks", str(blocks)]
    script += ["--folder", str(folder)]
    if name == "torchrelay":
        words = ["-m", "torchrelay.cli.main", "run", "--nproc-per-node", str(RANKS), "--quiet"]
        words += ["--run-dir", str(work / f"run-{size}")]
    else:
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = (work / f"{name}-{size}.log").open("wb")
    process = subprocess.Popen([sys.executable, *words, *script], env=environment, stdout=log, stderr=log)
    return Side(name, process, folder)


def compare(work: Path, size: str, steps: int, blocks: int) -> dict[str, list[float]]:
    """Both jobs in turns; lists of paired figures, one per block (the first is a warm-up and left out)."""
    ours, plain = (start(name, work, size, steps, blocks) for name in ("torchrelay", "torchrun"))
    pairs: dict[str, list[float]] = {"ours": [], "plain": [], "cpu_ours": [], "cpu_plain": [], "allreduce": []}
    try:
        for block in range(blocks):
            # Who goes first changes from block to block, so that drift favours nobody.
            order = (ours, plain) if block % 2 else (plain, ours)
            took = {side.name: side.run_block(block) for side in order}
            progress(f"{size}: block {block + 1} of {blocks}")
            if block == 0:
                continue
            pairs["ours"].append(took["torchrelay"][0])
            pairs["plain"].append(took["torchrun"][0])
            pairs["allreduce"].append(took["torchrun"][1])
            pairs["cpu_ours"].append(took["torchrelay"][2])
            pairs["cpu_plain"].append(took["torchrun"][2])
        for side in (ours, plain):
            side.process.wait(60)
    finally:
        for side in (ours, plain):
            if side.process.poll() is None:
                side.process.terminate()
                side.process.wait(30)
    return pairs


def ratio_bound(ours: list[float], plain: list[float]) -> float:
    """1 + the upper 95 % bound of the paired differences over the plain median."""
    differences = [a - b for a, b in zip(ours, plain, strict=True)]
    return 1 + upper_bound_of_mean(differences) / statistics.median(plain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=31)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tiny-steps", type=int, default=200)
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="torchrelay-bench-"))
    try:
        big = compare(work, "4m", options.steps, options.blocks)
        tiny = compare(work, "tiny", options.tiny_steps, options.blocks)
        added = statistics.median(a - b for a, b in zip(tiny["ours"], tiny["plain"], strict=True))
        figures = {
            "step_time_ratio_4m": ratio_bound(big["ours"], big["plain"]),
            "cpu_time_ratio_4m": ratio_bound(big["cpu_ours"], big["cpu_plain"]),
            "tiny_added_over_allreduce": added / statistics.median(tiny["allreduce"]),
            "step_4m_plain_s": statistics.median(big["plain"]),
            "step_4m_ours_s": statistics.median(big["ours"]),
            "step_tiny_plain_us": 1e6 * statistics.median(tiny["plain"]),
            "step_tiny_ours_us": 1e6 * statistics.median(tiny["ours"]),
            "allreduce_4_bytes_us": 1e6 * statistics.median(tiny["allreduce"]),
        }
        finish("overhead", figures, blocks=options.blocks)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
