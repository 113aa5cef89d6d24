"""Failure rates: from failures per 1,000 node-days to the mean time between failures of a whole job, and back.

A node has 8 GPUs unless said. A job's mean time falls as 1/GPUs only if the rate per node stays the same; a published
mean time is good for its own number of GPUs, and for no other.
"""

from __future__ import annotations

import math
from enum import StrEnum

GPUS_PER_NODE = 8
HOURS_PER_DAY = 24.0
HOURS_PER_MONTH = 730.0  # 365 * 24 / 12
HOURS_PER_YEAR = 8760.0


class Unreasonable(ValueError):
    """A figure that cannot be. `name` is the parameter (and so the flag) that it was given for.

    `why` is what the value must be, in words that name neither: whoever knows the flag says `--flag VALUE: why`. Empty
    if the message can stand by itself only.
    """

    def __init__(self, name: str, message: str, why: str = "", value: str = "") -> None:
        super().__init__(message)
        self.name = name
        self.why = why
        self.value = value


def unreasonable_value(name: str, value: float, why: str) -> Unreasonable:
    """The refusal of one value."""
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    return Unreasonable(name, f"{name} is {shown}: {why}", why, shown)


class Counting(StrEnum):
    """What a mean time to failure counts."""

    WALL = "wall"  # all time, recoveries included: failures come during recoveries, too
    RUNNING = "running"  # only time in which the job runs (work that is done again is running)


def mttf_h(gpus: float, per_1000_node_days: float, gpus_per_node: int = GPUS_PER_NODE) -> float:
    """Hours between failures of a job on so many GPUs: `24 * 1000 / (rate * nodes)`. A rate of 0: infinite.

    Raises `Unreasonable`.
    """
    check_at_least("per_1000_node_days", per_1000_node_days, 0)
    nodes = nodes_of(gpus, gpus_per_node)
    # Divided one after the other: the product of two tiny numbers would be 0.
    return math.inf if per_1000_node_days == 0 else HOURS_PER_DAY * 1000 / per_1000_node_days / nodes


def rate_per_1000_node_days(gpus: float, mttf_h: float, gpus_per_node: int = GPUS_PER_NODE) -> float:
    """The rate that a job's mean time stands for: the inverse of `mttf_h`. Raises `Unreasonable`."""
    check_above("mttf_h", mttf_h, 0)
    return HOURS_PER_DAY * 1000 / (mttf_h * nodes_of(gpus, gpus_per_node))


def nodes_of(gpus: float, gpus_per_node: int = GPUS_PER_NODE) -> float:
    """How many nodes; not rounded, as rates are not. Raises `Unreasonable`."""
    check_above("gpus", gpus, 0)
    check_above("gpus_per_node", gpus_per_node, 0)
    return gpus / gpus_per_node


def expected_failures(
    horizon_h: float, mttf_h: float, counting: Counting = Counting.WALL, bring_up_h: float = 0.0
) -> float:
    """Failures to expect: `H / M` if M counts wall time, `H / (M + b)` if it counts running time.

    Raises `Unreasonable`.
    """
    check_at_least("horizon_h", horizon_h, 0)
    check_above("mttf_h", mttf_h, 0)
    check_at_least("bring_up_h", bring_up_h, 0)
    return horizon_h / (mttf_h + bring_up_h if counting is Counting.RUNNING else mttf_h)


def first_of(links: int, each_mttf: float) -> float:
    """Mean time to the first failure of k parts that fail independently: `m / k`, in the unit of m.

    Raises `Unreasonable`.
    """
    check_above("links", links, 0)
    check_above("each_mttf", each_mttf, 0)
    return each_mttf / links


# ---------------------------------------------------------------- bounds


def check_above(name: str, value: float, bound: float) -> None:
    """Raises `Unreasonable`, for NaN too."""
    if not value > bound:
        raise unreasonable_value(name, value, f"it must be above {bound:g}")


def check_at_least(name: str, value: float, bound: float) -> None:
    """Raises `Unreasonable`, for NaN too."""
    if not value >= bound:
        raise unreasonable_value(name, value, f"it must be {bound:g} or more")


def check_finite(name: str, value: float) -> None:
    """Raises `Unreasonable`."""
    if not math.isfinite(value):
        raise unreasonable_value(name, value, "it must be a finite number")


def check_share(name: str, value: float) -> None:
    """Raises `Unreasonable` unless within 0 to 1."""
    if not 0 <= value <= 1:
        raise unreasonable_value(name, value, "it is a share, from 0 to 1")
