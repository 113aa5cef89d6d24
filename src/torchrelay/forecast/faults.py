"""Faults: when something breaks, where, and for how long.

Faults come one after another with gaps of a given mean: exponential, Weibull (a shape below 1 is bursty), uniform, or
replayed from a trace. A fault may be one of a burst (others begin within minutes), or take a switch with all nodes
behind it. Some nodes are lemons. Repairs are log-normal. A repaired node may fail again soon.

The mean of the gaps is stretched by what bursts and switches add, so that the rate that was asked for is the rate of
(node, fault) pairs that comes out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from torchrelay.economics.rates import Unreasonable, above, at_least, mttf_h, share

# Quantile of the standard normal distribution at 0.9.
NORMAL_P90 = 1.2815515655446004


class Cause(StrEnum):
    """What breaks; what follows from it differs."""

    NODE = "node"
    PROCESS = "process"  # software: its place is as good as before
    PATH = "path"  # one network path of several
    SWITCH = "switch"


@dataclass(frozen=True, slots=True)
class Fault:
    """One node at fault. Hours; `at_h` on the clock of the faults (see `Counting`)."""

    at_h: float
    node: int
    cause: Cause
    repair_h: float
    lead_h: float = 0.0  # so long before, it was foreseen; 0: it was not


class Gap(StrEnum):
    """How the time from one fault to the next is distributed."""

    EXPONENTIAL = "exponential"
    WEIBULL = "weibull"
    UNIFORM = "uniform"


@dataclass(frozen=True, kw_only=True)
class Process:
    """What is known of faults. Rates per 1,000 node-days, times in hours, shares from 0 to 1."""

    rate: float = 6.5
    gap: Gap = Gap.EXPONENTIAL
    shape: float = 1.0  # Weibull's
    spread: float = 0.25  # of uniform gaps: the mean, more or less by this share of it
    burst: float = 0.0  # share of faults that others follow
    burst_nodes: float = 2.0  # how many others, on average (geometric)
    burst_h: float = 0.05  # within which they begin
    switch: float = 0.0  # share of faults that are a switch's
    switch_nodes: int = 16  # nodes behind one
    lemons: float = 0.0  # share of nodes that fail more often
    lemon_times: float = 10.0  # how many times as often
    process: float = 0.0  # share of faults that are of the process, and not of its node
    path: float = 0.0  # share of faults that are of one network path
    repair_median_h: float = 20.0
    repair_p90_h: float = 242.0  # with that median, a mean of 133 h, as in StepFun's trace
    refail_day: float = 0.0  # share of repaired nodes that fail again within a day
    refail_week: float = 0.0  # within 7 days, the former included
    foreseen: float = 0.0  # share of node faults with a warning
    lead_h: float = 0.25  # how long before
    precision: float = 1.0  # share of warnings that come true

    def __post_init__(self) -> None:
        for name in ("rate", "burst_nodes", "burst_h", "repair_median_h", "lead_h"):
            at_least(name, getattr(self, name), 0)
        for name in ("shape", "lemon_times", "switch_nodes"):
            above(name, getattr(self, name), 0)
        for name in ("burst", "switch", "lemons", "process", "path", "refail_day", "refail_week", "foreseen", "spread"):
            share(name, getattr(self, name))
        above("precision", self.precision, 0)
        share("precision", self.precision)
        at_least("repair_p90_h", self.repair_p90_h, self.repair_median_h)
        at_least("refail_week", self.refail_week, self.refail_day)
        if self.switch + self.process + self.path > 1:
            raise Unreasonable("switch", "switch, process and path are shares of all faults: together at most 1")


class Stream:
    """The faults of one run, drawn one after another by one generator."""

    def __init__(self, process: Process, nodes: int, mean_gap_h: float | None, chance: np.random.Generator) -> None:
        self.process = process
        self.nodes = nodes
        self.chance = chance
        self.weights = lemon_weights(process, nodes)
        mean = mttf_h(nodes, process.rate, 1) if mean_gap_h is None else mean_gap_h
        self.mean_gap_h = mean * each_brings(process, nodes)
        sigma = math.log(process.repair_p90_h / process.repair_median_h) / NORMAL_P90 if process.repair_median_h else 0
        self._sigma = sigma

    def __iter__(self) -> Iterator[Fault]:
        """Faults by time, without end; none at all if the rate is 0."""
        now, waiting = 0.0, list[Fault]()
        while not math.isinf(self.mean_gap_h):
            now += self.gap_h()
            waiting += self.at(now)
            waiting.sort(key=lambda fault: fault.at_h)
            # What follows in a burst may come after the next fault of all: only what is past is given out.
            while waiting and waiting[0].at_h <= now:
                yield waiting.pop(0)

    def gap_h(self) -> float:
        mean = self.mean_gap_h
        match self.process.gap:
            case Gap.EXPONENTIAL:
                return float(self.chance.exponential(mean))
            case Gap.WEIBULL:
                shape = self.process.shape
                return float(self.chance.weibull(shape)) * mean / math.gamma(1 + 1 / shape)
            case Gap.UNIFORM:
                return mean * float(self.chance.uniform(1 - self.process.spread, 1 + self.process.spread))

    def at(self, now: float) -> list[Fault]:
        """What happens at one arrival: one fault, a switch's, or the first of a burst."""
        process = self.process
        kind = self.chance.random()
        if kind < process.switch:
            return self.switch(now)
        cause = Cause.NODE
        if kind < process.switch + process.process:
            cause = Cause.PROCESS
        elif kind < process.switch + process.process + process.path:
            cause = Cause.PATH
        found = [self.fault(now, self.victim(), cause)]
        if cause is Cause.NODE and self.chance.random() < process.burst:
            others = int(self.chance.geometric(1 / process.burst_nodes)) if process.burst_nodes >= 1 else 1
            for _ in range(min(others, self.nodes - 1)):
                later = now + float(self.chance.random()) * process.burst_h
                found.append(self.fault(later, self.victim(), Cause.NODE))
        return found

    def switch(self, now: float) -> list[Fault]:
        size = min(self.process.switch_nodes, self.nodes)
        first = self.victim() // size * size
        repair = self.repair_h()
        return [Fault(now, node, Cause.SWITCH, repair) for node in range(first, min(first + size, self.nodes))]

    def fault(self, at_h: float, node: int, cause: Cause) -> Fault:
        seen = cause is Cause.NODE and self.chance.random() < self.process.foreseen
        return Fault(at_h, node, cause, self.repair_h(), self.process.lead_h if seen else 0.0)

    def victim(self) -> int:
        if self.weights is None:
            return int(self.chance.integers(self.nodes))
        return int(np.searchsorted(self.weights, self.chance.random(), side="right"))

    def repair_h(self) -> float:
        return float(self.process.repair_median_h * math.exp(self._sigma * self.chance.standard_normal()))

    def refail_h(self) -> float | None:
        """In how many hours a node that was repaired just now fails again, by itself; None: it does not."""
        kind = self.chance.random()
        if kind < self.process.refail_day:
            return float(self.chance.random()) * 24
        if kind < self.process.refail_week:
            return 24 + float(self.chance.random()) * 144
        return None


def lemon_weights(process: Process, nodes: int) -> np.ndarray | None:
    """Cumulated shares of the faults by node; None if all are alike. The lemons are spread evenly over the nodes."""
    lemons = round(process.lemons * nodes)
    if lemons in (0, nodes):
        return None
    weights = np.ones(nodes)
    weights[np.linspace(0, nodes - 1, lemons).astype(int)] = process.lemon_times
    found: np.ndarray = np.cumsum(weights / weights.sum())
    found[-1] = 1.0
    return found


def each_brings(process: Process, nodes: int) -> float:
    """How many (node, fault) pairs an arrival brings on average, refailures included."""
    plain = 1 - process.switch - process.process - process.path
    others = min(max(1.0, process.burst_nodes), nodes - 1) if nodes > 1 else 0.0
    found = 1 + plain * process.burst * others + process.switch * (min(process.switch_nodes, nodes) - 1)
    repaired = found - process.process - process.path
    # A node that fails again is repaired again.
    return found + repaired * process.refail_week / (1 - process.refail_week) if process.refail_week < 1 else math.inf
