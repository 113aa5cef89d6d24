"""Make mutants, let the tests meet them, and show who survived."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator

import hypothesis  # noqa: F401  loaded once, for all children
import msgspec  # noqa: F401
import pytest  # noqa: F401

from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.killing import fork_for, told
from tests.mutants.making import MODULES, PROTOCOL, Mutant, mutants, path_of
from torchrelay.terminal.progress import progress

Verdict = tuple[Mutant, str]


def meet(chosen: list[Mutant], jobs: int) -> Iterator[Verdict]:
    """Let `jobs` children at a time run the tests; yields mutants as they are done, with their killer."""
    waiting, running = list(reversed(chosen)), dict[int, tuple[Mutant, int]]()
    kills = defaultdict[str, Counter[str]](Counter)
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            child, reading = fork_for(mutant, kills[mutant.module])
            running[child] = (mutant, reading)
        child, _ = os.wait()
        mutant, reading = running.pop(child)
        killer = told(reading)
        kills[mutant.module][killer] += 1
        yield mutant, killer


def sound() -> str:
    """Who kills the core as it is: nobody should."""
    child, reading = fork_for(None, {})
    os.waitpid(child, 0)
    return told(reading)


def choose(only: str | None, sample: int | None) -> list[Mutant]:
    """All mutants, those of one module, or every n-th."""
    every = [mutant for module in MODULES if only in (None, module) for mutant in mutants(module)]
    if sample is None or sample >= len(every):
        return every
    return every[:: max(1, len(every) // sample)][:sample]


def run(chosen: list[Mutant], jobs: int) -> tuple[list[Verdict], float]:
    """Meet them all, with a progress bar."""
    began = time.monotonic()
    done: list[Verdict] = []
    with progress("mutants") as told:
        for verdict in meet(chosen, jobs):
            done.append(verdict)
            alive = sum(not killer for _, killer in done)
            told(len(done), len(chosen), f"{alive} alive")
    return done, time.monotonic() - began


def judge(done: list[Verdict], *, complete: bool) -> int:
    """Say who killed, who survived, and what the list of equivalents says wrongly."""
    killers = Counter(killer for _, killer in done if killer)
    for killer, times in killers.most_common():
        print(f"{times:6} killed by {killer}")
    survivors = sorted((mutant.line, mutant.name, mutant) for mutant, killer in done if not killer)
    wrong = [mutant for _, name, mutant in survivors if name not in EQUIVALENT]
    for mutant in sorted(wrong, key=lambda each: (each.module, each.line)):
        where = path_of(mutant.module).relative_to(PROTOCOL.parent)
        print(f"SURVIVED {where}:{mutant.line}: {mutant.name}")
    alive = {name for _, name, _ in survivors}
    met = {mutant.name for mutant, _ in done}
    stale = [name for name in EQUIVALENT if (name in met and name not in alive) or (complete and name not in met)]
    for name in stale:
        print(f"listed as equivalent, and it is not: {name}")
    listed = len(survivors) - len(wrong)
    print(f"{len(done)} mutants: {sum(killers.values())} killed, {listed} equivalent, {len(wrong)} survived")
    return 1 if wrong or stale else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes to use (default 1)")
    parser.add_argument("--only", choices=MODULES, help="the mutants of one module")
    parser.add_argument("--sample", type=int, metavar="N", help="so many, always the same ones")
    options = parser.parse_args()
    killer = sound()
    if killer:
        print(f"the core as it is does not pass: {killer}", file=sys.stderr)
        return 2
    done, took = run(choose(options.only, options.sample), options.jobs)
    print(f"in {took:.0f} s")
    return judge(done, complete=options.only is None and options.sample is None)


if __name__ == "__main__":
    sys.exit(main())
