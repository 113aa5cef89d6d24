"""Picture: the loss of the disturbed run on top of the undisturbed one, and the pauses to scale."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # before pyplot: no display is needed to write a file
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from examples.demo.bits import Trace
from examples.demo.report import IncidentLine


def loss_curve(trace: Trace, rank: int = 0) -> tuple[list[int], list[float]]:
    """Steps and losses of a rank, in order."""
    steps = sorted(step for who, step in trace.losses if who == rank)
    return steps, [float.fromhex(min(trace.losses[rank, step])) for step in steps]


def draw(path: Path, undisturbed: Trace, disturbed: Trace, incidents: Sequence[IncidentLine], bit_equal: bool) -> None:
    """Write the picture as PNG."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(10, 7), height_ratios=(2, 1), layout="constrained")
    draw_losses(above, undisturbed, disturbed, incidents)
    draw_pauses(below, disturbed, incidents)
    verdict = "equal to the last bit" if bit_equal else "NOT equal"
    figure.suptitle(f"{len(incidents)} incidents; parameters, optimizer, losses and random states: {verdict}")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_losses(axes: Axes, undisturbed: Trace, disturbed: Trace, incidents: Sequence[IncidentLine]) -> None:
    axes.plot(*loss_curve(undisturbed), color="#9ecae1", linewidth=5, label="undisturbed")
    axes.plot(*loss_curve(disturbed), color="#08306b", linewidth=0.9, label="with faults")
    across = axes.get_xaxis_transform()  # x in steps, y from 0 at the bottom to 1 at the top
    for incident in incidents:
        axes.axvline(incident.step, color="#cb181d", linewidth=0.8, linestyle="--")
        told = f" {incident.name} {incident.fault} "
        axes.text(incident.step, 0.98, told, transform=across, fontsize=8, va="top", ha="left", rotation=90)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, averaged over ranks")
    axes.legend(loc="upper right")


def draw_pauses(axes: Axes, disturbed: Trace, incidents: Sequence[IncidentLine]) -> None:
    """Steps over wall time: where the line is level, nothing was committed."""
    moments = sorted((at, step) for (rank, step), at in disturbed.at.items() if rank == 0)
    if not moments:
        return
    begin = moments[0][0]
    axes.step([at - begin for at, _ in moments], [step for _, step in moments], where="post", color="#08306b")
    for incident in incidents:
        if incident.struck is None or incident.pause_s is None:
            continue
        start = incident.struck - begin
        axes.axvspan(start, start + incident.pause_s, color="#cb181d", alpha=0.35)
        told = f"{incident.pause_s:.2f} s"
        axes.text(
            start, 0.97, told, transform=axes.get_xaxis_transform(), fontsize=8, va="top", ha="right", rotation=90
        )
    axes.set_xlabel("seconds since the first step; pauses to scale")
    axes.set_ylabel("step committed")
