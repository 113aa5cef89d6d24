"""What tests of guarantee share."""

from __future__ import annotations

from datetime import datetime

from msgspec.structs import replace

from torchrelay.api.shown import Exclusion
from torchrelay.goodput.ledger import Line
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Rank

NOW = datetime.now().astimezone()


def line(number: int = 1, resolution: str = "clean", *, hours_ago: float = 1.0, **more: object) -> Line:
    """A line of a ledger."""
    at = datetime.fromtimestamp(NOW.timestamp() - 3_600 * hours_ago).astimezone().isoformat(timespec="milliseconds")
    plain = Line(
        id=f"I-{number}",
        job=JobId("train"),
        generation=Generation(2),
        at=at,
        kind="unplanned",
        move="",
        cause="SIGKILL",
        detector="agent: process exit",
        ranks=(Rank(1),),
        nodes=(NodeId("node-0"),),
        verdict="redo the step after 7",
        resume_point="7",
        source="rank 0",
        shares={},
        steps_lost=0 if resolution == "clean" else None,
        pause_ms=400,
        phases={},
        bytes=1,
        digest="d1",
        digest_equal=True,
        tried=(),
        resolution=resolution,
        eligible=True,
        story=("rank 1 moves to a spare", f"resolved: {resolution}"),
    )
    changed: Line = replace(plain, **more)
    return changed


def excluded(number: int, reason: Exclusion, evidence: str, resolution: str = "ended") -> Line:
    return line(number, resolution, eligible=False, excluded=reason, evidence=evidence)
