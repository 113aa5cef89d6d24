"""A rank that an operator asked to move goes back to its outgoing worker as its target was lost: the wish stays."""

from __future__ import annotations

from typing import Any

from tests.support.migration import SIGKILL, cut_over
from tests.support.telling import JOB, Story
from torchrelay.orchestrator.views.why import why_rank
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import Rank
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.moves import MoveKind, MoveState
from torchrelay.protocol.placement.boundary import AGAIN_MS


def given_back() -> Story:
    """The target dies when it holds the rank, and its outgoing worker has it again."""
    story = cut_over()
    story.lose(story.holder(1), signal=SIGKILL)
    story.settle()
    story.wait(AGAIN_MS)
    story.settle()
    return story


def test_it_is_moved_once_more() -> None:
    story = given_back()
    outgoing = story.job.moving.moves[0].outgoing_workers[Rank(1)]
    assert "once more for rank 1" in [text for _, text in story.job.moving.moves[0].story]
    assert (story.job.phase, story.job.moving.moves[-1].state) == (JobPhase.RUNNING, MoveState.DONE)
    assert story.holder(1) != outgoing
    assert len(story.job.moving.moves) == 1


def half_moved(**fields: Any) -> Story:
    """Of two ranks one has gone, and the other is with its outgoing worker again."""
    story = cut_over(0, 1, **({"spares": 3, "slot_faults": 0} | fields))
    story.lose(story.holder(1), signal=SIGKILL)
    story.settle()
    assert (story.job.phase, story.move.ranks) == (JobPhase.RUNNING, (1,))
    return story


def test_a_rank_that_has_gone_was_taken_by_no_fault() -> None:
    story = half_moved()
    assert story.move.moved == (0,)
    story.hear(ev.MoveWithdrawn(job=JOB, ranks=(Rank(1),), source="ann"))
    assert (story.move.state, story.move.story[-1][1]) == (MoveState.CALLED_OFF, "the request was withdrawn")
    lines = list(why_rank(story.cluster, story.job, Rank(0)))
    assert f"before: {story.move.name} moved it" in lines


def test_a_rank_that_has_gone_and_has_to_leave_its_new_place_is_moved_by_another_move() -> None:
    story = half_moved()
    place = story.cluster.workers[story.holder(0)]
    story.hear(ev.TaintSet(node=place.node, slot=place.slot, key="ecc", source="detector"))
    first, second = story.job.moving.moves
    assert (first.state, first.story[-1][1]) == (MoveState.RECOVERED, "rank 0 has gone; rank 1 is to move yet")
    assert (second.kind, second.ranks) == (MoveKind.PRE_EMPTIVE, (0,))


def test_all_that_have_gone_are_remembered() -> None:
    story = half_moved()
    story.wait(AGAIN_MS)
    story.settle()
    assert (story.move.state, story.move.moved) == (MoveState.DONE, (0, 1))


def test_while_it_goes_nobody_speaks_of_a_fault() -> None:
    story = cut_over()
    lines = list(why_rank(story.cluster, story.job, Rank(1)))
    assert any(line.startswith("M-1 moves it just now: cut over") for line in lines), lines
    assert not any("fault" in line for line in lines)


def test_when_it_has_moved_the_wish_is_forgotten() -> None:
    story = cut_over()
    assert story.job.moving.requests
    story.answer((od.Reconfigure, od.Restore, od.Resume))
    story.settle()
    assert story.job.moving.moves[-1].state is MoveState.DONE
    assert not story.job.moving.requests
