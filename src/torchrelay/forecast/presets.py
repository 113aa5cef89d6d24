"""Presets: published tables and cases, each as settings that can be run, with what was published beside them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import stdev

from msgspec import Struct

from torchrelay.economics.formulas.loss import Recovery, renewal_ettr
from torchrelay.economics.formulas.rates import Counting, mttf_h
from torchrelay.forecast.inputs.faults import Gap, Process
from torchrelay.forecast.inputs.settings import MINUTE_H, SECOND_H, Costs, Settings, Strategy
from torchrelay.forecast.results import Forecast, forecast

# GPUs, failures per 1,000 node-days, and the ETTR of five ways: 60 mean times x 3 runs, so each is a sample itself. The
# table is headed ±0.01, without saying of which kind.
TABLE: tuple[tuple[int, float, tuple[float, ...]], ...] = (
    (64, 6.5, (0.997, 0.993, 0.994, 1.000, 1.000)),
    (1024, 23.7, (0.88, 0.91, 0.945, 0.98, 0.994)),
    (1024, 6.5, (0.96, 0.965, 0.973, 0.996, 0.998)),
    (2048, 6.5, (0.93, 0.94, 0.96, 0.99, 0.997)),
    (4096, 6.5, (0.86, 0.91, 0.94, 0.98, 0.994)),
    (16384, 6.5, (0.56, 0.78, 0.87, 0.935, 0.968)),
    (16384, 3.79, (0.69, 0.845, 0.91, 0.96, 0.985)),
    (16384, 3.35, (0.72, 0.85, 0.917, 0.95, 0.985)),
    (16384, 2.34, (0.80, 0.89, 0.927, 0.977, 0.992)),
)
MEAN_REPAIR_H = 133.0
COLUMNS = ("restart 1.5 h + 20 min", "tuned, 20 min", "tuned, 5 min hot spare", "migration 2 min, 90 %",
           "migration 3 min, 100 %")  # fmt: skip
LENGTH, SAMPLE = 60, 3  # mean times in a run, and runs, in which each published cell was measured
WITHIN = 0.01
# StepFun's trace: bursts, lemons, slow repairs (the log-normal law with its median of 20 h and its mean of 133 h),
# refailures; causes as in the Llama 3 run.
REAL = Process(
    gap=Gap.WEIBULL,
    shape=0.62,
    burst=0.05,
    burst_nodes=2.0,
    lemons=0.05,
    lemon_times=5.0,
    process=0.13,
    path=0.084,
    repair_median_h=20.0,
    repair_p90_h=242.0,
    refail_day=0.19,
    refail_week=0.29,
)


class Cell(Struct, frozen=True, kw_only=True):
    """A cell of the table: as published, as simulated under the same simplifications, and exactly."""

    gpus: int
    rate: float
    mttf_h: float
    column: str
    published: float
    ours: float
    low: float
    high: float
    exact: float  # the closed form
    published_error: float  # standard error of a sample of 60 mean times x 3
    difference: float  # ours - published
    within: bool  # by 0.01


class Row(Struct, frozen=True, kw_only=True):
    """The same job in the full model."""

    gpus: int
    rate: float
    migration: Forecast  # driven by the protocol core
    hot_spare: Forecast


def simple(gpus: int, rate: float, column: int) -> Settings:
    """A cell's settings, with the table's simplifications: no failure in a recovery, spares without end."""
    plain = Settings(
        gpus=gpus,
        gap_h=mttf_h(gpus, rate),
        spares=None,
        counting=Counting.RUNNING,
        during_recovery=False,
        strategy=Strategy.RESTART,
        checkpoint=False,
        thinned=False,
        step_s=1e-6,
    )
    match column:
        case 0:
            return plain
        case 1:
            return replace(plain, strategy=Strategy.TUNED, checkpoint=True)
        case 2:
            return replace(plain, strategy=Strategy.HOT_SPARE, checkpoint=True)
        case 3:
            return replace(plain, strategy=Strategy.COVERED, costs=Costs(coverage=0.9, covered_h=2 * MINUTE_H))
        case _:
            return replace(plain, strategy=Strategy.COVERED, costs=Costs(coverage=1.0, covered_h=3 * MINUTE_H))


def exact(settings: Settings) -> float:
    """What renewal theory says of a cell."""
    costs = settings.costs
    hot = settings.strategy is Strategy.HOT_SPARE
    covers = settings.strategy is Strategy.COVERED
    return renewal_ettr(
        Recovery(
            interval_h=settings.interval_h(),
            replacement_h=costs.hot_h if hot else costs.replacement_h,
            restore_h=0.0 if hot else costs.restore_h,
            startup_h=0.0 if hot else costs.startup_h,
            coverage=costs.coverage if covers else 0.0,
            downtime_h=costs.covered_h if covers else 0.0,
            save_h=costs.save_h if settings.checkpoint else 0.0,
        ),
        settings.mttf_h,
    )


Told = Callable[[int, int], None]


def silent(done: int, every: int) -> None:
    """For who does not want to hear how much is done."""


def cells(runs: int = 400, seed: int = 0, told: Told = silent) -> list[Cell]:
    """All cells, measured as those were that were published, but in many more runs."""
    found = []
    for gpus, rate, published in TABLE:
        for column, value in enumerate(published):
            settings = simple(gpus, rate, column)
            settings = replace(settings, hours=LENGTH * settings.mttf_h)
            got = forecast(settings, runs, seed)
            mean = got.means["ettr"]
            assert mean.low is not None, "there are several runs"
            assert mean.high is not None, "as for the other end"
            error = stdev([one.ettr for one in got.outcomes]) / SAMPLE**0.5
            found.append(
                Cell(
                    gpus=gpus,
                    rate=rate,
                    mttf_h=settings.mttf_h,
                    column=COLUMNS[column],
                    published=value,
                    ours=mean.mean,
                    low=mean.low,
                    high=mean.high,
                    exact=exact(settings),
                    published_error=error,
                    difference=mean.mean - value,
                    within=abs(mean.mean - value) <= WITHIN + 1e-9,
                )
            )
            told(len(found), len(TABLE) * len(COLUMNS))
    return found


def full(gpus: int, rate: float, hours: float = 720.0) -> Settings:
    """The same job with all that the table leaves out: migration by the protocol core, and spares for its own faults.

    As many as are down at once for 99 % of the time if that was a Poisson number with StepFun's dispersion of 2.6; half
    of them dedicated, half floating.
    """
    down = gpus / 8 * rate / 24_000 * MEAN_REPAIR_H
    spares = math.ceil((down + 2.33 * math.sqrt(2.6 * down)) / 2)
    return Settings(
        gpus=gpus,
        hours=hours,
        strategy=Strategy.MIGRATION,
        faults=replace(REAL, rate=rate),
        spares=spares,
        floating=spares,
        failover=True,
    )


def rows(runs: int = 3, seed: int = 0, hours: float = 720.0, told: Told = silent) -> list[Row]:
    """The full model of each row: migration, and the hot-spare restart that it is to be compared with."""
    found = []
    for gpus, rate, _ in TABLE:
        settings = full(gpus, rate, hours)
        found.append(
            Row(
                gpus=gpus,
                rate=rate,
                migration=forecast(settings, runs, seed),
                hot_spare=forecast(replace(settings, strategy=Strategy.HOT_SPARE, failover=False), runs, seed),
            )
        )
        told(len(found), len(TABLE))
    return found


# ---------------------------------------------------------------- the published benchmark of 64 GPUs


@dataclass(frozen=True)
class Case:
    """A strategy of the benchmark, with the minutes that were published."""

    name: str
    minutes: float
    settings: Settings
    implied: str  # parameters that are worked back from the published minutes, not published themselves


def benchmark_64() -> tuple[Case, ...]:
    """3,000 steps, a checkpoint every 100, a fault every 2,700 to 4,500 s of wall time."""
    step_s = 7.75
    plain = Settings(
        gpus=64,
        work_h=3000 * step_s * SECOND_H,
        gap_h=1.0,
        faults=Process(gap=Gap.UNIFORM, spread=0.25),
        counting=Counting.WALL,
        spares=None,
        checkpoint=False,
        thinned=False,
        strategy=Strategy.COVERED,
        step_s=step_s,
        costs=Costs(interval_h=100 * step_s * SECOND_H, coverage=1.0, covered_h=2.5 * MINUTE_H),
    )
    interval = plain.costs.interval_h
    restart = Costs(interval_h=interval, replacement_h=16 * MINUTE_H)
    slow = Costs(interval_h=interval, torchft_step=1.4, replacement_h=0, restore_h=0, startup_h=0)
    return (
        Case("migration", 405, plain, "2.5 min pause, all covered; 7.75 s a step"),
        Case("restart", 818, replace(plain, strategy=Strategy.RESTART, costs=restart), "26 min bring-up"),
        Case("torchft", 930, replace(plain, strategy=Strategy.TORCHFT, costs=slow), "steps 2.4 times as long"),
    )


def llama3() -> dict[Strategy, Settings]:
    """54 days of 16,384 GPUs at the rate of the Llama 3 run (419 stops), with each strategy."""
    own = Strategy.MIGRATION  # a lost path only slows training with torchrelay's own network core
    plain = Settings(
        gpus=16384,
        hours=54 * 24,
        faults=replace(REAL, rate=3.79, gap=Gap.EXPONENTIAL, shape=1.0),
        spares=40,
        floating=40,
    )
    ways = (Strategy.RESTART, Strategy.TUNED, Strategy.HOT_SPARE, Strategy.TORCHFT, Strategy.MIGRATION)
    return {way: replace(plain, strategy=way, failover=way is own) for way in ways}
