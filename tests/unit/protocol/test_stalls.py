"""Ranks that wait for one another in vain: what is certain is found, with both places, and nothing else is."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.support.failure_detector import Ward
from torchrelay.protocol.health.failure_detector import ASTRAY_MS
from torchrelay.protocol.health.pulses import BEAT_MS
from torchrelay.protocol.health.stalls import Parting, Spot, Stalled, find_parting
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.ids import Point, Rank, WorkerId, WorkerPhase

AT = Point(10)
P = WorkerPhase
PAIR = 77  # the key of a group of ranks 0 and 1


def way(
    rank: int, phase: WorkerPhase, spot: Spot | None = None, *, point: Point | None = AT, begun: int = 5
) -> Stalled:
    groups = {0: begun, PAIR: 3} if rank < 2 else {0: begun}
    return Stalled(WorkerId(f"w{rank}"), Rank(rank), point, phase, groups, spot or Spot())


def parted(*ways: Stalled) -> Parting:
    found = find_parting(ways)
    assert found is not None
    return found


IN_BACKWARD = Spot("train.py:40", "backward", kind="step")
IN_BARRIER = Spot("train.py:50", "barrier")
IN_PAIR = Spot("train.py:70", "broadcast", PAIR)
IN_REDUCE = Spot("train.py:60", "all_reduce")

# ---------------------------------------------------------------- what is certain


def test_a_step_and_a_section_after_the_same_point_never_meet() -> None:
    found = parted(way(0, P.COMPUTING, IN_BACKWARD), way(1, P.SECTION, Spot("train.py:60", "all_reduce")))
    assert str(found).startswith(
        "after 10 rank 0 is in a step (backward, train.py:40), and rank 1 is in a section (all_reduce, train.py:60)"
    )


def test_the_gate_of_a_step_and_a_section_never_meet() -> None:
    found = parted(way(0, P.GATE, Spot("train.py:41", "all_reduce", kind="step")), way(1, P.SECTION))
    assert "rank 0 waits at the end of a step (train.py:41), and rank 1 is in a section" in str(found)


@pytest.mark.parametrize("phase", [P.COMPUTING, P.SECTION, P.GATE])
def test_a_call_for_which_somebody_is_missing_whose_script_has_ended(phase: WorkerPhase) -> None:
    found = parted(way(0, phase), way(1, P.FINISHED, Spot("train.py:90")))
    assert (found.one.rank, found.other.rank) == (1, 0)
    assert "rank 1 has ended its script (train.py:90)" in str(found)


def test_a_barrier_outside_of_calls_that_somebody_does_not_come_to_who_has_ended() -> None:
    assert parted(way(0, P.BETWEEN, IN_BARRIER), way(1, P.FINISHED)).one.rank == 1


def test_before_join_as_well() -> None:
    found = parted(way(0, P.BOOTING, IN_BARRIER, point=None), way(1, P.FINISHED, point=None))
    assert str(found).startswith("rank 1 has ended its script")


@pytest.mark.parametrize("phase", [P.BOOTING, P.BETWEEN])
def test_a_backward_pass_outside_of_calls_that_computes_nothing(phase: WorkerPhase) -> None:
    waiting = replace(way(0, phase, Spot("train.py:40", "backward"), point=None), idle=True)
    found = parted(waiting, way(1, P.FINISHED, point=None))
    assert "rank 0 waits in a backward pass (train.py:40)" in str(found)
    assert find_parting([replace(waiting, idle=False), way(1, P.FINISHED, point=None)]) is None


@pytest.mark.parametrize("phase", [P.COMPUTING, P.SECTION, P.GATE])
def test_a_barrier_outside_of_calls_while_others_are_in_the_next_one(phase: WorkerPhase) -> None:
    found = parted(way(0, P.BETWEEN, IN_BARRIER), way(1, phase), way(2, P.BETWEEN, IN_BARRIER))
    assert "rank 0 waits in a collective outside of any step or section (barrier, train.py:50)" in str(found)
    assert "run.atomic(function, ...)" in found.remedy


def test_the_same_in_a_group_of_some_ranks() -> None:
    assert find_parting([way(0, P.BETWEEN, IN_PAIR), way(2, P.COMPUTING)]) is None, "rank 2 is not in it"
    assert parted(way(0, P.BETWEEN, IN_PAIR), way(1, P.COMPUTING)).one.rank == 0


def test_the_collective_of_one_number_is_not_the_same_on_all() -> None:
    found = parted(way(0, P.BETWEEN, IN_BARRIER), way(1, P.BETWEEN, IN_REDUCE))
    assert "(barrier, train.py:50)" in str(found)
    assert "(all_reduce, train.py:60)" in str(found)
    assert parted(way(0, P.COMPUTING, Spot("a.py:1", "barrier", kind="step")), way(1, P.GATE)).other.rank == 1


# ---------------------------------------------------------------- what is not


@pytest.mark.parametrize(
    "ways",
    [
        [way(0, P.BETWEEN), way(1, P.COMPUTING, IN_BACKWARD)],  # it saves, or logs
        [way(0, P.BETWEEN, IN_BARRIER), way(1, P.BETWEEN)],  # it is late
        [way(0, P.BETWEEN, IN_BARRIER), way(1, P.BETWEEN, IN_REDUCE, begun=4)],  # async, or on its way
        [way(0, P.COMPUTING, IN_BACKWARD), way(1, P.GATE, begun=6)],  # a slow rank
        [way(0, P.SECTION, IN_BARRIER), way(1, P.SECTION)],  # rank 1 saves
        [way(0, P.SECTION, point=Point(9)), way(1, P.COMPUTING)],  # seen at two moments
        [way(0, P.GATE, point=Point(9)), way(1, P.FINISHED)],  # about to pass the last gate
        [way(0, P.BETWEEN), way(1, P.FINISHED)],  # it writes the last checkpoint
        [replace(way(0, P.BETWEEN), idle=True), way(1, P.FINISHED)],  # the same, and it waits for a disk
        [way(0, P.BETWEEN, Spot("a.py:1", "backward")), way(1, P.FINISHED)],  # it computes
        [replace(way(0, P.COMPUTING, IN_BACKWARD, point=Point(9)), idle=True), way(1, P.FINISHED)],  # two moments
        [way(0, P.BETWEEN, IN_PAIR), way(2, P.FINISHED)],  # rank 2 is not in it
        [way(0, P.BETWEEN, IN_PAIR), way(2, P.BETWEEN, IN_PAIR)],  # of rank 2 it is not known which number it is
        [way(0, P.BETWEEN, Spot("a.py:1", "recv", direct=True)), way(1, P.COMPUTING)],  # from rank 2
        [way(0, P.BETWEEN, Spot("a.py:1", "recv", direct=True)), way(1, P.BETWEEN, IN_BARRIER)],
        [way(0, P.SECTION, point=None), way(1, P.COMPUTING, point=None)],  # before the first point
        [way(0, P.BOOTING, IN_BARRIER, point=None), way(1, P.COMPUTING, point=None)],
        [way(0, P.COMPUTING, point=None), way(1, P.FINISHED)],
        [way(0, P.COMPUTING), way(1, P.FINISHED, point=None)],
        [way(0, P.UPDATING), way(1, P.COMPUTING)],
        [way(0, P.UPDATING, Spot("train.py:41", kind="step")), way(1, P.SECTION)],  # it is about to commit
        [way(0, P.STOPPED), way(1, P.STOPPED)],
        [way(0, P.FINISHED), way(1, P.FINISHED)],
        [way(0, P.COMPUTING, IN_REDUCE), way(1, P.COMPUTING, IN_REDUCE)],  # a slow one
        [],
    ],
)
def test_of_what_is_not_certain_nothing_is_said(ways: list[Stalled]) -> None:
    assert find_parting(ways) is None


# ---------------------------------------------------------------- as beats tell it


def test_one_that_has_ended_while_others_stand_in_a_step_ends_the_job_with_both_places() -> None:
    ward = Ward()
    ward.set(1, phase=P.FINISHED, spot=Spot("train.py:90"))
    for rank in (0, 2, 3):
        ward.set(rank, spot=IN_BACKWARD)
    assert ward.live(ASTRAY_MS) == []
    event = ward.live(BEAT_MS)[0]
    assert isinstance(event, ev.WorkerRaised)
    assert (event.rank, event.kind) == (1, "undeclared")
    assert "train.py:90" in event.summary
    assert "train.py:40" in event.summary


def test_where_steps_are_long_it_takes_three_of_them() -> None:
    ward = Ward()
    for rank in range(4):
        ward.set(rank, step_ms=4_000.0)
    ward.set(1, phase=P.FINISHED)
    assert ward.live(12_000) == []
    assert ward.live(BEAT_MS) != []


def test_a_place_that_is_not_told_again_is_the_same_until_it_moves() -> None:
    ward = Ward()
    ward.set(0, phase=P.BETWEEN, spot=IN_BARRIER)
    ward.live(BEAT_MS)
    ward.set(0, spot=None)
    ward.live(ASTRAY_MS)
    assert any("train.py:50" in event.summary for event in ward.live(BEAT_MS) if isinstance(event, ev.WorkerRaised))
    ward = Ward()
    ward.set(0, phase=P.BETWEEN, spot=IN_BARRIER)
    ward.live(BEAT_MS)
    ward.set(0, spot=None, collectives=101)
    assert not any(isinstance(event, ev.WorkerRaised) for event in ward.live(2 * ASTRAY_MS))


def test_what_a_deaf_worker_has_said_last_proves_nothing() -> None:
    ward = Ward()
    ward.set(0, phase=P.BETWEEN, spot=IN_BARRIER, beat_ms=5_000)
    assert not any(isinstance(event, ev.WorkerRaised) for event in ward.live(2 * ASTRAY_MS))
