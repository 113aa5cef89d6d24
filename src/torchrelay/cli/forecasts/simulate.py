"""`torchrelay simulate`: what faults will cost over weeks and months, under each way of getting over them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from statistics import fmean
from typing import Any

from msgspec import Struct

from torchrelay.cli.forecasts.numbers import blame_flag
from torchrelay.cli.forecasts.simulate_benchmark import Benchmark
from torchrelay.cli.forecasts.simulate_pages import (
    benchmark_page,
    cells_page,
    description_page,
    forecasts_page,
    rows_page,
    sweep_page,
)
from torchrelay.cli.forecasts.simulate_words import parser, settings_of, strategies, sweep_of
from torchrelay.client.runs import NotPossible
from torchrelay.economics.formulas.rates import Counting, Unreasonable, rate_per_1000_node_days
from torchrelay.economics.published.field import META_RATE, VENDOR_GPUS, VENDOR_MTTF_H
from torchrelay.forecast.inputs.describe import describe
from torchrelay.forecast.inputs.settings import Settings, Strategy
from torchrelay.forecast.play.engine import Stuck
from torchrelay.forecast.presets import Cell, Row, benchmark_64, cells, llama3, rows
from torchrelay.forecast.results import Forecast, Mean, forecast, mean_of
from torchrelay.forecast.sweep import sweep
from torchrelay.terminal.progress import progress
from torchrelay.terminal.show import Output, show_json
from torchrelay.terminal.typed import joined

BAD = 2
RUNS = 5
RELAYED = (Strategy.MIGRATION, Strategy.COVERED)  # whose network core gets over the loss of a path
BESIDE_PRESET = ("runs", "seed", "preset", "output", "quick", "strategy", "plot")
RATE = (
    f"No --rate was given: it is {META_RATE:g} failures per 1,000 node-days, Meta's. `torchrelay cost` starts from "
    f"{rate_per_1000_node_days(VENDOR_GPUS, VENDOR_MTTF_H):.4g}, of the published case ({VENDOR_MTTF_H:g} h on "
    f"{VENDOR_GPUS:,} GPUs): give both your own."
)
# Flags that are not called as what they set.
FLAGS = {
    "hours": "--days", "gap_h": "--mttf", "work_h": "--work", "repair_median_h": "--repair", "repair_p90_h": "--repair",
    "refail_day": "--refail", "refail_week": "--refail", "lead_h": "--lead", "covered_h": "--pause",
    "interval_h": "--interval", "save_h": "--save", "hot_h": "--hot", "torchft_stall_h": "--torchft-stall",
    "replacement_h": "--bring-up", "restore_h": "--bring-up", "startup_h": "--bring-up", "preempt_h": "--preempt",
    "snapshot_steps": "--snapshots", "step_s": "--step", "mean_s": "--phase", "cv": "--phase", "nodes": "--trace-nodes",
}  # fmt: skip
# A trace says this itself.
OF_A_TRACE = ("rate", "mttf", "gap", "shape", "burst", "switch", "switch_nodes", "lemons", "lemon_times", "process",
              "path", "repair", "refail", "foreseen", "lead", "precision", "counting")  # fmt: skip


class Table(Struct, frozen=True):
    """The published table: under its own simplifications, and in the full model."""

    cells: tuple[Cell, ...]
    full: tuple[Row, ...]


def simulate(words: list[str]) -> int:
    """Answer. Returns the exit code. Raises `NotPossible`, `ValueError` (a file)."""
    words = joined(words)
    given = parser().parse_args(words)
    try:
        check(given)
        found, page = asked(given)
    except Unreasonable as error:
        flag = FLAGS.get(error.name, "--" + error.name.replace("_", "-"))
        raise NotPossible(blame_flag(error, flag, words), BAD) from None
    except Stuck as error:
        raise NotPossible(
            f"{error}: give a repair time (--repair), spares, or a trace whose repairs end", BAD
        ) from None
    print(show_json(found) if given.output is Output.JSON else page)
    if given.plot:
        from torchrelay.cli.forecasts.simulate_plot import plot

        plot(found, given.plot)
    return 0


def check(given: argparse.Namespace) -> None:
    """Flags that say nothing together. Raises `NotPossible`."""
    if given.runs is not None and not 1 <= given.runs <= MOST_RUNS:
        raise NotPossible(f"--runs {given.runs}: give a number from 1 to {MOST_RUNS}", BAD)
    if given.seed < 0:
        raise NotPossible(f"--seed {given.seed}: give a number from 0 on", BAD)
    if given.plot:
        from torchrelay.cli.forecasts.simulate_plot import check_name

        check_name(given.plot)
    if given.describe and not given.trace:
        raise NotPossible("--describe is of a trace: give --trace FILE", BAD)
    if given.trace_nodes is not None and not given.describe:
        raise NotPossible("--trace-nodes is for --describe", BAD)
    check_trace(given)
    if given.quick and given.preset != "ettr-table":
        raise NotPossible("--quick is for --preset ettr-table", BAD)
    if given.preset:
        plain = vars(parser().parse_args([]))
        other = [name for name, value in vars(given).items() if value != plain[name] and name not in BESIDE_PRESET]
        if other:
            raise NotPossible(f"--preset has its own settings: leave --{other[0].replace('_', '-')} out", BAD)
        check_preset(given)


def check_trace(given: argparse.Namespace) -> None:
    """What a trace says itself, or cannot say, is not to be said beside it. Raises `NotPossible`."""
    running = given.counting is Counting.RUNNING
    if given.foreseen and running:
        raise NotPossible("--foreseen: faults that come in running time have no time for a warning: use wall", BAD)
    if not given.trace:
        return
    beside = [name for name in OF_A_TRACE if getattr(given, name) is not None]
    if beside:
        raise NotPossible(f"--{beside[0].replace('_', '-')} means nothing with --trace, which has its own faults", BAD)
    if given.sweep and given.sweep.partition("=")[0] == "rate":
        raise NotPossible("--sweep rate: a trace has its own rate, so all rows would be the same", BAD)
    if given.describe and (given.sweep or given.strategy or given.plot):
        raise NotPossible("--describe runs nothing: leave --sweep, --strategy and --plot out", BAD)


def check_preset(given: argparse.Namespace) -> None:
    """Raises `NotPossible`."""
    if given.preset == "llama3":
        known = llama3()
        other = [one for one in strategies(given.strategy) if one not in known]
        if other:
            raise NotPossible(f"--strategy {other[0]}: --preset llama3 has: {', '.join(known)}", BAD)
    elif given.strategy:
        raise NotPossible(f"--preset {given.preset} has its own strategies: leave --strategy out", BAD)
    elif given.plot:
        raise NotPossible(f"--plot shows forecasts and sweeps: --preset {given.preset} has neither", BAD)


def asked(given: argparse.Namespace) -> tuple[Any, str]:
    """What was found, and how it looks. Raises `NotPossible`, `Unreasonable`, `Stuck`, `ValueError`."""
    if given.preset:
        return preset(given)
    settings = settings_of(given)
    if given.describe:
        assert settings.trace is not None, "checked before"
        found = describe(settings.trace, given.trace_nodes)
        return found, description_page(found)
    wanted = [one for one in strategies(given.strategy) if possible(settings, one, given)]
    ways = [replace(settings, strategy=one, failover=given.failover and one in RELAYED) for one in wanted]
    runs = given.runs or (1 if given.trace else RUNS)
    if given.sweep is not None:
        name, values = sweep_of(given.sweep)
        with progress("runs") as told:
            swept = sweep(name, values, ways, runs, given.seed, told)
        return swept, "\n\n".join([sweep_page(swept), *rate_remark(given)])
    forecasts = run_all(ways, runs, given.seed)
    remarks = [*spares_remark(forecasts), *sure_remarks(forecasts), *rate_remark(given)]
    return forecasts, "\n\n".join([forecasts_page(forecasts, settings), *remarks])


def rate_remark(given: argparse.Namespace) -> list[str]:
    """That the rate is nobody's own, and that another command starts from another one."""
    if given.rate is not None or given.mttf is not None or given.trace is not None:
        return []
    if given.sweep is not None and given.sweep.startswith("rate="):
        return []
    return [RATE]


def possible(settings: Settings, strategy: Strategy, given: argparse.Namespace) -> bool:
    """Among all strategies, migration is left out where it can not be; asked for by name it says why not."""
    return given.strategy is not None or settings.spares is not None or strategy is not Strategy.MIGRATION


def preset(given: argparse.Namespace) -> tuple[Any, str]:
    """A published case, beside ours."""
    if given.preset == "ettr-table":
        with progress("cells") as told:
            first = cells(max(2, given.runs or 400), given.seed, told)
        with progress("rows of the full model") as told:
            full = [] if given.quick else rows(min(given.runs or 3, 20), given.seed, told=told)
        found = Table(tuple(first), tuple(full))
        page = cells_page(found.cells)
        return found, page if given.quick else f"{page}\n\n{rows_page(found.full)}"
    if given.preset == "benchmark-64":
        cases = []
        for case in benchmark_64():
            got = forecast(case.settings, given.runs or 20, given.seed)
            wall = got.means["jct_h"]
            minutes = Mean(*(None if one is None else 60 * one for one in (wall.mean, wall.low, wall.high)))  # type: ignore[arg-type]
            cases.append(Benchmark(case.name, case.minutes, minutes, case.implied, got))
        return tuple(cases), benchmark_page(cases)
    settings = llama3()
    wanted = [one for one in settings if given.strategy is None or one in strategies(given.strategy)]
    found_all = run_all([settings[one] for one in wanted], given.runs or 3, given.seed)
    page = forecasts_page(found_all, next(iter(settings.values())))
    return found_all, "\n\n".join([page, *sure_remarks(found_all)])


def run_all(ways: list[Settings], runs: int, seed: int) -> tuple[Forecast, ...]:
    """All ways, with progress on a terminal."""
    with progress("runs") as told:
        every, found = runs * len(ways), []
        for number, settings in enumerate(ways):
            found.append(forecast(settings, runs, seed, lambda done, first=number * runs: told(first + done, every)))  # type: ignore[misc]
        return tuple(found)


# ---------------------------------------------------------------- remarks

# Remarks of `torchrelay simulate`: what a table of forecasts shows only to those who know where to look.

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
