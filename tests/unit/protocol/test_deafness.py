"""When the time stands still because nobody is heard, for how long, and what is older after that."""

from __future__ import annotations

from msgspec.structs import replace

from tests.support.beating import JOB, A, B, C, Cast
from torchrelay.protocol.health.deafness import (
    MOST_STILL_MS,
    Deafness,
    all_silent,
    is_deaf,
    set_back,
)
from torchrelay.protocol.health.pulses import (
    BEAT_MS,
)
from torchrelay.protocol.health.silence import (
    ALL_SILENT_MS,
)
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.ids import JobId
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.table import Table
from torchrelay.protocol.rules.cluster import advance


def test_the_time_stands_while_nobody_is_heard_and_the_silence_counts_on() -> None:
    cast = Cast()
    cast.live(1_000, A, B, C)
    begin = cast.now_ms
    cast.live(5_000, trains=False)
    assert cast.now_ms == begin + ALL_SILENT_MS
    cast.live(BEAT_MS, A, trains=False)
    assert cast.now_ms == begin + ALL_SILENT_MS
    assert cast.silent(B).silent_ms == 5_000 + BEAT_MS, "not long enough to lose anybody: it is counted on"
    assert cast.live(2 * BEAT_MS, A, trains=False) == [B, C]
    assert cast.failure_detector.rhythms[A].longest_ms == 5_000 + BEAT_MS


def test_what_was_heard_before_the_time_stood_is_as_old_as_it_is() -> None:
    cast = Cast()
    cast.live(1_000, A, B, C)
    before = cast.failure_detector
    name, pulse = next(iter(before.pulses.items()))
    before = replace(before, pulses=before.pulses.put(name, replace(pulse, stopped_ms=5, advanced_ms=6)))
    after = set_back(before, 700)
    assert {key: at + 700 for key, at in after.heard.items()} == dict(before.heard.items())
    assert after.newest_ms is not None
    assert before.newest_ms == after.newest_ms + 700
    assert after.rhythms == before.rhythms
    then, now = before.pulses[name], after.pulses[name]
    assert then.sample == now.sample
    assert (now.stopped_ms, now.advanced_ms) == (5 - 700, 6 - 700)
    for field_name in ("heard_ms", "still_ms", "back_ms"):
        assert getattr(now, field_name) == getattr(then, field_name) - 700
    fresh = replace(before, pulses=before.pulses.put(name, replace(pulse, stopped_ms=None, advanced_ms=None)))
    assert set_back(fresh, 700).pulses[name].stopped_ms is None
    assert set_back(fresh, 700).pulses[name].advanced_ms is None
    assert set_back(replace(before, newest_ms=None), 700).newest_ms is None


def test_it_stands_once_and_not_again_before_somebody_is_heard() -> None:
    deafness = Deafness().look(True, 7)
    assert (deafness.still, deafness.since_ms, deafness.stood_ms(9), deafness.spent) == (True, 7, 2, False)
    assert deafness.look(True, 6 + MOST_STILL_MS) == deafness
    woken = deafness.look(False, 8)
    assert (woken.still, woken.spent, woken.left_ms, woken.stood_ms(9)) == (False, False, MOST_STILL_MS - 1, 0)
    spent = deafness.look(True, 7 + MOST_STILL_MS)
    assert (spent.still, spent.spent, spent.left_ms) == (False, True, 0)
    later = 10 * MOST_STILL_MS
    assert (spent.look(True, later).still, spent.look(True, later).spent) == (False, True)
    assert not spent.look(False, later).spent
    assert spent.look(False, later).look(True, later + 1).still


def test_what_it_has_stood_comes_back_while_it_goes_on() -> None:
    deafness = Deafness().look(True, 0).look(False, 10_000)
    assert deafness.left_ms == MOST_STILL_MS - 10_000
    assert deafness.look(False, 14_000).left_ms == MOST_STILL_MS - 6_000
    assert deafness.look(False, 14_000).look(False, 18_000).left_ms == MOST_STILL_MS - 2_000
    assert deafness.look(False, 90_000).left_ms == MOST_STILL_MS


def test_one_beat_now_and_then_does_not_hold_the_time_for_ever() -> None:
    cast = Cast()
    cast.live(1_000, A, B, C)
    cast.live(600_000, A, B, C, every_ms=10_000, trains=False)
    assert cast.now_ms > 600_000 / 2 - MOST_STILL_MS
    assert cast.lost == [], "all are as slow as that"


def test_a_job_that_is_to_stop_has_its_own_time() -> None:
    cast = Cast()
    cast.live(1_000, A, B, C)
    now = cast.now_ms + ALL_SILENT_MS
    assert is_deaf(cast.failure_detector, cast.cluster, now)
    asked = advance(cast.cluster, ev.SignalAsked(job=JOB, number=15, grace_ms=5_000, reason="enough"), cast.now_ms)
    assert asked.jobs[JOB].stop is not None
    assert not is_deaf(cast.failure_detector, asked, now)
    ends = advance(cast.cluster, ev.JobCancelled(job=JOB, reason="enough"), cast.now_ms)
    assert ends.jobs[JOB].phase is JobPhase.ENDING
    assert not is_deaf(cast.failure_detector, ends, now)
    assert all_silent(cast.failure_detector, ends, now)
    over = asked.with_job(replace(asked.jobs[JOB], phase=JobPhase.ENDED))
    assert is_deaf(cast.failure_detector, over, now), "it is over, and others may train"
    other = replace(cast.cluster.jobs[JOB], spec=replace(cast.cluster.jobs[JOB].spec, job=JobId("other")))
    assert not is_deaf(cast.failure_detector, asked.with_job(other), now), "one of them is to stop"
    assert is_deaf(cast.failure_detector, replace(cast.cluster, jobs=Table()), now), "one may be submitted"


def test_when_nothing_is_left_it_does_not_stand() -> None:
    deafness = Deafness(left_ms=0, seen_ms=5)
    assert not deafness.look(True, 5).still
    assert deafness.look(True, 6).still
    assert deafness.look(True, 5).look(True, 6).still


def test_without_a_living_node_the_time_goes_on() -> None:
    cast = Cast()
    cast.live(1_000, A, B, C)
    for node in (A, B, C):
        assert is_deaf(cast.failure_detector, cast.cluster, cast.now_ms + ALL_SILENT_MS)
        cast.cluster = advance(cast.cluster, ev.NodeLost(node=node, incarnation="a", reason=""), cast.now_ms)
    assert not is_deaf(cast.failure_detector, cast.cluster, cast.now_ms + ALL_SILENT_MS)


def test_where_beats_are_further_apart_two_of_them_must_be_missing() -> None:
    cast = Cast()
    cast.live(1_000, A, B, C)
    slow = replace(cast.failure_detector, beat_ms=4_000)
    assert not is_deaf(slow, cast.cluster, cast.now_ms + 7_999)
    assert is_deaf(slow, cast.cluster, cast.now_ms + 8_000)
