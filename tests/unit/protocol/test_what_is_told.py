"""What is told: the stories of incidents and moves, as operators read them."""

from __future__ import annotations

import pytest

from tests.support.telling import Story, running, say
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.ids import Point, Rank
from torchrelay.protocol.model.job import JobPhase

HERE, NEXT = Point(3), Point(4)
SIGKILL = 9


def told(story: Story, word: str) -> list[str]:
    """What the last incident tells with this word."""
    return [text for _, text in story.job.accounting.incidents[-1].story if word in text]


def recovering(until: JobPhase) -> Story:
    """A recovery, as far as the beginning of a phase."""
    story = running()
    story.lose(story.holder(1), signal=SIGKILL)
    while story.job.phase is not until:
        story.answer()
    return story


# ---------------------------------------------------------------- who restores whom


@pytest.mark.parametrize(
    ("sources", "shares", "names"),
    [
        ((Rank(0),), (1_000,), "rank 0"),
        ((Rank(0), Rank(2)), (700, 300), "rank 0 (700 bytes), rank 2 (300 bytes)"),
    ],
)
def test_shares_are_told_where_there_are_several(
    sources: tuple[Rank, ...], shares: tuple[int, ...], names: str
) -> None:
    story = recovering(JobPhase.RECONFIGURING)
    given = {"sources": sources, "shares": shares, "digest": "d", "size": 1_010}
    story.hear(say(story, ev.StateRestored, 1, point=HERE, **given))
    assert told(story, "restored from") == [f"rank 1 restored from {names}: 1,010 bytes, digest d equal"]
