"""Deafness: while no node at all is heard, the orchestrator's time stands still.

Then it is the orchestrator that hears nothing (its network, or the one machine is busy). No order reaches a worker and
no answer comes, so no deadline may pass: not that of a report, nor of a process that is to end. It stands from when all
have been silent for 2 s (two beats, where they are further apart) until the first is heard again, and for 58 s at most:
of them, it has so many again when it has gone on for as long. Nodes are lost as ever (see `silence`): what has stood
counts in their silence. A job that is to stop has no time to lose, and then it goes on.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from torchrelay.protocol.health.pulses import FailureDetector, Pulse
from torchrelay.protocol.health.silence import ALL_SILENT_MS, DEAF_MS
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.model.table import Table

MOST_STILL_MS = DEAF_MS - ALL_SILENT_MS


class Deafness(Struct, frozen=True):
    """Whether the time stands still for that reason. All times by a clock that goes on while the orchestrator runs.

    since_ms  since when it stands; None: it does not
    spent     it has stood for as long as it may, and nobody was heard since
    left_ms   how long it may stand, as of `seen_ms`
    """

    since_ms: int | None = None
    spent: bool = False
    left_ms: int = MOST_STILL_MS
    seen_ms: int | None = None

    @property
    def still(self) -> bool:
        return self.since_ms is not None

    def look(self, deaf: bool, passed_ms: int) -> Deafness:
        """After a look at who is heard. `passed_ms`: the time now."""
        if self.since_ms is not None:
            left = self.left_ms - (passed_ms - self.since_ms)
            return self if deaf and left > 0 else Deafness(spent=deaf, left_ms=max(0, left), seen_ms=passed_ms)
        gone_on = 0 if self.seen_ms is None else passed_ms - self.seen_ms
        left = min(MOST_STILL_MS, self.left_ms + gone_on)
        since = passed_ms if deaf and not self.spent and left > 0 else None
        return Deafness(since, spent=deaf and self.spent, left_ms=left, seen_ms=passed_ms)

    def stood_ms(self, passed_ms: int) -> int:
        """How long it has stood."""
        return 0 if self.since_ms is None else passed_ms - self.since_ms


def is_deaf(failure_detector: FailureDetector, cluster: Cluster, now_ms: int) -> bool:
    """Whether nobody is heard, and the time is to stand still for it."""
    return all_silent(failure_detector, cluster, now_ms) and not any(map(stops, cluster.jobs.values()))


def all_silent(failure_detector: FailureDetector, cluster: Cluster, now_ms: int) -> bool:
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


def stops(job: Job) -> bool:
    """Whether an operator, or a batch system, waits for its end."""
    return job.phase is not JobPhase.ENDED and (job.stop is not None or job.phase is JobPhase.ENDING)


def set_back(failure_detector: FailureDetector, stood_ms: int) -> FailureDetector:
    """The time has stood still for so long: what was heard before is older by that."""
    newest = failure_detector.newest_ms
    return replace(
        failure_detector,
        heard=Table((key, at_ms - stood_ms) for key, at_ms in failure_detector.heard.items()),
        pulses=Table((worker, pulse_set_back(one, stood_ms)) for worker, one in failure_detector.pulses.items()),
        newest_ms=None if newest is None else newest - stood_ms,
    )


def pulse_set_back(pulse: Pulse, stood_ms: int) -> Pulse:
    stopped, advanced = pulse.stopped_ms, pulse.advanced_ms
    return replace(
        pulse,
        heard_ms=pulse.heard_ms - stood_ms,
        still_ms=pulse.still_ms - stood_ms,
        stopped_ms=None if stopped is None else stopped - stood_ms,
        advanced_ms=None if advanced is None else advanced - stood_ms,
        back_ms=pulse.back_ms - stood_ms,
    )
