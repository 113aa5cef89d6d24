"""Remarks of `torchrelay simulate`: what a table of forecasts shows only to those who know where to look."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import fmean

from torchrelay.forecast.results import Forecast, Mean, mean_of

MOST_RUNS = 10_000  # that can be asked for
LONG_WAIT = 0.01  # of the time: from here on it costs more than checkpoints do
BEYOND = 5e-5  # what the table would not show


def spares_remark(found: Sequence[Forecast]) -> list[str]:
    """That training waited for nodes because spares ran out, and how many would have been enough."""
    waits = {one.strategy: fmean(run.waited_h / run.wall_h for run in one.outcomes) for one in found}
    names = [name for name, share in waits.items() if share >= LONG_WAIT]
    if not names or found[0].spares is None:
        return []
    spares, floating = found[0].spares, found[0].floating
    down = max(run.most_down for one in found if one.strategy in names for run in one.outcomes)
    if down <= spares + floating:
        return []
    ends = [f"{100 * some(waits[name] for name in names):.1f}" for some in (min, max)]
    others = f" and {floating} floating ones" if floating else ""
    return [
        f"Spares ran out: {listed(names)} stood still for {' to '.join(dict.fromkeys(ends))} % of the time, waiting "
        f"for a node. Up to {down} nodes were down at once, and there were {spares} dedicated spares{others}: "
        f"try --spares {down - floating}."
    ]


def sure_remarks(found: Sequence[Forecast]) -> list[str]:
    """What so few runs cannot say. All strategies meet the same faults, so they are compared run by run."""
    if found[0].runs == 1:
        return []
    wide = [one.strategy for one in found if is_beyond(one.means["ettr"])]
    pairs = list(combinations(found, 2))
    alike: dict[str, list[str]] = {}
    for one, other in pairs:
        if is_alike(one, other):
            alike.setdefault(one.strategy, []).append(other.strategy)
    said = []
    if wide:
        said.append(f"The interval of ETTR of {listed(wide)} reaches beyond 0 to 1, where no ETTR can be.")
    if alike:
        named = "; ".join(f"{name} from {listed(others)}" for name, others in alike.items())
        said.append(f"By ETTR these cannot be told apart, even run by run on the same faults: {named}.")
    if said:
        more = f"--runs {4 * found[0].runs}" if 4 * found[0].runs <= MOST_RUNS else "four times as many"
        return [" ".join([*said, f"More runs help: with {more} intervals are about half as wide, or less."])]
    if any(overlaps(one.means["ettr"], other.means["ettr"]) for one, other in pairs):
        return ["Intervals overlap, as one run has more faults than another; run by run all strategies differ."]
    return []


def is_beyond(mean: Mean) -> bool:
    """Whether an interval has values that no share can have: it is Student's, and knows of no bounds."""
    return mean.low is not None and mean.high is not None and (mean.low < -BEYOND or mean.high > 1 + BEYOND)


def is_alike(one: Forecast, other: Forecast) -> bool:
    """Whether the interval of the differences within each run holds 0. What is equal in all runs is not in doubt."""
    gaps = [mine.ettr - its.ettr for mine, its in zip(one.outcomes, other.outcomes, strict=True)]
    mean = mean_of(gaps)
    return any(gaps) and mean.low is not None and mean.high is not None and mean.low <= 0 <= mean.high


def overlaps(one: Mean, other: Mean) -> bool:
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return False
    return one != other and one.low <= other.high and other.low <= one.high


def listed(names: Sequence[str]) -> str:
    """a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
