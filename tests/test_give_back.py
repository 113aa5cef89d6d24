"""A rank that an operator asked to move goes back to its leaver, as its target was lost: it is still asked for."""

from __future__ import annotations

from tests.telling import Story
from tests.test_migration import SIGKILL, cut_over
from torchrelay.protocol import orders as od
from torchrelay.protocol.boundary import AGAIN_MS
from torchrelay.protocol.ids import Rank
from torchrelay.protocol.job import JobPhase
from torchrelay.protocol.moves import MoveState


def given_back() -> Story:
    """The target dies when it holds the rank, and its leaver has it again."""
    story = cut_over()
    story.lose(story.holder(1), signal=SIGKILL)
    story.settle()
    story.wait(AGAIN_MS)
    story.settle()
    return story


def test_it_is_moved_once_more() -> None:
    story = given_back()
    leaver = story.job.moves[0].leavers[Rank(1)]
    assert "once more for rank 1" in [text for _, text in story.job.moves[0].story]
    assert (story.job.phase, story.job.moves[-1].state) == (JobPhase.RUNNING, MoveState.DONE)
    assert story.holder(1) != leaver
    assert len(story.job.moves) == 1


def test_when_it_has_moved_the_wish_is_forgotten() -> None:
    story = cut_over()
    assert story.job.requests
    story.answer((od.Rewire, od.Restore, od.Resume))
    story.settle()
    assert story.job.moves[-1].state is MoveState.DONE
    assert not story.job.requests
