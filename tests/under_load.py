"""The tests with whole jobs, again and again, beside processes that keep the machine busy.

python -m tests.under_load                  20 runs beside two busy processes: hours, as each is half of `make test`
python -m tests.under_load --runs 3 --busy 4
python -m tests.under_load -- -k preempted  what comes after -- is pytest's

Exit code 1: some test has failed. What it said is in FOLDER/run-N.log, and stays.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.patience import VARIABLE
from torchrelay.terminal.show import table

HERE = Path(__file__).parents[1]
BUSY = "while True: pass"
PATIENCE = 4  # a start that takes ten seconds on an idle machine has taken forty
PYTEST = ("-q", "-n", "2", "--dist", "loadfile", "-m", "jobs and not gpu and not soak")


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes use a processor each, as far as there are any."""
    burning = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def run(folder: Path, number: int, words: list[str]) -> tuple[int, list[str], float]:
    """One run: how many tests there were, the names of those that failed, and the seconds that it took."""
    report = folder / f"run-{number}.xml"
    began = time.monotonic()
    with (folder / f"run-{number}.log").open("w") as log:
        limit = f"--timeout={PATIENCE * 300}"  # four times what pyproject.toml says
        command = [sys.executable, "-m", "pytest", *PYTEST, limit, f"--junitxml={report}", *words]
        surroundings = {**os.environ, VARIABLE: str(PATIENCE)}
        code = subprocess.run(command, cwd=HERE, env=surroundings, stdout=log, stderr=subprocess.STDOUT).returncode
    if code not in (0, 1) or not report.exists():
        raise RuntimeError(f"pytest ended with {code}: see {folder / f'run-{number}.log'}")
    cases = list(xml.parse(report).iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    names = [f"{case.get('classname')}::{case.get('name')}" for case in bad]
    return len(cases), names, time.monotonic() - began


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, metavar="N", help="how often (20)")
    parser.add_argument("--busy", type=int, default=2, metavar="N", help="busy processes beside (2)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where what they say is kept (a new one)")
    parser.add_argument("words", nargs="*", help="of pytest")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="torchrelay-under-load-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"logs in {folder}", flush=True)
    failed: Counter[str] = Counter()
    with busy(options.busy):
        for number in range(1, options.runs + 1):
            count, names, took = run(folder, number, options.words)
            failed.update(names)
            print(f"run {number} of {options.runs}: {count} tests, {len(names)} failed, {took:.0f} s", flush=True)
    if failed:
        print(table(("test", "failed in runs"), failed.most_common()))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
