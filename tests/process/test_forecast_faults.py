"""Forecast, faults: what is drawn has the rate, shape, bursts, lemons and repairs that were asked for."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.support.forecast_faults import drawn
from torchrelay.forecast.inputs.describe import weibull_shape
from torchrelay.forecast.inputs.faults import Gap


@pytest.mark.parametrize("shape", [0.5, 0.62, 1.0, 2.0])
def test_the_shape_is_found_again(shape: float) -> None:
    times = [fault.at_h for fault in drawn(8_000, gap=Gap.WEIBULL, shape=shape)]
    found = weibull_shape(np.diff(times).tolist())
    assert found == pytest.approx(shape, abs=0.03)


def test_lemons_fail_so_many_times_as_often() -> None:
    counts = Counter(fault.node for fault in drawn(40_000, lemons=0.05, lemon_times=10.0))
    most = sorted(counts.values(), reverse=True)
    lemons, others = most[:20], most[20:]
    assert np.mean(lemons) / np.mean(others) == pytest.approx(10, rel=0.1)
