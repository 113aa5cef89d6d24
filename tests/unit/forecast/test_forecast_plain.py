"""Forecast, plain ways: no node is lost or made, no fault is met twice, and a warning is of use."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

import pytest

from torchrelay.economics.formulas.rates import Counting
from torchrelay.forecast.inputs.faults import Cause, Fault, Gap, Process
from torchrelay.forecast.inputs.settings import Costs, Settings, Strategy
from torchrelay.forecast.play.engine import World
from torchrelay.forecast.play.plain import Covered, Restart
from torchrelay.forecast.results import WAYS, forecast, simulate
from torchrelay.protocol.model.incident import Resolution

QUIET = Process(rate=0.0)


def covered(**given: Any) -> Settings:
    return Settings(**{"gpus": 64, "hours": 40.0, "faults": QUIET, "spares": 2, "strategy": Strategy.COVERED, **given})


def struck(settings: Settings, *faults: Fault) -> tuple[World, Restart]:
    """A run in which just these faults happen; not yet begun, so that warnings can be put in."""
    world = World(settings, 0)
    world._coming = iter(faults)
    world.draw_next()
    way = WAYS[settings.strategy](world)
    assert isinstance(way, Restart)
    world.handling = way
    return world, way


def nodes_of(way: Restart) -> int:
    """All nodes that are somewhere, but for those under repair."""
    left = way.left if isinstance(way, Covered) else set()
    return len(way.members | way.waiting_nodes | set(way.lent) | way.lent_down | left)


def calm(world: World, _: int) -> None:
    """From now on no repaired node fails again."""
    world.again.process = QUIET


# ---------------------------------------------------------------- nodes


def test_a_job_that_waits_takes_a_floating_node_as_soon_as_it_is_repaired() -> None:
    """Node 8 is another job's and down when node 0 fails; it is there again at 3 h, node 0 only at 30 h."""
    job = Settings(gpus=64, hours=40.0, faults=QUIET, spares=0, floating=1, strategy=Strategy.RESTART)
    world, _ = struck(job, Fault(1.0, 8, Cause.NODE, 2.0), Fault(2.0, 0, Cause.NODE, 28.0))
    world.run()
    assert world.usage.waited_h == pytest.approx(1.0)
    assert world.usage.preempted == 1


def test_a_node_that_was_left_is_not_lost_when_a_process_on_it_fails() -> None:
    world, way = struck(covered(), Fault(2.0, 3, Cause.PROCESS, 5.0))
    world.after(1.0, world.warn, 3)
    world.after(4.0, world.clear, 3)
    world.run()
    assert 3 in way.waiting_nodes
    assert nodes_of(way) == 10
    assert world.interruptions == 0, "nothing ran there any more"


def test_a_foreseen_fault_that_does_not_come_gives_its_node_back() -> None:
    """It would come in the pause of another, which does not count then."""
    pause = Costs(coverage=1.0, covered_h=1.0)
    job = covered(during_recovery=False, costs=pause)
    world, way = struck(job, Fault(2.0, 0, Cause.NODE, 5.0), Fault(2.5, 3, Cause.NODE, 5.0, 1.5))
    world.after(1.0, world.warn, 3)
    world.run()
    assert world.moves == 1
    assert 3 in way.waiting_nodes
    assert nodes_of(way) == 10


@pytest.mark.parametrize("strategy", [Strategy.RESTART, Strategy.HOT_SPARE, Strategy.TORCHFT, Strategy.COVERED])
def test_after_a_storm_every_node_is_somewhere(strategy: Strategy) -> None:
    """Faults end after 400 h, and repairs within 50 h of that: 8 of the job, 2 spares, 2 of others are left."""
    faults = Process(
        rate=150,
        burst=0.2,
        process=0.2,
        path=0.1,
        refail_day=0.2,
        refail_week=0.3,
        foreseen=0.5,
        precision=0.5,
        repair_median_h=5,
        repair_p90_h=9,
    )
    for seed in range(5):
        job = Settings(gpus=64, hours=700.0, strategy=strategy, spares=2, floating=2, faults=faults)
        world = World(job, seed)
        world.handling = way = WAYS[strategy](world)
        assert isinstance(way, Restart)
        world._coming = takewhile(lambda fault: fault.at_h < 400, world._coming)
        world.after(450.0, partial(calm, world), 0)
        world.run()
        assert not world.down
        assert nodes_of(way) == 12, seed
        assert len(way.lent) == way.bench.floating - world.usage.in_use


# ---------------------------------------------------------------- warnings


@pytest.mark.parametrize("spares", [None, 40])
def test_a_warning_saves_the_pause_of_its_fault(spares: int | None) -> None:
    """With spares without end, too: the node is left, so its fault is nobody's."""
    job = covered(gpus=1024, hours=1000.0, spares=spares, costs=Costs(coverage=0.5))
    ettrs = [
        forecast(replace(job, faults=Process(rate=23.7, foreseen=share)), 4).means["ettr"].mean for share in (0.0, 1.0)
    ]
    assert ettrs[1] > ettrs[0] + 0.02


def test_a_warning_comes_so_long_before_its_fault_whatever_else_fails() -> None:
    """Gaps are far shorter than the lead, and no warning is late but those of the very first faults."""
    faults = Process(rate=50.0, foreseen=1.0, lead_h=3.0, gap=Gap.UNIFORM)
    world = World(covered(gpus=1024, spares=20, faults=faults), 0)
    heard: list[tuple[float, int]] = []
    world.handling = WAYS[Strategy.COVERED](world)
    world.warn = lambda node: heard.append((world.now_h, node))  # type: ignore[method-assign]
    world._heap = [(at, number, world.warn, node) for at, number, _, node in world._heap]
    struck_at: list[tuple[float, int]] = []
    strike = world.strike

    def note(fault: Fault) -> None:
        struck_at.append((fault.at_h, fault.node))
        strike(fault)

    world.strike = note  # type: ignore[method-assign]
    world.run()
    said = {(round(at, 6), node) for at, node in heard}
    late = [at for at, node in struck_at if at > 3 and (round(at - 3, 6), node) not in said]
    assert len(struck_at) > 5
    assert late == []


def test_false_alarms_are_as_many_as_the_precision_says() -> None:
    """Half of the warnings come true, so there are as many false ones; also where the mean time was given."""
    job = covered(gpus=1024, hours=3000.0, spares=60, gap_h=10.0, faults=Process(foreseen=1.0, precision=0.5))
    found = [simulate(job, seed) for seed in range(4)]
    alarms, faults = sum(one.alarms for one in found), sum(one.faults for one in found)
    assert alarms == pytest.approx(faults, rel=0.15)


def test_faults_in_running_time_have_no_warnings_and_no_false_ones() -> None:
    got = simulate(
        covered(counting=Counting.RUNNING, hours=500.0, faults=Process(rate=60, foreseen=0.5, precision=0.1)), 0
    )
    assert got.faults > 0
    assert (got.alarms, got.moves) == (0, 0)


# ---------------------------------------------------------------- what is counted


def test_a_pause_that_a_second_fault_turns_into_a_rollback_is_not_clean() -> None:
    job = covered(costs=Costs(coverage=0.5, covered_h=1.0))
    world, way = struck(job, Fault(5.0, 0, Cause.PROCESS, 1.0), Fault(5.5, 1, Cause.PROCESS, 1.0))
    draws = iter([0.0, 0.5, 1.0])  # covered, how far into a step, not covered
    world.chance = Drawn(draws)  # type: ignore[assignment]
    world.run()
    assert (world.verdicts[Resolution.CLEAN], world.verdicts[Resolution.FELL_BACK]) == (0, 1)
    assert isinstance(way, Covered)
    assert world.rollbacks == 1


def test_a_fault_in_a_planned_move_is_not_judged_by_an_earlier_one() -> None:
    """The first goes back to the checkpoint; the second, in the pause of a move, is covered."""
    job = covered(costs=Costs(coverage=0.5, move_h=1.0))
    world, _ = struck(job, Fault(5.0, 0, Cause.PROCESS, 1.0), Fault(10.5, 1, Cause.PROCESS, 1.0))
    world.chance = Drawn(iter([1.0, 0.0, 0.5]))  # type: ignore[assignment]
    world.after(10.0, world.warn, 3)
    world.run()
    assert world.rollbacks == 1


class Drawn:
    """A generator that draws what it is told."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def random(self) -> float:
        return float(next(self.values))


def test_refailures_are_not_reckoned_with_where_nothing_is_repaired() -> None:
    """Spares without end: nodes are not repaired, so none fails again, and the gaps are not stretched for it."""
    plain = Settings(gpus=1024, hours=2000.0, strategy=Strategy.RESTART, spares=None, faults=Process(rate=6.5))
    again = replace(plain, faults=Process(rate=6.5, refail_day=0.19, refail_week=0.29))
    assert [simulate(plain, seed).faults for seed in range(3)] == [simulate(again, seed).faults for seed in range(3)]


def test_all_ways_meet_the_same_faults() -> None:
    """Also where one of them only slows down when it loses a path, and others lose the node."""
    faults = Process(rate=20, path=0.3, refail_day=0.19, refail_week=0.29)
    plain = covered(gpus=256, hours=1000.0, spares=8, faults=faults)
    told = []
    for settings in (plain, replace(plain, failover=True), replace(plain, strategy=Strategy.RESTART)):
        world = World(settings, 0)
        world.handling = WAYS[settings.strategy](world)
        world.run()
        told.append([(fault.at_h, fault.node) for fault in [next(world._coming) for _ in range(3)]])
    assert told[0] == told[1] == told[2]
