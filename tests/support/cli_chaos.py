"""What tests of cli chaos share."""

from __future__ import annotations

from torchrelay.api.shown import RankStatus
from torchrelay.protocol.messages.ids import Generation, NodeId, Rank, WorkerId


def row(rank: int | None, node: NodeId, *, state: str = "computing", pid: int | None = 1) -> RankStatus:
    name = WorkerId(f"{node}.{rank}")
    return RankStatus(
        rank=None if rank is None else Rank(rank),
        worker=name,
        node=node,
        slot=0,
        pid=pid,
        state=state,
        generation=Generation(1),
        step=5,
        section=0,
        step_ms=100.0,
        in_state_ms=5,
        process="S",
        cpu_ms=1,
        silent_ms=10,
        replacement=False,
    )
