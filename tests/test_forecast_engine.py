"""Forecast, engine: time is conserved, closed forms are met, spares help, and a seed is a seed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from time import process_time

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from torchrelay.economics.formulas.intervals import young_h
from torchrelay.economics.formulas.loss import Recovery, pause_share, renewal_ettr
from torchrelay.economics.formulas.rates import Counting, Unreasonable
from torchrelay.forecast.inputs.faults import Cause, Fault, Gap, Process
from torchrelay.forecast.inputs.layouts import layout_of
from torchrelay.forecast.inputs.phases import Phases, Span
from torchrelay.forecast.inputs.settings import Costs, Settings, Short, Strategy
from torchrelay.forecast.play.engine import Stuck, World
from torchrelay.forecast.play.plain import Restart
from torchrelay.forecast.presets import benchmark_64, exact, llama3, simple
from torchrelay.forecast.results import forecast, mean_of, outcome_of, simulate, times_95

WILD = Process(
    rate=60, gap=Gap.WEIBULL, shape=0.7, burst=0.2, switch=0.02, switch_nodes=3, lemons=0.2, process=0.2, path=0.1,
    repair_median_h=5, repair_p90_h=20, refail_day=0.2, refail_week=0.3, foreseen=0.3, precision=0.5,
)  # fmt: skip


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
@pytest.mark.slow
def test_all_time_goes_somewhere(seed: int, strategy: Strategy, spares: int, floating: int, layout: str,
                                 counting: Counting, calm: bool, share: int, short: Short, snapshots: int,
                                 failover: bool, retry: float) -> None:  # fmt: skip
    got = simulate(
        Settings(
            gpus=64, hours=150, strategy=strategy, spares=spares, floating=floating, layout=layout_of(layout, 64),
            counting=counting, during_recovery=not calm, faults=WILD, policy={"ranks_per_slot": share}, short=short,
            snapshot_steps=snapshots, failover=failover, costs=Costs(retry=retry, spread=0.5),
        ),
        seed,
    )  # fmt: skip
    assert got.productive_h + sum(got.bad_h.values()) == pytest.approx(got.wall_h, abs=1e-6)
    assert got.wall_h == pytest.approx(150, abs=1e-6)
    assert all(hours >= -1e-9 for hours in (got.productive_h, *got.bad_h.values()))
    assert 0 <= got.goodput <= got.ettr <= 1
    assert got.interruptions <= got.faults
    assert got.waited_h <= got.wall_h + 1e-6


@pytest.mark.parametrize("strategy", Strategy)
def test_the_same_seed_gives_the_same_run(strategy: Strategy) -> None:
    job = Settings(gpus=64, hours=200, strategy=strategy, faults=WILD, spares=1)
    assert simulate(job, 5) == simulate(job, 5)
    assert simulate(job, 5) != simulate(job, 6)


@pytest.mark.parametrize("strategy", [one for one in Strategy if one is not Strategy.MIGRATION])
def test_without_faults_only_saves_and_steps_cost_time(strategy: Strategy) -> None:
    job = Settings(gpus=64, hours=1000, strategy=strategy, faults=Process(rate=0.0), spares=0, chosen=True)
    got = simulate(job, 0)
    slower = 1.1 if strategy is Strategy.TORCHFT else 1.0
    saves = 1.5 / (1.5 + 30 / 3600)
    assert got.ettr == pytest.approx(saves / slower, abs=1e-4)
    assert got.lost_dollars == pytest.approx((1 - got.ettr) * 64 * 1000 * 3)


# ---------------------------------------------------------------- closed forms


@pytest.mark.slow
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


@pytest.mark.slow
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
    job = Settings(gpus=64, gap_h=0.49, hours=1500.0, spares=None, strategy=Strategy.COVERED, checkpoint=False,
                   thinned=False, step_s=1e-6, costs=costs)  # fmt: skip
    found = forecast(job, 8).means["ettr"]
    theory = renewal_ettr(
        Recovery(interval_h=0.2, replacement_h=1 / 6, restore_h=1 / 12, startup_h=1 / 12, coverage=costs.coverage,
                 downtime_h=costs.covered_h, retry_share=costs.retry), 0.49, Counting.WALL,
    )  # fmt: skip
    assert found.high is not None
    half = found.high - found.mean
    assert abs(found.mean - theory) <= 1.5 * half
    assert half < 0.006, "else it says nothing"


@pytest.mark.slow
def test_a_pause_that_undoes_nothing_costs_d_by_m_and_d() -> None:
    job = replace(simple(16384, 6.5, 4), hours=20_000.0)
    found = forecast(job, 5).means["ettr"]
    assert found.mean == pytest.approx(1 - pause_share(0.05, job.mttf_h), abs=0.002)


@pytest.mark.slow
def test_no_interval_beats_that_of_young() -> None:
    job = replace(simple(4096, 6.5, 1), hours=30_000.0, chosen=True)
    best = young_h(job.costs.save_h, job.mttf_h)
    found = {}
    for times in (0.25, 0.5, 1.0, 2.0, 4.0):
        costs = replace(job.costs, interval_h=times * best)
        found[times] = forecast(replace(job, costs=costs), 3).means["ettr"].mean
    assert max(found, key=lambda times: found[times]) == 1.0, found


@pytest.mark.slow
def test_the_ordering_of_the_published_benchmark() -> None:
    minutes = {case.name: 60 * forecast(case.settings, 10).means["jct_h"].mean for case in benchmark_64()}
    assert minutes["migration"] < minutes["restart"] < minutes["torchft"]
    for case in benchmark_64():
        assert minutes[case.name] == pytest.approx(case.minutes, rel=0.06)


def test_work_that_is_asked_for_is_done() -> None:
    got = simulate(Settings(gpus=64, work_h=50.0, strategy=Strategy.RESTART, faults=WILD), 1)
    assert got.productive_h == pytest.approx(50, abs=1e-6)
    assert got.jct_h == got.wall_h > 50


# ---------------------------------------------------------------- what must help, helps


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [Strategy.RESTART, Strategy.TORCHFT, Strategy.MIGRATION])
def test_more_spares_do_not_hurt_in_the_mean(strategy: Strategy) -> None:
    job = Settings(gpus=128, hours=500, strategy=strategy,
                   faults=Process(rate=40, repair_median_h=10, repair_p90_h=30))  # fmt: skip
    found = [forecast(replace(job, spares=spares), 6).means["ettr"].mean for spares in (0, 2, 4, 8)]
    assert all(more >= fewer - 0.003 for fewer, more in pairwise(found)), found
    assert found[-1] > found[0] + 0.01


def test_floating_spares_help_and_cost_others_their_work() -> None:
    job = Settings(gpus=64, hours=500, strategy=Strategy.RESTART, spares=0, faults=Process(rate=40))
    alone, helped = forecast(job, 5), forecast(replace(job, floating=2), 5)
    assert helped.means["ettr"].mean > alone.means["ettr"].mean
    assert helped.means["preempted"].mean > 0
    assert helped.means["spare_dollars"].mean > alone.means["spare_dollars"].mean == 0


def test_to_shrink_is_better_than_to_wait() -> None:
    job = Settings(gpus=64, hours=500, strategy=Strategy.RESTART, spares=0, faults=Process(rate=20))
    assert forecast(replace(job, short=Short.SHRINK), 5).means["ettr"].mean > forecast(job, 5).means["ettr"].mean


def test_faults_that_strike_recoveries_make_them_longer() -> None:
    job = Settings(gpus=64, gap_h=0.5, hours=300, spares=None, strategy=Strategy.RESTART)
    calm, hit = (forecast(replace(job, during_recovery=during), 5).means["ettr"].mean for during in (False, True))
    assert hit < 0.95 * calm


def test_torchft_drops_batches_and_takes_longer_steps() -> None:
    got = simulate(Settings(gpus=64, hours=300, strategy=Strategy.TORCHFT, spares=None, gap_h=2.0), 0)
    assert got.goodput < got.ettr < 1 / 1.1
    assert got.rollbacks == 0
    assert got.step_mfu == pytest.approx(0.4 / 1.1)


def test_a_job_that_nobody_can_save_is_stuck_and_says_so() -> None:
    world = World(Settings(gpus=16, work_h=1e6, strategy=Strategy.RESTART, spares=0, faults=Process(rate=0.0)), 0)
    world._next = Fault(1.0, 0, Cause.NODE, float("inf"))
    world.way = Restart(world)
    with pytest.raises(Stuck, match=r"after 1\.0 h"):
        world.run()


def test_one_run_has_no_interval_and_several_have_students() -> None:
    assert mean_of([1.0]).low is None
    three = mean_of([1.0, 2.0, 3.0])
    assert three.mean == 2
    assert three.high == pytest.approx(2 + 4.303 / 3**0.5)
    # Of tables of Student's t: 2.0395 with 31 degrees of freedom, 2.0003 with 60, 1.96 without end.
    assert [times_95(freedom) for freedom in (30, 31, 60, 10**9)] == pytest.approx(
        [2.042, 2.0395, 2.0003, 1.96], abs=1e-3
    )


def test_the_median_of_two_pauses_is_between_them() -> None:
    costs = Costs(replacement_h=1.0, restore_h=0, startup_h=0)
    job = Settings(gpus=64, hours=50.0, strategy=Strategy.RESTART, spares=2, faults=Process(rate=0.0), costs=costs)
    world = World(job, 0)
    world.way = Restart(world)
    world.pauses_h = [2.0]
    world._next = Fault(5.0, 0, Cause.PROCESS, 1.0)
    world.run()
    assert outcome_of(world, 0).pause_p50_s == pytest.approx(1.5 * 3600)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"hours": 0.0}, "hours"),
        ({"step_s": -1.0}, "step_s"),
        ({"spares": -1}, "spares"),
        ({"spares": None}, "unlimited"),
        ({"path_speed": 0.0}, "path_speed"),
        ({"policy": {"no_such": 1}}, "no_such"),
        ({"policy": {"spares": 1}}, "'spares' is not known"),
        ({"policy": {"refill": 1}}, "refill=1"),
        ({"work_h": 0.0}, "work_h"),
        ({"hours": 1e7}, "to be expected"),
        ({"work_h": 1e7}, "to be expected"),
        ({"faults": Process(foreseen=0.5, precision=1e-9)}, "warnings are to be expected"),
        ({"gpus": 8_000_000}, "1,000,002 nodes"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, object], named: str) -> None:
    with pytest.raises(Unreasonable, match=named):
        Settings(**given)  # type: ignore[arg-type]


def test_all_strategies_meet_the_same_false_alarms() -> None:
    faults = Process(rate=200, foreseen=1, precision=0.5, repair_median_h=0.01, repair_p90_h=0.01)
    job = Settings(gpus=64, hours=300, faults=faults, spares=8)
    seen = {simulate(replace(job, strategy=way), 1).alarms for way in (Strategy.RESTART, Strategy.COVERED)}
    assert len(seen) == 1


def test_work_that_will_hardly_ever_be_done_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrelay.forecast.play.engine.MOST_FAULTS", 1000)
    job = Settings(gpus=64, work_h=100, gap_h=0.1, spares=None, strategy=Strategy.RESTART, chosen=True)
    with pytest.raises(Unreasonable, match=r"after 2,000 faults and .* it will hardly ever be"):
        simulate(job, 1)


def test_given_phases_are_the_pause() -> None:
    none = dict.fromkeys(("interrupt", "agree", "acquire", "reconfigure", "restore", "resume"), Span(0, 0))
    job = Settings(gpus=64, hours=300, spares=8, phases=Phases({**none, "detect": Span(30, 0)}),
                   faults=Process(rate=100))  # fmt: skip
    got = simulate(job, 0)
    assert got.pause_p50_s == pytest.approx(30, abs=1), "and 50 ms until the buddy has answered"


@pytest.mark.soak
@pytest.mark.timeout(120)
def test_the_largest_case_is_done_within_a_minute() -> None:
    job = llama3()[Strategy.MIGRATION]
    began = process_time()  # not the wall clock: others may want the core, too
    got = simulate(job, 0)
    assert process_time() - began < 60
    assert job.gpus == 16384
    assert got.wall_h == pytest.approx(54 * 24)
    assert got.interruptions > 200
    assert got.ettr > 0.97
