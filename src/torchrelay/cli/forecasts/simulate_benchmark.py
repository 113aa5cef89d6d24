"""Simulate benchmark: a case of the published benchmark beside its forecast."""

from __future__ import annotations

from msgspec import Struct

from torchrelay.forecast.results import Forecast, Mean


class Benchmark(Struct, frozen=True):
    """A case of the published benchmark."""

    name: str
    published_minutes: float
    minutes: Mean
    implied: str
    forecast: Forecast
