"""What tests of a worker's position share."""

from __future__ import annotations

from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Point, Rank, WorkerId
from torchrelay.protocol.messages.orders import Decide, Reconfigure, Verdict

WHO = {"node": NodeId("n"), "worker": WorkerId("w"), "job": JobId("j"), "rank": Rank(0)}


FIRST = Point(1)


def decide(generation: int, verdict: Verdict, point: Point) -> Decide:
    return Decide(**WHO, generation=Generation(generation), verdict=verdict, point=point)  # type: ignore[arg-type]


def reconfigure(generation: int) -> Reconfigure:
    return Reconfigure(**WHO, generation=Generation(generation), store="s:1")  # type: ignore[arg-type]
