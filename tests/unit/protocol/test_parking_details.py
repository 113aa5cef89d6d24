"""Parking, in detail: what changes nothing, what is noted of a try, and how one that comes to nothing is given up."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.telling import JOB, Story, running, submitted
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.events import Effect
from torchrelay.protocol.messages.ids import NodeId, Rank
from torchrelay.protocol.model.incident import PARKS
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.state import vacate_seat
from torchrelay.protocol.model.table import Table
from torchrelay.protocol.placement.boundary import REST_MS, TRIES
from torchrelay.protocol.placement.taints import TOLD
from torchrelay.protocol.recovery.ending import STOPPED
from torchrelay.protocol.rules.parking import lasting_objection, objection, room_elsewhere, told_to_end

A, B = NodeId("node-0"), NodeId("node-1")
PLACE: dict[str, Any] = {"park_dir": "/parked", "park_key": "0123456789abcdef", "grace_ms": 30_000}
SIGTERM = 15


def asked(grace_ms: int | None = None, number: int = 0) -> ev.ParkAsked:
    return ev.ParkAsked(job=JOB, reason="the nodes go", source="test", grace_ms=grace_ms, number=number)


def told(node: NodeId = A, gone_in_ms: int | None = None, reason: str = "told") -> ev.TaintSet:
    return ev.TaintSet(node=node, key=TOLD, value="15", reason=reason, source="agent", gone_in_ms=gone_in_ms)


def leaves(story: Story, in_ms: int = 60_000, effect: Effect = Effect.NO_EXECUTE) -> None:
    """The only node goes."""
    story.hear(ev.TaintSet(node=A, key="slurm", source="slurm", gone_in_ms=in_ms, effect=effect))


def with_a_place() -> Story:
    story = running(**PLACE)
    story.wait(1_000)
    return story


@pytest.fixture
def trains() -> Story:
    return with_a_place()


def now(story: Story) -> JobPhase:
    return story.job.phase


def halt(story: Story, wish: ev.ParkAsked | None = None) -> None:
    story.hear(wish or asked())
    story.answer((od.Halt,))
    story.answer((od.Decide,))
    assert now(story) is JobPhase.PARKING


def to_seal(story: Story, wish: ev.ParkAsked | None = None) -> None:
    halt(story, wish)
    story.answer((od.Park,))
    assert now(story) is JobPhase.SEALING


def fail(story: Story) -> None:
    """A try comes to nothing, and all go on."""
    rank: dict[str, Any] = {"job": JOB, "generation": story.job.generation, "worker": story.holder(1), "rank": Rank(1)}
    story.hear(ev.ParkFailed(reason="disk full", **rank))
    story.answer((od.Resume,))
    assert now(story) is JobPhase.RUNNING


# ---------------------------------------------------------------- asking


def test_when_it_was_asked_for_is_noted(trains: Story) -> None:
    trains.hear(asked())
    assert trains.job.parking.asked_ms == 1_000


def test_a_job_that_has_ended_is_not_asked(trains: Story) -> None:
    trains.hear(ev.JobCancelled(job=JOB, reason="enough"))
    before = trains.cluster
    trains.hear(asked())
    assert trains.cluster == before


def test_while_the_manifest_is_written_nothing_is_asked_any_more(trains: Story) -> None:
    to_seal(trains)
    before = trains.cluster
    trains.hear(asked(grace_ms=5_000))
    assert trains.cluster == before


def test_asked_again_after_a_try_that_failed_it_waits_all_the_same(trains: Story) -> None:
    halt(trains)
    fail(trains)
    again_ms = trains.job.parking.again_ms
    assert again_ms > trains.now_ms
    trains.hear(asked())
    assert trains.job.parking.again_ms == again_ms
    assert now(trains) is JobPhase.RUNNING


def test_what_does_not_fit_is_not_begun_of_our_own_accord_for_a_while(trains: Story) -> None:
    trains.cluster = trains.cluster.with_job(trains.job.with_parking(takes_ms=40_000))
    trains.hear(asked(grace_ms=30_000))
    assert trains.job.parking.rests_ms == trains.now_ms + REST_MS


# ---------------------------------------------------------------- what speaks against it


def test_a_freeze_without_a_reason_is_said_without_one(trains: Story) -> None:
    trains.hear(ev.FreezeSet(source="ops"))
    assert lasting_objection(trains.cluster, trains.job) == "frozen by ops"


def test_a_job_that_comes_back_is_not_parked_before_it_is_back(trains: Story) -> None:
    job = trains.job.with_parking(found=Table())
    assert lasting_objection(trains.cluster, job) == "it has not come back from its parking yet, which is as it was"


def test_a_rank_that_is_being_replaced_is_no_objection_that_lasts(trains: Story) -> None:
    trains.lose(trains.holder(1), code=3)
    assert now(trains) is JobPhase.AGREEING
    assert lasting_objection(trains.cluster, trains.job) == ""


def test_why_the_last_try_failed_speaks_against_the_next_one_for_a_while(trains: Story) -> None:
    halt(trains)
    fail(trains)
    why = "rank 1 could not be written down: disk full"
    assert objection(trains.cluster, trains.job) == why
    later = replace(trains.cluster, now_ms=trains.job.parking.again_ms)
    assert objection(later, trains.job) == ""


# ---------------------------------------------------------------- it comes to nothing


def test_a_job_that_ends_for_another_reason_ends_for_that(trains: Story) -> None:
    trains.hear(ev.FreezeSet(source="ops"), asked(grace_ms=5_000, number=SIGTERM))
    trains.hear(ev.JobCancelled(job=JOB, reason="enough"))
    trains.wait(5_000)
    assert trains.job.outcome is not None
    assert trains.job.outcome.reason == "enough"


def test_a_manifest_is_waited_for_also_when_the_time_is_over(trains: Story) -> None:
    to_seal(trains, asked(grace_ms=5_000, number=SIGTERM))
    trains.wait(5_001)
    assert now(trains) is JobPhase.SEALING


def test_a_rank_that_ended_while_the_manifest_failed_is_replaced_and_that_is_no_failure(trains: Story) -> None:
    to_seal(trains)
    trains.lose(trains.holder(1), signal=9)
    assert now(trains) is JobPhase.SEALING
    trains.hear(ev.SealFailed(job=JOB, name=trains.job.parking.name, reason="disk full"))
    assert now(trains) is JobPhase.AGREEING
    faults = trains.job.accounting.incidents[-1].faults
    found = {(fault.cause, fault.rank) for fault in faults if fault.detector == PARKS}
    assert found == {("parks: the nodes go", None), ("ended while the job was written down", 1)}
    assert trains.job.attempts.fruitless == 0


def test_one_that_is_too_late_is_called_off_and_the_job_goes_on(trains: Story) -> None:
    halt(trains, asked(grace_ms=5_000))
    trains.wait(5_000)
    assert now(trains) is JobPhase.RELEASING
    assert trains.job.parking.why_not.startswith("the time is over: parking: ")
    assert (trains.job.parking.asked, trains.job.parking.name, trains.job.stop) == (False, "", None)
    trains.answer((od.Resume,))
    assert now(trains) is JobPhase.RUNNING
    assert trains.job.outcome is None


def test_one_that_was_not_begun_in_time_calls_nothing_off(trains: Story) -> None:
    trains.hear(ev.FreezeSet(source="ops", reason="look"), asked(grace_ms=5_000))
    trains.wait(5_000)
    assert now(trains) is JobPhase.RUNNING
    assert trains.job.parking.why_not == "the time is over: frozen by ops: look"


def test_one_that_is_called_off_already_is_not_called_off_again(trains: Story) -> None:
    halt(trains, asked(grace_ms=5_000))
    rank: dict[str, Any] = {
        "job": JOB,
        "generation": trains.job.generation,
        "worker": trains.holder(1),
        "rank": Rank(1),
    }
    trains.hear(ev.ParkFailed(reason="disk full", **rank))
    assert now(trains) is JobPhase.RELEASING
    since_ms = trains.job.phase_ms
    trains.wait(5_000)
    assert (trains.job.phase, trains.job.phase_ms) == (JobPhase.RELEASING, since_ms)
    assert not trains.job.parking.asked


def test_one_that_is_too_late_ends_the_job_if_a_signal_asked_for_it(trains: Story) -> None:
    halt(trains, asked(grace_ms=5_000, number=SIGTERM))
    trains.wait(5_000)
    outcome = trains.job.outcome
    assert outcome is not None
    assert (outcome.code, trains.job.signals.count) == (STOPPED, 0)
    assert outcome.reason.startswith("the nodes go; the time is over: ")
    assert not trains.job.accounting.incidents[-1].eligible


def test_one_that_fails_while_the_job_stops_for_another_signal_passes_none_on(trains: Story) -> None:
    trains.hear(ev.FreezeSet(source="ops"), asked(grace_ms=5_000, number=SIGTERM))
    trains.hear(ev.SignalAsked(job=JOB, number=2, grace_ms=60_000, reason="Ctrl-C"))
    trains.wait(5_000)
    assert (trains.job.signals.count, trains.job.outcome) == (1, None)
    assert not trains.job.parking.asked


def test_without_a_deadline_nothing_is_left_to_the_ranks(trains: Story) -> None:
    trains.hear(asked(number=SIGTERM))
    trains.cluster = trains.cluster.with_job(trains.job.with_parking(tries=TRIES, why_not="disk full"))
    trains.hear(ev.Tick())
    outcome = trains.job.outcome
    assert outcome is not None
    assert outcome.reason.endswith("ranks were still there after 0 s")


# ---------------------------------------------------------------- nowhere to go


def test_a_job_that_only_starts_does_not_park_of_its_own_accord() -> None:
    story = submitted(spares=0, **PLACE)
    story.answer((od.StartWorker,))
    leaves(story)
    assert not story.job.parking.asked


def test_a_job_that_stops_does_not_park_of_its_own_accord() -> None:
    story = running(spares=0, **PLACE)
    story.hear(ev.SignalAsked(job=JOB, number=2, grace_ms=60_000, reason="Ctrl-C"))
    leaves(story)
    assert not story.job.parking.asked


def test_a_node_that_is_gone_this_moment_leaves_no_time() -> None:
    story = running(spares=0, **PLACE)
    leaves(story, 0)
    assert now(story) is JobPhase.RUNNING
    assert story.job.parking.why_not.startswith("the time is over")


def test_a_node_on_which_ranks_may_stay_is_no_reason() -> None:
    story = running(spares=0, **PLACE)
    leaves(story, effect=Effect.NO_SCHEDULE)
    assert not story.job.parking.asked


def test_what_room_there_is_elsewhere() -> None:
    story = running(spares=0, ranks_per_slot=2, **PLACE)
    story.hear(ev.NodeJoined(node=B, incarnation="b", slots=1))
    shared = len(story.job.seats)  # each of their slots takes one more
    assert room_elsewhere(story.cluster, story.job) == 1 + shared


def test_room_for_all_but_one_is_too_little_also_while_nobody_may_move() -> None:
    story = running(spares=0, **PLACE)
    story.hear(ev.NodeJoined(node=B, incarnation="b", slots=1), ev.FreezeSet(source="ops"))
    leaves(story)
    assert story.job.parking.asked


# ---------------------------------------------------------------- told to end


def test_how_long_a_scheduler_may_take(trains: Story) -> None:
    trains.hear(told())
    trains.wait(2_499)
    assert not trains.job.parking.asked
    trains.wait(1)
    assert trains.job.parking.asked


def test_it_begins_at_once_however_long_there_is(trains: Story) -> None:
    trains.hear(told(gone_in_ms=3_600_000))
    assert now(trains) is JobPhase.QUIESCING
    assert trains.job.parking.deadline_ms == trains.now_ms + 3_600_000


def test_one_that_was_to_begin_later_begins_at_once(trains: Story) -> None:
    trains.hear(asked(grace_ms=3_600_000))
    assert now(trains) is JobPhase.RUNNING
    trains.hear(told(gone_in_ms=60_000))
    assert now(trains) is JobPhase.QUIESCING


def test_one_whose_last_try_failed_is_not_begun_sooner_for_that(trains: Story) -> None:
    halt(trains)
    fail(trains)
    again_ms = trains.job.parking.again_ms
    trains.hear(told(gone_in_ms=60_000))
    assert (trains.job.parking.number, trains.job.parking.again_ms) == (SIGTERM, again_ms)


def test_other_taints_change_nothing_of_it(trains: Story) -> None:
    trains.hear(ev.TaintSet(node=B, key="drain", source="ops"), told(gone_in_ms=20_000))
    assert trains.job.parking.number == SIGTERM


def test_a_job_without_a_place_is_not_told_although_nothing_could_be_parked_anyway() -> None:
    story = running()
    story.hear(ev.FreezeSet(source="ops"), told(gone_in_ms=20_000))
    assert story.job.stop is None


def test_ranks_that_are_nowhere_were_not_told(trains: Story) -> None:
    job = trains.job
    for rank, seat in job.seats.items():
        job = job.with_seat(rank, vacate_seat(seat))
    trains.hear(told(gone_in_ms=20_000))
    assert told_to_end(trains.cluster, trains.job) is not None
    assert told_to_end(trains.cluster, job) is None


def test_a_job_that_is_about_to_end_is_let_end(trains: Story) -> None:
    job = trains.job.enter(JobPhase.FINISHING, trains.now_ms, "every rank has finished")
    trains.cluster = trains.cluster.with_job(job)
    trains.hear(told(gone_in_ms=20_000))
    assert (trains.job.stop, trains.job.parking.asked) == (None, False)


def test_a_node_that_is_taken_away_this_moment_leaves_no_time(trains: Story) -> None:
    trains.hear(told(gone_in_ms=0))
    assert trains.job.outcome is not None
    assert trains.job.outcome.code == STOPPED


def apart() -> Story:
    """A rank on each of two nodes."""
    story = Story()
    spec = ev.JobSpec(job=JOB, world_size=2, nproc_per_node=1, **PLACE)
    story.hear(ev.JobSubmitted(spec=spec))
    for node in (A, B):
        story.hear(ev.NodeJoined(node=node, incarnation="a", slots=1))
    story.settle()
    assert now(story) is JobPhase.RUNNING
    return story


def test_a_job_parks_when_all_its_nodes_were_told_and_not_before() -> None:
    story = apart()
    story.hear(told(B, gone_in_ms=20_000))
    story.wait(3_000)
    assert not story.job.parking.asked
    story.hear(told(A, gone_in_ms=20_000))
    assert story.job.parking.asked


def test_a_rank_whose_node_is_lost_does_not_keep_the_others_from_it() -> None:
    story = apart()
    story.hear(ev.NodeLost(node=B, incarnation="a", reason="power"))
    assert now(story) is JobPhase.AGREEING
    story.hear(told(A, gone_in_ms=20_000))
    assert (story.job.parking.asked, story.job.parking.number) == (True, SIGTERM)


def test_the_scheduler_is_waited_for_from_the_first_word_on() -> None:
    story = apart()
    story.hear(told(B))
    story.wait(2_000)
    story.hear(told(A))
    story.wait(499)
    assert not story.job.parking.asked
    story.wait(1)
    assert story.job.parking.deadline_ms == 30_000


def test_the_first_node_that_is_taken_away_counts_with_its_reason() -> None:
    story = apart()
    story.hear(told(A), told(B, gone_in_ms=90_000, reason="preempted"))
    assert (story.job.parking.reason, story.job.parking.deadline_ms) == ("preempted", 90_000)
    story = apart()
    story.hear(ev.FreezeSet(source="ops"))
    story.hear(told(A, gone_in_ms=90_000))
    story.hear(told(B, gone_in_ms=60_000, reason="sooner"))
    stop = story.job.stop
    assert stop is not None
    assert stop.reason.startswith("sooner; ")
