"""Silent wrong results as a class of faults: scripts that break a rule on purpose, each of them killed, moved, drained.

python -m tests.matrix --silent                       all cells, as a table
python -m tests.matrix --silent counter-global time   these scripts

Every cell must be equal to the undisturbed run, refused, or fallen back to the same bits. Exit code 1: some cell was
silent, stood still, or failed otherwise.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.cases import running
from tests.cases.running import CASES, Case, Driver, Fate, Verdict, disturbed, drain_of, migrate, run_calm

# To be drained, each rank is on a node of its own; the spare is on a third.
FLAGS = {"drain": ("--nodes", "2", "--nproc-per-node", "1", "--spare-nodes", "1")}
AT = 14  # in the second epoch
ACTS: dict[str, Driver | None] = {"kill": None, "move": migrate(1, at=AT), "drain": drain_of(1, at=AT)}
RULES = (
    "counter-closure", "counter-global", "counter-object", "generator-torch", "generator-numpy", "unseeded",
    "second-loader", "module-counter", "sampler-counter", "sampler-python", "sampler-numpy", "dataset-counter",
    "dataset-generator", "disk-cache", "environment", "time", "subset-by-time", "tokens-by-time", "own-tokens-by-time",
)  # fmt: skip
EDITED = ("edited-script", "edited-module", "edited-late-module")  # by somebody, while it trains
ALL = RULES + EDITED
FILES = {"edited-script": "train.py", "edited-module": "factors.py", "edited-late-module": "parts/late.py"}
BAD = (Fate.SILENT, Fate.HANG, Fate.FAILED)


def run_cell(work: Path, rule: str, act: str) -> Verdict:
    """Run a script, and do this to it."""
    driver = ACTS[act]
    calm = run_calm(work / "calm", "edited" if rule in EDITED else "rules", mode=rule)
    given = words(work, rule, act)
    if rule in EDITED:
        driver = editing(work / act / "project" / FILES[rule], driver)
    return disturbed(
        work / act,
        given,
        mode=rule,
        flags=FLAGS.get(act, running.FLAGS),
        drive=driver,
        strike=f"grad:{AT + 6}:1" if act == "kill" else "",
        env={"SLOW": str(AT + 1)} if driver else {},
        calm=calm,
    )


def attempt(work: Path, rule: str, act: str) -> Verdict:
    """A cell; one whose act did not come about on a machine that was busy is tried again, once."""
    try:
        return run_cell(work, rule, act)
    except AssertionError:
        return run_cell(work / "again", rule, act)


def words(work: Path, rule: str, act: str) -> list[str]:
    """The command of a cell; what is to be edited is a copy."""
    if rule not in EDITED:
        return [str(CASES / "rules" / "train.py")]
    project = work / act / "project"
    shutil.copytree(CASES / "edited", project, ignore=shutil.ignore_patterns("__pycache__"))
    return [str(project / "train.py")]


def editing(path: Path, then: Driver | None) -> Driver:
    """Somebody changes a factor in a file, and then this is done."""

    def drive(case: Case) -> None:
        case.until_step(AT)
        path.write_text(path.read_text().replace("FACTOR = 1.0", "FACTOR = 3.0"))
        if then is not None:
            then(case)

    return drive


def main(rules: Sequence[str]) -> int:
    """Go through the cells, print the table. Returns the exit code."""
    unknown = set(rules) - set(ALL)
    if unknown:
        print(f"no such scripts: {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
        return 2
    rows: dict[str, dict[str, Verdict]] = {}
    with tempfile.TemporaryDirectory(prefix="torchrelay-silent-") as folder:
        for rule in rules or ALL:
            begin = time.monotonic()
            work = Path(folder, rule)
            rows[rule] = {act: attempt(work, rule, act) for act in ACTS}
            told = ", ".join(f"{act}: {verdict.fate}" for act, verdict in rows[rule].items())
            print(f"{rule:20} {told} ({time.monotonic() - begin:.0f} s)", flush=True)
            shutil.rmtree(work, ignore_errors=True)
    return tell(rows)


def tell(rows: dict[str, dict[str, Verdict]]) -> int:
    """The table, and what each refusal said."""
    print(f"\n{'':20}" + "".join(f"{act:>14}" for act in ACTS))
    for rule, row in rows.items():
        print(f"{rule:20}" + "".join(f"{row[act].fate:>14}" for act in ACTS))
    cells = [verdict for row in rows.values() for verdict in row.values()]
    bad = [verdict for verdict in cells if verdict.fate in BAD]
    late = sum(verdict.fate is Fate.LATE for verdict in cells)
    silent = sum(verdict.fate is Fate.SILENT for verdict in cells)
    print(f"\n{len(cells)} cells: {silent} silent, {len(bad) - silent} stood still or failed, {late} refused late")
    for rule, row in rows.items():
        for act, verdict in row.items():
            if verdict.fate in (Fate.REFUSED, Fate.LATE):
                print(f"  {rule}, {act}: {verdict.why}")
            elif verdict.fate in BAD:
                print(f"  {rule}, {act}: {verdict.fate}: {'; '.join(verdict.differences[:2])}{os.linesep}{verdict.why}")
    return 1 if bad else 0
