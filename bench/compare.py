"""Compare: one job and one schedule of faults, run in turn under plain PyTorch, restarts, the rivals, and torchrelay.

    make bench NAME=compare
    make bench NAME=compare ARGS="--only torchrelay-spares --model gpt"
    make bench NAME=compare ARGS="--quick"

The GPT of the examples, and a small one; 4 ranks. Rivals are installed into environments of their own, pinned; one that
cannot be had or run says why, and the rest goes on. Figures by model and system, as gpt_torchrelay_spares_jct_s:

jct_s                  from the first step of the last rank to its last one
lost_steps             done again after a return to a checkpoint, or refused
unplanned_pause_p50_s  how long the survivors of a kill, a hang, a lost node stood, less a step (median)
step_time_ratio        a step before the first fault over one of plain PyTorch; see `overhead` for a paired measurement
bit_equal              the parameters after the last step against those of the undisturbed run, to the last bit
over_bound             (torchrelay) JCT over the undisturbed one plus a second for each fault
turns_over_bound       the same, of jobs that are live at once and take turns (see `turns`): one after the other they
                       meet another machine, which becomes slower or faster by more than the 3 % that are asked for

A system that does not come to its end has a second try, and the report says what ended the first; torchrelay has none.
The report, plots, and results.json go to --out.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

import turns
from compare_environments import CACHE, NotInstalled, packages, python_of
from compare_figures import Plain, Seen, begin_ns, end_ns, figures, mean_of, plain_of
from compare_report import write
from compare_results import NEVER, Outcome, Run
from compare_schedule import PER_JOB, Fault, faults, naive_interval, tuned_interval
from compare_systems import RANKS, Entry, Job, entries, here
from compare_task import MODELS, STEPS, write_corpus
from compare_trial import Trial, costs_of, plainly
from figures import finish, machine, progress

QUICK_SHARE, QUICK_PER_JOB = 0.1, 3.3
SETS = ("a", "b", "c")
PATIENCE_S = 100.0  # for each fault: more than any system's own timeouts, the 90 s of NVRx among them


Held = Callable[["Setting"], dict[str, Any]]


class Setting(Struct, frozen=True, kw_only=True):
    """One model's part of the bench. `work`: where the systems write, removed at the end."""

    model: str
    steps: int
    per_job: float
    schedule: tuple[Fault, ...]
    corpus: Path
    work: Path
    rivals: Path

    def order(self) -> dict[str, Any]:
        size, batch = MODELS[self.model]
        early = self.schedule[0].step * 9 // 10
        job = {"corpus": str(self.corpus), "size": size, "batch": batch, "steps": self.steps}
        return {**job, "ranks": RANKS, "early": early}


def try_out(entry: Entry, python: Path, setting: Setting, name: str, more: dict[str, Any], limit_s: float) -> Seen:
    """One system, from its start to its end."""
    schedule = setting.schedule if entry.name != "none" else ()
    job = Job(
        folder=setting.work / name,
        order={**setting.order(), **entry.order, **more},
        losses=sum(len(fault.ranks) for fault in setting.schedule),
    )
    progress(f"{setting.model}, {name}: starts")
    return Trial(entry.make(job, python), schedule, limit_s, said(setting, name)).run()


def said(setting: Setting, name: str) -> Callable[[str], None]:
    return lambda text: progress(f"{setting.model}, {name}: {text}")


def undisturbed(setting: Setting, entry: Entry, name: str) -> tuple[Seen, Plain]:
    """Raises ValueError if it fails: then there is nothing to compare with."""
    seen = try_out(entry, here(), setting, name, {}, limit_s=1800)
    plain = plain_of(seen)
    progress(f"{setting.model}, {name}: {plain.jct_s:.1f} s, a step {1000 * plain.step_s:.1f} ms")
    return seen, plain


def limit_s(setting: Setting, plain: Plain) -> float:
    """When a system is given up: none for being set to wait long."""
    return max(120.0, 5 * plain.jct_s) + PATIENCE_S * len(setting.schedule)


def outcome(entry: Entry, setting: Setting, plain: Plain, every: dict[str, int]) -> Outcome:
    """One system's figures, or why there are none; of its last try in which there were steps."""
    more = {"every": every[entry.checkpoints]} if entry.checkpoints else {}
    bare = Outcome(name=entry.name, title=entry.title, hang=entry.hang, note=entry.note)
    try:
        python = python_of(entry.needs, setting.rivals, said(setting, entry.name)) if entry.needs else here()
        known = packages(python) if entry.needs else []
    except (NotInstalled, OSError, subprocess.SubprocessError) as error:
        said(setting, entry.name)(f"not run: {error}")
        return msgspec.structs.replace(bare, reason=plainly(str(error)))
    bare = msgspec.structs.replace(bare, order={**entry.order, **more}, packages=known)

    def tried(name: str) -> Outcome:
        try:
            seen = try_out(entry, python, setting, name, more, limit_s(setting, plain))
        except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
            said(setting, name)(f"not run: {error}")
            return msgspec.structs.replace(bare, reason=plainly(str(error)))
        end = end_ns(seen)
        seen = msgspec.structs.replace(seen, reason=seen.reason or ("" if end is not None else NEVER))
        whole = f"{((end or 0) - begin_ns(seen)) / 1e9:.1f} s"
        said(setting, name)(f"not to the end: {seen.reason}" if seen.reason else whole)
        return msgspec.structs.replace(bare, reason=seen.reason, seen=seen)

    first = tried(entry.name)
    if first.ours or not first.reason:
        return first
    second = tried(f"{entry.name}-again")
    if has_steps(first) and not has_steps(second):
        return msgspec.structs.replace(first, reason=f"{first.reason}; the second try: {second.reason}")
    return msgspec.structs.replace(second, title=f"{entry.title}, second try", before=first.reason)


def has_steps(one: Outcome) -> bool:
    """Of each rank: then there are figures."""
    return one.seen is not None and all(one.seen.lines.values())


def judged(one: Outcome, plain: Plain) -> Outcome:
    """With its figures, if there was a step of each rank."""
    if one.seen is None or not has_steps(one):
        return one
    return msgspec.structs.replace(one, figures=figures(one.seen, plain))


def about_model(model: str) -> str:
    size, batch = MODELS[model]
    return (
        f"The GPT of the examples in size `{size}`, without dropout, on the source text of Python's standard library; "
        f"AdamW, DDP over Gloo, {RANKS} ranks of one thread, batches of {batch} windows of 64 bytes on each."
    )


def run_model(setting: Setting, chosen: Sequence[Entry], held: Held) -> Run:
    """All systems with one model; plain PyTorch first, for the others are measured by it, before ours, and last.

    `held`: the figures of torchrelay's and plain PyTorch's jobs in turns, if torchrelay is chosen.
    """
    first, plain = undisturbed(setting, entries()[0], "none")
    costs = costs_of(setting.work / "none")
    copy_s, write_s = statistics.median(costs.copy), statistics.median(costs.write)
    every = {
        "naive": naive_interval(setting.steps),
        "tuned": tuned_interval(setting.steps, setting.per_job, plain.step_s, copy_s=copy_s, write_s=write_s),
    }
    found: list[Outcome] = []
    between: Plain | None = None
    for entry in chosen:
        if found and entry.name.startswith("torchrelay") and not any(one.ours for one in found):
            between = once_more(setting, "none-between")
        found.append(outcome(entry, setting, plain, every))
    again = once_more(setting, "none-again")
    outcomes = [judged(one, plain if again is None else mean_of(plain, again)) for one in found]
    return Run(
        model=setting.model,
        about=about_model(setting.model),
        steps=setting.steps,
        ranks=RANKS,
        per_job=setting.per_job,
        schedule=list(setting.schedule),
        plain=plain,
        again=again,
        none=first,
        every=every,
        copy_s=copy_s,
        write_s=write_s,
        outcomes=outcomes,
        left_out=[entry.title for entry in entries()[1:] if entry.name not in {one.name for one in chosen}],
        between=between,
        turns=held(setting) if any(one.ours for one in found) else {},
    )


def in_turns(out: Path, about: dict[str, object], flags: str, setting: Setting) -> dict[str, Any]:
    """Torchrelay's jobs and plain PyTorch's, live at once; the report has a folder of its own. Empty if it fails."""
    progress(f"{setting.model}: in turns")
    folder, work = out / f"{setting.model}-turns", setting.work / "turns"
    work.mkdir()
    try:
        return turns.measure(work, folder, setting.corpus, setting.model, setting.schedule, setting.steps, about, flags)
    except ValueError as error:
        progress(f"{setting.model}, in turns: {error}")
        return {}


def once_more(setting: Setting, name: str) -> Plain | None:
    """Plain PyTorch again; None if it fails."""
    try:
        return undisturbed(setting, entries()[0], name)[1]
    except ValueError as error:
        progress(f"{setting.model}, {name}: {error}")
        return None


def setting_of(options: argparse.Namespace, model: str, work: Path, corpus: Path) -> Setting:
    per_job = QUICK_PER_JOB if options.quick else PER_JOB
    steps = options.steps or round(STEPS[model] * (QUICK_SHARE if options.quick else 1))
    (work / model).mkdir()
    return Setting(
        model=model,
        steps=steps,
        per_job=per_job,
        schedule=faults(options.seed, steps, per_job),
        corpus=corpus,
        work=work / model,
        rivals=options.rivals,
    )


def arguments() -> argparse.Namespace:
    names = [entry.name for entry in entries()[1:]]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=names, action="append", help="this system, beside plain PyTorch; repeatable")
    parser.add_argument("--model", choices=MODELS, action="append", help="this model alone (default: both)")
    usual = ", ".join(f"{steps} of {model}" for model, steps in STEPS.items())
    parser.add_argument("--steps", type=int, help=f"of each job (default: {usual})")
    parser.add_argument("--seed", type=int, default=7, help="of the schedule")
    parser.add_argument(
        "--torchft", choices=SETS, nargs="+", default=list(SETS), help="sets of TorchFT's timeouts (all)"
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps, and half of the faults")
    parser.add_argument(
        "--turns", action=argparse.BooleanOptionalAction, default=True, help="torchrelay beside plain PyTorch (yes)"
    )
    parser.add_argument("--rivals", type=Path, default=CACHE, help=f"where their environments are ({CACHE})")
    parser.add_argument("--out", type=Path, default=Path("compare-report"), help="the report's folder (compare-report)")
    parser.add_argument("--keep", action="store_true", help="keep what the systems wrote, and say where")
    options = parser.parse_args()
    for model in options.model or MODELS:
        try:
            faults(options.seed, options.steps or 10_000, QUICK_PER_JOB if options.quick else PER_JOB)
        except ValueError as error:
            parser.error(f"--steps {options.steps}, model {model}: {error}")
    return options


def flags_of(options: argparse.Namespace) -> str:
    """What was asked for, so that others may ask for the same."""
    words = [f"--{name} {value}" for name in ("only", "model") for value in getattr(options, name) or ()]
    words += [f"--steps {options.steps}"] if options.steps else []
    words += [f"--torchft {' '.join(options.torchft)}"] if options.torchft != list(SETS) else []
    return " ".join(
        [
            *words,
            f"--seed {options.seed}",
            *(["--quick"] if options.quick else []),
            *([] if options.turns else ["--no-turns"]),
        ]
    )


def chosen_of(options: argparse.Namespace) -> list[Entry]:
    skipped = {f"torchft-{times}" for times in SETS if times not in options.torchft}
    return [
        entry for entry in entries()[1:] if (entry.name in options.only if options.only else entry.name not in skipped)
    ]


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # systems do not outlive us
    work = Path(tempfile.mkdtemp(prefix="torchrelay-bench-"))
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        corpus = write_corpus(work / "corpus")
        about = machine()
        settings = [setting_of(options, model, work, corpus) for model in options.model or MODELS]
        runs: list[Run] = []
        flat: dict[str, object] = {}
        for setting in settings:
            flags = f"--model {setting.model} --seed {options.seed} --steps {setting.steps}"
            held: Held = partial(in_turns, options.out, about, flags) if options.turns else lambda _: {}
            runs.append(run_model(setting, chosen_of(options), held))
            flat = write(options.out, runs, about, flags_of(options))  # one model's results outlast the next one's end
        finish("compare", flat, seed=options.seed, report=str(options.out / "README.md"))
    except ValueError as error:
        raise SystemExit(f"compare: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        if options.keep:
            print(f"kept: {work}", file=sys.stderr)
        else:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
