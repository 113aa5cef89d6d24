"""Which silence loses a node: one that its own beats set; none while its ranks train on; not that of all at once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.support.beating import JOB, A, B, C, Cast
from tests.support.telling import begun
from torchrelay.protocol.health.failure_detector import judge
from torchrelay.protocol.health.pulses import (
    BEAT_MS,
    FRESH_MS,
    Beat,
    FailureDetector,
    forget,
    forget_strangers,
    hear,
    pace_ms,
)
from torchrelay.protocol.health.silence import (
    ALL_SILENT_MS,
    DEAF_MS,
    GAPS_MS,
    LEAST_SILENCE_MS,
    MOST_SILENCE_MS,
    Rhythm,
    Silence,
)
from torchrelay.protocol.health.silent_nodes import SilentNodes
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Point, Rank, WorkerId
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.table import Table
from torchrelay.protocol.rules.cluster import EMPTY, advance


def test_the_pulses_of_workers_that_have_ended_are_forgotten() -> None:
    cast = Cast()
    cast.live(1_000, A, B)
    known = cast.failure_detector
    assert forget(known, cast.cluster, cast.cluster) is known
    gone, *others = list(known.pulses)
    after = forget(known, cast.cluster, cast.cluster.forget(gone))
    assert list(after.pulses) == others
    assert after == replace(known, pulses=known.pulses.drop(gone))


def test_what_was_heard_last_is_looked_up_where_it_was_not_noted() -> None:
    some = FailureDetector(heard=Table({(A, "a"): 3, (B, "a"): 7, (C, "a"): 5}))
    assert (some.last_heard_ms(9), replace(some, newest_ms=8).last_heard_ms(9)) == (7, 8)
    assert FailureDetector().last_heard_ms(9) == 9


@pytest.mark.parametrize(("nodes", "ms"), [(0, 500), (1, 500), (250, 500), (251, 1_000), (500, 1_000), (501, 1_500)])
def test_of_many_nodes_each_beats_less_often(nodes: int, ms: int) -> None:
    assert pace_ms(nodes) == ms


def test_pulses_of_strangers_are_forgotten_when_there_are_many() -> None:
    cast = Cast()
    cast.live(1_000, A, B)
    known = cast.failure_detector
    assert (len(cast.cluster.workers), len(known.pulses)) == (4, 4)
    some = next(iter(known.pulses.values()))
    for strangers, kept in ((68, True), (69, False)):
        pulses = known.pulses.put_all((WorkerId(f"stranger-{number}"), some) for number in range(strangers))
        many = replace(known, pulses=pulses)
        assert forget_strangers(many, cast.cluster) == (many if kept else known)


# ---------------------------------------------------------------- the limit


@pytest.mark.parametrize(
    ("gap", "limit"),
    [(0, 6_000), (250, 6_000), (1_500, 6_000), (1_501, 6_004), (5_000, 20_000), (7_500, 30_000), (60_000, 30_000)],
)
def test_the_limit_is_four_of_the_longest_gaps_within_bounds(gap: int, limit: int) -> None:
    assert Rhythm(0).note(gap, gap).limit_ms() == limit


def test_a_gap_is_remembered_for_five_minutes_at_least_and_ten_at_most() -> None:
    assert GAPS_MS == 300_000
    rhythm = Rhythm(0).note(3_000, GAPS_MS - 1).note(2_000, GAPS_MS - 1)
    assert rhythm.longest_ms == 3_000
    rhythm = rhythm.note(250, GAPS_MS).note(500, 2 * GAPS_MS - 1)
    assert (rhythm.longest_ms, rhythm.gap_ms) == (3_000, 500)
    assert rhythm.note(250, 2 * GAPS_MS).longest_ms == 500
    assert Rhythm(0).note(3_000, 1).note(250, 2 * GAPS_MS).longest_ms == 250
    assert Rhythm(0).note(3_000, 1).note(0, 2 * GAPS_MS).longest_ms == 0
    assert Rhythm(7).longest_ms == Rhythm(7).note(0, 2 * GAPS_MS).before_ms == 0


@pytest.mark.parametrize(("gap", "over"), [(LEAST_SILENCE_MS - 1, False), (LEAST_SILENCE_MS, True)])
def test_who_is_heard_after_the_shortest_limit_of_all_ends_the_silence_of_all(gap: int, over: bool) -> None:
    failure_detector = FailureDetector(
        heard=Table(((node, "a"), 0) for node in (A, B)), rhythms=Table({A: Rhythm(0), B: Rhythm(0, 5_000)})
    )
    failure_detector = hear(failure_detector, Beat(node=A, incarnation="a"), gap)
    assert failure_detector.heard[B, "a"] == (gap if over else 0)


def test_time_may_begin_at_zero() -> None:
    cast = Cast(failure_detector=FailureDetector(heard=Table({(C, "a"): 0, (A, "a"): 5_000})), now_ms=5_000)
    assert cast.silent(C).lost_in_ms == LEAST_SILENCE_MS - 5_000


def test_a_node_that_beats_in_time_is_lost_after_six_seconds_of_silence() -> None:
    cast = Cast()
    cast.live(60_000, A, B, C)
    begin = cast.passed_ms
    assert cast.live(60_000, A, B) == [C]
    assert cast.lost == [(begin + LEAST_SILENCE_MS, C)]


def test_a_node_that_beats_with_gaps_has_four_of_them() -> None:
    cast = Cast()
    cast.live(60_000, A, B, C)
    for _ in range(3):
        cast.live(2_000, A, B)
        cast.live(BEAT_MS, A, B, C)
    begin = cast.passed_ms
    assert cast.live(60_000, A, B) == [C]
    assert cast.lost == [(begin + 4 * (2_000 + BEAT_MS), C)]


def test_the_time_without_an_agent_is_no_gap_between_its_beats() -> None:
    cast = Cast()
    cast.live(60_000, A, B, C)
    cast.live(5_000, A, B)
    cast.incarnations[C] = "b"
    cast.live(1_000, A, B, C)
    assert cast.failure_detector.rhythms[C].longest_ms == BEAT_MS


def test_a_lost_node_says_how_long_it_was_silent_and_which_limit_held() -> None:
    cast = Cast()
    cast.live(1_000, A, B, C)
    cast.live(LEAST_SILENCE_MS, A, B, tells=False)
    (event,) = judge(cast.failure_detector, cast.cluster, cast.now_ms)
    assert event == ev.NodeLost(node=C, incarnation="a", reason="no beat for 6.0 s (limit 6.0 s)", age_ms=6000)


def test_a_node_is_lost_once_and_only_if_it_was_heard() -> None:
    cast = Cast()
    assert judge(FailureDetector(), cast.cluster, 10_000_000) == ()
    cast.live(1_000, A, B, C)
    assert cast.live(10 * MOST_SILENCE_MS, A, B) == [C]


# ---------------------------------------------------------------- ranks that train on


def test_a_silent_node_whose_ranks_train_on_is_not_lost() -> None:
    cast = Cast()
    cast.live(1_000, A, B, C)
    assert cast.live(600_000, A, C) == []
    silence = cast.silent(B)
    assert str(silence) == "silent for 600.0 s, but its ranks train on"
    assert (silence.advanced_ms, silence.lost_in_ms) == (0, LEAST_SILENCE_MS)


def test_it_is_lost_when_the_others_have_committed_nothing_for_the_limit() -> None:
    cast = Cast()
    cast.live(1_000, A, B, C)
    cast.live(10_000, A, C)
    begin = cast.passed_ms
    assert cast.live(60_000, A, C, trains=False) == [B]
    assert cast.lost == [(begin + LEAST_SILENCE_MS, B)]


def test_a_node_without_ranks_is_lost_by_silence_alone_though_others_train() -> None:
    cast = Cast()
    cast.live(1_000, A, B, C)
    assert cast.live(LEAST_SILENCE_MS, A, B) == [C]


def test_what_was_committed_before_the_last_beat_proves_nothing() -> None:
    cast = Cast()
    cast.live(1_000, A, B, C)
    cast.live(1_000, A, B, C, trains=False)
    begin = cast.passed_ms
    cast.live(2_000, A, C, trains=False)
    assert cast.silent(B).advanced_ms is None
    cast.live(60_000, A, C, trains=False)
    assert cast.lost == [(begin + LEAST_SILENCE_MS, B)]


def test_what_was_committed_at_the_last_beat_proves_nothing_either() -> None:
    cast = Cast()
    cast.live(1_000, A, B, C)
    cast.live(2_000, A, C, trains=False)
    assert cast.silent(B).advanced_ms is None


def test_a_job_whose_ranks_are_all_on_silent_nodes_proves_nothing() -> None:
    cast = Cast()
    cast.live(1_000, A, B, C)
    assert sorted(cast.live(LEAST_SILENCE_MS, C)) == [A, B]


@pytest.mark.parametrize("phase", [JobPhase.AGREEING, JobPhase.STARTING, JobPhase.FINISHING])
def test_a_job_that_does_not_train_proves_nothing(phase: JobPhase) -> None:
    cast = Cast()
    cast.live(1_000, A, B, C)
    cast.cluster = cast.cluster.with_job(replace(cast.cluster.jobs[JOB], phase=phase))
    cast.live(LEAST_SILENCE_MS, A, C, tells=False)
    assert B in {node for _, node in cast.lost}


def test_points_of_another_generation_and_restored_states_are_no_proof() -> None:
    cast = Cast()
    cast.live(1_000, A, B, C)
    pulse = next(iter(cast.failure_detector.pulses.values()))
    cases: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({"point": None}, {"point": Point(11)}),
        ({}, {"point": None}),
        ({}, {"point": Point(cast.step + 1), "generation": Generation(2)}),
        ({}, {"point": Point(cast.step - 1)}),
    )
    for before, now in cases:
        earlier = msgspec.structs.replace(pulse.sample, **before)
        later = msgspec.structs.replace(pulse.sample, **now)
        failure_detector = replace(
            cast.failure_detector, pulses=Table({earlier.worker: replace(pulse, sample=earlier, advanced_ms=7)})
        )
        failure_detector = hear(failure_detector, Beat(node=A, incarnation="a", samples=(later,)), cast.now_ms + 1)
        assert failure_detector.pulses[later.worker].advanced_ms == 7


def test_of_gates_that_several_nodes_have_told_the_newest_is_the_proof() -> None:
    spec = ev.JobSpec(job=JOB, world_size=3, nproc_per_node=1, nodes=3)
    cluster = advance(EMPTY, ev.JobSubmitted(spec=spec), 0)
    for node in (A, B, C):
        cluster = advance(cluster, ev.NodeJoined(node=node, incarnation="a", slots=1), 0)
    cast = Cast(begun(cluster))
    cast.live(1_000, A, B, C)
    cast.live(3_000, A, C)
    cast.live(2_000, C)
    assert cast.silent(B).advanced_ms == 0
    cast.live(500, C, trains=False)
    assert cast.silent(B).advanced_ms == 500


def test_a_silent_node_is_judged_while_ranks_leave() -> None:
    cast = Cast()
    cast.live(1_000, A, B, C)
    stop = ev.SignalAsked(job=JOB, number=15, grace_ms=60_000, reason="enough")
    first = cast.cluster.jobs[JOB].seats[Rank(0)].worker
    assert first is not None
    for event in (stop, ev.WorkerExited(worker=first, node=A, code=0)):
        cast.cluster = advance(cast.cluster, event, cast.now_ms)
    assert cast.cluster.jobs[JOB].phase is JobPhase.RUNNING
    assert cast.live(LEAST_SILENCE_MS, A, C, trains=False) == [B]


# ---------------------------------------------------------------- all at once


def test_if_all_are_silent_at_once_nobody_is_lost_for_a_minute() -> None:
    cast = Cast()
    cast.live(1_000, A, B, C)
    begin = cast.passed_ms
    assert cast.live(DEAF_MS - BEAT_MS) == []
    silence = cast.silent(A)
    assert "and so are all: it may be the orchestrator that hears nothing" in str(silence)
    assert sorted(cast.live(BEAT_MS)) == [A, B, C]
    assert {at for at, _ in cast.lost} == {begin + DEAF_MS}


def test_who_is_silent_with_all_others_has_a_minute_and_alone_its_limit() -> None:
    cast = Cast()
    cast.live(1_000, A, B, C)
    cast.now_ms += ALL_SILENT_MS
    assert cast.silent(B).lost_in_ms == DEAF_MS - ALL_SILENT_MS
    cast.beat(A)
    assert cast.silent(B).lost_in_ms == LEAST_SILENCE_MS - ALL_SILENT_MS


def test_when_the_first_is_heard_again_the_others_have_time_to_come_back() -> None:
    cast = Cast()
    cast.live(1_000, A, B, C)
    cast.live(20_000, trains=False)
    begin = cast.passed_ms
    assert cast.live(20_000, C, trains=False) == []
    assert cast.live(20_000, A, C, trains=False) == [B]
    assert cast.lost == [(begin + BEAT_MS + MOST_SILENCE_MS, B)]


def test_gaps_of_the_only_node_that_is_heard_do_not_keep_a_dead_one_for_ever() -> None:
    cast = Cast()
    cast.live(1_000, A, C)
    cast.cluster = advance(cast.cluster, ev.NodeLost(node=B, incarnation="a", reason=""), cast.now_ms)
    begin = cast.passed_ms
    assert cast.live(120_000, A, every_ms=7_000) == [C]
    assert cast.lost[0][0] - begin <= 2 * MOST_SILENCE_MS


def test_who_is_heard_and_who_is_gone_is_not_called_silent() -> None:
    cast = Cast()
    cast.live(1_000, A, B, C)
    cast.live(FRESH_MS - BEAT_MS, A, C)
    assert cast.silence(B) is None
    cast.live(BEAT_MS, A, C)
    assert cast.silence(B) is not None
    cast.live(60_000, A, trains=False)
    assert cast.silence(B) is None


def test_all_are_silent_from_two_seconds_on() -> None:
    cast = Cast()
    cast.live(1_000, A, B, C)
    for ms, deaf in ((1_999, False), (2_000, True)):
        assert SilentNodes(cast.failure_detector, cast.cluster, cast.now_ms + ms).all_silent is deaf


def test_nodes_that_are_gone_or_have_not_begun_do_not_count_among_the_silent() -> None:
    cast = Cast()
    cast.live(1_000, A, B, C)
    cast.live(ALL_SILENT_MS, A)
    cast.cluster = advance(cast.cluster, ev.NodeLost(node=A, incarnation="a", reason=""), cast.now_ms)
    cast.now_ms += ALL_SILENT_MS
    assert cast.silent(B).all_silent
    new = ev.NodeJoined(node=NodeId("node-3"), incarnation="a", slots=1)
    cast.cluster = advance(cast.cluster, new, cast.now_ms)
    assert not cast.silent(B).all_silent


def test_one_node_that_is_heard_is_enough_to_tell_silence_from_deafness() -> None:
    cast = Cast()
    cast.live(1_000, A, B, C)
    cast.live(ALL_SILENT_MS, A)
    assert not cast.silent(B).all_silent


@pytest.mark.parametrize("then", [None, 1])
def test_a_gate_that_any_rank_passed_is_proof_of_all(then: int | None) -> None:
    cast = Cast()
    cast.live(1_000, A, B, C)
    still = [worker for worker in cast.failure_detector.pulses if cast.cluster.workers[worker].rank == Rank(0)]
    cast.live(10_000, A, C)
    pulses = cast.failure_detector.pulses.put(
        still[0], replace(cast.failure_detector.pulses[still[0]], advanced_ms=then)
    )
    cast.failure_detector = replace(cast.failure_detector, pulses=pulses)
    assert cast.silent(B).advanced_ms == 0


@pytest.mark.parametrize(
    ("left", "advanced", "told"),
    [(5, None, "(limit 9.0 s)"), (0, 100, "(limit 9.0 s)"), (1, 100, "but its ranks train on")],
)
def test_what_is_said_of_a_silence(left: int, advanced: int | None, told: str) -> None:
    silence = Silence(A, 3_000, 9_000, left, advanced)
    assert not silence.all_silent
    assert str(silence).split(" s", 1)[1].strip(", ") == told
    assert "so are all" in str(replace(silence, all_silent=True))


# ---------------------------------------------------------------- freezes


@pytest.mark.parametrize("phases", [(JobPhase.RUNNING,), (JobPhase.AGREEING,), (JobPhase.RUNNING, JobPhase.AGREEING)])
def test_under_a_freeze_nobody_is_judged_while_all_jobs_train(phases: tuple[JobPhase, ...]) -> None:
    cast = Cast()
    cast.live(1_000, A, B, C)
    job = cast.cluster.jobs[JOB]
    for number, phase in enumerate(phases):
        spec = msgspec.structs.replace(job.spec, job=JobId("other" if number else JOB))
        cast.cluster = cast.cluster.with_job(replace(job, spec=spec, phase=phase))
    cast.live(LEAST_SILENCE_MS, A, B, tells=False)
    assert judge(cast.failure_detector, cast.cluster, cast.now_ms) != ()
    frozen = replace(cast.cluster, freezes=Table({"ann": "looking"}))
    judged = judge(cast.failure_detector, frozen, cast.now_ms)
    assert (judged == ()) is (JobPhase.AGREEING not in phases)
