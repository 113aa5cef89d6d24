"""What tests of proofs share: a job that has lost a rank and goes on, and how its incidents stand."""

from __future__ import annotations

from tests.support.telling import JOB, Story, running
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.ids import Point, Rank
from torchrelay.protocol.model.incident import Resolution

HERE, NEXT = Point(3), Point(4)


def recovered() -> Story:
    """A job that has lost rank 1 and goes on after `HERE`."""
    story = running(HERE)
    story.lose(story.holder(1), signal=9)
    story.settle()
    return story


def resolutions(story: Story) -> list[Resolution]:
    return [incident.resolution for incident in story.job.accounting.incidents]


def finish(story: Story, *points: Point | None) -> None:
    for rank, point in enumerate(points):
        story.hear(
            ev.WorkerFinished(
                job=JOB, generation=story.job.generation, worker=story.holder(rank), rank=Rank(rank), point=point
            )
        )
