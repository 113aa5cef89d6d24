"""What tests of a worker's identity share."""

from __future__ import annotations

from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Rank, WorkerId
from torchrelay.protocol.messages.orders import Assign


def assign(rank: int = 5, replacement: bool = False) -> Assign:
    return Assign(
        node=NodeId("n"),
        worker=WorkerId("w"),
        job=JobId("j"),
        generation=Generation(1),
        rank=Rank(rank),
        world_size=8,
        local_world_size=4,
        local_rank=rank % 4,
        replacement=replacement,
        restarts=2,
    )
