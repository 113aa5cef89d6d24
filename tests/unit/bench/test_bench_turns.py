"""The bench `turns`: when its jobs wait, and the figures that it makes of what they have written down."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compare_schedule import AFTER, BEFORE, TURN, Fault, What, faults, turns
from tests.support.bench_turns import NAMES, PLAN, RANKS, S, job, jobs
from turns_figures import Turn, calm, firsts, flat_of, interval, job_of, over_bound


@given(st.integers(0, 10_000), st.integers(265, 6000))
def test_no_job_waits_around_a_fault_and_all_steps_are_in_a_turn(seed: int, steps: int) -> None:
    schedule = faults(seed, steps)
    plan = turns(schedule, steps)
    assert (plan[0], plan[-1]) == (1, steps)
    assert all(before < after for before, after in pairwise(plan))
    for fault in schedule:
        assert not any(-BEFORE <= at - fault.step < AFTER for at in plan[1:-1])


def test_without_a_fault_nearby_a_turn_has_25_steps() -> None:
    assert turns((Fault(61, What.KILL, 1),), 250) == (1, 25, 50, 175, 200, 225, 250)
    assert turns((Fault(60, What.KILL, 1),), 250) == (1, 25, 175, 200, 225, 250)
    assert turns((), TURN) == (1, TURN)


def test_a_jobs_time_is_that_of_its_turns_and_not_of_others() -> None:
    assert job("plain", [5.0, 6.0, 7.0]).took == pytest.approx([5.0, 6.0, 7.0], abs=1e-5)
    assert job("plain", [5.0, 6.0, 7.0], rest_s=500).took == pytest.approx([5.0, 6.0, 7.0], abs=1e-5)


def test_what_the_waiting_jobs_use_of_the_cores_is_taken_off() -> None:
    found = job("plain", [5.0, 6.0, 7.0], waiting_s=0.1)
    assert found.took == pytest.approx([5.0 - 0.15, 6.0 - 0.15, 7.0 - 0.15], abs=1e-4), "three others, two cores"
    ours = [job(name, [5.0, 5.0, 5.0], waiting_s=0.1, cpu_s=10.0 if "relay" in name else 8.0) for name in NAMES[:3]]
    figures = flat_of(ours, PLAN)
    assert figures["torchrelay_spares_waiting_cpu"] == pytest.approx(0.01)
    assert figures["plain_waiting_cpu"] == pytest.approx(0.01)
    assert figures["torchrelay_spares_cpu_ratio"] == pytest.approx(1.25)


def test_by_its_own_clock_a_job_has_no_gap_where_others_have_their_turns() -> None:
    for rest_s in (0.5, 500.0):
        found = job("torchrelay-spares", [9.9, 20.0, 10.0], struck=(99, 150), rest_s=rest_s)
        stamps = [row.at_ns / S for row in found.seen.lines[0]]
        gaps = [after - before for before, after in pairwise(stamps)]
        assert gaps == pytest.approx([0.1] * 99 + [0.2] * 100 + [0.1] * 100, abs=1e-4)
        assert [fault.at_ns / S for fault in found.seen.struck] == pytest.approx([9.8, 19.9], abs=1e-4)


def test_a_turn_that_a_rank_did_not_begin_or_end_is_no_time() -> None:
    found = job("plain", [5.0, 6.0, 7.0])
    begins = [Turn(first, 0) for first in PLAN[:-1] for _ in range(RANKS)]
    with pytest.raises(ValueError, match="3 ranks of some began after step 1"):
        job_of("some", "", found.seen, begins[1:], PLAN, [], 2)
    found.seen.lines[3].pop()
    with pytest.raises(ValueError, match="3 did step 300"):
        job_of("some", "", found.seen, begins, PLAN, [], 2)


def test_a_turn_that_a_ranks_next_holder_tells_again_has_begun_once() -> None:
    told = [Turn(1, 5), Turn(25, 50), Turn(25, 70), Turn(50, 90)]
    assert firsts(told) == [Turn(1, 5), Turn(25, 50), Turn(50, 90)]


def test_the_bound_is_the_plain_time_and_a_second_for_each_fault() -> None:
    assert over_bound([50.0, 56.0], [50.0, 50.0], 6) == 1.0
    figures = flat_of(jobs(spans=[5.1, 7.1, 5.1], struck=(150,)), PLAN)
    assert figures["plain_jct_s"] == pytest.approx(15.3, abs=1e-4)
    assert figures["plain_ratio"] == pytest.approx(1.04, abs=1e-4)
    assert figures["torchrelay_spares_over_bound"] == pytest.approx(17.3 / 16.3, abs=1e-4)
    assert figures["torchrelay_spares_step_ratio"] == pytest.approx(1.0, abs=1e-4)
    assert figures["torchrelay_spares_lost_steps"] == 0
    assert figures["torchrelay_spares_bit_equal"] is True
    assert figures["torchrelay_spares_once_share"] == 1.0


def test_a_turn_with_a_fault_is_not_calm_and_is_never_drawn_anew() -> None:
    found = job("torchrelay-spares", [5.1, 9.0, 5.1], struck=(150,))
    assert calm(found, PLAN) == [0, 2]
    low, high = interval(found, [5.0, 5.0, 5.0], PLAN)
    assert low == pytest.approx(high, abs=1e-5), "both calm turns are alike"
    assert low == pytest.approx(19.2 / 16, abs=1e-4)
    low, high = interval(job("torchrelay-spares", [5.0, 9.0, 6.0], struck=(150,)), [5.0, 5.0, 5.0], PLAN)
    assert (low, high) == pytest.approx((19 / 16, 21 / 16), abs=1e-4)


def test_what_a_step_takes_longer_is_that_of_the_calm_turns() -> None:
    figures = flat_of(jobs(spans=[5.2, 9.0, 5.3], struck=(150,)), PLAN)
    assert figures["torchrelay_spares_step_longer_ms"] == pytest.approx((100 / 99 + 2) / 2, abs=1e-2)


def test_a_job_without_a_calm_turn_has_no_ratio_of_steps() -> None:
    figures = flat_of(jobs(spans=[6.0, 6.0, 6.0], struck=(50, 150, 250)), PLAN)
    assert figures["torchrelay_spares_step_ratio"] is None
    assert figures["torchrelay_spares_step_longer_ms"] is None
    assert figures["torchrelay_spares_over_bound_low"] == figures["torchrelay_spares_over_bound"]


def test_other_bits_are_told_and_plain_jobs_of_two_minds_end_it() -> None:
    figures = flat_of(jobs(spans=[5.0, 5.0, 5.0], digest="e"), PLAN)
    assert figures["torchrelay_spares_bit_equal"] is False
    some = jobs(spans=[5.0, 5.0, 5.0])
    some[1] = msgspec.structs.replace(some[1], seen=msgspec.structs.replace(some[1].seen, digests=["e"] * RANKS))
    with pytest.raises(ValueError, match="2 results"):
        flat_of(some, PLAN)
