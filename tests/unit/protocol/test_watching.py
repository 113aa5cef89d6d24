"""Watching: at which limits the failure detector looks at all, and what it does not know."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.failure_detector import JOB, NOW, SPARE, Ward, ahead, cluster, evidence, pulse
from torchrelay.protocol.health.failure_detector import anybody_still, begun
from torchrelay.protocol.health.pulses import BEAT_MS, FRESH_MS, FailureDetector, Pulse, feel
from torchrelay.protocol.health.stalls import Spot
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.ids import START, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.table import Table

IN_BARRIER, IN_REDUCE = Spot("train.py:50", "barrier"), Spot("train.py:60", "all_reduce")


def known(*pulses: Pulse) -> FailureDetector:
    return FailureDetector(pulses=Table((each.sample.worker, each) for each in pulses))


def strayed(ward: Ward) -> bool:
    """Whether a rank was found at another call than the others."""
    return any(isinstance(event, ev.WorkerRaised) for event in ward.alarms)


# ---------------------------------------------------------------- whether there is anything to look at


def test_who_has_stood_for_three_seconds_is_looked_at() -> None:
    assert anybody_still(known(pulse(still=3_000)), cluster())
    assert not anybody_still(known(pulse(still=2_999)), cluster())


def test_a_spare_and_a_worker_that_has_ended_always_stand() -> None:
    ended = pulse(still=9_000)
    ended = replace(ended, sample=replace(ended.sample, worker=WorkerId("ended")))
    assert not anybody_still(known(pulse(SPARE, still=9_000), ended), cluster())


def test_samples_come_without_a_gap_if_they_come_within_two_beats() -> None:
    before = pulse()
    assert feel(before, before.sample, NOW + FRESH_MS - 1).back_ms == before.back_ms
    assert feel(before, before.sample, NOW + FRESH_MS).back_ms == NOW + FRESH_MS


def test_who_has_committed_nothing_has_come_as_far_as_the_start() -> None:
    assert begun(pulse(point=None, collectives=7)) == (START, 7)


# ---------------------------------------------------------------- ranks at different calls


def in_different_calls(ward: Ward, **fields: Any) -> Ward:
    """Rank 2 computes, the others are in a section."""
    for rank in range(4):
        ward.set(rank, phase=WorkerPhase.COMPUTING if rank == 2 else WorkerPhase.SECTION, **fields)
    return ward


@pytest.mark.parametrize(("step_ms", "limit_ms"), [(1_000.0, 5_000), (5_000.0, 15_000), (400_000.0, 600_000)])
def test_it_takes_three_steps_between_five_seconds_and_ten_minutes(step_ms: float, limit_ms: int) -> None:
    ward = in_different_calls(Ward())
    ward.set(1, step_ms=step_ms)  # the longest of all
    ward.live(limit_ms)
    assert not strayed(ward)
    ward.live(BEAT_MS)
    assert strayed(ward)


@pytest.mark.parametrize(("beat_ms", "known_to_stand"), [(1_999, True), (2_000, False)])
def test_who_says_nothing_for_two_seconds_may_be_elsewhere(beat_ms: int, known_to_stand: bool) -> None:
    ward = in_different_calls(Ward())
    ward.set(2, beat_ms=beat_ms)
    ward.live(10_000)
    assert strayed(ward) is known_to_stand


@pytest.mark.parametrize("phase", [JobPhase.AGREEING, JobPhase.QUIESCING])
def test_nobody_has_strayed_while_all_are_asked_to_stop(phase: JobPhase) -> None:
    ward = in_different_calls(Ward())
    ward.cluster = ward.cluster.with_job(replace(ward.cluster.jobs[JOB], phase=phase))
    ward.live(10_000)
    assert not strayed(ward)


def test_one_whose_rank_its_agent_does_not_know_yet_has_not_strayed() -> None:
    ward = in_different_calls(Ward())
    ward.samples[Rank(2)] = replace(ward.samples[Rank(2)], rank=None)
    ward.live(10_000)
    assert not strayed(ward)


def test_other_collectives_of_the_same_number_are_found_by_their_numbers() -> None:
    for later, found in ((0, True), (1, False)):
        ward = Ward()
        for rank in range(4):
            ward.set(rank, phase=WorkerPhase.BETWEEN, spot=IN_REDUCE)
        ward.set(2, spot=IN_BARRIER, collectives=ward.samples[Rank(2)].collectives + later)
        ward.live(10_000)
        assert strayed(ward) is found


def test_other_collectives_in_a_group_of_some_ranks_are_found_as_well() -> None:
    ward = Ward()
    for rank, call in ((0, "barrier"), (1, "all_reduce")):
        ward.set(rank, phase=WorkerPhase.BETWEEN, groups=((77, 3),), spot=Spot("train.py:70", call, 77))
    ward.live(10_000)
    assert strayed(ward)


@pytest.mark.parametrize("busy", [(), (0,)])
def test_in_a_backward_pass_only_one_that_computes_nothing_waits_for_who_has_ended(busy: tuple[int, ...]) -> None:
    ward = Ward()
    for rank in range(4):
        ward.set(rank, phase=WorkerPhase.BETWEEN)
    ward.set(0, spot=Spot("train.py:40", "backward"))
    ward.set(1, phase=WorkerPhase.FINISHED)
    ward.live(10_000, busy=busy)
    assert strayed(ward) is not bool(busy)


# ---------------------------------------------------------------- hangs


@pytest.mark.parametrize(("spot", "where"), [(None, ""), (Spot(), ""), (Spot("train.py:50"), " at train.py:50")])
def test_where_it_hangs_is_told_if_that_is_known(spot: Spot | None, where: str) -> None:
    told = evidence(pulse(still=10_000, spot=spot), ahead(0, still=10_000))
    assert told.startswith(f"standing still{where} for 10.0 s while others wait for it")


def test_nobody_is_seen_to_wait_whose_rank_is_not_known_yet() -> None:
    waits = ahead(0, still=20_000)
    assert evidence(pulse(still=20_000), waits) != ""
    assert evidence(pulse(still=20_000), replace(waits, sample=replace(waits.sample, rank=None))) == ""


def test_of_shards_that_nobody_has_named_it_is_not_known_whether_another_has_them() -> None:
    seats = cluster().jobs[JOB].seats
    standing = replace(seats[Rank(0)], ready=True, holds=Point(10), shard="")
    there = seats.put(Rank(0), standing).put(Rank(1), replace(seats[Rank(1)], shard=""))
    for still, found in ((4_999, False), (5_000, True)):
        told = evidence(pulse(still=still), phase=JobPhase.PREPARING, seats=there, resume_point=Point(10))
        assert bool(told) is found
