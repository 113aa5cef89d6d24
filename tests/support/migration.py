"""What tests of migration share."""

from __future__ import annotations

from typing import Any

from tests.support.telling import JOB, Story, running
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import NodeId, Point, Rank
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.moves import MoveState

HERE, NEXT = Point(3), Point(4)
SIGKILL = 9


def asked(*ranks: int, to: str | None = None, reason: str = "a wish") -> ev.MoveAsked:
    node = None if to is None else NodeId(to)
    return ev.MoveAsked(job=JOB, ranks=tuple(Rank(rank) for rank in ranks), to=node, reason=reason, source="ann")


def tainted(node: str = "node-0", slot: int | None = 1, **fields: Any) -> ev.TaintSet:
    return ev.TaintSet(node=NodeId(node), slot=slot, **({"key": "ecc", "source": "detector"} | fields))


def cleared(node: str = "node-0", slot: int | None = 1, **fields: Any) -> ev.TaintCleared:
    return ev.TaintCleared(node=NodeId(node), slot=slot, **({"key": "ecc", "source": "detector"} | fields))


def preparing(*ranks: int, **fields: Any) -> Story:
    """A job of which some ranks are asked to move; their targets are being prepared."""
    story = running(**({"spares": 2} | fields))
    story.hear(asked(*(ranks or (1,))))
    return story


def quiescing(*ranks: int, **fields: Any) -> Story:
    story = preparing(*ranks, **fields)
    story.answer((od.Assign,))
    assert story.job.phase is JobPhase.QUIESCING
    return story


def halting(*ranks: int, **fields: Any) -> Story:
    story = quiescing(*ranks, **fields)
    story.answer((od.Halt,))
    assert story.job.phase is JobPhase.HALTING
    return story


def cut_over(*ranks: int, **fields: Any) -> Story:
    story = halting(*ranks, **fields)
    story.answer((od.Decide,))
    story.answer((od.Replay,))
    assert (story.job.phase, story.move.state) == (JobPhase.RECONFIGURING, MoveState.CUT_OVER)
    return story


def on_nodes(there: int, slots: int, **fields: Any) -> Story:
    """A job of two ranks that trains, on nodes with so many slots."""
    story = Story()
    story.hear(ev.JobSubmitted(spec=ev.JobSpec(job=JOB, world_size=2, **fields)))
    for number in range(there):
        story.hear(ev.NodeJoined(node=NodeId(f"node-{number}"), incarnation="a", slots=slots))
    story.settle()
    story.train(HERE)
    return story
