"""Generations: what is forgotten when one begins, and when all train in it."""

from __future__ import annotations

import pytest

from tests.support.migration import HERE, SIGKILL, cut_over
from tests.support.telling import running, say
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import Rank
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.table import FEW


@pytest.mark.parametrize("survivors", [2, FEW, FEW + 1])
def test_however_many_have_reported_all_are_asked_again_after_another_loss(survivors: int) -> None:
    story = running(ranks=survivors + 2, spares=2)
    story.lose(story.holder(0), signal=SIGKILL)
    story.answer((od.Interrupt,))
    assert story.job.phase is JobPhase.PREPARING
    story.lose(story.holder(1), signal=SIGKILL)
    asked = [order.rank for order in story.orders() if isinstance(order, od.Interrupt)]
    assert (story.job.phase, sorted(asked)) == (JobPhase.AGREEING, [0, *range(2, survivors + 2)])
    story.settle()
    assert (story.job.phase, story.job.resume_point) == (JobPhase.RUNNING, HERE)


def test_when_all_train_no_source_is_distrusted_any_more() -> None:
    """A rank went back to its outgoing worker, after another had sent a state that differed."""
    story = cut_over(spares=2)
    story.hear(say(story, ev.RestoreFailed, 1, source=Rank(0), reason="differs", mismatch=True))
    story.lose(story.holder(1), signal=SIGKILL)
    assert story.job.seats[Rank(1)].distrusted == {0}
    story.settle()
    assert (story.job.phase, story.job.seats[Rank(1)].distrusted) == (JobPhase.RUNNING, frozenset())
