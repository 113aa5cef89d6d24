"""Migration: choices and limits of moves in the core, each by itself."""

from __future__ import annotations

from typing import Any

from tests.telling import JOB, Stand, Story, running
from torchrelay.protocol import events as ev
from torchrelay.protocol import orders as od
from torchrelay.protocol.ids import NodeId, Point, Rank, WorkerPhase
from torchrelay.protocol.job import JobPhase
from torchrelay.protocol.moves import MoveState

HERE, NEXT = Point(3), Point(4)
NODE = NodeId("node-0")
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
    story.answer((od.CatchUp,))
    assert (story.job.phase, story.move.state) == (JobPhase.REWIRING, MoveState.MOVING)
    return story


# ---------------------------------------------------------------- heirs


def test_a_target_that_was_told_of_another_point_does_not_inherit_when_it_is_too_late_to_ask() -> None:
    story = quiescing(ranks=3, spares=2)
    for rank in (0, 2):
        story.stands[story.holder(rank)] = Stand(HERE, WorkerPhase.GATE, NEXT)
    story.answer((od.Halt,))
    story.answer((od.Decide,), but=(0, 2))
    target, leaver = story.move.targets[Rank(1)], story.holder(1)
    story.answer((od.CatchUp,))
    story.hear(ev.WorkerHung(worker=leaver, evidence="stopped"))
    story.answer((od.Interrupt,))
    assert (story.job.phase, story.job.target) == (JobPhase.PREPARING, HERE)
    records = tuple(ev.PrivateRecord(point, b"private") for point in (HERE, NEXT))
    story.hear(ev.WorkerExited(worker=leaver, node=NODE, signal=SIGKILL, private=records))
    assert story.holder(1) != target
    story.settle()
    assert story.job.phase is JobPhase.RUNNING


def test_a_target_that_inherits_when_all_have_reported_is_asked_for_no_report() -> None:
    story = preparing()
    target, leaver = story.move.targets[Rank(1)], story.holder(1)
    story.hear(ev.WorkerPrepared(worker=target))
    story.hear(ev.WorkerHung(worker=leaver, evidence="stopped"))
    story.answer((od.Interrupt,))
    assert story.job.phase is JobPhase.PREPARING
    story.lose(leaver, signal=SIGKILL)
    assert story.holder(1) == target
    assert story.job.seats[Rank(1)].assigned_in == story.job.generation
