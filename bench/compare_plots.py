"""Plots of `compare`: progress and goodput over time with the faults, the phases of a kill, and the JCTs as bars."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from compare_figures import begin_ns, goodput, progress
from compare_phases import Phases, medians, phases
from compare_results import Outcome, Run
from compare_schedule import What

WINDOWS = 60  # of goodput, in the time of the undisturbed job
MARKERS = {What.KILL: "x", What.STOP: "s", What.NODE: "D", What.LEAVE: ">"}
OURS, OTHERS, PLAIN = "#1b7837", "#4575b4", "#777777"


def drawn(run: Run) -> list[Outcome]:
    """Those that have done steps to draw a line of."""
    return [one for one in run.outcomes if one.seen is not None and one.figures is not None and progress(one.seen)]


def colour(one: Outcome) -> str:
    return OURS if one.ours else OTHERS


def faults_s(one: Outcome) -> list[tuple[float, What, int]]:
    assert one.seen is not None
    begin = begin_ns(one.seen)
    return [((fault.at_ns - begin) / 1e9, fault.what, fault.step) for fault in one.seen.struck]


def draw_progress(run: Run) -> Figure:
    """Steps over time: flat while a system stands, falling where steps are done again."""
    figure, axes = plt.subplots(figsize=(9, 5))
    axes.plot(*zip(*progress(run.none), strict=True), color=PLAIN, linestyle="--", label="plain PyTorch, no faults")
    styles = cycle(("-", "-.", ":"))
    for one in drawn(run):
        assert one.seen is not None
        (line,) = axes.plot(*zip(*progress(one.seen), strict=True), linestyle=next(styles), linewidth=1.4)
        line.set_label(one.title)
        for at, what, step in faults_s(one):
            axes.plot(at, step, MARKERS[what], color=line.get_color(), markersize=4)
    axes.set(xlabel="seconds from the first step", ylabel="steps done", title=f"{run.model}: progress, and the faults")
    axes.legend(fontsize=7, loc="lower right")
    return figure


def draw_goodput(run: Run) -> Figure:
    """New samples in the model per time, over what plain PyTorch does; a row for each system."""
    rows = drawn(run)
    figure, found = plt.subplots(
        len(rows), 1, figsize=(9, 1.1 * len(rows) + 1), sharex=True, squeeze=False, layout="constrained"
    )
    window = run.undisturbed_s / WINDOWS
    for one, axes in zip(rows, found[:, 0], strict=True):
        assert one.seen is not None
        points = goodput(one.seen, run.plain.step_s, window)
        if points:
            axes.fill_between(*zip(*points, strict=True), step="mid", color=colour(one), alpha=0.7)
        for at, what, _ in faults_s(one):
            axes.axvline(at, color="#b2182b", linewidth=0.8)
            axes.text(at, 1.25, what, fontsize=6, color="#b2182b", ha="left", va="top")
        axes.axhline(1, color=PLAIN, linewidth=0.6, linestyle="--")
        axes.set(ylim=(0, 1.3), yticks=(0, 1))
        axes.set_title(one.title, fontsize=8, loc="left", pad=2)
    found[-1, 0].set_xlabel("seconds from the first step")
    figure.suptitle(f"{run.model}: goodput over plain PyTorch's, and the faults", fontsize=10)
    return figure


def draw_phases(run: Run) -> Figure | None:
    """A kill, phase by phase: medians, one after the other."""
    rows: list[tuple[str, Phases]] = []
    for one in drawn(run):
        assert one.seen is not None
        if found := phases(one.seen):
            rows.append((one.title, medians(found)))
    if not rows:
        return None
    figure, axes = plt.subplots(figsize=(9, 0.55 * len(rows) + 2.2), layout="constrained")
    names = dict.fromkeys(name for _, each in rows for name in each)
    colours = dict(zip(names, cycle(plt.get_cmap("tab20").colors), strict=False))  # type: ignore[attr-defined]
    told: set[str] = set()
    for at, (_, each) in enumerate(rows):
        left = 0.0
        for name, length in each.items():
            axes.barh(at, length, left=left, color=colours[name], label=None if name in told else name)
            told.add(name)
            left += length
        axes.text(left, at, f" {left:.2f} s", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), [title for title, _ in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel="seconds (medians of the phases)", title=f"{run.model}: a kill, phase by phase")
    axes.legend(fontsize=6, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    axes.margins(x=0.1)
    return figure


def draw_jct(run: Run) -> Figure:
    """Times to the last step, and to as many samples."""
    figure, axes = plt.subplots(figsize=(9, 0.5 * len(run.outcomes) + 1.6), layout="constrained")
    axes.barh(0, run.undisturbed_s, color=PLAIN)
    titles = ["plain PyTorch, no faults"]
    for at, one in enumerate(run.outcomes, start=1):
        titles.append(one.title)
        found = one.figures
        if found is None or found.jct_s is None:
            axes.text(0, at, " not run" if found is None else " not finished", va="center", fontsize=7)
            continue
        axes.barh(at, found.jct_s, color=colour(one))
        if found.jct_samples_s is not None and found.jct_samples_s > found.jct_s:
            axes.barh(at, found.jct_samples_s - found.jct_s, left=found.jct_s, color=colour(one), alpha=0.4)
        axes.text(
            found.jct_samples_s or found.jct_s,
            at,
            f" {found.jct_samples_s or found.jct_s:.1f} s",
            va="center",
            fontsize=7,
        )
    axes.axvline(run.undisturbed_s, color=PLAIN, linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(titles)), titles, fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel="seconds to the last step (pale: to as many samples)", title=f"{run.model}: job completion time")
    axes.margins(x=0.1)
    return figure


def draw(run: Run, out: Path) -> list[Path]:
    """Draw all that there is something of; returns the files."""
    kinds: dict[str, Callable[[Run], Figure | None]] = {"jct": draw_jct}
    if drawn(run):
        kinds |= {"progress": draw_progress, "goodput": draw_goodput, "phases": draw_phases}
    found = []
    for name, kind in kinds.items():
        figure = kind(run)
        if figure is not None:
            path = out / f"{run.model}-{name}.png"
            figure.savefig(path, dpi=110, bbox_inches="tight")
            plt.close(figure)
            found.append(path)
    return found
