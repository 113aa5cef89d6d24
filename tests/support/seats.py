"""Seats: ranks whose holders have reported, for tests of single decisions."""

from __future__ import annotations

from tests.support.telling import JOB
from torchrelay.protocol.messages.events import WorkerReported
from torchrelay.protocol.messages.ids import Generation, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.model.roster import Seat

HERE, NEXT = Point(7), Point(8)
GATE, COMPUTING = WorkerPhase.GATE, WorkerPhase.COMPUTING


def reported(committed: Point | None, phase: WorkerPhase = COMPUTING, pending: Point | None = None) -> Seat:
    """A seat whose holder has reported."""
    report = WorkerReported(
        job=JOB,
        generation=Generation(2),
        worker=WorkerId("w"),
        rank=Rank(0),
        committed=committed,
        phase=phase,
        pending=pending,
    )
    return Seat(worker=WorkerId("w"), shard="all", report=report, holds=committed, serves=committed is not None)


def seats(*them: Seat) -> dict[Rank, Seat]:
    return {Rank(rank): seat for rank, seat in enumerate(them)}
