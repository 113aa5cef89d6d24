"""Intervals: how often to save a checkpoint, and how much less often once most failures do not go back to one."""

from __future__ import annotations

import math

from torchrelay.economics.formulas.rates import check_above, check_at_least, check_share


def young_h(save_h: float, mttf_h: float, coverage: float = 0.0) -> float:
    """The best interval, hours of work between saves: `sqrt(2 * s * M / (1 - c))` (Young 1974; c: see below).

    Only failures that go back to a checkpoint count, and with a share c covered these come every M/(1-c). Infinite if
    all are covered: then no checkpoint is ever read, and what is saved is insurance. Raises `Unreasonable`.
    """
    check_at_least("save_h", save_h, 0)
    check_above("mttf_h", mttf_h, 0)
    check_share("coverage", coverage)
    return math.inf if coverage == 1 else math.sqrt(2 * save_h * mttf_h / (1 - coverage))


def daly_h(save_h: float, mttf_h: float, coverage: float = 0.0) -> float:
    """The same to a higher order, for saves that are not short beside M (Daly 2006).

    `sqrt(2 s M) * (1 + sqrt(s / 2M) / 3 + (s / 2M) / 9) - s` for s < 2M, else M. Raises `Unreasonable`.
    """
    between = math.inf if coverage == 1 else mttf_h / (1 - coverage)
    first = young_h(save_h, mttf_h, coverage)
    if math.isinf(first):
        return first
    if save_h >= 2 * between:
        return between
    ratio = save_h / (2 * between)
    return first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_h


def thinned_h(save_h: float, mttf_h: float, coverage: float, longest_h: float) -> float:
    """Young's interval for a share of covered failures, and no longer than the longest that is allowed.

    Raises `Unreasonable`.
    """
    check_above("longest_h", longest_h, 0)
    return min(longest_h, young_h(save_h, mttf_h, coverage))
