"""Watch: how often nodes are to beat, and when what their beats told is judged.

A judgement is a look at all ranks. Where there are many, each node beats less often, and nobody is judged more often
than that: what the orchestrator does at rest stays the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from msgspec.structs import replace

from torchrelay.orchestrator.core.clock import UNSAID, Clock
from torchrelay.orchestrator.core.heirs import Heirs
from torchrelay.orchestrator.core.traffic import AgentPort
from torchrelay.orchestrator.store.journal import Reached
from torchrelay.protocol.health.deafness import Deafness, is_deaf, limit_ms, set_back
from torchrelay.protocol.health.failure_detector import judge
from torchrelay.protocol.health.pulses import (
    BEAT_MS,
    Beat,
    FailureDetector,
    forget_strangers,
    hear,
    pace_ms,
)
from torchrelay.protocol.messages.events import Event, WorkerExited
from torchrelay.protocol.model.facts import is_alive
from torchrelay.protocol.model.state import Cluster
from torchrelay.wire.messages.channel import Pace

log = logging.getLogger("torchrelay.orchestrator")


class Watch:
    """Of one orchestrator."""

    def __init__(self) -> None:
        self._judged_ms: int | None = None
        self._deafness = Deafness()

    @property
    def still(self) -> bool:
        """Whether the clock is held because nobody is heard."""
        return self._deafness.still

    def mind_silence(self, failure_detector: FailureDetector, cluster: Cluster, clock: Clock) -> FailureDetector:
        """Hold the clock while nobody is heard; release it when it has stood for as long as it may.

        While it is held for another reason nobody is silent: silence is counted by this clock.
        """
        return self._look(failure_detector, clock, is_deaf(failure_detector, cluster, clock.now_ms()))

    def wake(self, failure_detector: FailureDetector, clock: Clock) -> FailureDetector:
        """Somebody is heard: time goes on before that is taken in."""
        return self._look(failure_detector, clock, deaf=False) if self.still else failure_detector

    def hold(self, clock: Clock) -> None:
        """Hold the clock for another reason, until somebody else releases it."""
        clock.hold()
        self._deafness = Deafness()

    def _look(self, failure_detector: FailureDetector, clock: Clock, deaf: bool) -> FailureDetector:
        before, passed = self._deafness, clock.ran_ms()  # who was away itself has not listened
        self._deafness = before.look(deaf, passed)
        if self.still == before.still:
            return failure_detector
        if self.still:
            silent_s = limit_ms(failure_detector) / 1000
            log.warning("no node has been heard for %g s: until one is, no deadline passes", silent_s)
            clock.hold()
            return failure_detector
        clock.release()
        stood_ms = before.stood_ms(passed)
        if self._deafness.spent:
            log.warning("no node has been heard for %.0f s more: time goes on", stood_ms / 1000)
        return set_back(failure_detector, stood_ms)

    def set_pace(
        self, failure_detector: FailureDetector, cluster: Cluster, agents: Iterable[AgentPort]
    ) -> FailureDetector:
        """Tell all agents how often to beat, if that has changed with the number of nodes."""
        beat_ms = pace_ms(cluster.nodes.count(is_alive))
        if beat_ms == failure_detector.beat_ms:
            return failure_detector
        for agent in agents:
            agent.send(Pace(beat_ms))
        return replace(failure_detector, beat_ms=beat_ms)

    def judge(
        self, failure_detector: FailureDetector, cluster: Cluster, now_ms: int
    ) -> tuple[FailureDetector, tuple[Event, ...]]:
        """Who is silent, or hangs; nobody if it is too soon to look again."""
        beat_ms, last_ms = failure_detector.beat_ms, self._judged_ms
        if beat_ms > BEAT_MS and last_ms is not None and now_ms - last_ms < beat_ms:
            return failure_detector, ()
        self._judged_ms = now_ms
        failure_detector = forget_strangers(failure_detector, cluster)
        return failure_detector, judge(failure_detector, cluster, now_ms)


def listen_anew(failure_detector: FailureDetector, cluster: Cluster, now_ms: int) -> FailureDetector:
    """Count silence of all nodes from now."""
    for node in cluster.nodes.values():
        if node.alive:
            failure_detector = hear(failure_detector, Beat(node=node.node, incarnation=node.incarnation), now_ms)
    return failure_detector


def mind_what_waits(heirs: Heirs | None, clock: Clock) -> None:
    """As long as heirs are waited for, nobody can answer what was decided: time stands still."""
    if heirs is not None and heirs.late:
        clock.hold(UNSAID)
    else:
        clock.release(UNSAID)


# ---------------------------------------------------------------- how far jobs are, for reading only


def note_beat(reached: Reached, beat: Beat, cluster: Cluster) -> None:
    """A beat has told how far ranks are."""
    # What no job has passed yet: mostly a beat tells of nothing further, and its workers need not be looked up.
    passed = min(reached.values(), default=None) if len(reached) >= len(cluster.jobs) else None
    for sample in beat.samples:
        if passed is not None and sample.point is not None and (sample.generation, sample.point) <= passed:
            continue
        worker = cluster.workers.get(sample.worker)
        if worker is not None and sample.point is not None:
            place = (sample.generation, sample.point)
            reached[worker.job] = max(place, reached.get(worker.job, place))


def note_end(reached: Reached, event: Event, before: Cluster, after: Cluster) -> None:
    """A job's last steps are over before a beat tells of them: one that has ended well left a record of the last."""
    if isinstance(event, WorkerExited) and event.code == 0 and event.private:
        worker = before.workers.get(event.worker)
        if worker is not None and worker.rank is not None:
            place = (after.jobs[worker.job].generation, max(record.point for record in event.private))
            reached[worker.job] = max(place, reached.get(worker.job, place))


RIVAL_MS = 2_000  # an agent heard within this time keeps its node's name for itself


def is_rival(former: AgentPort, incarnation: str, detector: FailureDetector, now_ms: int) -> bool:
    """Whether another agent of the node has just been heard."""
    if former.incarnation == incarnation:
        return False
    return now_ms - detector.heard.get((former.node, former.incarnation), -RIVAL_MS) < RIVAL_MS
