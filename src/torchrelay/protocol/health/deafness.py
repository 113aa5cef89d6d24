"""Deafness: while no node at all is heard, the orchestrator's time stands still.

Then it is the orchestrator that hears nothing (its network, or the one machine is busy). No order reaches a worker and
no answer comes, so no deadline may pass: not that of a report, nor of a process that is to end. It stands from when all
have been silent for 2 s (two beats, where they are further apart) until the first is heard again, and for 54 s at most.
After that each node has its own limit, as ever (see `silence`): none of them is lost before 60 s.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from torchrelay.protocol.health.pulses import FailureDetector, count_from_now, would_lose
from torchrelay.protocol.health.silence import LEAST_SILENCE_MS
from torchrelay.protocol.model.state import Cluster

ALL_SILENT_MS = 2_000
DEAF_MS = 60_000
MOST_STILL_MS = DEAF_MS - LEAST_SILENCE_MS


class Deafness(Struct, frozen=True):
    """Whether the time stands still for that reason.

    since_ms  since when, by a clock that goes on; None: it does not
    spent     it has stood for as long as it may, and nobody was heard since
    """

    since_ms: int | None = None
    spent: bool = False

    @property
    def still(self) -> bool:
        return self.since_ms is not None

    def look(self, deaf: bool, passed_ms: int) -> Deafness:
        """After a look at who is heard. `passed_ms`: the time of the clock that goes on."""
        if not deaf:
            return Deafness()
        if self.spent:
            return self
        if self.since_ms is None:
            return Deafness(passed_ms)
        return Deafness(spent=True) if passed_ms - self.since_ms >= MOST_STILL_MS else self


def is_deaf(failure_detector: FailureDetector, cluster: Cluster, now_ms: int) -> bool:
    """Whether there are living nodes, and none of them has been heard of late."""
    limit = limit_ms(failure_detector)
    if now_ms - failure_detector.last_heard_ms(now_ms) < limit:  # mostly, and then nobody looks at each
        return False
    heard = failure_detector.heard
    living = [heard.get((node.node, node.incarnation)) for node in cluster.nodes.values() if node.alive]
    return bool(living) and all(since is not None and now_ms - since >= limit for since in living)


def limit_ms(failure_detector: FailureDetector) -> int:
    """How long all must have been silent."""
    return max(ALL_SILENT_MS, failure_detector.fresh_ms)


def after_standstill(failure_detector: FailureDetector, stood_ms: int, now_ms: int) -> FailureDetector:
    """The time has stood still for so long, and now a node is heard. The silence of the others is as long as it was."""
    gap_ms = stood_ms + limit_ms(failure_detector)
    if would_lose(failure_detector, gap_ms):
        return count_from_now(failure_detector, gap_ms, now_ms)
    heard, rhythms = failure_detector.heard, failure_detector.rhythms
    for (node, incarnation), at_ms in failure_detector.heard.items():
        if at_ms < now_ms:
            heard = heard.put((node, incarnation), at_ms - stood_ms)
        elif node in rhythms:
            rhythms = rhythms.put(node, rhythms[node].note(gap_ms, now_ms))
    return replace(failure_detector, heard=heard, rhythms=rhythms)
