"""Details: small things of the core that somebody relies on, each by itself."""

from __future__ import annotations

from tests.telling import JOB, Story, running, say, submitted
from torchrelay.protocol import events as ev
from torchrelay.protocol import orders as od
from torchrelay.protocol.ids import NodeId, Point, Rank
from torchrelay.protocol.job import JobPhase
from torchrelay.protocol.roster import natural
from torchrelay.protocol.table import Table

HERE, NEXT = Point(3), Point(4)
NODE = NodeId("node-0")
SIGKILL = 9


# ---------------------------------------------------------------- placing


def test_ranks_take_the_first_slots_of_all_nodes() -> None:
    story = Story()
    for node in ("node-10", "node-2"):
        story.hear(ev.NodeJoined(node=NodeId(node), incarnation="a", slots=2))
    story.hear(ev.JobSubmitted(spec=ev.JobSpec(job=JOB, world_size=2, nproc_per_node=1, nodes=2)))
    held = [story.cluster.workers[story.holder(rank)] for rank in (0, 1)]
    assert [(worker.node, worker.slot) for worker in held] == [("node-2", 0), ("node-10", 0)]


def test_a_wait_for_places_that_is_over_does_not_count_for_the_next() -> None:
    story = submitted(slots=1, spares=0, spare_wait_ms=1_000)
    story.wait(10)
    assert story.job.waiting_ms == 0
    story.hear(ev.NodeJoined(node=NODE, incarnation="a", slots=2))
    assert story.job.waiting_ms is None
    story.settle()
    assert story.job.phase is JobPhase.RUNNING


def test_a_name_may_have_digits_that_are_no_numbers() -> None:
    assert sorted(["node-²", "node-10", "node-2"], key=natural) == ["node-2", "node-10", "node-²"]


# ---------------------------------------------------------------- what is kept


def test_the_end_of_a_job_is_dated() -> None:
    story = running()
    story.hear(ev.JobCancelled(job=JOB, reason="Ctrl-C"))
    story.wait(70)
    story.settle()
    assert (story.job.phase, story.job.phase_ms) == (JobPhase.ENDED, 70)


def test_what_is_said_again_and_again_stands_in_the_story_once() -> None:
    story = running()
    story.lose(story.holder(1), signal=SIGKILL)
    while story.job.phase is not JobPhase.REWIRING:
        story.answer()
    for _ in range(3):
        story.wait(10)
        story.hear(say(story, ev.RestoreFailed, 1, source=Rank(7), reason="refused"))
    told = [text for _, text in story.job.incidents[-1].story if "could not be restored" in text]
    assert len(told) == 1


# ---------------------------------------------------------------- deadlines


def test_a_survivor_has_as_long_to_the_edge_as_was_agreed() -> None:
    story = running(ready_ms=1_000)
    story.lose(story.holder(1), signal=SIGKILL)
    story.answer((od.Interrupt,))
    assert story.job.phase is JobPhase.PREPARING
    story.answer((od.Assign, od.CatchUp))
    story.wait(999)
    assert (story.job.phase, story.job.generation) == (JobPhase.PREPARING, 2)
    story.wait(1)
    assert (story.job.phase, story.job.generation) == (JobPhase.AGREEING, 3)


# ---------------------------------------------------------------- tables


def test_a_table_is_equal_to_tables_only() -> None:
    assert Table({1: 2}) == Table([(1, 2)])
    assert Table({1: 2}) != {1: 2}
