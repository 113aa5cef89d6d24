"""Plots of `torchrelay simulate`: a sweep as curves with their intervals, forecasts as where the time goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchrelay.client.runs import NotPossible
from torchrelay.forecast.play.buckets import Bucket
from torchrelay.forecast.results import Forecast
from torchrelay.forecast.sweep import Swept

KINDS = (".png", ".svg", ".pdf")


def check_name(path: Path) -> None:
    """Before anything is run. Raises `NotPossible`."""
    if path.suffix.lower() not in KINDS:
        raise NotPossible(f"--plot {path}: the name must end in {', '.join(KINDS)}", 2)
    if not path.parent.is_dir():
        raise NotPossible(f"--plot {path}: there is no folder {path.parent}", 2)
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise NotPossible("--plot needs matplotlib: pip install 'torchrelay[plot]'", 2)


def plot(found: Any, path: Path) -> None:
    """Draw what was found. Raises `NotPossible`."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed to write a file
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 6))
    try:
        if isinstance(found, tuple) and found and isinstance(found[0], Swept):
            curves(axes, found)
        elif isinstance(found, tuple) and found and isinstance(found[0], Forecast):
            bars(axes, found)
        else:
            raise NotPossible("--plot shows forecasts and sweeps: there is nothing of the kind here", 2)
        figure.tight_layout()
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise NotPossible(f"--plot {path}: {error.strerror or error}", 2) from None
    finally:
        plt.close(figure)


def curves(axes: Any, found: tuple[Swept, ...]) -> None:
    """ETTR over what was changed."""
    values = [one.value for one in found]
    for number, first in enumerate(found[0].forecasts):
        means = [one.forecasts[number].means["ettr"] for one in found]
        (line,) = axes.plot(values, [one.mean for one in means], marker="o", label=first.strategy)
        lows = [one.mean if one.low is None else one.low for one in means]
        highs = [one.mean if one.high is None else one.high for one in means]
        axes.fill_between(values, lows, highs, alpha=0.2, color=line.get_color())
    if min(values) > 0 and max(values) / min(values) >= 8:
        axes.set_xscale("log")
        axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.set(xlabel=found[0].name, ylabel="ETTR (productive share of the time)")
    axes.set_title(f"{found[0].forecasts[0].runs} runs each; bands: 95 % confidence")
    axes.grid(alpha=0.3)
    axes.legend()


def bars(axes: Any, found: tuple[Forecast, ...]) -> None:
    """What is lost, by bucket."""
    names = [one.strategy for one in found]
    below = [0.0] * len(found)
    for bucket in Bucket:
        shares = [100 * one.buckets[bucket].mean for one in found]
        if any(shares):
            axes.bar(names, shares, bottom=below, label=bucket)
            below = [low + share for low, share in zip(below, shares, strict=True)]
    for place, one in enumerate(found):
        axes.annotate(f"ETTR {one.means['ettr'].mean:.3f}", (place, below[place]), ha="center", va="bottom")
    axes.set(ylabel="% of the time that is not productive", title=f"{found[0].gpus:,} GPUs, {found[0].runs} runs")
    axes.legend()
