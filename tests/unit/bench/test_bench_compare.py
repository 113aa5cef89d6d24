"""The bench `compare`: its schedule, and the figures that it makes of what ranks have written down."""

from __future__ import annotations

import math
import random
import statistics
from itertools import pairwise

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from compare_figures import (
    Line,
    Struck,
    bits_equal,
    end_ns,
    figures,
    first_together_ns,
    goodput,
    kept,
    once_and_never,
    pause_s,
    repeated,
    samples_end_ns,
    steady_s,
)
from compare_phases import AGAIN, FIRST, medians, phases
from compare_schedule import (
    LAST,
    MIX,
    MTTF_MIN,
    PER_JOB,
    Fault,
    What,
    arithmetic,
    faults,
    naive_interval,
    tuned_interval,
)
from tests.support.bench_compare import PLAIN, RANKS, World, dated, fewer, left, restarted, with_ledger

# ---------------------------------------------------------------- the schedule


def test_the_rate_is_that_of_the_field_test() -> None:
    assert pytest.approx(59.08, abs=0.01) == MTTF_MIN
    assert pytest.approx(6.6, abs=0.01) == PER_JOB
    assert "one per 59 minutes" in arithmetic(1000, PER_JOB, 0.05)
    assert "a fault every 151 steps (7.6 s)" in arithmetic(1000, PER_JOB, 0.05)


@given(st.integers(0, 10_000), st.integers(300, 5_000))
@example(339, 321)  # the last one lies before the limit and is rounded to behind it
def test_a_schedule_holds_each_kind_spares_rank_0_and_ends_before_the_job(seed: int, steps: int) -> None:
    found = faults(seed, steps)
    assert found == faults(seed, steps)
    assert {fault.what for fault in found[:6]} >= {fault.what for fault in found}
    if len(found) >= len(MIX):
        assert {fault.what for fault in found} == set(What)
    assert all(0 not in fault.ranks for fault in found)
    assert all(0 < fault.step <= LAST * steps for fault in found)
    gaps = [after.step - before.step for before, after in pairwise(found)]
    assert all(0.75 * steps / PER_JOB - 1 <= gap <= 1.25 * steps / PER_JOB + 1 for gap in gaps)


def test_seeds_differ() -> None:
    assert len({faults(seed, 1000) for seed in range(20)}) == 20


def test_a_node_takes_two_ranks() -> None:
    assert Fault(5, What.NODE, 2).ranks == (2, 3)
    assert Fault(5, What.KILL, 1).ranks == (1,)


def test_too_short_a_job_is_refused() -> None:
    with pytest.raises(ValueError, match="100 steps are too few for 6"):
        faults(1, 100)


def test_the_tuned_interval_is_the_best_one_of_a_job_that_pays_for_copies_and_for_lost_steps() -> None:
    step_s, copy_s, steps, per_job = 0.05, 0.01, 2000, 6.6

    def cost(every: int) -> float:
        return steps / every * copy_s + per_job * every / 2 * step_s

    best = min(range(1, 400), key=cost)
    found = tuned_interval(steps, per_job, step_s, copy_s=copy_s, write_s=0.0)
    assert cost(found) <= 1.02 * cost(best)
    assert naive_interval(steps) == 67


def test_a_checkpoint_is_written_before_the_next_one_begins() -> None:
    assert tuned_interval(2000, 6.6, 0.05, copy_s=0.001, write_s=3.0) == 120


# ---------------------------------------------------------------- figures


def test_steps_done_again_are_lost_and_their_samples_count_once() -> None:
    world = restarted()
    world.lines[2].pop(19)  # killed before it had written down its last step
    found = figures(world.seen(), PLAIN)
    assert found.lost_steps == found.repeated_steps == 4
    assert found.refused_steps == 0
    assert (found.once_share, found.skipped_samples_share) == (1.0, 0.0)
    assert found.jct_s == found.jct_samples_s == pytest.approx(1.9 + 3.0 + 2.4)
    assert found.ettr == pytest.approx(3.9 / 7.3)
    assert found.unplanned_pause_p50_s == pytest.approx(3.0)
    assert found.bit_equal is True


def test_a_batch_of_a_missing_replica_is_skipped_and_more_steps_make_up_for_the_samples() -> None:
    seen = fewer().seen("other")
    found = figures(seen, PLAIN)
    assert (found.lost_steps, found.refused_steps) == (1, 1)
    assert found.once_share == pytest.approx(150 / 160)
    assert found.skipped_samples_share == pytest.approx(10 / 160)
    assert found.jct_s is not None
    assert found.jct_s == pytest.approx(1.9 + 1.0 + 1.0 + 1.0)
    assert found.jct_samples_s == pytest.approx(found.jct_s + 0.3)  # 10 batches: three more steps of four
    assert found.bit_equal is False
    assert found.bit_equal_early is True
    assert found.whole_again_p50_s == pytest.approx(2.1)


def test_a_sample_that_is_in_the_model_twice_is_not_there_once() -> None:
    world = World(steps=20)
    world.train(0, 20)
    world.lines[1][10] = Line(11, world.lines[1][10].at_ns, 0, 9 * RANKS + 1, 3, 1, 1)
    for rank in (0, 2, 3):
        old = world.lines[rank][10]
        world.lines[rank][10] = Line(11, old.at_ns, 0, old.batch, 3, 1, 1)
    once, never = once_and_never(world.seen())
    assert once == pytest.approx(78 / 80)  # the one twice, and the one that it came in place of
    assert never == pytest.approx(1 / 80)


def test_what_was_under_way_may_still_be_done_and_is_no_end_of_the_pause() -> None:
    world = World()
    world.train(0, 20)
    world.wait(0.05)
    world.lose(What.KILL, 2)
    world.wait(-0.05)
    world.train(20, 21)  # its gradients had been given before
    world.wait(2.0)
    world.train(21, 40)
    assert pause_s(world.seen(), 0, 0.1) == pytest.approx(2.0)


def test_a_pause_is_put_down_to_the_fault_before_it() -> None:
    world = World()
    world.train(0, 15)
    world.lose(What.KILL, 2)
    world.wait(0.5)
    world.train(15, 25)
    world.lose(What.STOP, 3)
    world.wait(2.0)
    world.train(25, 40)
    seen = world.seen()
    assert [pause_s(seen, at, 0.1) for at in (0, 1)] == [pytest.approx(0.5), pytest.approx(2.0)]
    found = figures(seen, PLAIN)
    assert found.hang_pause_s == pytest.approx(2.0)
    assert found.unplanned_pause_p50_s == pytest.approx(1.25)


def test_the_pause_of_a_fault_in_the_middle_of_a_step_is_not_put_down_to_the_one_before_it() -> None:
    world = World()
    world.train(0, 15)
    for what, rank, pause in ((What.KILL, 2, 0.3), (What.STOP, 3, 2.0)):
        world.wait(0.03)  # faults come while a step is under way
        world.lose(what, rank)
        world.wait(pause)
        world.train(15, 25) if what is What.KILL else world.train(25, 40)
    seen = world.seen()
    assert [pause_s(seen, at, 0.1) for at in (0, 1)] == [pytest.approx(0.3), pytest.approx(2.0)]
    first = seen.struck[0]
    assert first_together_ns(seen, 0) == first.at_ns + round(0.4e9)


def test_who_never_goes_on_has_no_pause_and_no_end() -> None:
    world = World()
    world.train(0, 20)
    world.lose(What.KILL, 2)
    seen = world.seen()
    assert pause_s(seen, 0, 0.1) is None
    assert first_together_ns(seen, 0) is None
    assert end_ns(seen) is None
    assert samples_end_ns(seen) is None
    found = figures(seen, PLAIN)
    assert found.jct_s is found.ettr is found.once_share is None


@pytest.mark.parametrize(("back", "done", "known"), [(0, 9, False), (0, 10, True), (15, 9, False), (15, 10, True)])
def test_who_ends_right_after_a_fault_did_not_get_over_it(back: int, done: int, known: bool) -> None:
    """Some steps may have been under way; those that are done again are done, too."""
    world = World()
    world.train(0, 10)
    world.lose(What.KILL, 1)
    world.wait(0.5)
    world.train(10, 20)
    world.lose(What.STOP, 2)
    world.wait(0.01)
    world.mark("loaded")
    world.train(20 - back, 20 - back + done)
    seen = msgspec.structs.replace(world.seen(), reason="ended with code 1")
    assert (pause_s(seen, 1, 0.1) is not None) is known
    assert (first_together_ns(seen, 1) is not None) is known
    assert bool(phases(seen, What.STOP)) is known
    assert (figures(seen, PLAIN).hang_pause_s is not None) is known
    assert pause_s(seen, 0, 0.1) == pytest.approx(0.5)  # it got over the one before


def test_who_did_the_last_step_got_over_a_fault_right_before_it() -> None:
    world = World()
    world.train(0, 37)
    world.lose(What.STOP, 2)
    world.wait(0.7)
    world.train(37, 40)
    seen = msgspec.structs.replace(world.seen(), reason="ended with code 90")
    assert pause_s(seen, 0, 0.1) == pytest.approx(0.7)


def test_bits_are_equal_if_those_of_all_ranks_are() -> None:
    assert bits_equal(["a"] * 4, 4, "a") is True
    assert bits_equal(["a"] * 3, 4, "a") is None
    assert bits_equal([], 4, "a") is None
    assert bits_equal(["a", "a", "a", "b"], 4, "a") is bits_equal(["b"], 4, "a") is False


def test_a_pause_is_there_though_no_usual_step_was_seen() -> None:
    world = restarted()
    world.lines = {
        rank: [msgspec.structs.replace(row, together=3) for row in rows] for rank, rows in world.lines.items()
    }
    found = figures(world.seen(), PLAIN)
    assert math.isnan(found.step_s)
    assert found.unplanned_pause_p50_s == pytest.approx(3.0)


def test_the_steady_step_is_taken_before_the_first_fault() -> None:
    world = restarted()
    assert steady_s(world.seen()) == pytest.approx(0.1)
    world.struck[0] = Struck(what=What.KILL, ranks=(2,), at_ns=0, step=3)
    assert math.isnan(steady_s(world.seen()))


def test_goodput_sums_up_to_all_that_is_in_the_model() -> None:
    seen = restarted().seen()
    window = 0.25
    points = goodput(seen, 0.1, window)
    assert sum(share for _, share in points) * window / 0.1 == pytest.approx(39, abs=1)  # the first one is before
    assert min(share for _, share in points) == 0.0
    assert max(share for _, share in points) <= 1.5


@given(st.integers(0, 1000))
def test_whatever_is_done_again_no_batch_is_counted_twice(seed: int) -> None:
    dice, world, at = random.Random(seed), World(), 0
    while at < world.steps:
        to = min(world.steps, at + dice.randint(1, 12))
        world.train(at, to)
        at = to if to == world.steps or dice.random() < 0.5 else dice.randint(max(0, to - 8), to)
    seen = world.seen()
    assert once_and_never(seen) == (1.0, 0.0)
    assert sum(len(batches) for _, batches in kept(seen).values()) == world.steps * RANKS
    assert repeated(seen) == len(world.lines[0]) - world.steps


# ---------------------------------------------------------------- phases


def test_a_restart_is_split_by_the_marks_of_its_processes() -> None:
    world = restarted()
    (found,) = phases(world.seen())
    assert list(found.values()) == [pytest.approx(value) for value in (0.5, 2.0, 0.25, 0.25, 0.1, 0.4)]
    assert found[FIRST] == pytest.approx(0.1)
    assert found[AGAIN] == pytest.approx(0.4)


def test_who_goes_on_with_fewer_stands_and_is_whole_again() -> None:
    (found,) = phases(fewer().seen())
    assert found["stand until timeouts are over"] == pytest.approx(0.9 + 0.1)
    assert found["train with fewer"] == pytest.approx(1.1)


def test_ours_are_told_by_the_ledger_whatever_number_of_incidents_a_fault_made() -> None:
    seen = left().seen()
    leave, kill = seen.struck
    first, again = dated(kill.at_ns + 10**7, detect=20, restore=70), dated(kill.at_ns + 10**9, detect=5)
    assert phases(with_ledger(seen, again, first)) == [{"detect": 0.025, "restore": 0.07}]
    assert phases(with_ledger(seen, again, first), What.LEAVE) == []
    told = with_ledger(seen, dated(leave.at_ns, stand=10), dated(kill.at_ns - 10**6, detect=3))
    assert (phases(told), phases(told, What.LEAVE)) == ([{"detect": 0.003}], [{"stand": 0.01}])


def test_medians_keep_the_order_of_the_phases() -> None:
    assert list(medians([{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 4.0, "c": 5.0}]).items()) == [
        ("a", 2.0),
        ("b", 3.0),
        ("c", 2.5),
    ]


def test_the_mean_of_the_gaps_is_that_of_the_rate() -> None:
    firsts = [faults(seed, 10_000)[0].step for seed in range(400)]
    assert statistics.mean(firsts) == pytest.approx(10_000 / PER_JOB, rel=0.02)
