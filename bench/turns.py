"""Turns: what torchrelay's job with faults takes, against plain PyTorch's without, measured at the same time.

    make bench NAME=turns
    make bench NAME=turns ARGS="--steps 1000"

The GPT and the faults of `compare`. Four jobs are live at once: plain PyTorch twice, torchrelay with two spares, and
without. They take turns of 25 steps, and each waits while another trains; so all meet the same machine, which in the
hour that `compare` takes becomes slower or faster by more than what is asked for. A job's time is the sum
of its turns. All that a fault sets in motion is in the turn of its job.

plain_jct_s     mean of both plain jobs, from the first step of the last rank to its last one
plain_ratio     one of them over the other: what two jobs of the same code differ by; nothing below can be known better
jct_s           the same of torchrelay's
over_bound      jct_s over (plain_jct_s and a second for each fault): to be at most 1.03; and its 95 % interval, by
                resampling the turns without a fault
step_ratio      turns without a fault over the plain ones (median), and the upper 95 % bound of that
stood_s         the sum of the pauses, each how long the survivors stood, less a step
once_share      of the samples: in the model exactly once; bit_equal: the parameters are those of plain PyTorch
idle_cpu        of all cores, what jobs that wait used in the plain job's turns

The report, a plot, and results.json go to --out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from compare import MODELS, write_corpus
from compare_figures import Seen
from compare_processes import cpu_s
from compare_schedule import PER_JOB, Fault, faults, turns
from compare_systems import RANKS, Entry, Job, System, entries, here
from compare_trial import POLL_S, Tail, Trial
from figures import finish, machine, progress
from turns_figures import Job as Taken
from turns_figures import Turn, flat_of, job_of
from turns_report import write

STEPS = 3000
LIMIT_S = 3600.0  # of all jobs together
PLAIN, OURS = ("plain", "plain-again"), ("torchrelay-spares", "torchrelay-shrink")
Faults = tuple[Fault, ...]


class Side:
    """One of the jobs: its system, how far it is, and what it has used."""

    def __init__(self, entry: Entry, name: str, work: Path, order: dict[str, object], schedule: Faults) -> None:
        self.name, self.title = name, entry.title
        self.system: System = entry.make(Job(folder=work / name, order=order, losses=0), here())
        self.trial = Trial(self.system, schedule, LIMIT_S, lambda text: progress(f"{name}: {text}"))

    def cpu_s(self) -> dict[int, float]:
        """CPU seconds of each of its processes."""
        return {pid: cpu_s(pid) for pid in self.system.cpu_pids()}

    def until(self, step: int) -> None:
        """Let it go on until all ranks have done so many steps. Raises ValueError if they never do."""
        while not self.trial.at(step):
            if self.trial.over() and not self.trial.at(step):
                raise ValueError(f"{self.name} did not come to step {step}: {self.trial.reason}")
            time.sleep(POLL_S)

    def turn(self, first: int, last: int) -> None:
        (self.system.folder / f"go-{first}").write_text("")
        self.until(last)

    def finish(self) -> Seen:
        """Raises ValueError if it did not end well."""
        while not self.trial.over():
            time.sleep(POLL_S)
        if self.trial.reason:
            raise ValueError(f"{self.name}: {self.trial.reason}")
        return self.trial.seen()

    def begins(self) -> list[Turn]:
        """When each rank began each of its turns."""
        folder = self.system.folder / "turns"
        return [turn for rank in range(RANKS) for turn in Tail(folder / f"rank-{rank}.jsonl").read(Turn)]


def sides_of(work: Path, schedule: Faults, plan: Sequence[int]) -> list[Side]:
    size, batch = MODELS["gpt"]
    order: dict[str, object] = {
        "corpus": str(write_corpus(work / "corpus")), "size": size, "batch": batch, "steps": plan[-1],
        "ranks": RANKS, "early": plan[1], "turns": plan[:-1],
    }  # fmt: skip
    known = {entry.name: entry for entry in entries()}
    plain = msgspec.structs.replace(known["none"], order={})
    return [
        *(Side(plain, name, work, order, ()) for name in PLAIN),
        *(Side(known[name], name, work, order, schedule) for name in OURS),
    ]


def take_turns(sides: Sequence[Side], plan: Sequence[int]) -> float:
    """All turns of all jobs; who goes first changes. Returns the CPU share of those that waited while plain trained."""
    used = spent = 0.0
    for at, (first, last) in enumerate(pairwise(plan)):
        shift = at % len(sides)
        for side in (*sides[shift:], *sides[:shift]):
            waiting = [other for other in sides if other is not side] if side.name in PLAIN else []
            before, begin = [other.cpu_s() for other in waiting], time.monotonic()
            side.turn(first, last)
            spent += time.monotonic() - begin if waiting else 0.0
            for other, known in zip(waiting, before, strict=True):
                used += sum(seconds - known.get(pid, 0.0) for pid, seconds in other.cpu_s().items())
        progress(f"step {last} of {plan[-1]}")
    return used / spent / (os.cpu_count() or 1)


def run(work: Path, schedule: Faults, plan: Sequence[int]) -> tuple[list[Taken], float]:
    """Raises ValueError if a job did not come to its end."""
    sides = sides_of(work, schedule, plan)
    try:
        for side in sides:
            progress(f"{side.name}: starts")
            side.trial.begin()
            side.until(1)
        idle = take_turns(sides, plan)
        taken = []
        for side in sides:
            seen = side.finish()
            taken.append(job_of(side.name, side.title, seen, side.begins(), plan))
        return taken, idle
    finally:
        for side in sides:
            side.trial.end()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each job ({STEPS})")
    parser.add_argument("--seed", type=int, default=7, help="of the schedule")
    parser.add_argument("--out", type=Path, default=Path("turns-report"), help="the report's folder (turns-report)")
    parser.add_argument("--keep", action="store_true", help="keep what the jobs wrote, and say where")
    options = parser.parse_args()
    try:
        faults(options.seed, options.steps)
    except ValueError as error:
        parser.error(f"--steps {options.steps}: {error}")
    return options


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # jobs do not outlive us
    schedule = faults(options.seed, options.steps)
    plan, about = turns(schedule, options.steps), machine()
    work = Path(tempfile.mkdtemp(prefix="torchrelay-bench-"))
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        taken, idle = run(work, schedule, plan)
        flags = f"--seed {options.seed}" + (f" --steps {options.steps}" if options.steps != STEPS else "")
        figures = flat_of(taken, plan, idle)
        write(options.out, taken, plan, schedule, figures, about, flags)
        finish("turns", figures, seed=options.seed, per_job=PER_JOB, report=str(options.out / "README.md"))
    except ValueError as error:
        raise SystemExit(f"turns: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        if options.keep:
            print(f"kept: {work}")
        else:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
