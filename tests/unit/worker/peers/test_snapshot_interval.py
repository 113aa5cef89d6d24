"""Snapshot interval: how often snapshots are best taken, by what they cost and how often such jobs fail."""

from __future__ import annotations

import math
from typing import Any

import pytest

from torchrelay.errors import RefusedError
from torchrelay.worker.peers import snapshots
from torchrelay.worker.peers.snapshots import (
    AUTO,
    EVERY,
    FACTOR,
    FIRST,
    MOST_S,
    RANK_MTBF_S,
    SnapshotInterval,
    best_interval,
    interval,
    mtbf_s,
)

HOUR_S = 3600.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def alone(world: int, clock: Clock | None = None) -> SnapshotInterval:
    """A rank that the others agree with."""
    return SnapshotInterval(world, lambda values: values, clock or Clock())


def test_the_interval_is_youngs() -> None:
    # A node of 8 in a cluster of 16,384 GPUs: one fault in 3.1 hours. Each snapshot costs a fifth of a second.
    between = math.sqrt(2 * 0.2 * RANK_MTBF_S / 16_384)
    assert best_interval(0.2, 4.0, RANK_MTBF_S / 16_384) == round(between / 4.0) == 17


def test_what_costs_nothing_is_still_not_taken_all_the_time_and_what_costs_much_not_never() -> None:
    assert best_interval(0.0, 1.0, 3 * HOUR_S) == best_interval(snapshots.LEAST_COST_S, 1.0, 3 * HOUR_S) == 1
    assert best_interval(5.0, 1.0, 1e9) == MOST_S
    assert best_interval(0.1, 1_000.0, 3 * HOUR_S) == 1
    assert best_interval(0.1, 0.0, 3 * HOUR_S) > 0


def test_what_is_known_of_large_clusters_counts_as_one_fault_seen() -> None:
    assert mtbf_s(4, 0, 0.0) == RANK_MTBF_S / 4
    assert mtbf_s(16_384, 0, 0.0) == pytest.approx(3.1 * HOUR_S, rel=0.01)
    assert mtbf_s(16_384, 9, 7 * HOUR_S) == pytest.approx(1.01 * HOUR_S, rel=0.01)


def test_the_cost_is_what_a_step_with_a_snapshot_takes_longer() -> None:
    clock = Clock()
    found = alone(16_384, clock)
    for step in range(40):
        snapshot = step % 10 == 0
        clock.now += 2.2 if snapshot else 2.0
        if step == 25:
            clock.now += 60.0  # an evaluation: a median does not see it
        found.passed(snapshot=snapshot)
    calm = found.agree()
    assert calm == best_interval(0.2, 2.0, mtbf_s(16_384, 0, clock.now))
    for _ in range(6):
        found.renew()
    assert found.agree() == best_interval(0.2, 2.0, mtbf_s(16_384, 5, clock.now)) < calm


def test_time_in_which_all_stood_is_no_step() -> None:
    clock = Clock()
    found = alone(16_384, clock)
    for turn in range(3):
        found.renew()
        clock.now += 1_000.0 * turn
        for step in range(4):
            clock.now += 1.0 + step % 2
            found.passed(snapshot=step % 2 == 1)
    assert found.agree() == best_interval(1.0, 1.0, mtbf_s(16_384, 2, clock.now))


def test_only_steps_count() -> None:
    clock = Clock()
    found = alone(16_384, clock)
    for turn in range(80):
        clock.now += 0.01
        found.passed(snapshot=False, counts=False)  # a section
        clock.now += 60.0 if turn == 70 else 2.0
        found.passed(snapshot=turn % 10 == 0, counts=turn != 70)  # once rolled forward
    assert found.agree() == best_interval(0.0, 2.0, mtbf_s(16_384, 0, clock.now))


def test_they_agree_in_few_gates_and_anew_in_each_generation() -> None:
    found = alone(4)
    asked = []
    for count in range(60):
        if found.due(count):
            asked.append(count)
            found.agree()
    assert asked == [FIRST, FIRST * FACTOR, FIRST * FACTOR * FACTOR]
    found.renew()
    assert found.due(FIRST)
    assert not found.due(FIRST - 1)


def test_auto_begins_as_if_nothing_was_said() -> None:
    assert interval(AUTO, alone=True) == interval(None, alone=True) == EVERY
    assert interval(AUTO, alone=False) == 0


@pytest.mark.parametrize("given", ["often", -1, True, 2.5])
def test_other_words_are_refused(given: Any) -> None:
    with pytest.raises(RefusedError, match="snapshot_every is"):
        interval(given, alone=True)


def test_all_take_the_figures_of_whoever_has_it_worst() -> None:
    heard = []

    def largest(values: list[float]) -> list[float]:
        heard.append(values)
        return [0.4, 8.0, 3.0, 100.0]

    assert SnapshotInterval(4, largest, Clock()).agree() == best_interval(0.4, 8.0, mtbf_s(4, 3, 100.0))
    assert heard == [[0.0, 0.0, 0.0, 0.0]]
