"""Turns: what torchrelay's job with faults takes, against plain PyTorch's without, measured at the same time.

    make bench NAME=turns
    make bench NAME=turns ARGS="--model small --steps 1000"

A model and the faults of `compare`. Four jobs are live at once: plain PyTorch twice, torchrelay with two spares, and
without. They take turns of 25 steps, and each waits while another trains; so all meet the same machine, which in the
hour that `compare` takes becomes slower or faster by more than what is asked for. A job's time is the sum of its turns,
less the share of the processors that the waiting jobs used in them: agents and an orchestrator go on while their ranks
wait, and belong to their own job. All that a fault sets in motion is in the turn of its job.

plain_jct_s     mean of both plain jobs, from the first step of the last rank to its last one
plain_ratio     one of them over the other: what two jobs of the same code differ by; nothing below can be known better
jct_s           the same of torchrelay's
over_bound      jct_s over (plain_jct_s and a second for each fault): to be at most 1.03; and its 95 % interval, by
                resampling the turns without a fault
step_ratio      turns without a fault over the plain ones (median), and the upper 95 % bound of that
step_longer_ms  the same as a difference, for each step
stood_s         the sum of the pauses, each how long the survivors stood, less a step
once_share      of the samples: in the model exactly once; bit_equal: the parameters are those of plain PyTorch
cpu_ratio       CPU time of turns without a fault, all processes of a job, over the plain ones (median)
waiting_cpu     of all cores, what a job used while it waited

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

from compare_figures import Seen
from compare_processes import cpu_s
from compare_schedule import PER_JOB, Fault, faults, turns
from compare_systems import RANKS, Entry, Job, System, entries, here
from compare_task import MODELS, STEPS, write_corpus
from compare_trial import POLL_S, Tail, Trial
from figures import finish, machine, progress
from turns_figures import Job as Taken
from turns_figures import Spent, Turn, firsts, flat_of, job_of
from turns_report import write

LIMIT_S = 3600.0  # of all jobs together
PLAIN, OURS = ("plain", "plain-again"), ("torchrelay-spares", "torchrelay-shrink")
Faults = tuple[Fault, ...]


class Side:
    """One of the jobs: its system, how far it is, and what it has used."""

    def __init__(
        self, entry: Entry, name: str, work: Path, order: dict[str, object], schedule: Faults, plan: Sequence[int]
    ) -> None:
        self.name, self.title = name, entry.title
        self.system: System = entry.make(Job(folder=work / name, order=order, losses=0), here())
        self.trial = Trial(self.system, schedule, LIMIT_S, lambda text: progress(f"{name}: {text}"))
        self.steps = plan[-1]
        self.spent: list[Spent] = []
        self._open: list[int] = []
        for step in plan[:-1]:
            os.mkfifo(self.system.folder / f"go-{step}")

    def cpu_s(self) -> dict[int, float]:
        """CPU seconds of each of its processes."""
        return {pid: cpu_s(pid) for pid in self.system.cpu_pids()}

    def used_s(self, before: dict[str, dict[int, float]]) -> float:
        """CPU seconds that it has used since; of processes that have ended meanwhile nothing is known."""
        known = before[self.name]
        return sum(seconds - known.get(pid, 0.0) for pid, seconds in self.cpu_s().items())

    def until(self, step: int) -> None:
        """Let it go on until all ranks have done so many steps. Raises ValueError if they never do."""
        while not self.trial.at(step):
            if self.trial.over() and not self.trial.at(step):
                raise ValueError(f"{self.name} did not come to step {step}: {self.trial.reason}")
            time.sleep(POLL_S)

    def turn(self, first: int, last: int) -> None:
        """Raises ValueError if it does not come to its end. After its last one it is over."""
        self._open.append(os.open(self.system.folder / f"go-{first}", os.O_RDWR))  # for whoever comes late, too
        self.until(last)
        while last == self.steps and not self.trial.over():
            time.sleep(POLL_S)  # what a job does at its end is nobody else's time

    def finish(self) -> Seen:
        """Raises ValueError if it did not end well."""
        while not self.trial.over():
            time.sleep(POLL_S)
        if self.trial.reason:
            raise ValueError(f"{self.name}: {self.trial.reason}")
        return self.trial.seen()

    def end(self) -> None:
        self.trial.end()
        for pipe in self._open:
            os.close(pipe)

    def begins(self) -> list[Turn]:
        """When each rank began each of its turns."""
        folder = self.system.folder / "turns"
        told = (Tail(folder / f"rank-{rank}.jsonl").read(Turn) for rank in range(RANKS))
        return [turn for turns in told for turn in firsts(turns)]


def sides_of(work: Path, corpus: Path, model: str, schedule: Faults, plan: Sequence[int]) -> list[Side]:
    size, batch = MODELS[model]
    order: dict[str, object] = {
        "corpus": str(corpus), "size": size, "batch": batch, "steps": plan[-1], "ranks": RANKS, "early": plan[1],
        "turns": plan[:-1],
    }  # fmt: skip
    known = {entry.name: entry for entry in entries()}
    plain = msgspec.structs.replace(known["none"], order={})
    return [
        *(Side(plain, name, work, order, (), plan) for name in PLAIN),
        *(Side(known[name], name, work, order, schedule, plan) for name in OURS),
    ]


def take_turns(sides: Sequence[Side], plan: Sequence[int]) -> None:
    """All turns of all jobs; who goes first changes. Each notes what it and the waiting ones have used in its turns."""
    for at, (first, last) in enumerate(pairwise(plan)):
        shift = at % len(sides)
        for side in (*sides[shift:], *sides[:shift]):
            before, begin = {other.name: other.cpu_s() for other in sides}, time.monotonic()
            side.turn(first, last)
            took_s = time.monotonic() - begin
            side.spent.append(Spent(took_s=took_s, cpu_s={other.name: other.used_s(before) for other in sides}))
        progress(f"step {last} of {plan[-1]}")


def run(work: Path, corpus: Path, model: str, schedule: Faults, plan: Sequence[int]) -> list[Taken]:
    """Raises ValueError if a job did not come to its end."""
    sides = sides_of(work, corpus, model, schedule, plan)
    try:
        for side in sides:
            progress(f"{side.name}: starts")
            side.trial.begin()
            side.until(1)
        take_turns(sides, plan)
        cores = os.cpu_count() or 1
        return [job_of(side.name, side.title, side.finish(), side.begins(), plan, side.spent, cores) for side in sides]
    finally:
        for side in sides:
            side.end()


def measure(
    work: Path, out: Path, corpus: Path, model: str, schedule: Faults, steps: int, about: dict[str, object], flags: str
) -> dict[str, object]:
    """The flat figures; the report goes to `out`. Raises ValueError if a job did not come to its end."""
    plan = turns(schedule, steps)
    out.mkdir(parents=True, exist_ok=True)
    taken = run(work, corpus, model, schedule, plan)
    figures = flat_of(taken, plan)
    write(out, taken, plan, schedule, figures, about, flags, model)
    return figures


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt", help="of `compare` (gpt)")
    usual = ", ".join(f"{steps} of {model}" for model, steps in STEPS.items())
    parser.add_argument("--steps", type=int, help=f"of each job (default: {usual})")
    parser.add_argument("--seed", type=int, default=7, help="of the schedule")
    parser.add_argument("--out", type=Path, default=Path("turns-report"), help="the report's folder (turns-report)")
    parser.add_argument("--keep", action="store_true", help="keep what the jobs wrote, and say where")
    options = parser.parse_args()
    options.steps = options.steps or STEPS[options.model]
    try:
        faults(options.seed, options.steps)
    except ValueError as error:
        parser.error(f"--steps {options.steps}: {error}")
    return options


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # jobs do not outlive us
    work = Path(tempfile.mkdtemp(prefix="torchrelay-bench-"))
    flags = f"--model {options.model} --seed {options.seed} --steps {options.steps}"
    try:
        figures = measure(
            work,
            options.out,
            write_corpus(work / "corpus"),
            options.model,
            faults(options.seed, options.steps),
            options.steps,
            machine(),
            flags,
        )
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
