"""Who is silent and who hangs: no false alarm in an hour of ordinary life, and a hang is found in seconds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.support.failure_detector import JOB, NOW, RANKS, SPARE, Ward, ahead, cluster, evidence, pulse
from torchrelay.protocol.health.failure_detector import ASTRAY_MS, LEAST_STILL_MS, begun, judge, patience
from torchrelay.protocol.health.pulses import BEAT_MS, FRESH_MS, FailureDetector, Pulse, Sample, feel, forget
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.ids import START, Generation, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.roster import Life
from torchrelay.protocol.model.table import Table
from torchrelay.protocol.rules.cluster import advance


def test_a_worker_stopped_by_a_signal_is_found_in_seconds() -> None:
    ward = Ward()
    ward.step()
    ward.wait_for(2, phase=WorkerPhase.COMPUTING)
    ward.set(2, process="T")
    begin = ward.now_ms
    while not ward.live(BEAT_MS):
        assert ward.now_ms - begin < 3_000
    hung = ward.alarms[0]
    assert isinstance(hung, ev.WorkerHung)
    assert hung.worker == ward.samples[Rank(2)].worker
    assert "stopped by a signal" in hung.evidence


def test_a_worker_stopped_inside_a_collective_is_found_though_nobody_is_ahead_of_it() -> None:
    ward = Ward()
    ward.step()
    ward.set(2, process="T")
    begin = ward.now_ms
    while not ward.live(BEAT_MS):
        assert ward.now_ms - begin < 2_500
    assert {event.worker for event in ward.alarms if isinstance(event, ev.WorkerHung)} == {ward.samples[Rank(2)].worker}


@pytest.mark.parametrize("reason", ["another is behind it", "others move", "a sample is missing"])
def test_a_stopped_worker_is_let_be_while_others_are_not_kept_by_it(reason: str) -> None:
    ward = Ward()
    ward.step()
    ward.set(2, process="T")
    if reason == "another is behind it":
        ward.set(1, collectives=ward.samples[Rank(1)].collectives - 1)
    for number in range(20):
        if reason == "others move":
            ward.set(3, phase=WorkerPhase.GATE if number % 2 else WorkerPhase.COMPUTING)
        if reason == "a sample is missing":
            ward.samples.pop(Rank(3), None)
        ward.live(BEAT_MS)
    assert [event.worker for event in ward.alarms if isinstance(event, ev.WorkerHung)] == []


def test_a_worker_that_sleeps_in_a_step_is_found_when_twenty_steps_have_passed() -> None:
    ward = Ward()
    ward.step(2_000)
    ward.wait_for(1, phase=WorkerPhase.COMPUTING)
    assert ward.live(39_000) == []
    assert [type(event) for event in ward.live(2_000)[:1]] == [ev.WorkerHung]


def test_a_worker_that_computes_without_an_end_is_found_too_but_later() -> None:
    ward = Ward()
    ward.step()
    ward.wait_for(1, phase=WorkerPhase.COMPUTING)
    assert ward.live(119_000, busy=(1,)) == []
    assert ward.live(2_000, busy=(1,)) != []


def test_a_stopped_spare_is_found_because_it_could_not_take_a_rank() -> None:
    ward = Ward()
    spare = next(worker for worker in ward.cluster.workers.values() if worker.rank is None)
    ward.samples[Rank(99)] = msgspec.structs.replace(
        ward.samples[Rank(0)], worker=spare.worker, rank=None, point=None, process="T"
    )
    ward.live(3_000)
    assert {event.worker for event in ward.alarms if isinstance(event, ev.WorkerHung)} == {spare.worker}


def test_while_all_move_nobody_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    ward, looked = Ward(), []
    spare = next(worker for worker in ward.cluster.workers.values() if worker.rank is None)
    ward.samples[Rank(99)] = msgspec.structs.replace(ward.samples[Rank(0)], worker=spare.worker, rank=None, point=None)

    def look(_: object, one: Pulse, __: int) -> str:
        looked.append(one.sample.worker)
        return ""

    monkeypatch.setattr("torchrelay.protocol.health.failure_detector.judge_worker", look)
    for beat in range(30):
        for rank in range(RANKS):
            ward.set(rank, collectives=101 + beat)
        ward.live(BEAT_MS)
    assert looked == []
    ward.live(2 * LEAST_STILL_MS)
    assert set(looked) == {one.worker for one in ward.samples.values()}


def test_old_samples_say_nothing() -> None:
    ward = Ward()
    ward.wait_for(2, phase=WorkerPhase.COMPUTING)
    ward.set(2, process="T")
    ward.live(BEAT_MS)
    assert judge(ward.failure_detector, ward.cluster, ward.now_ms + 5_000) == ()


def test_pulses_of_workers_that_ended_are_forgotten() -> None:
    ward = Ward()
    ward.live(BEAT_MS)
    gone = ward.samples[Rank(0)].worker
    cluster = replace(ward.cluster, workers=ward.cluster.workers.drop(gone))
    assert WorkerId(gone) not in forget(ward.failure_detector, ward.cluster, cluster).pulses


STOPPED_LIMITS = [(100.0, 1_000), (1_000.0, 5_000), (1e6, 30_000)]


def test_patience_is_as_said() -> None:
    for step, limit in STOPPED_LIMITS:
        assert patience(pulse(stopped=1, step_ms=step), NOW)[0] == limit
    assert patience(pulse(phase=WorkerPhase.SECTION), NOW)[0] is None
    assert patience(pulse(phase=WorkerPhase.BETWEEN), NOW)[0] == 1_800_000
    for phase in (WorkerPhase.COMPUTING, WorkerPhase.GATE, WorkerPhase.UPDATING):
        for step, limit in ((0.0, 600_000), (100.0, 10_000), (1_000.0, 20_000), (1e6, 600_000)):
            assert patience(pulse(phase=phase, still=1_000, used=50, step_ms=step), NOW)[0] == limit
        for step, limit in ((0.0, 3_600_000), (100.0, 120_000), (2_000.0, 200_000), (1e6, 3_600_000)):
            assert patience(pulse(phase=phase, still=1_000, used=51, step_ms=step), NOW)[0] == limit


def test_a_stopped_spare_is_in_the_way_whatever_the_others_do() -> None:
    others = [pulse(rank) for rank in range(RANKS)]
    for step, limit in STOPPED_LIMITS:
        assert evidence(pulse(SPARE, stopped=limit - 1, step_ms=step), *others) == ""
        assert evidence(pulse(SPARE, stopped=limit, step_ms=step), *others) == (
            f"stopped for {limit / 1000:.1f} s (patience {limit / 1000:.1f} s)"
        )
    assert evidence(pulse(SPARE, still=9_000_000), *others) == ""


def test_half_of_a_stop_must_have_been_seen() -> None:
    for step, limit in STOPPED_LIMITS[:1]:
        assert evidence(pulse(SPARE, stopped=limit, step_ms=step, heard=limit // 2)) != ""
        assert evidence(pulse(SPARE, stopped=limit, step_ms=step, heard=limit // 2 + 1)) == ""
    waiting = [ahead(rank, still=2_000) for rank in (0, 2, 3)]
    assert evidence(pulse(still=2_000, stopped=1_000, heard=500), *waiting) != ""
    assert evidence(pulse(still=2_000, stopped=1_000, heard=501), *waiting) == ""


def test_in_which_phases_a_stopped_holder_is_in_the_way() -> None:
    found = {phase for phase in JobPhase if evidence(pulse(stopped=1_000), phase=phase)}
    assert found == set(JobPhase) - {JobPhase.RUNNING, JobPhase.SEALING, JobPhase.ENDING, JobPhase.ENDED}
    waiting = [ahead(rank, still=60_000) for rank in (0, 2, 3)]
    assert evidence(pulse(still=60_000), *waiting) != ""
    assert evidence(pulse(still=60_000), *waiting, phase=JobPhase.ENDING) == ""
    assert evidence(pulse(still=60_000), *waiting, phase=JobPhase.AGREEING) == ""


def in_the_way(one: Pulse, *, ready: bool = False, **job: Any) -> str:
    """Why this worker keeps all from the safepoint, when only it is not there."""
    seats = cluster().jobs[JOB].seats
    seats = seats.put(Rank(1), replace(seats[Rank(1)], ready=ready))
    return evidence(one, **{"phase": JobPhase.PREPARING, "seats": seats, **job})


@pytest.mark.parametrize(
    ("phase", "step_ms", "limit"),
    [
        (WorkerPhase.COMPUTING, 100.0, 5_000), (WorkerPhase.GATE, 1_000.0, 20_000),
        (WorkerPhase.COMPUTING, 0.0, 600_000),
        (WorkerPhase.COMPUTING, 60_000.0, 600_000),
        (WorkerPhase.SECTION, 100.0, 120_000),
    ],
)  # fmt: skip
def test_who_does_not_come_out_of_its_call_after_a_fault_is_stuck(
    phase: WorkerPhase, step_ms: float, limit: int
) -> None:
    there: dict[str, Any] = {"phase": phase, "step_ms": step_ms}
    assert in_the_way(pulse(still=limit, **there)) == (
        f"does not come out of its call for {limit / 1000:.1f} s (patience {limit / 1000:.1f} s)"
    )
    assert in_the_way(pulse(still=limit - 1, **there)) == ""
    assert in_the_way(pulse(still=limit, used=limit, main=limit // 20, **there)) != ""
    assert in_the_way(pulse(still=limit, main=limit // 20 + 1, **there)) == ""


def test_who_is_stuck_has_less_time_if_another_stands_with_its_shard() -> None:
    target = Point(10)
    seats = cluster().jobs[JOB].seats

    def found(still: int, **other: Any) -> str:
        twin = replace(seats[Rank(0)], **{"ready": True, "holds": target, "shard": "all", **other})
        mine = replace(seats[Rank(1)], ready=False, shard="all")
        there = seats.put(Rank(0), twin).put(Rank(1), mine)
        return evidence(pulse(still=still), phase=JobPhase.PREPARING, seats=there, resume_point=target)

    assert found(2_999) == ""
    assert found(3_000) == "does not come out of its call for 3.0 s (patience 3.0 s)"
    others: list[dict[str, Any]] = [{"ready": False}, {"holds": Point(9)}, {"holds": None}, {"shard": "half"}]
    for other in others:
        assert found(4_999, **other) == ""
        assert found(5_000, **other) != ""


def test_nobody_stands_still_for_longer_than_its_samples_tell() -> None:
    """In a large job there are seconds between two beats: what has moved since the last one is not known yet."""
    assert in_the_way(pulse(still=9_000, heard=4_000)) != ""
    assert in_the_way(pulse(still=9_000, heard=4_001)) == ""
    assert in_the_way(pulse(still=9_000, heard=8_000), phase_ms=NOW - 12_999) == ""
    assert evidence(pulse(still=10_000, heard=1), ahead(0, still=10_000)) == "", "while all train, too"
    slow = FailureDetector(beat_ms=8_000)
    ward = Ward(failure_detector=slow)
    ward.live(BEAT_MS)
    ward.wait_for(1, phase=WorkerPhase.COMPUTING)
    ward.live(BEAT_MS)
    assert judge(ward.failure_detector, ward.cluster, ward.now_ms + 15_000) == (), "one sample says nothing of that"
    ward.now_ms += 14_500
    ward.live(BEAT_MS)
    assert [type(alarm) for alarm in ward.alarms] == [ev.WorkerHung], "a second one does"


def test_nobody_is_stuck_by_the_first_sample_after_its_agent_was_away() -> None:
    """Meanwhile no order has reached it."""
    first = feel(None, pulse().sample, NOW - 20_000)
    away = feel(first, pulse().sample, NOW - 10_000)
    assert in_the_way(away, phase_ms=NOW - 15_000) == ""
    for ms in range(0, 5_000, BEAT_MS):
        away = feel(away, pulse().sample, NOW - 9_500 + ms)
    assert in_the_way(away, phase_ms=NOW - 15_000) == in_the_way(away, phase_ms=NOW - 10_000) != ""


def test_of_those_that_hang_while_all_train_the_one_that_has_stood_longest_is_lost() -> None:
    """Another may only have waited for it, in a group of which nobody knows whom it waits for."""
    ward = Ward()
    ward.step()
    ward.set(2, elsewhere=5)  # it moves no more from here on
    ward.live(500)
    ward.set(1, elsewhere=5)  # nor does this one, a little later
    for rank in (1, 2):
        ward.set(rank, process="T")
    ward.live(8_000)
    found = judge(ward.failure_detector, ward.cluster, ward.now_ms)
    assert [one.worker for one in found if isinstance(one, ev.WorkerHung)] == [ward.samples[Rank(2)].worker]
    recovers = replace(ward.cluster.jobs[JOB], phase=JobPhase.AGREEING)
    both = judge(ward.failure_detector, ward.cluster.with_job(recovers), ward.now_ms)
    assert len(both) == 2, "in a recovery each is in the way"


@pytest.mark.parametrize("later", [1, 2])
@pytest.mark.parametrize("ahead", ["groups", "point"])
def test_the_one_that_is_behind_is_lost_before_the_one_that_has_stood_longest(later: int, ahead: str) -> None:
    """Who has begun more waits in it for one that has not, though it may have come there first."""
    ward = Ward()
    ward.step()
    ward.set(3 - later, elsewhere=5)
    ward.live(500)
    ward.set(later, elsewhere=5)
    for rank in (1, 2):
        ward.set(rank, process="T")
    sample = ward.samples[Rank(1)]
    further: dict[str, object] = {
        "groups": (("others", 1),),
        "point": (sample.point or START).after_step(),
    }
    ward.set(1, **{ahead: further[ahead]})
    ward.live(8_000)
    found = judge(ward.failure_detector, ward.cluster, ward.now_ms)
    assert [one.worker for one in found if isinstance(one, ev.WorkerHung)] == [ward.samples[Rank(2)].worker]


def test_who_has_begun_more_collectives_is_further_in_the_same_step() -> None:
    here = pulse()
    one = replace(here, sample=replace(here.sample, collectives=here.sample.collectives + 1))
    two = replace(here, sample=replace(here.sample, groups=(("others", 1), ("more", 1))))
    later = replace(here, sample=replace(here.sample, point=(here.sample.point or START).after_step()))
    assert begun(here) < begun(one) < begun(two) < begun(later)


def test_nobody_is_stuck_at_an_safepoint_or_before_all_were_told_where_to_go_or_for_want_of_time() -> None:
    stuck = pulse(still=700_000)
    others = set(JobPhase) - {JobPhase.PREPARING}
    assert {phase for phase in others if in_the_way(stuck, phase=phase)} == set()
    for phase in set(WorkerPhase) - {WorkerPhase.COMPUTING, WorkerPhase.GATE, WorkerPhase.SECTION}:
        assert in_the_way(pulse(still=700_000, phase=phase)) == ""
    assert in_the_way(stuck, ready=True) == ""
    assert in_the_way(stuck, phase_ms=NOW - 4_999) == ""
    assert in_the_way(stuck, phase_ms=NOW - 5_000) != ""
    assert in_the_way(pulse(SPARE, still=700_000)) == ""


def test_who_is_stopped_while_others_have_finished_keeps_them() -> None:
    seats = cluster().jobs[JOB].seats
    seats = seats.put(Rank(0), replace(seats[Rank(0)], finished=True))
    assert evidence(pulse(stopped=1_000), seats=seats) != ""
    assert evidence(pulse(stopped=999), seats=seats) == ""
    assert evidence(pulse(stopped=1_500, phase=WorkerPhase.FINISHED), seats=seats) == ""
    assert evidence(pulse(stopped=1_500)) == ""


def test_the_wait_counts_from_the_first_who_waits_and_from_its_own_last_move() -> None:
    assert evidence(pulse(still=10_000), ahead(0, still=10_000), ahead(2, still=0)).startswith(
        "standing still for 10.0"
    )
    assert evidence(pulse(still=9_999), ahead(0, still=10_000)) == ""
    assert evidence(pulse(still=10_000), ahead(0, still=9_999)) == ""
    assert evidence(pulse(still=10_000), pulse(0, still=10_000)) == ""
    assert evidence(pulse(still=9_000_000, phase=WorkerPhase.SECTION), ahead(0, still=9_000_000)) == ""


def test_a_stopped_worker_that_others_wait_for_is_found_though_one_moves() -> None:
    assert evidence(pulse(still=2_000, stopped=2_000), ahead(0, still=2_000), *map(pulse, (2, 3))) != ""


def test_only_fresh_samples_of_this_generation_tell_who_waits() -> None:
    one = pulse(still=20_000)
    assert evidence(one, ahead(0, still=20_000, heard=FRESH_MS - 1)) != ""
    assert evidence(one, ahead(0, still=20_000, heard=FRESH_MS)) == ""
    assert evidence(one, ahead(0, still=20_000, generation=Generation(0))) == ""
    assert evidence(one, ahead(SPARE, still=20_000)) == ""
    assert evidence(pulse(still=20_000, generation=Generation(0)), ahead(0, still=20_000)) == ""


def test_a_standstill_of_all_is_one_only_if_all_are_known_to_stand() -> None:
    one = pulse(still=2_000, stopped=2_000)
    two = [pulse(rank, still=2_000) for rank in (0, 2)]
    assert evidence(one, *two, pulse(3, still=1_000, heard=FRESH_MS - 1)).startswith("stopped by a signal for 1.0 s")
    assert evidence(one, *two, pulse(3, still=999)) == ""
    assert evidence(one, *two, pulse(3, still=2_000, heard=FRESH_MS)) == ""
    assert evidence(one, *two, pulse(3, still=2_000, generation=Generation(0))) == ""
    assert evidence(one, *two, pulse(3, still=2_000, collectives=99)) == ""
    assert evidence(one, *two, pulse(SPARE, still=2_000)) == ""


def test_whatever_moves_ends_a_standstill() -> None:
    before = pulse(still=5_000)
    assert feel(before, before.sample, NOW).still_ms == NOW - 5_000
    moves: tuple[dict[str, Any], ...] = (
        {"point": Point(11)}, {"phase": WorkerPhase.GATE}, {"collectives": 101},
    )  # fmt: skip
    for fields in moves:
        assert feel(before, pulse(**fields).sample, NOW).still_ms == NOW
    assert feel(before, pulse(generation=Generation(2)).sample, NOW).still_ms == NOW - 5_000


def test_a_hang_is_dated_by_its_last_move_and_told_once_it_is_to_be_ended_no_more() -> None:
    spare = pulse(SPARE, still=70_000, stopped=60_000, heard=FRESH_MS - 1)
    failure_detector = FailureDetector(pulses=Table({spare.sample.worker: spare}))
    (hung,) = judge(failure_detector, cluster(), NOW)
    assert isinstance(hung, ev.WorkerHung)
    assert hung.age_ms == 70_000
    assert judge(failure_detector, cluster(), NOW + 1) == ()
    fenced = advance(cluster(), hung, 0)
    assert fenced.workers[spare.sample.worker].life is Life.FENCING
    assert judge(failure_detector, fenced, NOW) == ()


# The longest last.


def test_an_hour_of_steps_with_saves_evaluation_and_compilation_raises_no_alarm() -> None:
    ward = Ward()
    # Before the first commit the script compiles, one rank far longer than the others.
    for rank in range(RANKS):
        ward.set(rank, point=Point(0), step_ms=0.0)
    ward.wait_for(2, phase=WorkerPhase.COMPUTING)
    ward.live(300_000, busy=(2,))
    hour = ward.now_ms + 3_600_000
    while ward.now_ms < hour:
        for _ in range(200):
            ward.step()
        # Rank 0 saves for 20 s, outside any section, using the disk only; the others wait in the next step.
        ward.wait_for(0, phase=WorkerPhase.BETWEEN)
        ward.live(20_000)
        ward.step()
        # All evaluate, and one of them is late by half a minute in a declared section.
        ward.wait_for(3, phase=WorkerPhase.SECTION)
        ward.live(30_000)
        ward.step()
        # A new shape: one rank compiles for a minute.
        ward.wait_for(1, phase=WorkerPhase.COMPUTING)
        ward.live(60_000, busy=(1,))
    assert ward.alarms == []


def test_ranks_that_stand_at_different_calls_have_strayed() -> None:
    ward = Ward()
    for rank in (0, 1, 3):
        ward.set(rank, phase=WorkerPhase.SECTION)
    assert ward.live(ASTRAY_MS) == []
    (event,) = set(ward.live(BEAT_MS))
    assert isinstance(event, ev.WorkerRaised)
    assert (event.rank, event.kind, event.point) == (2, "undeclared", Point(10))
    assert "after 10 rank 2 is in a step, and rank 0 is in a section" in event.summary
    cluster = advance(ward.cluster, event, ward.now_ms)
    outcome = cluster.jobs[JOB].outcome
    assert outcome is not None
    assert (outcome.code, outcome.reason) == (91, event.summary)


def test_ranks_at_different_points_or_on_the_move_have_not_strayed() -> None:
    ward = Ward()
    for rank in (0, 1, 3):
        ward.set(rank, phase=WorkerPhase.SECTION, point=Point(9))
    assert not any(isinstance(event, ev.WorkerRaised) for event in ward.live(2 * ASTRAY_MS))
    ward = Ward()
    for rank in range(4):
        ward.set(rank, phase=WorkerPhase.SECTION, point=None)
    ward.set(2, phase=WorkerPhase.COMPUTING)
    assert not any(isinstance(event, ev.WorkerRaised) for event in ward.live(2 * ASTRAY_MS))
    ward = Ward()
    for beat in range(2 * ASTRAY_MS // BEAT_MS):
        for rank in (0, 1, 3):
            ward.set(rank, phase=WorkerPhase.SECTION, collectives=100 + beat)
        assert ward.live(BEAT_MS) == []


def test_an_agent_that_does_not_tell_main_threads_apart_tells_of_no_time_of_theirs() -> None:
    told = msgspec.to_builtins(msgspec.structs.replace(Ward().samples[Rank(0)], main_ms=5))
    told.pop("main_ms")
    sample = msgspec.convert(told, Sample)
    assert sample.main_ms == 0
    assert Pulse(sample, 0, 0, 0).still_main_ms == 0
