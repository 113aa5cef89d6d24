"""Patience: how much longer the deadlines of tests are than on a machine that does nothing else.

`python -m tests.under_load` sets it. What torchrelay promises within a time is measured by the clock all the same.
"""

from __future__ import annotations

import os

VARIABLE = "TORCHRELAY_TEST_PATIENCE"
FACTOR = max(1.0, float(os.environ.get(VARIABLE, "1")))


def longer(seconds: float) -> float:
    """So long on this machine."""
    return seconds * FACTOR
