"""Report of `compare`: Markdown with tables, plots beside it, and results.json."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from compare_figures import Figures, once_and_never, repeated
from compare_phases import longest, medians, phases
from compare_results import NEVER, SECOND_A_FAULT, Outcome, Run, flat, over_bound, record, spent
from compare_schedule import What, arithmetic
from steady import KEPT

# What is better when it is less, and by how much it must differ to be said: of those in which we may lose.
JUDGED = {
    "jct_s": ("time to the last step", "s", 1.02),
    "jct_samples_s": ("time to as many samples", "s", 1.02),
    "lost_steps": ("steps lost", "steps", 1.0),
    "skipped_samples_share": ("planned samples that are never in the model, share", "", 1.0),
    "step_time_ratio": ("step before the first fault", "x plain", 1.02),
    "cpu_time_ratio": ("CPU time of a step", "x plain", 1.02),
    "unplanned_pause_p50_s": ("pause after an unplanned fault, median", "s", 1.05),
    "unplanned_pause_max_s": ("the longest pause", "s", 1.05),
    "planned_pause_p50_s": ("pause when a rank leaves", "s", 1.05),
    "hang_pause_s": ("pause after a hang", "s", 1.05),
    "whole_again_p50_s": ("until all ranks train again, median", "s", 1.05),
    "start_s": ("from the command to the first step", "s", 1.05),
}
LIMIT = 1.03  # of the JCT over the undisturbed one and a second for each fault
NOT_SHOWN = (
    "No GPU, no NCCL, one machine, four ranks on few cores: times are of protocols and processes, not of a cluster. A "
    "process starts here in seconds, a job of thousands of GPUs in minutes.",
    "Who does not come to its end has a second try, but for torchrelay: its title says if the figures are of it. A "
    "fault that ended a system has no pause: those of one that did not come to its end are of the kinder faults.",
    "Faults come one at a time and at steps; a second fault waits until its victim trains again. Rank 0 is never hit.",
    "The loss of a node costs the rivals two ranks; torchrelay also loses the agent and the forkserver there, and as "
    "many ranks as it has there by then. Nobody loses a machine for longer than a process takes to start.",
    "CPU time is that of all processes of a system, those in reserve included: NVRx keeps as many as the faults will "
    "cost, torchrelay two or none.",
    "A step is a median: what comes with some steps only, such as a checkpoint, is not in it.",
    "The time before the first step counts for nobody.",
    f"All systems run one thread a rank, and glibc keeps their memory ({', '.join(sorted(KEPT))}): what a process "
    "gives back to the kernel and takes again is luck, and differs by 2 % of a step between jobs of the same code.",
    "A restart that loses no state still does not come to the same bits: a DDP that is made anew sums the gradients of "
    "its first step in other buckets, and Gloo in another order with them. Nothing is wrong with the checkpoints.",
    "Steps of a system before its first fault are some seconds of one run, not a paired measurement: "
    "`make bench NAME=overhead` takes turns. Whole jobs come one after the other, and the machine may become slower or "
    "faster meanwhile: `make bench NAME=turns` lets torchrelay's and plain PyTorch's take turns.",
)


def number(value: float | bool | None, digits: int = 2) -> str:
    if value is None or math.isnan(value):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, int) else f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def equal(found: Figures) -> str:
    """Whether the last bits are those of the undisturbed run; if not, whether they ever were."""
    if found.bit_equal:
        return "yes"
    if found.bit_equal is None:
        return "-"
    return "no" if found.bit_equal_early else "no, nor before the first fault"


def results(run: Run) -> list[str]:
    head = ["system", "JCT, steps (s)", "JCT, samples (s)", "ETTR", "faults", "steps lost", "samples once", "never",
            "bit-equal"]  # fmt: skip
    jct = f"{run.undisturbed_s:.1f}"
    once, never = once_and_never(run.none)
    same = "-" if run.again is None else number(run.again.digest == run.plain.digest)
    rows = [["plain PyTorch, no faults", jct, jct, "100 %", "0", str(repeated(run.none)), percent(once, 2),
             percent(never, 2), same]]  # fmt: skip
    for one in run.outcomes:
        if (found := one.figures) is None:
            rows.append([one.title, "not run", *["-"] * 7])
            continue
        lost = f"{found.lost_steps}" + (f" ({found.refused_steps} refused)" if found.refused_steps else "")
        rows.append(
            [
                one.title,
                number(found.jct_s, 1) if found.jct_s else "not finished",
                number(found.jct_samples_s, 1),
                percent(found.ettr),
                str(found.faults),
                lost,
                percent(found.once_share, 2),
                percent(found.skipped_samples_share, 2),
                equal(found),
            ]
        )
    return table(head, rows)


def recoveries(run: Run) -> list[str]:
    head = ["system", "pause p50 (s)", "max", "a rank leaves", "a rank hangs", "all train again, p50", "step / plain",
            "CPU / plain", "start (s)"]  # fmt: skip
    rows = []
    for one in run.outcomes:
        if (found := one.figures) is not None:
            rows.append(
                [
                    one.title,
                    number(found.unplanned_pause_p50_s),
                    number(found.unplanned_pause_max_s),
                    number(found.planned_pause_p50_s),
                    number(found.hang_pause_s),
                    number(found.whole_again_p50_s),
                    number(found.step_time_ratio, 3),
                    number(found.cpu_time_ratio, 3),
                    number(found.start_s, 1),
                ]
            )
    return table(head, rows)


def explained(run: Run) -> list[str]:
    """The order of the JCTs, by where each one's time went."""
    found = [(one, parts) for one in run.outcomes if (parts := spent(run, one)) is not None]
    if not found:
        return []
    found.sort(key=lambda each: each[1]["beyond the undisturbed"])
    names = list(found[0][1])
    rows = [[one.title, *(number(parts[name], 1) for name in names)] for one, parts in found]
    return table(["system", *(f"{name} (s)" for name in names)], rows)


def of_phases(run: Run) -> list[str]:
    """By kind of fault. Of whom less can be told than it was hit, that is said."""
    lines = []
    for what in What:
        for one in run.outcomes:
            made = 0 if one.seen is None else sum(fault.what is what for fault in one.seen.struck)
            each = phases(one.seen, what) if one.seen is not None else []
            if made:
                middle, most = medians(each), longest(each)
                told = ", ".join(f"{name} {middle[name]:.2f} ({most[name]:.2f})" for name in middle)
                count = f"{len(each)}" if len(each) == made else f"{len(each)} of {made}"
                lines.append(f"- {what}, {one.title}, {count}: {told or 'not known'}")
    return [*lines, ""]


def otherwise(run: Run) -> list[str]:
    """Where a system did not meet the faults of the schedule as they stand there: its figures are of another trial."""
    lines = []
    for one in run.outcomes:
        if one.seen is None:
            continue
        if one.figures is not None and one.figures.idle_faults:
            lines.append(
                f"- {one.title}: {one.figures.idle_faults} x a rank was asked to leave and stayed; not counted as a "
                "fault, and its time is that of a job with fewer"
            )
        if one.seen.missed and not one.reason:
            lines.append(f"- {one.title}: {one.seen.missed} of the faults came too late to be made before the end")
        for fault, plan in zip(one.seen.struck, run.schedule, strict=False):
            if fault.ranks != plan.ranks:
                hit = " and ".join(map(str, fault.ranks))
                lines.append(f"- {one.title}: the {fault.what} at step {fault.step} hit {hit}")
    return ["Not as the schedule has it:", "", *lines, ""] if lines else []


def losses(run: Run) -> list[str]:
    """Where another system is better than one of ours."""
    ours = [(one.title, one.figures) for one in run.outcomes if one.ours and one.figures is not None]
    others = [(one.title, one.figures) for one in run.outcomes if not one.ours and one.figures is not None]
    done = [(title, one) for title, one in others if one.jct_s is not None]
    lines = [f"- {one.title}: {unfinished(one)}" for one in run.outcomes if one.ours and unfinished(one)]
    for name, (words, unit, margin) in JUDGED.items():
        for ours_title, figures in ours:
            mine = getattr(figures, name)
            # Who has not done the whole job has lost few steps of it.
            better = [
                (value, title)
                for title, one in (done if name == "lost_steps" else others)
                if mine is not None and (value := getattr(one, name)) is not None and value * margin < mine
            ]
            if better:
                told = "; ".join(f"{title} {number(value)}" for value, title in sorted(better))
                lines.append(f"- {words}: {ours_title} {number(mine)} {unit}".rstrip() + f"; {told}")
    for ours_title, figures in ours:
        equals = [title for title, one in others if one.bit_equal]
        if not figures.bit_equal and equals:
            lines.append(f"- bit-equal: {ours_title} {equal(figures)}; {', '.join(equals)} yes")
    return [*(lines or ["- in none of what is measured here"]), ""]


def unfinished(one: Outcome) -> str:
    """Why there is no time to the last step; empty if there is one."""
    if one.figures is not None and one.figures.jct_s is not None:
        return ""
    return f"not to the end: {one.reason or NEVER}"


def ended_early(one: Outcome) -> list[str]:
    """What ended each try that did not come to the end."""
    if not one.before:
        return [f"- {one.title}: {one.reason}"] if one.reason else []
    told = one.reason or "came to its end"
    return [f"- {one.title}: {told}; its figures are of this try. The first: {one.before}"]


def bounds(run: Run) -> list[str]:
    """What torchrelay is held to, met or not."""
    lines = []
    if run.between is not None and run.again is not None:
        lines.append(
            f"Plain PyTorch right before these two took {run.between.jct_s:.1f} s, right after them "
            f"{run.again.jct_s:.1f} s; the mean is what they are held to.\n"
        )
    for one in run.outcomes:
        ratio = over_bound(run, one)
        if not one.ours:
            continue
        if ratio is None or one.figures is None:
            lines.append(f"- {one.title}: **not held**: {unfinished(one)}")
            continue
        lines.append(
            f"- {one.title}: JCT over the undisturbed one plus {SECOND_A_FAULT:g} s for each of "
            f"{one.figures.faults} faults: {verdict(ratio)}; samples exactly once: "
            f"{percent(one.figures.once_share, 2)}; bit-equal: {equal(one.figures)}; "
            f"steps lost: {one.figures.lost_steps}"
        )
    return [*lines, "", *beside(run)] if any(one.ours for one in run.outcomes) else []


def verdict(ratio: float) -> str:
    return f"{ratio:.3f} (limit {LIMIT}: {'held' if ratio <= LIMIT else '**not held**'})"


def beside(run: Run) -> list[str]:
    """The same of jobs that were live at once."""
    if not run.turns:
        return []
    lines = [
        "Jobs one after the other meet a machine that becomes slower or faster. The same, live at once and in turns "
        f"([report]({run.model}-turns/README.md)), where two plain ones differ by "
        f"{percent(abs(run.turns['plain_ratio'] - 1))}:", "",
    ]  # fmt: skip
    for one in run.outcomes:
        if one.ours:
            name = one.name.replace("-", "_")
            ratio, low, high = (run.turns[f"{name}_over_bound{end}"] for end in ("", "_low", "_high"))
            lines.append(f"- {one.title}: {verdict(ratio)}, 95 % interval {low:.3f} to {high:.3f}")
    return [*lines, ""]


def settings(run: Run) -> list[str]:
    head = ["system", "how it is set", "who ends a rank that hangs", "checkpoint every"]
    rows = []
    for one in run.outcomes:
        every = one.order.get("every")
        rows.append([one.title, one.note or "-", one.hang or "-", f"{every} steps" if every else "-"])
    return table(head, rows)


def part(run: Run, plots: Sequence[Path]) -> list[str]:
    faults = ", ".join(f"{fault.step} {fault.what} of {' and '.join(map(str, fault.ranks))}" for fault in run.schedule)
    failed = [line for one in run.outcomes for line in ended_early(one)]
    failed += [f"- {title}: left out by the flags above" for title in run.left_out]
    second = "it did not come to its end a second time; the first"
    if run.again is not None:
        second = f"{run.again.jct_s:.1f} s at the end of the bench (drift {percent(run.drift)}); its mean"
    return [
        f"## Model: {run.model}",
        "",
        run.about,
        "",
        arithmetic(run.steps, run.per_job, run.plain.step_s),
        "",
        f"Faults, each at the step at which the first rank has done so many: {faults}.",
        "",
        f"Plain PyTorch without faults: {run.plain.jct_s:.1f} s first, {second} is what the others are held to. A "
        f"checkpoint stops the step for {1000 * run.write_s:.0f} ms, or {1000 * run.copy_s:.0f} ms if it is written "
        "beside.",
        "",
        *otherwise(run),
        *results(run),
        *recoveries(run),
        "### What torchrelay is held to",
        "",
        *bounds(run),
        "### Where torchrelay loses",
        "",
        *losses(run),
        "### Why this order",
        "",
        "Seconds beyond the undisturbed time, and where they went. *Stood*: the sum of the pauses. *Longer steps*: the "
        "difference to plain PyTorch before the first fault, for all steps. *Rest*: what these do not explain, such as "
        "processes that start beside the training on the same cores; below zero: not all survivors stood as long as "
        "the one that stood longest, or steps became shorter. A refused step is in the pauses.",
        "",
        *explained(run),
        "### Phases of recovery",
        "",
        "Seconds, median (longest).",
        "",
        *of_phases(run),
        *(["### Not run, or a try not to its end", "", *failed, ""] if failed else []),
        *(line for plot in plots for line in (f"![{plot.stem}]({plot.name})", "")),
        "### Settings",
        "",
        *settings(run),
    ]


def words_of(runs: Sequence[Run], about: dict[str, object], flags: str, plots: dict[str, list[Path]]) -> str:
    """The whole report."""
    known = {one.name: one.packages for run in runs for one in run.outcomes if one.packages}
    lines = [
        "# Side by side", "",
        "One job and one schedule of faults, run in turn under plain PyTorch, restarts from checkpoints, the rivals "
        "that run on a CPU, and torchrelay. To run it again:", "",
        f'    make bench NAME=compare{f" ARGS={chr(34)}{flags}{chr(34)}" if flags else ""}', "",
        "Machine: " + ", ".join(f"{name} {value}" for name, value in about.items() if value is not None) + ".", "",
        "JCT: from the first step of the last rank to its last one. ETTR: what the same samples take undisturbed under "
        "plain PyTorch, over what they took. A pause: how long the survivors stood, beyond a step. Steps lost: done "
        "again, or refused.", "",
        *(line for run in runs for line in part(run, plots[run.model])),
        "## What this does not show", "", *(f"- {one}" for one in NOT_SHOWN), "",
        *(["## Packages of the rivals", ""] if known else []),
        *(line for name, found in known.items() for line in (f"- {name}: {', '.join(found)}",)), "",
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def write(out: Path, runs: Sequence[Run], about: dict[str, object], flags: str) -> dict[str, object]:
    """Write all of it into a folder; returns the flat figures."""
    whole = {"machine": about, "flags": flags, "runs": [record(run) for run in runs]}
    (out / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n")
    try:
        from compare_plots import draw
    except ImportError as error:
        print(f"no plots: {error}")
        plots: dict[str, list[Path]] = {run.model: [] for run in runs}
    else:
        plots = {run.model: draw(run, out) for run in runs}
    (out / "README.md").write_text(words_of(runs, about, flags, plots))
    return flat(runs)
