"""Answers that are said again: nothing follows from them, so they need not be heard."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.support.telling import Story, submitted
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.ids import Generation, NodeId, Point, Rank, WorkerId
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.rules.answers import is_repeated
from torchrelay.protocol.rules.cluster import advance

SIGKILL = 9


class Repeating:
    """A story in which each answer is said again, right away and after all that follows."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.repeated: set[type[ev.Event]] = set()
        self.known: list[ev.Answer] = []

    def hear(self, event: ev.Event) -> None:
        assert not is_repeated(self.story.cluster, event), "it is the first time"
        self.story.hear(event)
        if isinstance(event, ev.Answer):
            self.known.append(event)
        for answer in self.known:
            if is_repeated(self.story.cluster, answer):
                self.repeated.add(type(answer))
                now = self.story.cluster.now_ms
                assert advance(self.story.cluster, answer, now) == self.story.cluster, "nothing follows from it"

    def settle(self) -> None:
        self.story.settle_by(self.hear)


def test_nothing_follows_from_an_answer_that_is_said_again() -> None:
    told = Repeating(submitted(ranks=3, spares=2))
    told.settle()
    told.story.train(Point(3))
    for rank in (1, 2):
        worker = told.story.holder(rank)
        records = told.story.stands[worker].records(worker)
        told.hear(ev.WorkerExited(worker=worker, node=NodeId("node-0"), signal=SIGKILL, private=records))
        told.settle()
    assert told.story.job.phase is JobPhase.RUNNING
    assert told.repeated == {ev.WorkerReported, ev.WorkerReady, ev.WorkerReconfigured, ev.WorkerResumed}


@pytest.mark.parametrize(
    "other", [{"generation": Generation(2)}, {"worker": WorkerId("another")}, {"rank": Rank(7)}, {"job": "another"}]
)
def test_of_another_worker_or_generation_it_is_none(other: dict[str, object]) -> None:
    story = submitted(ranks=2, spares=1)
    story.settle()
    holder = story.holder(0)
    event = ev.WorkerResumed(job=story.job.spec.job, generation=Generation(1), worker=holder, rank=Rank(0))
    assert is_repeated(story.cluster, event)
    assert not is_repeated(story.cluster, replace(event, **other))
