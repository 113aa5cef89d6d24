"""What tests of failure detector share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
from msgspec.structs import replace

from tests.support.telling import begun
from torchrelay.protocol.health.failure_detector import Company, judge, judge_worker
from torchrelay.protocol.health.pulses import BEAT_MS, Beat, FailureDetector, Pulse, Sample, hear
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Point, Rank, WorkerPhase
from torchrelay.protocol.model.table import Table
from torchrelay.protocol.rules.cluster import EMPTY, Cluster, advance

JOB, NODE = JobId("job"), NodeId("node-0")
RANKS = 4


def running() -> Cluster:
    """A cluster whose job trains on four workers."""
    spec = ev.JobSpec(job=JOB, world_size=RANKS, nproc_per_node=RANKS, spares=1)
    cluster = advance(EMPTY, ev.JobSubmitted(spec=spec), 0)
    cluster = advance(cluster, ev.NodeJoined(node=NODE, incarnation="a", slots=RANKS + 1), 0)
    return begun(cluster)


@dataclass
class Ward:
    """Workers whose samples a test sets, and the verdicts on them."""

    cluster: Cluster = field(default_factory=running)
    failure_detector: FailureDetector = field(default_factory=FailureDetector)
    now_ms: int = 0
    samples: dict[Rank, Sample] = field(default_factory=dict)
    alarms: list[ev.Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        for rank, seat in self.cluster.jobs[JOB].seats.items():
            assert seat.worker is not None
            self.samples[rank] = Sample(
                worker=seat.worker,
                rank=rank,
                generation=Generation(1),
                point=Point(10),
                phase=WorkerPhase.COMPUTING,
                phase_ms=0,
                step_ms=100.0,
                collectives=100,
                beat_ms=50,
                process="S",
                cpu_ms=0,
            )

    def set(self, rank: int, **fields: object) -> None:
        self.samples[Rank(rank)] = msgspec.structs.replace(self.samples[Rank(rank)], **fields)

    def live(self, ms: int, *, busy: tuple[int, ...] = ()) -> list[ev.Event]:
        """Let time pass, beat by beat; ranks that are busy use CPU time."""
        assert ms % BEAT_MS == 0, "nothing would happen in the rest of it"
        for _ in range(ms // BEAT_MS):
            self.now_ms += BEAT_MS
            for rank in busy:
                self.set(rank, cpu_ms=self.samples[Rank(rank)].cpu_ms + BEAT_MS)
            beat = Beat(node=NODE, incarnation="a", samples=tuple(self.samples.values()))
            self.failure_detector = hear(self.failure_detector, beat, self.now_ms)
            self.alarms += judge(self.failure_detector, self.cluster, self.now_ms)
        return self.alarms

    def step(self, ms: int = BEAT_MS) -> None:
        """All ranks do a step; whoever was behind has caught up."""
        entered = max(sample.collectives for sample in self.samples.values()) + 5
        for rank in range(RANKS):
            before = self.samples[Rank(rank)]
            assert before.point is not None
            self.set(
                rank,
                point=before.point.after_step(),
                phase=WorkerPhase.COMPUTING,
                collectives=entered,
                step_ms=float(ms),
            )
        self.live(ms)

    def wait_for(self, rank: int, *, phase: WorkerPhase) -> None:
        """All others are one collective ahead of this rank, blocked in it."""
        for other in range(RANKS):
            if other != rank:
                self.set(other, collectives=self.samples[Rank(other)].collectives + 1)
                if phase is WorkerPhase.SECTION:
                    self.set(other, phase=WorkerPhase.GATE)  # of the same section
        self.set(rank, phase=phase)


# ---------------------------------------------------------------- at the limits

NOW = 10_000_000
SPARE = 99


@cache
def cluster() -> Cluster:
    return running()


def pulse(
    rank: int = 1,
    *,
    still: int = 0,
    stopped: int | None = None,
    heard: int = 0,
    used: int = 0,
    main: int = 0,
    **fields: Any,
) -> Pulse:
    """A pulse of a rank's holder, or of the spare; ages in ms before now."""
    workers = {seat: worker.worker for worker in cluster().workers.values() for seat in [worker.rank]}
    worker = workers[None if rank == SPARE else Rank(rank)]
    given: dict[str, Any] = {
        "worker": worker, "rank": Rank(rank), "generation": Generation(1), "point": Point(10),
        "phase": WorkerPhase.COMPUTING, "phase_ms": 0, "step_ms": 100.0, "collectives": 100, "beat_ms": 50,
        "process": "S", "cpu_ms": 5_000 + used, "main_ms": 3_000 + main,
    }  # fmt: skip
    since = None if stopped is None else NOW - stopped
    return Pulse(Sample(**(given | fields)), NOW - heard, NOW - still, 5_000, since, None, 3_000)


def evidence(one: Pulse, *others: Pulse, **job: Any) -> str:
    """Why the first of these hangs, in this job; empty if it does not."""
    failure_detector = FailureDetector(pulses=Table((each.sample.worker, each) for each in (one, *others)))
    return judge_worker(Company(failure_detector, replace(cluster().jobs[JOB], **job), NOW), one, NOW)


def ahead(rank: int, **fields: Any) -> Pulse:
    return pulse(rank, collectives=101, **fields)
