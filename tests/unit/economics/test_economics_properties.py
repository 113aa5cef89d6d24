"""Economics, for any numbers: more failures never cost less, shares stay shares, and the best interval is the best."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from torchrelay.economics.formulas.bill import Cluster, Form, bill
from torchrelay.economics.formulas.intervals import daly_h, young_h
from torchrelay.economics.formulas.loss import Recovery, coverage_needed, linear_loss, loss_h, renewal_ettr
from torchrelay.economics.formulas.rates import Counting, mttf_h, rate_per_1000_node_days

SHARES = st.floats(0, 1)
HOURS = st.floats(0.01, 1000)
RATES = st.floats(0.01, 1000)
GPUS = st.integers(1, 200_000)
RECOVERIES = st.builds(
    Recovery,
    interval_h=st.floats(0.01, 24),
    replacement_h=st.floats(0, 2),
    restore_h=st.floats(0, 1),
    startup_h=st.floats(0, 1),
    coverage=SHARES,
    downtime_h=st.floats(0, 1),
    save_h=st.floats(0, 0.5),
    retry_share=st.floats(0, 0.9),
    step_overhead=st.floats(0, 1),
)


@given(GPUS, RATES)
def test_rates_and_times_are_inverse(gpus: int, rate: float) -> None:
    assert rate_per_1000_node_days(gpus, mttf_h(gpus, rate)) == pytest.approx(rate)


@given(RECOVERIES, RATES, RATES, st.sampled_from(Counting), st.sampled_from(Form))
def test_more_failures_never_cost_less(
    recovery: Recovery, one: float, other: float, counting: Counting, form: Form
) -> None:
    few, many = sorted((one, other))
    costs = [
        bill(Cluster(mttf_h=mttf_h(1024, rate), counting=counting), recovery, form).lost_dollars for rate in (few, many)
    ]
    assert costs[0] <= costs[1] * (1 + 1e-9) + 1e-6


@given(RECOVERIES, HOURS, st.sampled_from(Counting), st.sampled_from(Form))
def test_nothing_is_gained_by_failing(recovery: Recovery, hours: float, counting: Counting, form: Form) -> None:
    found = bill(Cluster(mttf_h=hours, counting=counting), recovery, form)
    assert found.lost_share >= -1e-12
    assert found.loss_per_failure_h >= 0
    assert found.lost_dollars >= -1e-6
    assert 0 <= found.ettr <= 1


@given(RECOVERIES, st.floats(1e-4, 1e4), st.sampled_from(Counting))
def test_the_useful_share_is_a_share(recovery: Recovery, hours: float, counting: Counting) -> None:
    assert 0 <= renewal_ettr(recovery, hours, counting) <= 1


@given(RECOVERIES, st.floats(50, 1000))
def test_both_forms_agree_for_small_products(recovery: Recovery, times: float) -> None:
    """The difference is of second order in what is lost; slower steps and saves are taken out, as they multiply."""
    plain = replace(recovery, save_h=0.0, step_overhead=0.0)
    hours = times * (plain.interval_h + plain.bring_up_h + plain.downtime_h)
    linear, exact = linear_loss(plain, hours), 1 - renewal_ettr(plain, hours, Counting.WALL)
    assert linear == pytest.approx(exact, abs=2 / times**2)


@given(RECOVERIES, HOURS)
def test_failures_during_recoveries_cost_more(recovery: Recovery, hours: float) -> None:
    # A failure that cuts a covered downtime short is cheap if starting again takes no time at all.
    assume(recovery.replacement_h + recovery.restore_h + recovery.startup_h >= recovery.downtime_h)
    in_wall, in_running = (renewal_ettr(recovery, hours, each) for each in (Counting.WALL, Counting.RUNNING))
    assert in_wall <= in_running + 1e-12


@given(RECOVERIES, SHARES)
def test_covering_more_loses_less_if_a_migration_is_the_shorter(recovery: Recovery, coverage: float) -> None:
    assume(recovery.downtime_h <= recovery.interval_h / 2 + recovery.bring_up_h)
    more = replace(recovery, coverage=max(coverage, recovery.coverage))
    assert loss_h(more) <= loss_h(recovery) + 1e-9


@given(st.floats(0.001, 0.1), st.floats(1, 1000), SHARES.filter(lambda share: share < 0.999), st.floats(0.2, 5))
def test_youngs_interval_is_the_best_of_the_linear_form(
    save_h: float, hours: float, coverage: float, factor: float
) -> None:
    """Of `(1-c) * I/2M + s/I`, which is what the interval costs; no other does better."""

    def lost(interval_h: float) -> float:
        recovery = Recovery(interval_h=interval_h, coverage=coverage)
        return linear_loss(recovery, hours) + save_h / interval_h

    best = young_h(save_h, hours, coverage)
    assert lost(best) <= lost(best * factor) + 1e-12


@given(st.floats(0.001, 0.1), st.floats(2, 1000), st.floats(0.2, 5), st.floats(0, 0.5))
def test_dalys_interval_is_the_best_of_the_renewal_form(
    save_h: float, hours: float, factor: float, bring_up_h: float
) -> None:
    """To a thousandth: it is a series, cut off."""

    def useful(interval_h: float) -> float:
        return renewal_ettr(Recovery(interval_h=interval_h, save_h=save_h, replacement_h=bring_up_h), hours)

    best = daly_h(save_h, hours)
    assert useful(best) >= useful(best * factor) - 1e-3


@given(st.floats(0.01, 1), SHARES, st.floats(0, 1))
def test_the_coverage_that_is_needed_is_just_enough(allowed_h: float, share: float, more_h: float) -> None:
    downtime_h, restart_h = share * allowed_h, allowed_h + more_h
    needed = coverage_needed(allowed_h, downtime_h, restart_h)
    assert 0 <= needed <= 1
    recovery = Recovery(interval_h=2 * restart_h, coverage=needed, downtime_h=downtime_h)
    assert loss_h(recovery) == pytest.approx(allowed_h)


@given(st.floats(0.001, 1), st.floats(1, 100), SHARES, SHARES)
def test_more_coverage_never_makes_checkpoints_denser(save_h: float, hours: float, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert young_h(save_h, hours, low) <= young_h(save_h, hours, high)
    assert math.isinf(young_h(save_h, hours, 1.0))
