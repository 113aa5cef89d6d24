"""Rosters for the scheduler: published when ranks have changed hands, and not for every answer of a large job."""

from __future__ import annotations

from msgspec.structs import replace

from tests.support.telling import Story, running
from torchrelay.orchestrator.scheduling import is_held_otherwise, roster_of
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import Point, Rank
from torchrelay.protocol.model.job import Job, JobPhase


def rosters(story: Story, before: Job) -> bool:
    return is_held_otherwise(before, story.job)


def test_a_loss_and_a_replacement_are_told_and_answers_are_not() -> None:
    story = running(ranks=3)
    trains = story.job
    story.prove(Point(3))
    assert not rosters(story, trains)
    story.lose(story.holder(1), signal=9)
    lost = story.job
    assert rosters(story, trains)
    story.answer((od.Interrupt,), but=(0,))
    assert not rosters(story, lost), "a report"
    story.settle()
    assert roster_of(story.cluster, story.job).generation == story.job.generation == lost.generation
    assert not rosters(story, lost), "the spare had the rank at once"


def test_another_holder_in_the_same_generation_is_told() -> None:
    story = running(ranks=3, spares=2)
    story.lose(story.holder(1), signal=9)
    before = story.job
    story.lose(story.holder(1), signal=9)
    assert story.job.generation == before.generation
    assert story.job.seats[Rank(1)].worker != before.seats[Rank(1)].worker
    assert rosters(story, before)


def test_the_end_is_told() -> None:
    job = running().job
    assert is_held_otherwise(job, replace(job, phase=JobPhase.ENDED))
    assert not is_held_otherwise(job, replace(job, phase=JobPhase.FINISHING))
