"""What tests of forecast faults share."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np

from torchrelay.forecast.inputs.faults import Fault, Process, Stream

NODES = 400


def drawn(count: int, seed: int = 1, **given: Any) -> list[Fault]:
    stream = Stream(Process(**given), NODES, None, np.random.default_rng(seed))
    return list(islice(iter(stream), count))
