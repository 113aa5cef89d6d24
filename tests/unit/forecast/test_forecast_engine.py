"""Forecast, engine: time is conserved, closed forms are met, spares help, and a seed is a seed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.forecast_engine import WILD
from torchrelay.economics.formulas.rates import Unreasonable
from torchrelay.forecast.inputs.faults import Cause, Fault, Process
from torchrelay.forecast.inputs.phases import Phases, Span
from torchrelay.forecast.inputs.settings import Costs, Settings, Short, Strategy
from torchrelay.forecast.play.engine import Stuck, World
from torchrelay.forecast.play.plain import Restart
from torchrelay.forecast.results import forecast, mean_of, outcome_of, simulate, times_95


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


def test_work_that_is_asked_for_is_done() -> None:
    got = simulate(Settings(gpus=64, work_h=50.0, strategy=Strategy.RESTART, faults=WILD), 1)
    assert got.productive_h == pytest.approx(50, abs=1e-6)
    assert got.jct_h == got.wall_h > 50


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
    world.handling = Restart(world)
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
    world.handling = Restart(world)
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
    job = Settings(
        gpus=64, hours=300, spares=8, phases=Phases({**none, "detect": Span(30, 0)}), faults=Process(rate=100)
    )
    got = simulate(job, 0)
    assert got.pause_p50_s == pytest.approx(30, abs=1), "and 50 ms until the buddy has answered"
