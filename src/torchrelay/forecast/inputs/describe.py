"""Describe: what a trace says of faults: how often, how bursty, which nodes, how soon again, how long, how many."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from torchrelay.economics.formulas.rates import rate_per_1000_node_days, unreasonable_value
from torchrelay.forecast.inputs.trace import Trace

BURST_H = 0.05  # 3 minutes
DAY_H = 24.0


class Description(Struct, frozen=True, kw_only=True):
    """Statistics of a trace. Times in hours; None where there are too few faults to say."""

    faults: int
    nodes: int
    span_days: float
    rate: float  # per 1,000 node-days
    gap_cv: float | None
    weibull_shape: float | None
    in_burst: float  # share of faults that begin within 3 minutes of the one before
    largest_burst: int  # different nodes in a chain of such faults
    never_failed: int
    worst_node: int  # faults of the node with most
    dispersion: float  # variance of the faults per node by their mean; 1 if all nodes are alike
    refail_day: float | None  # share of repairs after which the node fails again within a day
    refail_week: float | None
    repair_median_h: float | None
    repair_mean_h: float | None
    repair_p90_h: float | None
    down_p50: float
    down_p95: float
    down_p99: float
    spares_99: float  # dedicated spares, as a share of the nodes, that are enough for 99 % of the time
    causes: dict[str, int]


def describe(trace: Trace, nodes: int | None = None) -> Description:
    """All statistics. `nodes`: how many there were, those included that never failed. Raises `Unreasonable`."""
    present = len(trace.nodes) if nodes is None else nodes
    if present < len(trace.nodes):
        raise unreasonable_value("nodes", present, f"the trace names {len(trace.nodes)} nodes, so give as many or more")
    starts = [entry.start_h for entry in trace.entries]
    gaps = np.diff(starts)
    repairs = [entry.end_h - entry.start_h for entry in trace.entries if math.isfinite(entry.end_h)]
    per_node = Counter(entry.node for entry in trace.entries)
    counts = np.array([*per_node.values(), *[0] * (present - len(per_node))])
    down = down_quantiles(trace, (0.5, 0.95, 0.99))
    again = refails(trace)
    span = max(trace.span_h, 1e-9)
    return Description(
        faults=len(starts),
        nodes=present,
        span_days=trace.span_h / DAY_H,
        rate=rate_per_1000_node_days(present, span / len(starts), 1),
        gap_cv=float(gaps.std() / gaps.mean()) if len(gaps) > 1 and gaps.mean() > 0 else None,
        weibull_shape=weibull_shape(gaps.tolist()),
        in_burst=float((gaps <= BURST_H).sum()) / len(starts),
        largest_burst=largest_burst(trace),
        never_failed=int((counts == 0).sum()),
        worst_node=int(counts.max()),
        dispersion=float(counts.var() / counts.mean()),
        refail_day=share_within(again, DAY_H),
        refail_week=share_within(again, 7 * DAY_H),
        repair_median_h=quantile(repairs, 0.5),
        repair_mean_h=float(np.mean(repairs)) if repairs else None,
        repair_p90_h=quantile(repairs, 0.9),
        down_p50=down[0],
        down_p95=down[1],
        down_p99=down[2],
        spares_99=down[2] / present,
        causes=dict(Counter(entry.cause for entry in trace.entries).most_common()),
    )


def quantile(values: Sequence[float], share: float) -> float | None:
    return float(np.quantile(values, share)) if values else None


def weibull_shape(gaps: Sequence[float]) -> float | None:
    """The shape by maximum likelihood: the root of `sum(x^k ln x)/sum(x^k) - 1/k - mean(ln x)`, by bisection.

    Below 1: bursty. Gaps of 0 (two faults at the same recorded time) have no likelihood under any Weibull law, and are
    left out; `in_burst` counts them. None with fewer than 10 gaps, or if all are alike.
    """
    positive = np.array([gap for gap in gaps if gap > 0])
    if len(positive) < 10 or positive.max() == positive.min():
        return None
    logs = np.log(positive / positive.max())  # the scale is of no account, and this one cannot overflow

    def slope(shape: float) -> float:
        powers = np.exp(shape * logs)
        return float((powers * logs).sum() / powers.sum() - 1 / shape - logs.mean())

    low, high = 1e-3, 1e3
    for _ in range(80):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if slope(middle) > 0 else (middle, high)
    return math.sqrt(low * high)


def largest_burst(trace: Trace) -> int:
    """Different nodes in a chain of faults, each within 3 minutes of the one before."""
    largest, chain, last = 0, set[str](), -math.inf
    for entry in trace.entries:
        chain = {*chain, entry.node} if entry.start_h - last <= BURST_H else {entry.node}
        largest, last = max(largest, len(chain)), entry.start_h
    return largest


def refails(trace: Trace) -> list[float]:
    """After each repair, the hours until the same node fails again; infinite if it does not.

    Repairs that end within a week of the trace's end are left out: nobody saw whether they held.
    """
    by_node: dict[str, list[tuple[float, float]]] = {}
    for entry in trace.entries:
        by_node.setdefault(entry.node, []).append((entry.start_h, entry.end_h))
    found = []
    for spans in by_node.values():
        for number, (_, end) in enumerate(spans):
            if end <= trace.span_h - 7 * DAY_H:
                found.append(spans[number + 1][0] - end if number + 1 < len(spans) else math.inf)
    return found


def share_within(hours: Sequence[float], limit_h: float) -> float | None:
    return sum(one <= limit_h for one in hours) / len(hours) if hours else None


def down_quantiles(trace: Trace, shares: Sequence[float]) -> list[float]:
    """How many nodes are down at the same time, for these shares of the time."""
    moves = sorted(
        [(entry.start_h, 1) for entry in trace.entries]
        + [(min(entry.end_h, trace.span_h), -1) for entry in trace.entries]
    )
    time_at: Counter[int] = Counter()
    down, last = 0, 0.0
    for at, change in moves:
        time_at[down] += at - last  # type: ignore[assignment]
        down, last = down + change, at
    whole = sum(time_at.values())
    found = []
    for share in shares:
        passed = 0.0
        level = 0
        for level in sorted(time_at):
            passed += time_at[level]
            if passed >= share * whole - 1e-9:
                break
        found.append(float(level))
    return found
