"""Nodes that beat, a job that trains on two of them, and what is judged of them as time passes."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.support.telling import begun
from torchrelay.protocol.health.deafness import (
    Deafness,
    is_deaf,
    set_back,
)
from torchrelay.protocol.health.failure_detector import judge
from torchrelay.protocol.health.pulses import (
    BEAT_MS,
    Beat,
    FailureDetector,
    Sample,
    hear,
)
from torchrelay.protocol.health.silence import (
    Silence,
)
from torchrelay.protocol.health.silent_nodes import SilentNodes
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Point, WorkerPhase
from torchrelay.protocol.rules.cluster import EMPTY, Cluster, advance

JOB = JobId("job")
A, B, C = (NodeId(f"node-{place}") for place in range(3))


def running(per_node: int = 2) -> Cluster:
    """A job that trains with ranks on A and B; C has slots and holds nothing."""
    spec = ev.JobSpec(job=JOB, world_size=2 * per_node, nproc_per_node=per_node, nodes=2)
    cluster = advance(EMPTY, ev.JobSubmitted(spec=spec), 0)
    for node in (A, B, C):
        cluster = advance(cluster, ev.NodeJoined(node=node, incarnation="a", slots=per_node), 0)
    return begun(cluster)


@dataclass
class Cast:
    """Nodes that beat, a job that trains, and what is judged of them."""

    cluster: Cluster = field(default_factory=running)
    failure_detector: FailureDetector = field(default_factory=FailureDetector)
    now_ms: int = 0
    passed_ms: int = 0  # by a clock that never stands
    deafness: Deafness = field(default_factory=Deafness)
    step: int = 10
    lost: list[tuple[int, NodeId]] = field(default_factory=list)
    incarnations: dict[NodeId, str] = field(default_factory=dict)

    def beat(self, node: NodeId) -> None:
        samples = [
            Sample(
                worker=worker.worker,
                rank=worker.rank,
                generation=Generation(1),
                point=Point(self.step),
                phase=WorkerPhase.COMPUTING,
                phase_ms=0,
                step_ms=100.0,
                collectives=self.step,
                beat_ms=50,
                process="S",
                cpu_ms=0,
            )
            for worker in self.cluster.workers.values()
            if worker.node == node
        ]
        incarnation = self.incarnations.get(node, "a")
        self.failure_detector = hear(
            self.failure_detector, Beat(node=node, incarnation=incarnation, samples=tuple(samples)), self.now_ms
        )

    def live(
        self, ms: int, *nodes: NodeId, every_ms: int = BEAT_MS, trains: bool = True, tells: bool = True
    ) -> list[NodeId]:
        """Time passes; these nodes beat, and the job trains or stands still. Returns who was lost meanwhile."""
        before = len(self.lost)
        for _ in range(ms // BEAT_MS):
            self.passed_ms += BEAT_MS
            if not self.deafness.still:
                self.now_ms += BEAT_MS
            self.step += trains
            if self.passed_ms % every_ms == 0:
                for node in nodes:
                    self.look(deaf=False)
                    self.beat(node)
            self.look(is_deaf(self.failure_detector, self.cluster, self.now_ms))
            for event in judge(self.failure_detector, self.cluster, self.now_ms):
                if isinstance(event, ev.NodeLost):
                    self.lost.append((self.passed_ms, event.node))
                    if tells:
                        self.cluster = advance(self.cluster, event, self.now_ms)
        return [node for _, node in self.lost[before:]]

    def look(self, deaf: bool) -> None:
        """As the orchestrator does it, see `orchestrator.core.watch`."""
        before = self.deafness
        self.deafness = before.look(deaf, self.passed_ms)
        if before.still and not self.deafness.still:
            self.failure_detector = set_back(self.failure_detector, before.stood_ms(self.passed_ms))

    def silence(self, node: NodeId) -> Silence | None:
        return SilentNodes(self.failure_detector, self.cluster, self.now_ms).of(self.cluster.nodes[node])

    def silent(self, node: NodeId) -> Silence:
        """Of a node that is not heard."""
        silence = self.silence(node)
        assert silence is not None, f"{node} is heard"
        return silence
