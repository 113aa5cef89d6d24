"""Many schedules of the protocol core, or one with its story.

    python -m torchrelay.simulation --seeds 10000 --jobs 2
    python -m torchrelay.simulation --seed 7 --story

Exits with 0 if no invariant was violated, with 1 if one was, with 3 if the seeds did not reach all that they must.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from torchrelay.simulation.model.coverage import missing, table
from torchrelay.simulation.run import Result, run_seed
from torchrelay.terminal.progress import progress

CHUNK = 50
SHOWN_LINES = 80


def run_chunk(first: int, last: int) -> tuple[Counter[str], list[tuple[int, str]], int]:
    """Seeds from `first` to before `last`: what they reached, what they broke, and how many they were."""
    reached: Counter[str] = Counter()
    broken = []
    for seed in range(first, last):
        result = run_seed(seed)
        reached.update(result.coverage)
        if result.violation:
            broken.append((seed, result.violation))
    return reached, broken, last - first


def chunks(first: int, count: int) -> Iterator[tuple[int, int]]:
    for start in range(first, first + count, CHUNK):
        yield start, min(start + CHUNK, first + count)


def run_many(first: int, count: int, jobs: int) -> tuple[Counter[str], list[tuple[int, str]]]:
    """All seeds, on `jobs` processes, with a progress bar."""
    reached: Counter[str] = Counter()
    broken: list[tuple[int, str]] = []
    done = 0
    with progress("schedules") as told, ProcessPoolExecutor(jobs) as pool:
        for result in pool.map(run_chunk, *zip(*chunks(first, count), strict=True)):
            reached.update(result[0])
            broken += result[1]
            done += result[2]
            told(done, count, f"{len(broken)} violations" if broken else "")
    return reached, broken


def commit() -> str:
    """The git commit that this ran on, if it is known."""
    try:
        found = subprocess.run(("git", "describe", "--always", "--dirty"), capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def show(result: Result, lines: int) -> None:
    """A seed's story, and how to see it again."""
    if len(result.story) > lines:
        print(f"... {len(result.story) - lines} lines before")
    print("\n".join(result.story[-lines:]))
    verdict = f"VIOLATION: {result.violation}" if result.violation else "no violation"
    print(f"\nseed {result.seed}, git commit {commit()}: {verdict}")
    print(f"replay: python -m torchrelay.simulation --seed {result.seed} --story")


def main() -> int:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many schedules (default 1000)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes to use (default 1)")
    parser.add_argument("--seed", type=int, metavar="SEED", help="one schedule only")
    parser.add_argument("--story", action="store_true", help="tell what happens in it")
    options = parser.parse_args()
    if options.seeds < 1 or options.jobs < 1:
        parser.error("--seeds and --jobs must be at least 1")
    if options.seed is not None:
        result = run_seed(options.seed, story=True)
        show(result, 10**9 if options.story else SHOWN_LINES)
        return 1 if result.violation else 0
    began = time.monotonic()
    reached, broken = run_many(options.first, options.seeds, options.jobs)
    took = time.monotonic() - began
    print(table(reached))
    print(f"\n{options.seeds} schedules, {options.seeds / took:.0f} per second, {len(broken)} violations")
    for seed, violation in broken[:20]:
        print(f"  seed {seed}: {violation}")
    if broken:
        print()
        show(run_seed(broken[0][0], story=True), SHOWN_LINES)
        return 1
    left = missing(reached, options.seeds)
    for what in left:
        print(f"never reached: {what}")
    return 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
