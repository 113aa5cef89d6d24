"""`torchrelay simulate`: what faults will cost over weeks and months, under each way of getting over them."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from msgspec import Struct

from torchrelay.cli.forecasts.numbers import blame
from torchrelay.cli.forecasts.simulate_benchmark import Benchmark
from torchrelay.cli.forecasts.simulate_pages import (
    benchmark_page,
    cells_page,
    description_page,
    forecasts_page,
    rows_page,
    sweep_page,
)
from torchrelay.cli.forecasts.simulate_remarks import MOST_RUNS, spares_remark, sure_remarks
from torchrelay.cli.forecasts.simulate_words import parser, settings_of, strategies, sweep_of
from torchrelay.client.runs import NotPossible
from torchrelay.economics.formulas.rates import Counting, Unreasonable, rate_per_1000_node_days
from torchrelay.economics.published.field import META_RATE, VENDOR_GPUS, VENDOR_MTTF_H
from torchrelay.forecast.inputs.describe import describe
from torchrelay.forecast.inputs.settings import Settings, Strategy
from torchrelay.forecast.play.engine import Stuck
from torchrelay.forecast.presets import Cell, Row, benchmark_64, cells, llama3, rows
from torchrelay.forecast.results import Forecast, Mean, forecast
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
        raise NotPossible(blame(error, flag, words), BAD) from None
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
