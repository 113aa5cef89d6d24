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

from torchrelay.economics.formulas.rates import (
    Unreasonable,
    check_above,
    check_at_least,
    check_finite,
    check_share,
    mttf_h,
    unreasonable_value,
)
from torchrelay.economics.published.field import META_RATE

# Quantile of the standard normal distribution at 0.9.
NORMAL_P90 = 1.2815515655446004
LEAST_SHAPE = 0.1  # of Weibull gaps: below it, all but one in millions are no gap at all


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

    rate: float = META_RATE
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
            check_at_least(name, getattr(self, name), 0)
        for name in ("shape", "lemon_times", "switch_nodes"):
            check_above(name, getattr(self, name), 0)
        for name in ("burst", "switch", "lemons", "process", "path", "refail_day", "refail_week", "foreseen", "spread"):
            check_share(name, getattr(self, name))
        for name in ("rate", "shape", "lemon_times", "repair_median_h", "repair_p90_h"):
            check_finite(name, getattr(self, name))
        check_at_least("shape", self.shape, LEAST_SHAPE)
        check_above("precision", self.precision, 0)
        check_share("precision", self.precision)
        if not self.repair_p90_h >= self.repair_median_h:
            why = "the p90 comes second, and it cannot be below the median"
            raise unreasonable_value("repair_p90_h", self.repair_p90_h, why)
        if not self.refail_week >= self.refail_day:
            why = "the share within a week comes second, and it holds that within a day"
            raise unreasonable_value("refail_week", self.refail_week, why)
        if self.refail_week == 1:
            raise unreasonable_value("refail_week", self.refail_week, "a node that always fails again is never of use")
        if self.switch + self.process + self.path > 1:
            what = "--switch, --process and --path are shares of all faults"
            raise Unreasonable("switch", f"{what}: together they can be 1 at most")


class Stream:
    """The faults of one run, drawn one after another by one generator."""

    def __init__(
        self,
        process: Process,
        nodes: int,
        mean_gap_h: float | None,
        chance: np.random.Generator,
        *,
        repairs: bool = True,
    ) -> None:
        """`repairs`: whether nodes are repaired at all, and so can fail again."""
        self.process = process
        self.nodes = nodes
        self.chance = chance
        self.weights = lemon_weights(process, nodes)
        mean = mttf_h(nodes, process.rate, 1) if mean_gap_h is None else mean_gap_h
        self.mean_gap_h = mean * each_brings(process, nodes, repairs=repairs)

    def __iter__(self) -> Iterator[Fault]:
        """Faults by time, without end; none at all if the rate is 0."""
        now, waiting = 0.0, list[Fault]()
        first = True
        while not math.isinf(self.mean_gap_h):
            now += self.first_h() if first else self.gap_h()
            first = False
            waiting += self.at(now)
            waiting.sort(key=lambda fault: fault.at_h)
            # What follows in a burst may come after the next fault of all: only what is past is given out.
            while waiting and waiting[0].at_h <= now:
                yield waiting.pop(0)

    def first_h(self) -> float:
        """Until the first fault of a run, which begins in the middle of a gap: nodes have been failing before.

        A long gap is more likely to be met, by its length. With bursty gaps a run that began with a fault would have up
        to one fault more than its rate says. Uniform gaps are those of an injector, which begins with the run.
        """
        if self.process.gap is not Gap.WEIBULL:
            return self.gap_h()
        shape = self.process.shape
        met: float = (
            float(self.chance.gamma(1 + 1 / shape)) ** (1 / shape) * self.mean_gap_h / math.gamma(1 + 1 / shape)
        )
        return float(self.chance.random()) * met

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
        return repair_h(self.process, self.chance)

    def warned_h(self) -> float:
        """Mean time between faults with a warning: node faults that are not refailures."""
        process = self.process
        each = plain_share(process) * (1 + process.burst * others_of(process, self.nodes)) * process.foreseen
        return self.mean_gap_h / each if each else math.inf


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


class Again:
    """Refailures: whether and when a repaired node fails again, and for how long. Each node has a generator of its own.

    So what one node does between two faults takes nothing from the draws of another, nor from those of the stream.
    """

    def __init__(self, process: Process, seed: int) -> None:
        self.process = process
        self.seed = seed
        self._of: dict[int, np.random.Generator] = {}

    def draw(self, node: int) -> tuple[float, Fault] | None:
        """In how many hours a node that was repaired just now fails again, by itself, and how; None: it does not."""
        process = self.process
        if not process.refail_week:
            return None
        if node not in self._of:
            self._of[node] = np.random.default_rng([self.seed, 2, node])
        chance = self._of[node]
        kind, share = chance.random(), float(chance.random())
        repair = repair_h(process, chance)
        if kind >= process.refail_week:
            return None
        hours = 24 * share if kind < process.refail_day else 24 + 144 * share
        return hours, Fault(hours, node, Cause.NODE, repair)


def repair_h(process: Process, chance: np.random.Generator) -> float:
    """Log-normal, by its median and its p90."""
    if not process.repair_median_h:
        return 0.0
    sigma = math.log(process.repair_p90_h / process.repair_median_h) / NORMAL_P90
    return float(process.repair_median_h * math.exp(sigma * chance.standard_normal()))


def plain_share(process: Process) -> float:
    """Arrivals that are of a node."""
    return 1 - process.switch - process.process - process.path


def others_of(process: Process, nodes: int) -> float:
    """How many others a burst takes on average: geometric, but never more than there are."""
    most = nodes - 1
    if process.burst_nodes <= 1 or most < 1:
        return float(min(1, most))
    stop = 1 / process.burst_nodes
    return float((1 - (1 - stop) ** most) / stop)


def behind_a_switch(process: Process, nodes: int) -> float:
    """How many nodes a lost switch takes on average; the last one may have fewer behind it."""
    size = min(process.switch_nodes, nodes)
    whole, rest = divmod(nodes, size)
    return (whole * size**2 + rest**2) / nodes


def each_brings(process: Process, nodes: int, *, repairs: bool = True) -> float:
    """How many (node, fault) pairs an arrival brings on average, refailures included."""
    found = 1 + plain_share(process) * process.burst * others_of(process, nodes)
    found += process.switch * (behind_a_switch(process, nodes) - 1)
    if not repairs:
        return found
    repaired = found - process.process - process.path  # a path that is mended says nothing of its node
    # A node that fails again is repaired again.
    return found + repaired * process.refail_week / (1 - process.refail_week)
