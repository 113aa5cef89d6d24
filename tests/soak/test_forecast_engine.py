"""Forecast, engine: time is conserved, closed forms are met, spares help, and a seed is a seed."""

from __future__ import annotations

from time import process_time

import pytest

from torchrelay.forecast.inputs.settings import Strategy
from torchrelay.forecast.presets import llama3
from torchrelay.forecast.results import simulate


@pytest.mark.timeout(120)
def test_the_largest_case_is_done_within_a_minute() -> None:
    job = llama3()[Strategy.MIGRATION]
    began = process_time()  # not the wall clock: others may want the core, too
    got = simulate(job, 0)
    assert process_time() - began < 60
    assert job.gpus == 16384
    assert got.wall_h == pytest.approx(54 * 24)
    assert got.interruptions > 200
    assert got.ettr > 0.97
