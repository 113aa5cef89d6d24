"""The matrix of faults and phases on real processes: what `make test` covers, and what `make soak` goes through.

python -m tests.matrix --all                 every cell once, and every second fault in a recovery
python -m tests.matrix --minutes 60 --seed 3 random cells for an hour, then the cells that were covered
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.jobs import SCRIPTS, Finished, differences, run_job

HOWS = ("kill", "raise", "exit", "stop", "oom", "comm")
PHASES = ("forward", "backward", "gate", "update", "between", "section")
# Second faults: what a survivor or the newcomer is doing when it is hit, while a recovery is under way.
RECOVERY = ("report", "catch up", "rewire", "restore", "resume")
# An exception cannot be raised from outside in the main thread while it waits in the gate.
IMPOSSIBLE = {("raise", "gate"), ("comm", "gate"), ("comm", "between"), ("comm", "update")}
RANKS = 4
STRIDE = 7  # steps between two faults: epochs are 25 steps, so every edge is met


@dataclass(frozen=True)
class Cell:
    """One kind of fault at one place; `second` strikes another worker during the recovery from the first."""

    how: str
    phase: str
    second: str = ""

    def __str__(self) -> str:
        return f"{self.how} in {self.phase}" + (f", then kill in {self.second}" if self.second else "")


ALL = [Cell(how, phase) for how in HOWS for phase in PHASES if (how, phase) not in IMPOSSIBLE]
SECONDS = [Cell("kill", "backward", second) for second in RECOVERY] + [Cell("kill", "gate", "rewire")]


def plan_of(cells: list[Cell], chance: random.Random) -> tuple[list[dict[str, Any]], int]:
    """A plan for the script, one cell after the other, and how many steps it needs."""
    plan: list[dict[str, Any]] = []
    step = 4
    for number, cell in enumerate(cells):
        rank = chance.randrange(RANKS)
        if cell.phase == "section":
            step += -step % 25  # sections are at the ends of epochs, after 25 steps
        fault = {"id": f"f{number}", "ranks": [rank], "step": step, "phase": cell.phase, "how": cell.how}
        plan.append(fault)
        if cell.second:
            other = (rank + 1 + chance.randrange(RANKS - 1)) % RANKS
            ranks = [rank] if cell.second in ("catch up", "restore") else [other]
            second = {"id": f"s{number}", "ranks": ranks, "phase": cell.second, "how": "kill", "after": f"f{number}"}
            plan.append(second)
        step += STRIDE
    return plan, step + 3


def run_cells(work: Path, name: str, cells: list[Cell], seed: int, *, timeout_s: float = 600) -> Finished:
    """One job that meets all these faults, one after the other."""
    plan, steps = plan_of(cells, random.Random(seed))
    marks = work / f"{name}-marks"
    marks.mkdir()
    plan_file = work / f"{name}-plan.json"
    plan_file.write_text(json.dumps(plan))
    script = [str(SCRIPTS / "faulty.py"), "--steps", str(steps), "--plan", str(plan_file), "--marks", str(marks)]
    flags = ["--nproc-per-node", str(RANKS), "--spares", "2", "--slot-faults", "0"]
    done = run_job(work / name, script, flags, timeout_s=timeout_s)
    struck = {path.name.split(".")[0] for path in marks.iterdir()}
    missing = {fault["id"] for fault in plan} - struck
    assert not missing, f"faults that never struck: {missing} of {plan}\n{done.output[-3000:]}"
    return done


def run_undisturbed(work: Path, name: str, cells: list[Cell], seed: int) -> Finished:
    """The same job without faults, in processes of its own."""
    _, steps = plan_of(cells, random.Random(seed))
    script = [str(SCRIPTS / "faulty.py"), "--steps", str(steps)]
    return run_job(work / name, script, ["--nproc-per-node", str(RANKS)])


def verdict(done: Finished, calm: Finished) -> list[str]:
    """What is wrong with a disturbed run; empty if nothing is."""
    wrong = [] if done.code == 0 else [f"exit code {done.code}: {done.output[-2000:]}"]
    wrong += differences(done, calm)[:10]
    wrong += [f"{row['id']} ({row['cause']}): {row['resolution']}" for row in unclean(done)]
    return wrong


def unclean(done: Finished) -> list[dict[str, Any]]:
    return [row for row in done.incidents() if row["resolution"] != "clean"]


def soak(minutes: float, seed: int, per_job: int) -> int:
    """Random cells until the time is up; prints what was covered."""
    chance = random.Random(seed)
    until = time.monotonic() + 60 * minutes
    covered: Counter[Cell] = Counter()
    bad = 0
    while time.monotonic() < until or not covered:
        cells = [chance.choice(ALL + SECONDS) for _ in range(per_job)]
        bad += go_through(cells, chance.randrange(1 << 30), covered)
    print_cover(covered, bad)
    return 1 if bad else 0


def go_through(cells: list[Cell], seed: int, covered: Counter[Cell]) -> int:
    """One job and its undisturbed twin. Returns how many things were wrong."""
    with tempfile.TemporaryDirectory(prefix="torchrelay-soak-") as folder:
        work = Path(folder)
        calm = run_undisturbed(work, "calm", cells, seed)
        done = run_cells(work, "disturbed", cells, seed, timeout_s=60 + 30 * len(cells))
        wrong = verdict(done, calm)
    covered.update(cells)
    print(f"{sum(covered.values()):5} faults, seed {seed}: {wrong or 'clean, bit-equal'}", flush=True)
    return len(wrong)


def print_cover(covered: Counter[Cell], bad: int) -> None:
    """The matrix: how often each cell was struck."""
    print("\n" + " " * 8 + "".join(f"{phase:>10}" for phase in PHASES))
    for how in HOWS:
        cells = [str(covered[Cell(how, phase)]) if Cell(how, phase) in ALL else "-" for phase in PHASES]
        print(f"{how:8}" + "".join(f"{cell:>10}" for cell in cells))
    for cell in SECONDS:
        print(f"{covered[cell]:5}  {cell}")
    print(f"{sum(covered.values())} faults, {bad} violations")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every cell once")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--per-job", type=int, default=8, help="faults in one job")
    options = parser.parse_args()
    if not options.all:
        return soak(options.minutes, options.seed, options.per_job)
    covered: Counter[Cell] = Counter()
    cells = ALL + SECONDS
    bad = 0
    for first in range(0, len(cells), options.per_job):
        bad += go_through(cells[first : first + options.per_job], options.seed + first, covered)
    print_cover(covered, bad)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
