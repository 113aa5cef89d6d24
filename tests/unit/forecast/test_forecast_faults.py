"""Forecast, faults: what is drawn has the rate, shape, bursts, lemons and repairs that were asked for."""

from __future__ import annotations

import math
from itertools import islice, pairwise, takewhile
from typing import Any

import numpy as np
import pytest

from tests.support.forecast_faults import NODES, drawn
from torchrelay.economics.formulas.rates import Unreasonable, mttf_h
from torchrelay.forecast.inputs.faults import Again, Cause, Gap, Process, Stream


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"gap": Gap.WEIBULL, "shape": 0.62},
        {"gap": Gap.UNIFORM},
        {"burst": 0.2, "burst_nodes": 3.0},
        {"switch": 0.05, "switch_nodes": 16},
        {"lemons": 0.1},
        {"process": 0.3, "path": 0.2},
    ],
    ids=str,
)
def test_the_rate_is_what_was_asked_for(given: dict[str, Any]) -> None:
    faults = drawn(20_000, rate=5.0, **given)
    mean = faults[-1].at_h / len(faults)
    assert mean == pytest.approx(mttf_h(NODES, 5.0, 1), rel=0.06)


def test_faults_come_in_order_of_time() -> None:
    faults = drawn(5_000, burst=0.5, burst_nodes=5.0, burst_h=10.0, rate=50.0)
    assert all(one.at_h <= two.at_h for one, two in pairwise(faults))


def test_a_switch_takes_all_its_nodes_at_once() -> None:
    by_time: dict[float, set[int]] = {}
    for fault in drawn(3_200, switch=1.0, switch_nodes=16):
        assert fault.cause is Cause.SWITCH
        by_time.setdefault(fault.at_h, set()).add(fault.node)
    assert all(len(nodes) == 16 and max(nodes) - min(nodes) == 15 for nodes in list(by_time.values())[:-1])


def test_bursts_begin_within_minutes() -> None:
    alone = np.diff([fault.at_h for fault in drawn(8_000, rate=1.0)])
    bursty = np.diff([fault.at_h for fault in drawn(8_000, rate=1.0, burst=0.2)])
    assert (alone < 0.05).mean() < 0.01
    assert (bursty < 0.05).mean() > 0.15


def test_repairs_are_log_normal_with_this_median_and_p90() -> None:
    repairs = [fault.repair_h for fault in drawn(20_000, repair_median_h=20.0, repair_p90_h=312.0)]
    assert np.median(repairs) == pytest.approx(20, rel=0.05)
    assert np.quantile(repairs, 0.9) == pytest.approx(312, rel=0.1)


def test_refailures_have_their_shares() -> None:
    again = Again(Process(refail_day=0.19, refail_week=0.29), 3)
    drawn = [again.draw(number % NODES) for number in range(20_000)]
    hours = [math.inf if one is None else one[0] for one in drawn]
    day = sum(one <= 24 for one in hours) / len(hours)
    week = sum(one <= 168 for one in hours) / len(hours)
    assert day == pytest.approx(0.19, abs=0.01)
    assert week == pytest.approx(0.29, abs=0.01)


def test_what_a_node_does_after_its_repair_takes_nothing_from_the_draws_of_another() -> None:
    one, two = (Again(Process(refail_day=0.5, refail_week=0.9), 3) for _ in range(2))
    for _ in range(5):
        one.draw(1)
    assert [one.draw(2) for _ in range(20)] == [two.draw(2) for _ in range(20)]


def test_a_run_with_bursty_gaps_does_not_begin_with_a_fault() -> None:
    """8 nodes for a month: 1.58 faults, as the rate says; begun at a fault it would be 2.2."""
    process = Process(rate=6.5, gap=Gap.WEIBULL, shape=0.62)
    runs = (Stream(process, 8, None, np.random.default_rng([seed, 1])) for seed in range(2_000))
    counts = [sum(1 for _ in takewhile(lambda fault: fault.at_h < 730, run)) for run in runs]
    assert np.mean(counts) == pytest.approx(730 / mttf_h(8, 6.5, 1), rel=0.08)


@pytest.mark.parametrize(
    ("nodes", "given"), [(18, {"switch": 1.0, "switch_nodes": 16}), (3, {"burst": 1.0}), (2, {"burst": 1.0})], ids=str
)
def test_the_rate_is_what_was_asked_for_with_few_nodes(nodes: int, given: dict[str, Any]) -> None:
    stream = Stream(Process(rate=6.5, **given), nodes, None, np.random.default_rng(4))
    faults = list(islice(iter(stream), 20_000))
    assert faults[-1].at_h / len(faults) == pytest.approx(mttf_h(nodes, 6.5, 1), rel=0.03)


def test_the_same_seed_gives_the_same_faults() -> None:
    given: dict[str, Any] = {"burst": 0.3, "lemons": 0.1, "switch": 0.01, "foreseen": 0.5}
    assert drawn(500, seed=7, **given) == drawn(500, seed=7, **given)
    assert drawn(500, seed=7, **given) != drawn(500, seed=8, **given)


def test_without_a_rate_nothing_ever_fails() -> None:
    assert drawn(1, rate=0.0) == []


def test_a_foreseen_fault_has_its_lead() -> None:
    leads = [fault.lead_h for fault in drawn(4_000, foreseen=0.4, lead_h=0.5)]
    assert set(leads) == {0.0, 0.5}
    assert sum(lead > 0 for lead in leads) / len(leads) == pytest.approx(0.4, abs=0.03)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"rate": -1.0}, "rate"),
        ({"rate": math.nan}, "rate"),
        ({"shape": 0.0}, "shape"),
        ({"burst": 1.5}, "burst"),
        ({"repair_median_h": 400.0}, "repair_p90_h"),
        ({"refail_day": 0.5, "refail_week": 0.2}, "refail_week"),
        ({"refail_day": 0.5, "refail_week": 1.0}, "refail_week"),
        ({"rate": math.inf}, "rate"),
        ({"shape": math.inf}, "shape"),
        ({"shape": 0.005}, "shape"),
        ({"lemon_times": math.inf}, "lemon_times"),
        ({"precision": 0.0}, "precision"),
        ({"switch": 0.5, "process": 0.6}, "switch"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, object], named: str) -> None:
    with pytest.raises(Unreasonable, match=named):
        Process(**given)  # type: ignore[arg-type]
