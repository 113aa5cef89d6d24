"""What is heard at the door: several events at once, what workers say when they join, and names that nobody knows."""

from __future__ import annotations

from msgspec.structs import replace

from tests.support.migration import HERE, SIGKILL
from tests.support.telling import running, say, training
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.ids import Rank
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.rules.cluster import advance


def test_of_events_that_are_heard_together_what_is_due_is_done_after_the_last() -> None:
    story = running(ranks=3)
    story.lose(story.holder(2), signal=SIGKILL)
    stand = training(HERE)
    reports = [
        say(story, ev.WorkerReported, rank, committed=HERE, phase=stand.phase, pending=stand.pending) for rank in (0, 1)
    ]
    for report in reports:
        story.cluster = advance(story.cluster, report, story.now_ms, more=True)
    assert (story.job.phase, story.job.resume_point) == (JobPhase.AGREEING, None)
    story.wait(0)
    assert (story.job.phase, story.job.resume_point) == (JobPhase.PREPARING, HERE)


def test_how_often_snapshots_are_taken_is_kept_until_somebody_says_otherwise() -> None:
    story = running()
    assert story.job.rollback.every == 0, "none are taken"
    story.hear(say(story, ev.WorkerJoined, 0, snapshot_every=5, snapshot_buddies=2))
    assert (story.job.rollback.every, story.job.rollback.buddies) == (5, 2)
    story.hear(say(story, ev.WorkerJoined, 1))
    assert (story.job.rollback.every, story.job.rollback.buddies) == (5, 2)
    story.hear(say(story, ev.WorkerJoined, 1, snapshot_every=0))
    assert (story.job.rollback.every, story.job.rollback.buddies) == (0, 1)


def test_of_a_node_that_keeps_no_snapshots_nothing_is_noted() -> None:
    story = running()
    story.lose(story.holder(1), signal=SIGKILL)
    stand = training(HERE)
    story.hear(say(story, ev.WorkerReported, 0, committed=HERE, phase=stand.phase, pending=stand.pending, kept=()))
    assert (story.job.phase, len(story.job.rollback.kept)) == (JobPhase.PREPARING, 0)


def test_who_speaks_of_a_rank_that_there_is_not_is_not_heard() -> None:
    story = running()
    before = story.cluster
    differ = say(story, ev.ReplicasDiffer, 0, point=HERE, ranks=(Rank(1),), evidence="other bits")
    story.hear(replace(differ, rank=Rank(9)))
    assert story.cluster == before
