"""Sweep: the same forecast with one thing changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from msgspec import Struct

from torchrelay.economics.formulas.rates import Unreasonable, unreasonable_value
from torchrelay.forecast.inputs.layouts import layout_of
from torchrelay.forecast.inputs.settings import Settings
from torchrelay.forecast.results import Forecast, forecast


class Swept(Struct, frozen=True):
    """One value of what was changed, and what came of it for each strategy."""

    name: str
    value: float
    forecasts: tuple[Forecast, ...]


def gpus(settings: Settings, value: float) -> Settings:
    """Spares and the nodes of others grow with the job."""
    times = value / settings.gpus
    spares = None if settings.spares is None else round(settings.spares * times)
    layout = layout_of(settings.placed.name, whole("gpus", value), settings.gpus_per_node)
    gap = None if settings.gap_h is None else settings.gap_h / times
    return replace(
        settings, gpus=int(value), spares=spares, floating=round(settings.floating * times), layout=layout, gap_h=gap
    )


def rate(settings: Settings, value: float) -> Settings:
    return replace(settings, faults=replace(settings.faults, rate=value), gap_h=None)


def interval(settings: Settings, value: float) -> Settings:
    """Minutes between checkpoints, for strategies that would find their own, too."""
    return replace(settings, costs=replace(settings.costs, interval_h=value / 60), chosen=True)


def spares(settings: Settings, value: float) -> Settings:
    return replace(settings, spares=whole("spares", value))


def floating(settings: Settings, value: float) -> Settings:
    return replace(settings, floating=whole("floating", value))


def whole(name: str, value: float) -> int:
    """Raises `Unreasonable`."""
    if value != int(value) or value < 0:
        raise unreasonable_value(name, value, "give a whole number from 0 on")
    return int(value)


SWEEPS: dict[str, Callable[[Settings, float], Settings]] = {
    "gpus": gpus, "rate": rate, "interval": interval, "spares": spares, "floating": floating,
}  # fmt: skip


def changed_to(name: str, value: float, settings: Settings) -> Settings:
    """The settings with one thing changed. Raises `Unreasonable`, saying which value of the sweep it was."""
    try:
        return SWEEPS[name](settings, value)
    except Unreasonable as error:
        why = f"{name}={value:g}: {error.why or error}"
        raise Unreasonable("sweep", why, why) from error


def sweep(
    name: str,
    values: list[float],
    ways: list[Settings],
    runs: int,
    seed: int,
    told: Callable[[int, int], None] = lambda _, __: None,
) -> tuple[Swept, ...]:
    """Each value for each way. `told` hears how many runs of how many are done. Raises as `forecast`."""
    changed = [[changed_to(name, value, settings) for settings in ways] for value in values]  # all are checked before
    every, done, found = len(values) * len(ways) * runs, 0, []
    for value, row in zip(values, changed, strict=True):
        forecasts = []
        for settings in row:
            start = done
            forecasts.append(forecast(settings, runs, seed, lambda count, start=start: told(start + count, every)))  # type: ignore[misc]
            done += runs
        found.append(Swept(name, value, tuple(forecasts)))
    return tuple(found)
