"""Replicas that hold different bits: who is believed, and what follows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec import structs
from msgspec.structs import replace

from tests.support.telling import JOB, Story, running
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.events import Effect
from torchrelay.protocol.messages.ids import Generation, NodeId, Point, Rank
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.recovery.replicas import DETECTOR, TAINT, Verdict, judge_replicas


@pytest.mark.parametrize(
    ("told", "differing", "doubtful"),
    [
        ("a1 a1 a1", (), ()),
        ("a1 a2 a1", (1,), ()),
        ("a1 a2 a3 a1", (), (0, 1, 2, 3)),  # half is no majority
        ("a1 a2 a2 a2 a3", (0, 4), ()),
        ("a1 a2", (), (0, 1)),
        ("a1 b2", (), ()),  # other shards hold other things
        ("a1 b1 a1 b2 a1 b1", (3,), ()),
        ("a1 b1 a2 b2 a1 b1", (2, 3), ()),
        ("a1", (), ()),
    ],
)
def test_the_majority_of_each_shard_is_believed(
    told: str, differing: tuple[int, ...], doubtful: tuple[int, ...]
) -> None:
    known = [(rank, word[0], word[1:]) for rank, word in enumerate(told.split())]
    assert judge_replicas(known) == Verdict(differing, doubtful)


def differ(story: Story, *ranks: int, by: int = 0, generation: int | None = None) -> ev.ReplicasDiffer:
    return ev.ReplicasDiffer(
        worker=story.holder(by),
        job=JOB,
        rank=Rank(by),
        generation=Generation(generation or story.job.generation),
        point=Point(3),
        ranks=tuple(map(Rank, ranks)),
        evidence=f"ranks {ranks} differ",
    )


def three_ranks() -> Story:
    return running(ranks=3)


@pytest.fixture
def story() -> Story:
    return three_ranks()


def test_who_differs_is_replaced_and_its_place_taken_last(story: Story) -> None:
    culprit = story.holder(1)
    story.hear(differ(story, 1))
    assert story.job.phase is JobPhase.AGREEING
    (fault,) = story.job.accounting.incidents[-1].faults
    assert (fault.rank, fault.worker, fault.detector, fault.cause) == (1, culprit, DETECTOR, "ranks (1,) differ")
    (taint,) = story.cluster.taints.values()
    assert (taint.node, taint.slot, taint.key, taint.effect) == (
        NodeId("node-0"),
        1,
        TAINT,
        Effect.PREFER_NO_SCHEDULE,
    )
    assert "differ" in taint.reason
    story.settle()
    assert story.job.open_incident is None
    assert story.job.accounting.incidents[-1].sources == (Rank(0),)
    assert story.holder(1) != culprit


def test_a_second_time_in_one_place_closes_it(story: Story) -> None:
    story.hear(ev.TaintSet(node=NodeId("node-0"), slot=1, key=TAINT, effect=Effect.PREFER_NO_SCHEDULE, source=DETECTOR))
    story.hear(differ(story, 1))
    assert [taint.effect for taint in story.cluster.taints.values()] == [Effect.NO_EXECUTE]
    story.settle()
    assert all(worker.slot != 1 for worker in story.cluster.workers.values())


def test_without_a_majority_nobody_goes_on(story: Story) -> None:
    story.hear(differ(story))
    assert story.job.outcome is not None
    assert story.job.outcome.code == 91
    assert story.job.outcome.reason == "ranks () differ: nobody can tell who is right"


def taken_over(story: Story, rank: int) -> None:
    """This rank is lost, and its replacement trains."""
    story.lose(story.holder(rank), signal=9)
    story.settle()
    assert story.job.phase is JobPhase.RUNNING


def test_a_replacement_that_goes_another_way_is_not_replaced_again_by_one_that_would_too(story: Story) -> None:
    taken_over(story, 1)
    story.hear(structs.replace(differ(story, 1), since=Point(3)))
    assert story.job.outcome is not None
    assert story.job.outcome.code == 91
    assert "ranks changed hands after" in story.job.outcome.reason
    assert "between two calls" in story.job.outcome.reason
    assert not story.cluster.taints, "no machine is to blame"


def test_another_rank_that_differs_after_a_recovery_is_replaced_as_ever(story: Story) -> None:
    taken_over(story, 1)
    story.hear(structs.replace(differ(story, 2), since=Point(3)))
    assert story.job.outcome is None
    assert story.job.accounting.incidents[-1].faults[0].rank == 2


def test_a_replacement_that_differs_much_later_is_replaced_as_ever(story: Story) -> None:
    taken_over(story, 1)
    story.hear(differ(story, 1))
    assert story.job.outcome is None


def test_without_a_majority_after_a_recovery_the_usual_cause_is_named(story: Story) -> None:
    taken_over(story, 1)
    story.hear(structs.replace(differ(story), since=Point(3)))
    assert story.job.outcome is not None
    assert "ranks changed hands after" in story.job.outcome.reason


@pytest.mark.parametrize("wrong", ["generation", "sender", "phase"])
def test_what_is_told_too_late_or_by_others_is_nothing(story: Story, wrong: str) -> None:
    event = differ(story, 1, generation=7 if wrong == "generation" else None)
    if wrong == "sender":
        story.lose(story.holder(0), signal=9)
    if wrong == "phase":
        story.lose(story.holder(2), signal=9)
    before = story.cluster
    story.hear(event)
    assert story.cluster == before


def test_it_is_told_twice_and_done_once(story: Story) -> None:
    event = differ(story, 1)
    story.hear(event)
    before = story.cluster
    story.hear(event)
    assert story.cluster == before


def finish(story: Story, *held: str, shards: Sequence[str] = "aaa", points: str = "888") -> None:
    """Each rank's script ends, with what it holds then."""
    for rank, what in enumerate(held):
        seat = story.job.seats[Rank(rank)]
        job = story.job.with_seat(Rank(rank), replace(seat, shard=shards[rank]))
        story.cluster = story.cluster.with_job(job)
        finished = ev.WorkerFinished(
            job=JOB,
            generation=job.generation,
            worker=story.holder(rank),
            rank=Rank(rank),
            point=Point(int(points[rank])),
            held=what,
        )
        story.hear(finished)


@pytest.mark.parametrize(
    ("held", "shards", "points"),
    [
        (("x", "x", "x"), "aaa", "888"),
        (("x", "x", "y"), "aab", "888"),  # of another shard
        (("x", "x", "y"), "aaa", "889"),  # it has ended elsewhere, which others see to
        (("x", "x", ""), "aaa", "888"),  # its script has changed the model after its last step
        (("", "", ""), "aaa", "888"),
    ],
)
def test_all_end_alike(story: Story, held: tuple[str, ...], shards: str, points: str) -> None:
    finish(story, *held, shards=shards, points=points)
    assert story.job.phase is JobPhase.FINISHING


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (("x", "y", "x"), "rank 1 holds other parameters than most of its replicas when the script ended"),
        (("x", "y", "z"), "ranks 0, 1, 2 hold different parameters when the script ended"),
        (("", "y", "z"), "ranks 1, 2 hold different parameters when the script ended"),
    ],
)
@pytest.mark.parametrize("restarts", [0, 1])
def test_replicas_that_end_with_other_parameters_end_the_job(held: tuple[str, ...], words: str, restarts: int) -> None:
    story = running(ranks=3, max_restarts=restarts)
    finish(story, *held)
    assert story.job.outcome is not None, "a checkpoint of its own may hold them, too: no restart"
    assert (story.job.outcome.code, story.job.phase) == (91, JobPhase.ENDING)
    assert story.job.outcome.reason.startswith(words)
    assert story.job.accounting.incidents[-1].faults[-1].detector == DETECTOR


def test_of_ranks_whose_joining_is_heard_late_nobody_says_that_they_are_replicas(story: Story) -> None:
    """Which shard they hold is not known yet: it is not the same because of that."""
    for rank in (0, 2):
        seat = replace(story.job.seats[Rank(rank)], joined=False)
        story.cluster = story.cluster.with_job(story.job.with_seat(Rank(rank), seat))
    finish(story, "x", "y", "z", shards=("", "a", ""))
    assert story.job.phase is JobPhase.FINISHING


def test_a_replacement_of_a_rank_that_had_finished_tells_its_own(story: Story) -> None:
    finish(story, "y")
    taken_over(story, 0)
    finish(story, "x", "x", "x")
    assert story.job.phase is JobPhase.FINISHING
