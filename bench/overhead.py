"""Overhead: DDP with torchrelay against plain DDP under torchrun, taking turns block by block in one run.

    make bench NAME=overhead
    make bench NAME=overhead ARGS="--layout fsdp"     # FSDP2 in place of DDP, without clipping: fsdp_step_time_ratio_4m

step_time_ratio_4m   upper 95 % bound of the median of the paired differences, as a ratio to the plain step
cpu_time_ratio_4m    the same of CPU time, of the whole process tree: workers, agent, orchestrator against torchrun
tiny_added_over_allreduce   what a step of a tiny model takes longer, over what one bare all-reduce of 4 bytes in the
                     same place of a plain step adds to it (medians of paired differences)

Three jobs take turns: torchrelay, torchrun, and torchrun with that bare all-reduce before each update. Shown beside it:
an all-reduce in a row of many (allreduce_in_a_row_us), which costs less than one that wakes up waiting ranks.

Two jobs of the same code differ, too, for as long as they run. With `--starts` the three are started several times, and
the differences of all their blocks are taken together; the median of each start is shown (.._by_start).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from figures import finish, progress, upper_bound_of_median
from spread import LAYOUTS
from steady import environment
from steps import wait_for
from torchrelay.wire.files.procfs import TICKS, ProcessGone, living_below, read_stat

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
        ticks = 0
        for pid in (self.process.pid, *(each.pid for each in living_below(self.process.pid))):
            with suppress(ProcessGone):
                ticks += read_stat(pid).cpu_ticks
        return ticks / TICKS

    def rows(self, block: int) -> list[list[Any]]:
        """What the ranks wrote of a block: [block, ns of a step, ns of an all-reduce], and what `--each` adds."""
        found: list[list[Any]] = []
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


def start(name: str, work: Path, size: str, layout: str, steps: int, blocks: int) -> Side:
    """Start one of the two jobs; it idles until its first block."""
    folder = work / f"{name}-{size}"
    folder.mkdir()
    script = [str(HERE / "blocks.py"), "--size", size, "--layout", layout, "--steps", str(steps)]
    script += ["--blocks", str(blocks), "--folder", str(folder), *(["--bare"] if name == "bare" else [])]
    if name == "torchrelay":
        words = ["-m", "torchrelay.cli.main", "run", "--nproc-per-node", str(RANKS), "--quiet"]
        words += ["--run-dir", str(work / f"run-{size}")]
    else:
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    log = (work / f"{name}-{size}.log").open("wb")
    process = subprocess.Popen([sys.executable, *words, *script], env=environment(), stdout=log, stderr=log)
    return Side(name, process, folder)


NAMES = ("torchrelay", "torchrun", "bare")


@dataclass
class Figures:
    """What one job took: one value per block."""

    step_s: list[float] = field(default_factory=list)
    allreduce_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def compare_starts(
    work: Path, options: argparse.Namespace, size: str, steps: int
) -> tuple[dict[str, Figures], list[float]]:
    """The jobs in turns, of all starts together; and of each start the median ratio of ours to the plain step."""
    pooled = {name: Figures() for name in NAMES}
    ratios: list[float] = []
    for start in range(options.starts):
        folder = work / f"{size}-{start}"
        folder.mkdir()
        found = compare(folder, size, options.layout, steps, options.blocks)
        ratios.append(1 + middle(found, "torchrelay") / statistics.median(found["torchrun"].step_s))
        for name, figures in found.items():
            pooled[name].step_s += figures.step_s
            pooled[name].allreduce_s += figures.allreduce_s
            pooled[name].cpu_s += figures.cpu_s
        progress(f"{options.layout} {size}: start {start + 1} of {options.starts}: {ratios[-1]:.4f} of plain")
    return pooled, ratios


def compare(work: Path, size: str, layout: str, steps: int, blocks: int) -> dict[str, Figures]:
    """The jobs in turns; the first block is a warm-up and left out."""
    sides = {name: start(name, work, size, layout, steps, blocks) for name in NAMES}
    found = {name: Figures() for name in NAMES}
    try:
        for block in range(blocks):
            # Who goes first changes from block to block, so that drift favours nobody.
            for name in (*NAMES[block % 3 :], *NAMES[: block % 3]):
                step_s, allreduce_s, cpu_s = sides[name].run_block(block)
                if block:
                    found[name].step_s.append(step_s)
                    found[name].allreduce_s.append(allreduce_s)
                    found[name].cpu_s.append(cpu_s)
            progress(f"{layout} {size}: block {block + 1} of {blocks}")
        for side in sides.values():
            side.process.wait(60)
    finally:
        for side in sides.values():
            if side.process.poll() is None:
                side.process.terminate()
                side.process.wait(30)
    return found


def ratio_bound(ours: list[float], plain: list[float]) -> float:
    """1 + the upper 95 % bound of the paired differences' median over the plain median."""
    return 1 + upper_bound_of_median(differences(ours, plain)) / statistics.median(plain)


def differences(ours: list[float], plain: list[float]) -> list[float]:
    return [a - b for a, b in zip(ours, plain, strict=True)]


def big_figures(big: dict[str, Figures]) -> dict[str, object]:
    """4 M parameters: what a step and its CPU time cost beyond the plain ones."""
    plain = big["torchrun"]
    return {
        "step_time_ratio_4m": ratio_bound(big["torchrelay"].step_s, plain.step_s),
        "cpu_time_ratio_4m": ratio_bound(big["torchrelay"].cpu_s, plain.cpu_s),
        "bare_step_time_ratio_4m": ratio_bound(big["bare"].step_s, plain.step_s),
        "step_time_ratio_4m_p50": 1 + middle(big, "torchrelay") / statistics.median(plain.step_s),
        "step_4m_plain_s": statistics.median(plain.step_s),
        "step_4m_ours_s": statistics.median(big["torchrelay"].step_s),
    }


def tiny_figures(tiny: dict[str, Figures]) -> dict[str, object]:
    """A tiny model: what a step takes longer, over what one bare all-reduce adds."""
    step_us = {name: 1e6 * statistics.median(tiny[name].step_s) for name in NAMES}
    return {
        "tiny_added_over_allreduce": middle(tiny, "torchrelay") / middle(tiny, "bare"),
        "step_tiny_plain_us": step_us["torchrun"],
        "step_tiny_bare_us": step_us["bare"],
        "step_tiny_ours_us": step_us["torchrelay"],
        "allreduce_in_a_row_us": 1e6 * statistics.median(tiny["torchrun"].allreduce_s),
    }


def middle(found: dict[str, Figures], name: str) -> float:
    """The median of the paired differences of this job's steps from the plain ones."""
    return statistics.median(differences(found[name].step_s, found["torchrun"].step_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=LAYOUTS, default="ddp", help="not ddp: 4 M parameters only")
    parser.add_argument("--blocks", type=int, default=41, help="of each start; the first is a warm-up")
    parser.add_argument("--starts", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tiny-steps", type=int, default=100)
    parser.add_argument("--short", action="store_true", help="7 blocks")
    options = parser.parse_args()
    if options.short:
        options.blocks = 7
    work = Path(tempfile.mkdtemp(prefix="torchrelay-bench-"))
    try:
        big, by_start = compare_starts(work, options, "4m", options.steps)
        figures = big_figures(big) | {"step_time_ratio_4m_by_start": by_start}
        if options.layout == "ddp":
            figures |= tiny_figures(compare_starts(work, options, "tiny", options.tiny_steps)[0])
        else:
            figures = {f"{options.layout.replace('-', '_')}_{name}": value for name, value in figures.items()}
        finish("overhead", figures, blocks=options.blocks, starts=options.starts)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
