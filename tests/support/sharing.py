"""What tests of sharing share."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from tests.support.migration import HERE
from tests.support.telling import JOB, Story
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.model.roster import Worker
from torchrelay.protocol.recovery.sharing import (
    shares_with,
)


def lost(node: str = "node-1") -> ev.NodeLost:
    return ev.NodeLost(node=NodeId(node), incarnation="a", reason="silence")


def back(node: str = "node-1", slots: int = 1) -> ev.NodeJoined:
    return ev.NodeJoined(node=NodeId(node), incarnation="b", slots=slots)


def spread(ranks: int = 3, slots: int = 1, nodes: int | None = None, **fields: Any) -> Story:
    """A job with so many ranks on a node, that may share slots."""
    fields = {"ranks_per_slot": 2, "nproc_per_node": slots, "probation_ms": 0} | fields
    story = Story()
    there = nodes if nodes is not None else ranks // slots
    story.hear(ev.JobSubmitted(spec=ev.JobSpec(job=JOB, world_size=ranks, nodes=there, **fields)))
    for number in range(there):
        story.hear(ev.NodeJoined(node=NodeId(f"node-{number}"), incarnation="a", slots=slots))
    story.settle()
    story.train(HERE)
    for worker, stand in story.stands.items():  # somebody keeps the records of those whose node is lost
        story.stands[worker] = replace(stand, keeps=True)
    return story


def holder_of(story: Story, rank: int) -> Worker:
    return story.cluster.workers[story.holder(rank)]


def place(story: Story, rank: int) -> str:
    return holder_of(story, rank).place


def crowded(story: Story) -> list[int]:
    """The ranks that are guests in the slots of others."""
    return [rank for rank in story.job.seats if shares_with(story.cluster, holder_of(story, rank)) is not None]
