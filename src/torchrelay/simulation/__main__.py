"""Many schedules of the protocol core and what they must reach, or one with its story.

    python -m torchrelay.simulation --seeds 10000 --jobs 2
    python -m torchrelay.simulation --seed 7 --story
    python -m torchrelay.simulation --seed 7 --nodes 512

Exits with 0 if no invariant was violated, with 1 if one was, with 3 if the seeds did not reach all that they must.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import get_args

from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.orders import Verdict
from torchrelay.protocol.model.incident import Resolution
from torchrelay.protocol.model.job import BEFORE_CUTOVER, RECOVERING, JobPhase
from torchrelay.protocol.model.moves import OPEN_MOVES, MoveState
from torchrelay.protocol.recovery.ending import NO_SPARE, NO_STATE, PARKED, REFUSED, STOPPED
from torchrelay.simulation.model.plans import COMES_TO, FaultKind, Lack, Plan
from torchrelay.simulation.world import Result, run_large, run_seed
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
    parser.add_argument("--nodes", type=int, metavar="N", help="with --seed: a job on so many nodes of eight ranks")
    parser.add_argument("--story", action="store_true", help="tell what happens in it")
    options = parser.parse_args()
    if options.seeds < 1 or options.jobs < 1:
        parser.error("--seeds and --jobs must be at least 1")
    if options.nodes is not None and (options.nodes < 4 or options.seed is None):
        parser.error("--nodes must be at least 4, and goes with --seed")
    with quiet():
        return play(options)


@contextmanager
def quiet() -> Iterator[None]:
    """Heads in it are real ones and have words of their own; `--story` tells more."""
    logger = logging.getLogger("torchrelay")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def play(options: argparse.Namespace) -> int:
    """What was asked for; returns the exit code."""
    if options.seed is not None:
        large = options.nodes is not None
        result = run_large(options.seed, options.nodes, story=True) if large else run_seed(options.seed, story=True)
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


# ---------------------------------------------------------------- what the seeds have reached, and must reach

# Faults that find something to hit in every phase of a recovery.
ENOUGH = 3_000  # so many seeds must reach everything,
ENOUGH_FOR_PHASES = 10_000  # and so many these faults in every phase of a recovery, some of which last for milliseconds
EVERYWHERE = (FaultKind.KILL, FaultKind.TWO, FaultKind.ORCHESTRATOR, FaultKind.AGENT, FaultKind.SPLIT, FaultKind.POWER)
# Left to chance: a call-off lasts for milliseconds, and 100,000 seeds have not met it with both ranks still there.
BY_CHANCE = (FaultKind.TWO, JobPhase.RELEASING)

# Faults of those who change hands, and when they can be hit as such.
OF_MOVES = (FaultKind.KILL_TARGET, FaultKind.KILL_OUTGOING)
HALTS = (JobPhase.RUNNING, JobPhase.QUIESCING, JobPhase.HALTING)


# A signal that is to be passed on to the script: shown by unit tests and real processes only, so far (but for one that
# follows on a parking that comes to nothing).
NOT_SIMULATED = {"order: PassOn", "event: SignalAsked"}
FAMILIES = (
    "outcome",
    "resolution",
    "move",
    "verdict",
    "order",
    "event",
    "lack",
    "succession",
    "split",
    "during",
    "late",
)
# What a succession has come to when another fault strikes.
SECOND_LOSSES = (
    ("stands", FaultKind.HEIR), ("stands", FaultKind.FROZEN), ("stands", FaultKind.HALVES),
    ("elected", FaultKind.HEIR), ("elected", FaultKind.FROZEN), ("acts", FaultKind.HEAD), ("proposes", FaultKind.HEAD),
)  # fmt: skip
# Few jobs park, and a call-off lasts for milliseconds; tests strike heads while a job parks.
SELDOM = {JobPhase.RELEASING, JobPhase.PARKING}
# Small worlds have no racks (see `large`).
NOT_SMALL = {f"fault: {FaultKind.RACK}"}


def required(seeds: int) -> list[str]:
    """Everything that some of so many seeds must reach."""
    if seeds < ENOUGH:
        return []
    wanted = [f"phase: {phase}" for phase in JobPhase if phase is not JobPhase.STARTING]
    wanted += [f"verdict: {verdict}" for verdict in Verdict if verdict is not Verdict.GO_ON]  # that is of each move
    wanted += [f"move: {state}" for state in MoveState if state not in OPEN_MOVES]
    wanted += [f"resolution: {resolution}" for resolution in Resolution if resolution is not Resolution.OPEN]
    codes = (0, Plan.script_code, NO_SPARE, NO_STATE, REFUSED, STOPPED, PARKED, 137)
    wanted += [f"outcome: {code}" for code in codes]
    wanted += [f"fault: {kind}" for kind in FaultKind]
    wanted += [f"succession: {what}" for what in COMES_TO]
    wanted += [f"split: the head is {how} a majority" for how in ("with", "without")]
    if seeds >= ENOUGH_FOR_PHASES:
        places = [(kind, phase) for kind in EVERYWHERE for phase in sorted(RECOVERING | BEFORE_CUTOVER)]
        wanted += [f"fault: {kind} in {phase}" for kind, phase in places if (kind, phase) != BY_CHANCE]
        wanted += [f"fault: {kind} in {phase}" for kind in OF_MOVES for phase in HALTS]
        recovers = sorted((RECOVERING | BEFORE_CUTOVER) - SELDOM)
        wanted += [f"fault: {FaultKind.HEAD} in {phase}" for phase in recovers]
        wanted += [f"during: {what}, {kind}" for what, kind in SECOND_LOSSES]
        wanted += ["late: a former head decides", "nobody acts any more"]
    wanted += [f"lack: {lack}" for lack in Lack]
    wanted.append("a parked job has gone on")
    wanted += [f"order: {kind.__name__}" for kind in get_args(od.AnyOrder)]
    wanted += [f"event: {kind.__name__}" for kind in (*ev.Fact.__subclasses__(), *ev.Answer.__subclasses__())]
    return [what for what in wanted if what not in NOT_SIMULATED | NOT_SMALL]


def missing(reached: Counter[str], seeds: int) -> list[str]:
    """What so many seeds must reach, and did not."""
    return [what for what in required(seeds) if not reached[what]]


def table(reached: Counter[str]) -> str:
    """What was reached how often; faults by the phase in which they struck."""
    lines = []
    for family in (
        "outcome",
        "resolution",
        "move",
        "verdict",
        "order",
        "event",
        "lack",
        "succession",
        "split",
        "during",
        "late",
    ):
        found = sorted(
            (what, n) for what, n in reached.items() if what.startswith(f"{family}: ") and " in " not in what
        )
        lines.append(f"{family:10} " + ", ".join(f"{what.removeprefix(f'{family}: ')} {n}" for what, n in found))
    phases = list(JobPhase)
    lines.append("")
    lines.append(f"{'fault, struck in':48}" + "".join(f"{phase[:8]:>9}" for phase in phases) + f"{'all':>9}")
    for kind in FaultKind:
        cells = "".join(f"{reached[f'fault: {kind} in {phase}']:9}" for phase in phases)
        lines.append(f"{kind:48}{cells}{reached[f'fault: {kind}']:9}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
