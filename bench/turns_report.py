"""Report of `turns`: Markdown with a table, a plot beside it, and results.json."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from compare_figures import pause_s, steady_s
from compare_report import LIMIT, number, percent, table
from compare_results import SECOND_A_FAULT
from compare_schedule import Fault
from turns_figures import Job, plain_of

COLOURS = ("#1b7837", "#762a83")


def verdict(over: float) -> str:
    return f"{over:.3f} ({'held' if over <= LIMIT else '**not held**'})"


def row_of(job: Job, figures: dict[str, Any]) -> list[str]:
    def of(name: str) -> Any:
        return figures[f"{job.name.replace('-', '_')}_{name}"]

    return [
        job.title,
        number(of("jct_s"), 1),
        verdict(of("over_bound")),
        f"{of('over_bound_low'):.3f} to {of('over_bound_high'):.3f}",
        f"{number(of('step_ratio'), 3)} ({number(of('step_ratio_bound'), 3)})",
        number(of("step_longer_ms"), 2),
        number(of("cpu_ratio"), 3),
        number(of("stood_s"), 1),
        str(of("faults")),
        str(of("lost_steps")),
        percent(of("once_share"), 2),
        number(of("bit_equal")),
    ]


def waiting(job: Job, figures: dict[str, Any]) -> float:
    return float(figures[f"{job.name.replace('-', '_')}_waiting_cpu"])


def pauses(job: Job) -> str:
    """Each fault's, in the order of the schedule."""
    step_s = steady_s(job.seen)
    told = [f"{fault.what} {number(pause_s(job.seen, at, step_s))}" for at, fault in enumerate(job.seen.struck)]
    return f"- {job.title}: {', '.join(told)}"


def words_of(
    jobs: Sequence[Job],
    plan: Sequence[int],
    schedule: Sequence[Fault],
    figures: dict[str, Any],
    about: dict[str, object],
    flags: str,
    model: str,
) -> str:
    """The whole report."""
    head = ["system", "JCT (s)", f"over the bound (limit {LIMIT})", "95 % interval", "a step, over plain (bound)",
            "longer by (ms)", "its CPU time", "stood (s)", "faults", "steps lost", "samples once",
            "bit-equal"]  # fmt: skip
    faults = ", ".join(f"{fault.step} {fault.what} of {' and '.join(map(str, fault.ranks))}" for fault in schedule)
    ours = [job for job in jobs if job.ours]
    lines = [
        "# In turns", "",
        "Torchrelay's job with faults against plain PyTorch's without, live at once and taking turns, so that both "
        "meet the same machine. To run it again:", "", f'    make bench NAME=turns ARGS="{flags}"', "",
        "Machine: " + ", ".join(f"{name} {value}" for name, value in about.items() if value is not None) + ".", "",
        f"Model `{model}` of `compare`, 4 ranks of one thread that keep their memory, DDP over Gloo, "
        f"{plan[-1]:,} steps, {figures['turns']} turns. Faults by step: {faults}.", "",
        f"The bound: what plain PyTorch takes without faults, {figures['plain_jct_s']:.1f} s, and "
        f"{SECOND_A_FAULT:g} s for each fault. Of the two plain jobs the second took {figures['plain_ratio']:.3f} of "
        "the first; what differs by less cannot be told from nothing. What jobs use of the cores while they wait is "
        "taken off the time of those whose turn it is: "
        f"{', '.join(f'{job.title} {percent(waiting(job, figures), 2)}' for job in ours)}, plain PyTorch "
        f"{percent(figures['plain_waiting_cpu'], 2)}. The interval comes of drawing the "
        "turns without a fault anew; what faults cost is of this one schedule.", "",
        *table(head, [row_of(job, figures) for job in ours]),
        "With more ranks than cores, as here, what one rank computes beside its step others wait for.", "",
        "Pauses by fault (s): how long the survivors stood, less a step.", "", *(pauses(job) for job in ours), "",
        "![turns](turns.png)", "",
    ]  # fmt: skip
    return "\n".join(lines)


def draw(path: Path, jobs: Sequence[Job], plan: Sequence[int]) -> None:
    """Seconds beyond plain PyTorch by step, and what a second for each fault and 3 % would allow."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plain = plain_of(jobs)
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for job, colour in zip((job for job in jobs if job.ours), COLOURS, strict=True):
        beyond = [0.0, *accumulate(mine - theirs for mine, theirs in zip(job.took, plain, strict=True))]
        axes.plot(plan, beyond, color=colour, label=job.title, marker=".", markersize=4)
        if job is jobs[-1]:
            for fault in job.seen.struck:
                axes.axvline(fault.step, color="#b2182b", linewidth=0.6)
                axes.text(
                    fault.step,
                    0.02,
                    f" {fault.what}",
                    fontsize=6,
                    color="#b2182b",
                    transform=axes.get_xaxis_transform(),
                )
            met = [sum(fault.step < step for fault in job.seen.struck) for step in plan]
            passed = [0.0, *accumulate(plain)]
            allowed = [LIMIT * (s + SECOND_A_FAULT * n) - s for s, n in zip(passed, met, strict=True)]
            axes.plot(plan, allowed, color="#777777", linestyle="--", label="allowed: 3 %, and a second for each fault")
    axes.set(xlabel="steps", ylabel="seconds beyond plain PyTorch", title="Time beyond plain PyTorch without faults")
    axes.legend(fontsize=7, loc="upper left")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write(
    out: Path,
    jobs: Sequence[Job],
    plan: Sequence[int],
    schedule: Sequence[Fault],
    figures: dict[str, Any],
    about: dict[str, object],
    flags: str,
    model: str,
) -> None:
    """Write all of it into a folder."""
    whole = {
        "machine": about, "flags": flags, "plan": list(plan), "schedule": list(schedule), "figures": figures,
        "took_s": {job.name: job.took for job in jobs}, "cpu_s": {job.name: job.cpu for job in jobs},
        "struck": {job.name: job.seen.struck for job in jobs},
    }  # fmt: skip
    (out / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n")
    draw(out / "turns.png", jobs, plan)
    (out / "README.md").write_text(words_of(jobs, plan, schedule, figures, about, flags, model))
