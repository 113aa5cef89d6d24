"""Sources: of whom a rank that needs its state is told, in which order, and how many."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.support.migration import SIGKILL, cut_over, preparing
from tests.support.seats import GATE, HERE, NEXT, reported, seats
from tests.support.telling import Stand, Story, running, say
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import Point, Rank
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.roster import Life, Seat
from torchrelay.protocol.model.table import SMALL, Table
from torchrelay.protocol.placement.policy import (
    MOST_SOURCES,
    choose_sources,
)


def sources_for(known: dict[Rank, Seat], rank: Rank, point: Point, *, tried: bool = False) -> tuple[Rank, ...]:
    return tuple(choose_sources(Table(known), rank, point, tried=tried))


def test_a_source_holds_the_same_shard_at_the_point_and_reported_it() -> None:
    lost = Seat(shard="all")
    good = reported(HERE)
    assert sources_for(seats(lost, good, good), Rank(0), HERE) == (1, 2)
    assert sources_for(seats(good, lost), Rank(1), HERE) == (0,)
    assert sources_for(seats(good), Rank(0), HERE) == ()
    assert sources_for(seats(lost, reported(NEXT)), Rank(0), HERE) == ()
    assert sources_for(seats(lost, replace(good, holds=None)), Rank(0), HERE) == ()
    assert sources_for(seats(lost, replace(good, serves=False)), Rank(0), HERE) == ()
    assert sources_for(seats(lost, replace(good, shard="left")), Rank(0), HERE) == ()


def test_who_rolls_forward_is_a_source_too() -> None:
    rolling = replace(reported(HERE, GATE, NEXT), holds=NEXT)
    assert sources_for(seats(Seat(shard="all"), rolling), Rank(0), NEXT) == (1,)


def test_unknown_shards_are_not_equal() -> None:
    unknown = replace(reported(HERE), shard="")
    assert sources_for(seats(Seat(), unknown), Rank(0), HERE) == ()


def test_a_source_that_failed_may_be_asked_again_and_one_whose_digest_differed_not() -> None:
    good = reported(HERE)
    failed = Seat(shard="all", failed=frozenset({Rank(1)}))
    distrusting = Seat(shard="all", distrusted=frozenset({Rank(1)}))
    assert sources_for(seats(failed, good, good), Rank(0), HERE) == (2,)
    assert sources_for(seats(failed, good, good), Rank(0), HERE, tried=True) == (1, 2)
    assert sources_for(seats(distrusting, good, good), Rank(0), HERE, tried=True) == (2,)


def test_a_replacement_that_was_restored_can_be_asked_from_the_next_generation_on() -> None:
    restored = replace(reported(None), holds=HERE)
    assert sources_for(seats(Seat(shard="all"), restored), Rank(0), HERE) == ()
    assert sources_for(seats(Seat(shard="all"), restored), Rank(0), HERE, tried=True) == (1,)


def sources(story: Story, rank: int) -> list[str]:
    """Where the holder of a rank is told to fetch its state."""
    found = [order for order in story.orders() if isinstance(order, od.Restore) and order.rank == rank]
    return [source.address for order in found for source in order.sources]


def test_a_outgoing_that_did_not_deliver_is_asked_no_more_in_this_generation_and_not_again_if_its_digest_differed() -> (
    None
):
    for mismatch in (False, True):
        story = cut_over(spares=2)
        outgoing, other = f"at:{story.job.seats[Rank(1)].outgoing}", f"at:{story.holder(0)}"
        assert sources(story, 1) == [outgoing, other]
        story.hear(say(story, ev.RestoreFailed, 1, source=Rank(1), reason="broken", mismatch=mismatch))
        assert sources(story, 1) == [other]
        story.hear(say(story, ev.ReconfigureFailed, 0, reason="refused"))
        for kind in (od.Interrupt, od.Decide, od.Replay):
            story.answer((kind,))
        assert sources(story, 1) == ([other] if mismatch else [outgoing, other])


def test_who_is_restored_gives_the_state_of_its_rank_and_its_outgoing_does_not() -> None:
    story = cut_over(0, 1, ranks=3, spares=3)
    story.answer((od.Restore,), but=(1,))
    story.lose(story.holder(2), signal=SIGKILL)
    for kind in (od.Assign, od.Interrupt, od.Decide, od.Replay):
        story.answer((kind,))
    assert (story.job.phase, story.job.seats[Rank(0)].outgoing is None) == (JobPhase.RECONFIGURING, False)
    assert sources(story, 2) == [f"at:{story.holder(0)}", f"at:{story.job.seats[Rank(1)].outgoing}"]


def test_a_outgoing_of_another_shard_gives_nothing() -> None:
    story = preparing(0, 1, spares=2)
    story.hear(*(say(story, ev.WorkerJoined, rank, shard=shard) for rank, shard in enumerate(("left", "right"))))
    for rank, shard in enumerate(("left", "right")):
        story.stands[story.move.targets[Rank(rank)]] = Stand(shard=shard)
    for kind in (od.Assign, od.Halt, od.Decide, od.Replay):
        story.answer((kind,))
    assert sources(story, 1) == [f"at:{story.job.seats[Rank(1)].outgoing}"]


def test_outgoing_workers_that_did_not_deliver_are_asked_again_before_all_is_given_up() -> None:
    story = cut_over(0, 1, spares=3)
    outgoing = story.job.seats[Rank(1)].outgoing
    assert outgoing is not None
    story.lose(outgoing, signal=SIGKILL)
    story.lose(story.holder(1), signal=SIGKILL)
    for kind in (od.Assign, od.Interrupt, od.Decide, od.Replay):
        story.answer((kind,))
    assert (story.job.phase, sources(story, 1)) == (JobPhase.RECONFIGURING, [f"at:{story.job.seats[Rank(0)].outgoing}"])
    generation = story.job.generation
    story.hear(say(story, ev.RestoreFailed, 1, source=Rank(0), reason="broken"))
    assert (story.job.phase, story.job.generation) == (JobPhase.AGREEING, generation + 1)


def test_a_target_that_nobody_can_restore_gives_its_rank_back() -> None:
    story = cut_over(spares=2)
    target, outgoing = story.holder(1), story.job.seats[Rank(1)].outgoing
    for source in (0, 1):
        story.hear(say(story, ev.RestoreFailed, 1, source=Rank(source), reason="broken"))
    assert (story.holder(1), story.cluster.workers[target].life) == (outgoing, Life.FENCING)
    fault = story.job.accounting.incidents[-1].faults[0]
    assert (fault.cause, fault.detector) == ("its state could not be had, verified", "restore")


# ---------------------------------------------------------------- many replicas


BEFORE_RESTORE = (od.StartWorker, od.Assign, od.Interrupt, od.Decide, od.Replay)


def restored_from(ranks: int, lost: int) -> list[int]:
    """The sources that a replacement is told of, in a job of so many replicas."""
    story = running(ranks=ranks, spares=1)
    story.train(HERE)
    story.lose(story.holder(lost), signal=SIGKILL)
    while story.job.phase is not JobPhase.RECONFIGURING:
        story.answer(BEFORE_RESTORE)
    (order,) = (one for one in story.orders() if isinstance(one, od.Restore))
    return [source.rank for source in order.sources]


def test_few_replicas_are_all_named_the_lowest_first() -> None:
    assert restored_from(17, 2) == [0, 1, *range(3, 17)]
    assert restored_from(20, 1) == list(range(2, 18)), "sixteen of more"


@pytest.mark.parametrize("ranks", [MOST_SOURCES + 4, SMALL + 10])
def test_of_many_replicas_each_replacement_is_told_of_those_that_follow_it(ranks: int) -> None:
    assert restored_from(ranks, 1) == list(range(2, 2 + MOST_SOURCES))
    expected = [rank % ranks for rank in range(ranks - 2, ranks - 2 + MOST_SOURCES)]
    assert restored_from(ranks, ranks - 3) == expected


def test_when_all_that_were_named_have_failed_others_are() -> None:
    ranks = MOST_SOURCES + 6
    good = reported(HERE)
    failed = replace(Seat(shard="all"), failed=frozenset(map(Rank, range(1, MOST_SOURCES + 1))))
    rest = tuple(range(MOST_SOURCES + 1, ranks))
    assert sources_for(seats(failed, *[good] * (ranks - 1)), Rank(0), HERE) == rest
