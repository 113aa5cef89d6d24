"""Results: what runs come to, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, median, stdev

from msgspec import Struct

from torchrelay.economics.formulas.loss import job_mfu
from torchrelay.economics.formulas.rates import Counting
from torchrelay.forecast.inputs.settings import Settings, Strategy
from torchrelay.forecast.play.buckets import Bucket
from torchrelay.forecast.play.driving import Driving
from torchrelay.forecast.play.engine import Handling, World
from torchrelay.forecast.play.plain import Covered, Restart, TorchFT
from torchrelay.protocol.model.incident import Resolution

WAYS: dict[Strategy, Callable[[World], Handling]] = {
    Strategy.RESTART: Restart, Strategy.TUNED: Restart, Strategy.HOT_SPARE: Restart, Strategy.TORCHFT: TorchFT,
    Strategy.COVERED: Covered, Strategy.MIGRATION: Driving,
}  # fmt: skip
Z975 = 1.959964
# Student's t for 95 %, by degrees of freedom; beyond the table see `times_95`.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
       2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip


class Outcome(Struct, frozen=True, kw_only=True):
    """One run. Hours and dollars."""

    seed: int
    wall_h: float
    productive_h: float
    bad_h: dict[str, float]
    ettr: float  # productive / wall
    goodput: float  # the same without work whose samples were dropped
    jct_h: float  # wall time for the work asked for, or for as much work as the horizon would hold undisturbed
    step_mfu: float
    job_mfu: float
    faults: int
    interruptions: int
    clean: int  # incidents in which nothing was lost; several interruptions may be one incident
    rollbacks: int
    back_to_snapshots: int
    ended: int
    alarms: int
    moves: int
    pause_p50_s: float | None  # None: training never stood
    pause_max_s: float | None
    spares_taken: int
    preempted: int
    borrowed_node_h: float
    waited_h: float
    most_down: int
    lost_dollars: float  # job's GPU-hours that were not productive
    spare_dollars: float  # dedicated spares, and what floating ones cost others
    total_dollars: float  # of the job's nodes and the spares


class Mean(Struct, frozen=True):
    """A mean over runs with its 95 % confidence interval; of one run only there is none."""

    mean: float
    low: float | None
    high: float | None


class Forecast(Struct, frozen=True, kw_only=True):
    """All runs of one setting."""

    strategy: Strategy
    gpus: int
    mttf_h: float
    interval_h: float | None  # None: no checkpoint is ever needed
    runs: int
    nodes: int
    hours: float  # of each run, unless `work_h` was asked for
    work_h: float | None
    counting: Counting
    spares: int | None  # None: without end
    floating: int
    layout: str
    copies: int  # of the state
    phases: str  # where those of migration are from
    means: dict[str, Mean]  # of pauses: over the runs that had any
    buckets: dict[str, Mean]  # share of the wall time
    outcomes: tuple[Outcome, ...]


def simulate(settings: Settings, seed: int) -> Outcome:
    """One run; the same seed gives the same run. Raises `Stuck`, `BadTrace`."""
    world = World(settings, seed)
    world.handling = WAYS[settings.strategy](world)
    world.run()
    return outcome_of(world, seed)


def outcome_of(world: World, seed: int) -> Outcome:
    settings, account, usage = world.settings, world.account, world.usage
    wall = world.now_h
    ettr = account.productive_h / wall
    slower = 1 + settings.costs.torchft_step if settings.strategy is Strategy.TORCHFT else 1.0
    pauses = world.pauses_h
    gpu_h = settings.gpus * wall
    node_price = settings.gpus_per_node * settings.price
    lent = usage.borrowed_h * settings.displaced + usage.preempted * settings.preempt_lost_h
    spare_dollars = ((settings.spares or 0) * wall + lent) * node_price
    ended = world.verdicts[Resolution.ENDED]
    return Outcome(
        seed=seed,
        wall_h=wall,
        productive_h=account.productive_h,
        bad_h={bucket: account.bad_h[bucket] for bucket in Bucket},
        ettr=ettr,
        goodput=max(0.0, account.productive_h - account.dropped_h) / wall,
        jct_h=wall if settings.work_h is not None else settings.hours / ettr if ettr else math.inf,
        step_mfu=settings.mfu / slower,
        job_mfu=job_mfu(settings.mfu, min(1.0, ettr)),
        faults=world.faults,
        interruptions=world.interruptions,
        clean=world.verdicts[Resolution.CLEAN],
        rollbacks=world.rollbacks,
        back_to_snapshots=world.back_to_snapshots,
        ended=ended,
        alarms=world.alarms,
        moves=world.moves,
        pause_p50_s=3600 * median(pauses) if pauses else None,
        pause_max_s=3600 * max(pauses) if pauses else None,
        spares_taken=usage.taken,
        preempted=usage.preempted,
        borrowed_node_h=usage.borrowed_h,
        waited_h=usage.waited_h,
        most_down=usage.most_down,
        lost_dollars=(gpu_h - settings.gpus * account.productive_h) * settings.price,
        spare_dollars=spare_dollars,
        total_dollars=gpu_h * settings.price + spare_dollars,
    )


MEANS = ("ettr", "goodput", "jct_h", "step_mfu", "job_mfu", "faults", "interruptions", "clean", "rollbacks",
         "back_to_snapshots", "ended", "alarms", "moves", "pause_p50_s", "pause_max_s", "spares_taken", "preempted",
         "borrowed_node_h", "waited_h", "most_down", "lost_dollars", "spare_dollars", "total_dollars")  # fmt: skip


def forecast(settings: Settings, runs: int, seed: int = 0, told: Callable[[int], None] = lambda _: None) -> Forecast:
    """So many runs with seeds of their own. `told` hears after each how many are done. Raises as `simulate`."""
    outcomes = []
    for number in range(runs):
        outcomes.append(simulate(settings, seed + number))
        told(number + 1)
    interval = settings.interval_h()
    return Forecast(
        strategy=settings.strategy,
        gpus=settings.gpus,
        mttf_h=settings.mttf_h,
        interval_h=None if math.isinf(interval) else interval,
        runs=runs,
        nodes=settings.nodes,
        hours=settings.hours,
        work_h=settings.work_h,
        counting=settings.counting,
        spares=settings.spares,
        floating=settings.floating,
        layout=settings.placed.name,
        copies=settings.placed.replicas,
        phases=settings.phases.source,
        means={
            name: mean_of([value for one in outcomes if (value := getattr(one, name)) is not None]) for name in MEANS
        },
        buckets={bucket: mean_of([one.bad_h[bucket] / one.wall_h for one in outcomes]) for bucket in Bucket},
        outcomes=tuple(outcomes),
    )


def mean_of(values: Sequence[float]) -> Mean:
    """The mean, with Student's interval: right for a few runs, if what they vary by is about normal."""
    middle = fmean(values) if values else 0.0
    if len(values) < 2 or math.isinf(middle):
        return Mean(middle, None, None)
    freedom = len(values) - 1
    half = times_95(freedom) * stdev(values) / math.sqrt(len(values))
    return Mean(middle, middle - half, middle + half)


def times_95(freedom: int) -> float:
    """Student's t for 95 %; beyond the table by its expansion around the normal distribution, good to 0.001."""
    if freedom <= len(T95):
        return T95[freedom - 1]
    z = Z975
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
