"""Many schedules of successions and what they must reach, or one with its story.

    python -m torchrelay.simulation.succession --seeds 100000 --jobs 2
    python -m torchrelay.simulation.succession --seed 7 --story

Exits as `python -m torchrelay.simulation` does.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from torchrelay.simulation.succession.world import Result, run_seed
from torchrelay.terminal.progress import progress

CHUNK = 200
SHOWN_LINES = 80
ENOUGH = 3_000  # so many seeds must reach everything
WANTED = (
    "acts", "copied", "copy cut", "copy forgotten", "crash", "crash amid a proposal", "crash of a head", "elected",
    "excluded", "follows what is settled", "follows what may be settled", "goes on", "goes on alone",
    "goes on with another", "healed", "heirs change", "left", "memory lost", "settled", "split", "stands",
    "told that it is settled", "too few are left", "voters change", "2 copies have led", "3 copies have led",
)  # fmt: skip


def run_chunk(first: int, last: int) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Seeds from `first` to before `last`: what they reached, and what they broke."""
    reached: Counter[str] = Counter()
    broken = []
    for seed in range(first, last):
        result = run_seed(seed)
        reached.update(result.coverage)
        if result.violation:
            broken.append((seed, result.violation))
    return reached, broken


def chunks(first: int, count: int) -> Iterator[tuple[int, int]]:
    for start in range(first, first + count, CHUNK):
        yield start, min(start + CHUNK, first + count)


def missing(reached: Counter[str], seeds: int) -> list[str]:
    """What so many seeds must reach, and did not."""
    return [what for what in WANTED if not reached[what]] if seeds >= ENOUGH else []


def run_many(first: int, count: int, jobs: int) -> int:
    """All seeds, on `jobs` processes; says what came of it, and returns how to exit."""
    reached: Counter[str] = Counter()
    broken: list[tuple[int, str]] = []
    began = time.monotonic()
    parts = list(chunks(first, count))
    with progress("successions") as told, ProcessPoolExecutor(jobs) as pool:
        for done, result in enumerate(pool.map(run_chunk, *zip(*parts, strict=True)), 1):
            reached.update(result[0])
            broken += result[1]
            told(min(done * CHUNK, count), count, f"{len(broken)} violations" if broken else "")
    took = time.monotonic() - began
    print("\n".join(f"{times:9} {what}" for what, times in sorted(reached.items())))
    print(f"\n{count} schedules, {count / took:.0f} per second, {len(broken)} violations")
    for seed, violation in broken[:20]:
        print(f"  seed {seed}: {violation}")
    if broken:
        print()
        return show(broken[0][0], SHOWN_LINES)
    left = missing(reached, count)
    for what in left:
        print(f"never reached: {what}")
    return 3 if left else 0


def show(seed: int, lines: int) -> int:
    """A seed's story, and how to see it again; returns how to exit."""
    result: Result = run_seed(seed, story=True)
    if len(result.story) > lines:
        print(f"... {len(result.story) - lines} lines before")
    print("\n".join(result.story[-lines:]))
    print(f"\nseed {seed}: {f'VIOLATION: {result.violation}' if result.violation else 'no violation'}")
    print(f"replay: python -m torchrelay.simulation.succession --seed {seed} --story")
    return 1 if result.violation else 0


def main() -> int:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many schedules (default 1000)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes to use (default 1)")
    parser.add_argument("--seed", type=int, metavar="SEED", help="one schedule only")
    parser.add_argument("--story", action="store_true", help="tell all that happens in it")
    options = parser.parse_args()
    if options.seeds < 1 or options.jobs < 1:
        parser.error("--seeds and --jobs must be at least 1")
    if options.seed is not None:
        return show(options.seed, 10**9 if options.story else SHOWN_LINES)
    return run_many(options.first, options.seeds, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
