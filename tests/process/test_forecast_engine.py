"""Forecast, engine: time is conserved, closed forms are met, spares help, and a seed is a seed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.forecast_engine import WILD
from torchrelay.economics.formulas.intervals import young_h
from torchrelay.economics.formulas.loss import Recovery, pause_share, renewal_ettr
from torchrelay.economics.formulas.rates import Counting
from torchrelay.forecast.inputs.faults import Process
from torchrelay.forecast.inputs.layouts import layout_of
from torchrelay.forecast.inputs.settings import Costs, Settings, Short, Strategy
from torchrelay.forecast.presets import benchmark_64, exact, simple
from torchrelay.forecast.results import forecast, simulate


@given(
    seed=st.integers(0, 10_000), strategy=st.sampled_from(list(Strategy)), spares=st.integers(0, 3),
    floating=st.integers(0, 2), layout=st.sampled_from(["ddp", "fsdp", "hsdp=2", "tp=8,pp=4"]),
    counting=st.sampled_from(list(Counting)), calm=st.booleans(), share=st.integers(1, 3), short=st.sampled_from(Short),
    snapshots=st.sampled_from([0, 30]), failover=st.booleans(), retry=st.sampled_from([0.0, 0.3]),
)  # fmt: skip
@example(  # the time of a new submission was no whole millisecond, and never came
    seed=4201, strategy=Strategy.MIGRATION, spares=1, floating=0, layout="ddp", counting=Counting.WALL, calm=False,
    share=1, short=Short.WAIT, snapshots=30, failover=True, retry=0.0,
)  # fmt: skip
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_all_time_goes_somewhere(
    seed: int,
    strategy: Strategy,
    spares: int,
    floating: int,
    layout: str,
    counting: Counting,
    calm: bool,
    share: int,
    short: Short,
    snapshots: int,
    failover: bool,
    retry: float,
) -> None:
    got = simulate(
        Settings(
            gpus=64,
            hours=150,
            strategy=strategy,
            spares=spares,
            floating=floating,
            layout=layout_of(layout, 64),
            counting=counting,
            during_recovery=not calm,
            faults=WILD,
            policy={"ranks_per_slot": share},
            short=short,
            snapshot_steps=snapshots,
            failover=failover,
            costs=Costs(retry=retry, spread=0.5),
        ),
        seed,
    )
    assert got.productive_h + sum(got.bad_h.values()) == pytest.approx(got.wall_h, abs=1e-6)
    assert got.wall_h == pytest.approx(150, abs=1e-6)
    assert all(hours >= -1e-9 for hours in (got.productive_h, *got.bad_h.values()))
    assert 0 <= got.goodput <= got.ettr <= 1
    assert got.interruptions <= got.faults
    assert got.waited_h <= got.wall_h + 1e-6


# ---------------------------------------------------------------- closed forms


@pytest.mark.parametrize("column", range(5))
@pytest.mark.parametrize(("gpus", "rate"), [(1024, 23.7), (16384, 6.5)])
def test_restart_and_given_coverage_are_as_renewal_theory_says(gpus: int, rate: float, column: int) -> None:
    job = simple(gpus, rate, column)
    job = replace(job, hours=2000 * job.mttf_h)
    found = forecast(job, 12).means["ettr"]
    assert found.low is not None
    half = found.mean - found.low
    # Twice the interval: ten cells are looked at, and one in twenty is outside of its own by chance.
    assert abs(found.mean - exact(job)) <= 2 * half + 1e-4
    assert half < 0.01, "else it says nothing"


@pytest.mark.parametrize(
    "given",
    [
        {"coverage": 0.0, "retry": 0.5},  # each attempt is struck by itself
        {"coverage": 0.9, "covered_h": 0.2},  # a pause may end in a rollback
        {"coverage": 1.0, "covered_h": 0.2},
    ],
    ids=str,
)
def test_recoveries_that_are_struck_are_as_renewal_theory_says(given: dict[str, float]) -> None:
    """Faults in wall time, half an hour apart: they strike bring-ups and pauses, too."""
    costs = Costs(interval_h=0.2, **given)
    job = Settings(
        gpus=64,
        gap_h=0.49,
        hours=1500.0,
        spares=None,
        strategy=Strategy.COVERED,
        checkpoint=False,
        thinned=False,
        step_s=1e-6,
        costs=costs,
    )
    found = forecast(job, 8).means["ettr"]
    theory = renewal_ettr(
        Recovery(
            interval_h=0.2,
            replacement_h=1 / 6,
            restore_h=1 / 12,
            startup_h=1 / 12,
            coverage=costs.coverage,
            downtime_h=costs.covered_h,
            retry_share=costs.retry,
        ),
        0.49,
        Counting.WALL,
    )
    assert found.high is not None
    half = found.high - found.mean
    assert abs(found.mean - theory) <= 1.5 * half
    assert half < 0.006, "else it says nothing"


def test_a_pause_that_undoes_nothing_costs_d_by_m_and_d() -> None:
    job = replace(simple(16384, 6.5, 4), hours=20_000.0)
    found = forecast(job, 5).means["ettr"]
    assert found.mean == pytest.approx(1 - pause_share(0.05, job.mttf_h), abs=0.002)


def test_no_interval_beats_that_of_young() -> None:
    job = replace(simple(4096, 6.5, 1), hours=30_000.0, chosen=True)
    best = young_h(job.costs.save_h, job.mttf_h)
    found = {}
    for times in (0.25, 0.5, 1.0, 2.0, 4.0):
        costs = replace(job.costs, interval_h=times * best)
        found[times] = forecast(replace(job, costs=costs), 3).means["ettr"].mean
    assert max(found, key=lambda times: found[times]) == 1.0, found


def test_the_ordering_of_the_published_benchmark() -> None:
    minutes = {case.name: 60 * forecast(case.settings, 10).means["jct_h"].mean for case in benchmark_64()}
    assert minutes["migration"] < minutes["restart"] < minutes["torchft"]
    for case in benchmark_64():
        assert minutes[case.name] == pytest.approx(case.minutes, rel=0.06)


# ---------------------------------------------------------------- what must help, helps


@pytest.mark.parametrize("strategy", [Strategy.RESTART, Strategy.TORCHFT, Strategy.MIGRATION])
def test_more_spares_do_not_hurt_in_the_mean(strategy: Strategy) -> None:
    job = Settings(gpus=128, hours=500, strategy=strategy, faults=Process(rate=40, repair_median_h=10, repair_p90_h=30))
    found = [forecast(replace(job, spares=spares), 6).means["ettr"].mean for spares in (0, 2, 4, 8)]
    assert all(more >= fewer - 0.003 for fewer, more in pairwise(found)), found
    assert found[-1] > found[0] + 0.01
