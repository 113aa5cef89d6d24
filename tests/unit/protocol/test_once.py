"""What was done once is not done again by who takes over a rank; by all after a start from the checkpoint."""

from __future__ import annotations

from tests.support.telling import JOB, Story, raised, running
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.ids import Rank


def changed_by(story: Story, event: ev.Event) -> bool:
    before = story.cluster
    story.hear(event)
    return story.cluster != before


def test_a_result_is_recorded_once() -> None:
    story = running()
    story.hear(ev.OnceRecorded(job=JOB, rank=Rank(1), name="n", value=b"first"))
    assert not changed_by(story, ev.OnceRecorded(job=JOB, rank=Rank(1), name="n", value=b"second"))
    assert dict(story.job.once) == {1: (("n", b"first"),)}


def test_after_a_restart_from_the_checkpoint_it_is_done_again() -> None:
    story = running(max_restarts=1)
    story.hear(ev.OnceRecorded(job=JOB, rank=Rank(1), name="start", value=b"epoch 0"))
    story.hear(raised(story, 1, kind="undeclared"))
    assert story.job.attempts.restarts == 1
    assert not story.job.once
    assert not changed_by(story, ev.OnceRecorded(job=JOB, rank=Rank(1), name="start", value=b"epoch 0"))
    story.hear(ev.OnceRecorded(job=JOB, rank=Rank(1), name="start", value=b"epoch 2", restarts=1))
    assert dict(story.job.once) == {1: (("start", b"epoch 2"),)}
