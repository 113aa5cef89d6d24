"""Decisions: every choice of the core by itself, at its limits."""

from __future__ import annotations

from dataclasses import replace

from tests.telling import JOB
from torchrelay.protocol.events import JobSpec, WorkerReported
from torchrelay.protocol.ids import START, Generation, NodeId, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.orders import Verdict
from torchrelay.protocol.policy import (
    choose_sources,
    choose_spare,
    choose_target,
    cordoned,
    judge_report,
    slot_order,
)
from torchrelay.protocol.roster import Life, Seat, Worker, natural

HERE, NEXT = Point(7), Point(8)
GATE, COMPUTING = WorkerPhase.GATE, WorkerPhase.COMPUTING
SPEC = JobSpec(job=JOB, world_size=4, nproc_per_node=2)


def reported(committed: Point | None, phase: WorkerPhase = COMPUTING, pending: Point | None = None) -> Seat:
    """A seat whose holder has reported."""
    report = WorkerReported(
        job=JOB, generation=Generation(2), worker=WorkerId("w"), rank=Rank(0), committed=committed, phase=phase,
        pending=pending,
    )  # fmt: skip
    return Seat(
        worker=WorkerId("w"), shard="all", report=report, holds=committed, serves=committed is not None
    )  # fmt: skip


def seats(*them: Seat) -> dict[Rank, Seat]:
    return {Rank(rank): seat for rank, seat in enumerate(them)}


# ---------------------------------------------------------------- spares


def spare(name: str, life: Life, node: str = "node-1") -> Worker:
    return Worker(WorkerId(name), NodeId(node), 0, JOB, life, 0)


def chosen(*spares: Worker, near: str = "node-1") -> str | None:
    best, reason = choose_spare(spares, Rank(3), near=NodeId(near))
    assert "rank 3" in reason
    return best.worker if best is not None else None


def test_a_warm_spare_comes_before_a_started_one_and_that_before_a_starting_one() -> None:
    starting, started, warm = spare("a", Life.STARTING), spare("b", Life.STARTED), spare("c", Life.WARM)
    assert chosen(starting, started, warm) == "c"
    assert chosen(starting, started) == "b"
    assert chosen(starting) == "a"


def test_a_spare_that_is_to_be_ended_is_none() -> None:
    assert chosen(spare("a", Life.FENCING)) is None
    assert chosen() is None


def test_a_rank_stays_on_its_node_if_it_can() -> None:
    here, there = spare("b", Life.WARM, "node-1"), spare("a", Life.WARM, "node-2")
    assert chosen(here, there, near="node-1") == "b"
    assert chosen(here, there, near="node-2") == "a"
    assert chosen(spare("b", Life.STARTED, "node-1"), there, near="node-1") == "a"


def test_of_equal_spares_the_first_by_name_is_taken() -> None:
    assert chosen(spare("w.10", Life.WARM), spare("w.9", Life.WARM)) == "w.9"


def test_names_are_sorted_as_people_do() -> None:
    assert sorted(["node-10", "node-2", "node-b", "node-a"], key=natural) == ["node-2", "node-10", "node-a", "node-b"]
    assert sorted(["10", "x", "9"], key=natural) == ["9", "10", "x"]


# ---------------------------------------------------------------- sources


def test_a_source_holds_the_same_shard_at_the_point_and_reported_it() -> None:
    lost = Seat(shard="all")
    good = reported(HERE)
    assert choose_sources(seats(lost, good, good), Rank(0), HERE) == (1, 2)
    assert choose_sources(seats(good, lost), Rank(1), HERE) == (0,)
    assert choose_sources(seats(good), Rank(0), HERE) == ()
    assert choose_sources(seats(lost, reported(NEXT)), Rank(0), HERE) == ()
    assert choose_sources(seats(lost, replace(good, holds=None)), Rank(0), HERE) == ()
    assert choose_sources(seats(lost, replace(good, serves=False)), Rank(0), HERE) == ()
    assert choose_sources(seats(lost, replace(good, shard="left")), Rank(0), HERE) == ()


def test_who_rolls_forward_is_a_source_too() -> None:
    rolling = replace(reported(HERE, GATE, NEXT), holds=NEXT)
    assert choose_sources(seats(Seat(shard="all"), rolling), Rank(0), NEXT) == (1,)


def test_unknown_shards_are_not_equal() -> None:
    unknown = replace(reported(HERE), shard="")
    assert choose_sources(seats(Seat(), unknown), Rank(0), HERE) == ()


def test_a_source_that_failed_may_be_asked_again_and_one_whose_digest_differed_not() -> None:
    good = reported(HERE)
    failed = Seat(shard="all", failed=frozenset({Rank(1)}))
    distrusting = Seat(shard="all", distrusted=frozenset({Rank(1)}))
    assert choose_sources(seats(failed, good, good), Rank(0), HERE) == (2,)
    assert choose_sources(seats(failed, good, good), Rank(0), HERE, tried=True) == (1, 2)
    assert choose_sources(seats(distrusting, good, good), Rank(0), HERE, tried=True) == (2,)


def test_a_newcomer_that_was_restored_can_be_asked_from_the_next_generation_on() -> None:
    restored = replace(reported(None), holds=HERE)
    assert choose_sources(seats(Seat(shard="all"), restored), Rank(0), HERE) == ()
    assert choose_sources(seats(Seat(shard="all"), restored), Rank(0), HERE, tried=True) == (1,)


# ---------------------------------------------------------------- the target and the verdicts


def test_the_target_is_the_newest_point_that_a_survivor_committed() -> None:
    assert choose_target(seats(reported(HERE), reported(NEXT), Seat())) == (
        NEXT, "step 8 is committed on rank 1: nobody goes back behind it"
    )  # fmt: skip
    assert choose_target(seats(reported(NEXT), reported(NEXT)))[1].startswith("step 8 is committed on rank 0")


def test_without_state_there_is_no_target() -> None:
    assert choose_target(seats(Seat(), reported(None))) == (None, "no survivor holds any state")
    assert choose_target(seats(reported(START), reported(None))) == (
        START, "nothing was committed yet: all workers start again"
    )  # fmt: skip


def test_what_was_decided_holds_as_long_as_somebody_can_get_there() -> None:
    waiting = reported(HERE, GATE, NEXT)
    target, why = choose_target(seats(waiting, reported(HERE)), NEXT)
    assert (target, "is lost since" in why) == (NEXT, True)
    assert choose_target(seats(reported(HERE, COMPUTING, NEXT)), NEXT)[0] == HERE
    assert choose_target(seats(reported(HERE, GATE, Point(9))), NEXT)[0] == HERE
    assert choose_target(seats(waiting), None)[0] == HERE
    there = choose_target(seats(reported(NEXT), waiting), NEXT)
    assert (there[0], "is committed on rank 0" in there[1]) == (NEXT, True)
    assert choose_target(seats(reported(Point(9)), waiting), NEXT)[0] == Point(9)


def test_a_survivor_redoes_or_rolls_forward_or_cannot_come() -> None:
    assert judge_report(reported(HERE), HERE) is Verdict.REDO
    assert judge_report(reported(HERE, GATE, NEXT), HERE) is Verdict.REDO
    assert judge_report(reported(HERE, GATE, NEXT), NEXT) is Verdict.ROLL_FORWARD
    assert judge_report(reported(HERE, COMPUTING, NEXT), NEXT) is None
    assert judge_report(reported(HERE, GATE, NEXT), Point(9)) is None
    assert judge_report(reported(None), HERE) is None
    assert judge_report(reported(None, GATE, HERE), HERE) is None
    assert judge_report(Seat(), HERE) is None


# ---------------------------------------------------------------- places


def test_ranks_fill_the_first_slots_of_each_node_and_spares_the_others() -> None:
    places = [(NodeId("node-10"), 0), (NodeId("node-2"), 2), (NodeId("node-2"), 1), (NodeId("node-2"), 0)]
    ordered = sorted(places, key=lambda place: slot_order(SPEC, *place))
    assert ordered == [("node-2", 0), ("node-2", 1), ("node-10", 0), ("node-2", 2)]


def test_a_slot_is_cordoned_while_its_faults_are_recent() -> None:
    spec = JobSpec(job=JOB, world_size=1, nproc_per_node=1, slot_faults=2, slot_window_ms=1_000)
    assert not cordoned(spec, (500,), 600)
    assert cordoned(spec, (0, 900), 1_000)
    assert not cordoned(spec, (0, 900), 1_001)
    assert cordoned(spec, (0, 0, 900, 901), 1_500)


def test_no_limit_means_no_cordon_and_no_refill_means_one_fault() -> None:
    free = JobSpec(job=JOB, world_size=1, nproc_per_node=1, slot_faults=0)
    assert not cordoned(free, (1,) * 16, 1)
    once = JobSpec(job=JOB, world_size=1, nproc_per_node=1, refill=False, slot_faults=0)
    assert not cordoned(once, (), 1)
    assert cordoned(once, (1,), 10_000_000)
