"""What tests of forecast core share."""

from __future__ import annotations

from typing import Any

from torchrelay.forecast.inputs.faults import Process
from torchrelay.forecast.inputs.layouts import layout_of
from torchrelay.forecast.inputs.settings import Settings

QUIET = Process(rate=0.0)
OFTEN = Process(rate=40, repair_median_h=8, repair_p90_h=12)


def job(**given: Any) -> Settings:
    fields: dict[str, Any] = {"gpus": 64, "hours": 40.0, "faults": QUIET, "spares": 2, **given}
    if isinstance(fields.get("layout"), str):
        fields["layout"] = layout_of(fields["layout"], fields["gpus"])
    return Settings(**fields)
