"""What tests of forecast engine share."""

from __future__ import annotations

from torchrelay.forecast.inputs.faults import Gap, Process

WILD = Process(
    rate=60,
    gap=Gap.WEIBULL,
    shape=0.7,
    burst=0.2,
    switch=0.02,
    switch_nodes=3,
    lemons=0.2,
    process=0.2,
    path=0.1,
    repair_median_h=5,
    repair_p90_h=20,
    refail_day=0.2,
    refail_week=0.3,
    foreseen=0.3,
    precision=0.5,
)
