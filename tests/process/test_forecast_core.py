"""Forecast, core: migration is what the protocol core decides, so another policy gives another forecast."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.forecast_core import OFTEN, job
from torchrelay.forecast.play import cutout
from torchrelay.forecast.play.cutout import CutOut
from torchrelay.forecast.results import forecast, simulate


@pytest.mark.parametrize("layout", ["ddp", "hsdp=2", "fsdp"])
@pytest.mark.parametrize("given", [{}, {"policy": {"ranks_per_slot": 2}}, {"snapshot_steps": 50}], ids=str)
def test_the_core_decides_the_same_on_the_cut_out_as_on_the_whole_job(
    monkeypatch: pytest.MonkeyPatch, layout: str, given: dict[str, Any]
) -> None:
    settings = job(layout=layout, faults=OFTEN, hours=500.0, spares=3, **given)
    part = [simulate(settings, seed) for seed in range(3)]

    class Whole(CutOut):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.show(sorted(self.outside))

    monkeypatch.setattr(cutout, "ROOMY", 1_000_000)
    monkeypatch.setattr("torchrelay.forecast.play.driving.CutOut", Whole)
    whole = [simulate(settings, seed) for seed in range(3)]
    names = ("faults", "interruptions", "clean", "rollbacks", "back_to_snapshots", "ended", "moves", "spares_taken")
    for one, other in zip(part, whole, strict=True):
        assert [getattr(one, name) for name in names] == [getattr(other, name) for name in names]
        assert one.ettr == pytest.approx(other.ettr, abs=2e-3)
        assert one.interruptions > 0


# ---------------------------------------------------------------- another policy, another forecast


def test_to_oversubscribe_changes_the_forecast() -> None:
    """No spare is left: to wait, or to go on at half speed in a slot that another rank uses."""
    waits, shares = (
        forecast(job(spares=0, faults=OFTEN, hours=400.0, policy={"ranks_per_slot": ranks}), 3) for ranks in (1, 2)
    )
    assert shares.means["ettr"].mean > waits.means["ettr"].mean + 0.01
    assert waits.means["ended"].mean > 0 == shares.means["ended"].mean
    assert shares.buckets["custom"].mean > 0 == waits.buckets["custom"].mean
    assert shares.means["moves"].mean > 0, "back to a slot of its own when the node is repaired"
