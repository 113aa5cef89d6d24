"""Who is silent and who hangs: no false alarm in an hour of ordinary life, and a hang is found in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec
import pytest

from torchrelay.protocol import events as ev
from torchrelay.protocol.cluster import EMPTY, Cluster, advance
from torchrelay.protocol.ids import Generation, JobId, NodeId, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.job import JobPhase
from torchrelay.protocol.vitals import BEAT_MS, Beat, Sample, Vitals, forget, hear, judge

JOB, NODE = JobId("job"), NodeId("node-0")
RANKS = 4


def running() -> Cluster:
    """A cluster whose job trains on four workers."""
    spec = ev.JobSpec(job=JOB, world_size=RANKS, nproc_per_node=RANKS, spares=1)
    cluster = advance(EMPTY, ev.JobSubmitted(spec=spec), 0)
    cluster = advance(cluster, ev.NodeJoined(node=NODE, incarnation="a", slots=RANKS + 1), 0)
    for worker in list(cluster.workers.values()):
        event = ev.WorkerStarted(
            worker=worker.worker, node=NODE, slot=worker.slot, pid=10 + worker.slot, address="a", store="s"
        )
        cluster = advance(cluster, event, 0)
    answers: list[ev.Answer] = []
    seats = [(rank, seat.worker) for rank, seat in cluster.jobs[JOB].seats.items() if seat.worker is not None]
    first = Generation(1)
    answers += [ev.WorkerReady(job=JOB, generation=first, worker=w, rank=rank, point=None) for rank, w in seats]
    answers += [ev.WorkerRewired(job=JOB, generation=first, worker=w, rank=rank) for rank, w in seats]
    answers += [ev.WorkerResumed(job=JOB, generation=first, worker=w, rank=rank) for rank, w in seats]
    for answer in answers:
        cluster = advance(cluster, answer, 0)
    assert cluster.jobs[JOB].phase is JobPhase.RUNNING
    return cluster


@dataclass
class Ward:
    """Workers whose samples a test sets, and the verdicts on them."""

    cluster: Cluster = field(default_factory=running)
    vitals: Vitals = field(default_factory=Vitals)
    now_ms: int = 0
    samples: dict[Rank, Sample] = field(default_factory=dict)
    alarms: list[ev.Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        for rank, seat in self.cluster.jobs[JOB].seats.items():
            assert seat.worker is not None
            self.samples[rank] = Sample(
                worker=seat.worker, rank=rank, generation=Generation(1), point=Point(10), phase=WorkerPhase.COMPUTING,
                phase_ms=0, step_ms=100.0, collectives=100, beat_ms=50, process="S", cpu_ms=0,
            )  # fmt: skip

    def set(self, rank: int, **fields: object) -> None:
        self.samples[Rank(rank)] = msgspec.structs.replace(self.samples[Rank(rank)], **fields)

    def live(self, ms: int, *, busy: tuple[int, ...] = ()) -> list[ev.Event]:
        """Let time pass, beat by beat; ranks that are busy use CPU time."""
        for _ in range(ms // BEAT_MS):
            self.now_ms += BEAT_MS
            for rank in busy:
                self.set(rank, cpu_ms=self.samples[Rank(rank)].cpu_ms + BEAT_MS)
            beat = Beat(node=NODE, incarnation="a", samples=tuple(self.samples.values()))
            self.vitals = hear(self.vitals, beat, self.now_ms)
            self.alarms += judge(self.vitals, self.cluster, self.now_ms)
        return self.alarms

    def step(self, ms: int = 250) -> None:
        """All ranks do a step; whoever was behind has caught up."""
        entered = max(sample.collectives for sample in self.samples.values()) + 5
        for rank in range(RANKS):
            before = self.samples[Rank(rank)]
            assert before.point is not None
            self.set(
                rank, point=before.point.after_step(), phase=WorkerPhase.COMPUTING,
                collectives=entered, step_ms=float(ms),
            )  # fmt: skip
        self.live(ms)

    def wait_for(self, rank: int, *, phase: WorkerPhase) -> None:
        """All others are one collective ahead of this rank, blocked in it."""
        for other in range(RANKS):
            if other != rank:
                self.set(other, collectives=self.samples[Rank(other)].collectives + 1)
        self.set(rank, phase=phase)


def test_a_worker_stopped_by_a_signal_is_found_in_seconds() -> None:
    ward = Ward()
    ward.step()
    ward.wait_for(2, phase=WorkerPhase.COMPUTING)
    ward.set(2, process="T")
    begin = ward.now_ms
    while not ward.live(BEAT_MS):
        assert ward.now_ms - begin < 2_500
    hung = ward.alarms[0]
    assert isinstance(hung, ev.WorkerHung)
    assert hung.worker == ward.samples[Rank(2)].worker
    assert "stopped by a signal" in hung.evidence


def test_a_worker_stopped_inside_a_collective_is_found_though_nobody_is_ahead_of_it() -> None:
    ward = Ward()
    ward.step()
    ward.set(2, process="T")
    begin = ward.now_ms
    while not ward.live(BEAT_MS):
        assert ward.now_ms - begin < 2_500
    assert {event.worker for event in ward.alarms if isinstance(event, ev.WorkerHung)} == {ward.samples[Rank(2)].worker}


@pytest.mark.parametrize("reason", ["another is behind it", "others move", "a sample is missing"])
def test_a_stopped_worker_is_let_be_while_others_are_not_kept_by_it(reason: str) -> None:
    ward = Ward()
    ward.step()
    ward.set(2, process="T")
    if reason == "another is behind it":
        ward.set(1, collectives=ward.samples[Rank(1)].collectives - 1)
    for number in range(20):
        if reason == "others move":
            ward.set(3, phase=WorkerPhase.GATE if number % 2 else WorkerPhase.COMPUTING)
        if reason == "a sample is missing":
            ward.samples.pop(Rank(3), None)
        ward.live(2 * BEAT_MS)
    assert [event.worker for event in ward.alarms if isinstance(event, ev.WorkerHung)] == []


def test_a_worker_that_sleeps_in_a_step_is_found_when_twenty_steps_have_passed() -> None:
    ward = Ward()
    ward.step(2_000)
    ward.wait_for(1, phase=WorkerPhase.COMPUTING)
    assert ward.live(39_000) == []
    assert [type(event) for event in ward.live(2_000)[:1]] == [ev.WorkerHung]


def test_a_worker_that_computes_without_an_end_is_found_too_but_later() -> None:
    ward = Ward()
    ward.step()
    ward.wait_for(1, phase=WorkerPhase.COMPUTING)
    assert ward.live(119_000, busy=(1,)) == []
    assert ward.live(2_000, busy=(1,)) != []


@pytest.mark.parametrize("phase", list(WorkerPhase))
def test_nobody_hangs_for_whom_nobody_waits(phase: WorkerPhase) -> None:
    ward = Ward()
    ward.set(1, phase=phase)
    assert ward.live(4_000_000) == []


def test_a_stopped_spare_is_found_because_it_could_not_take_a_rank() -> None:
    ward = Ward()
    spare = next(worker for worker in ward.cluster.workers.values() if worker.rank is None)
    ward.samples[Rank(99)] = msgspec.structs.replace(
        ward.samples[Rank(0)], worker=spare.worker, rank=None, point=None, process="T"
    )
    ward.live(3_000)
    assert {event.worker for event in ward.alarms if isinstance(event, ev.WorkerHung)} == {spare.worker}


def test_old_samples_say_nothing() -> None:
    ward = Ward()
    ward.wait_for(2, phase=WorkerPhase.COMPUTING)
    ward.set(2, process="T")
    ward.live(BEAT_MS)
    assert judge(ward.vitals, ward.cluster, ward.now_ms + 10_000) == ()


def test_a_silent_node_is_lost_and_one_that_beats_is_not() -> None:
    ward = Ward()
    ward.live(1_000)
    assert judge(ward.vitals, ward.cluster, ward.now_ms + 14_000) == ()
    lost = judge(ward.vitals, ward.cluster, ward.now_ms + 15_000)
    assert [type(event) for event in lost] == [ev.NodeLost]


def test_pulses_of_workers_that_ended_are_forgotten() -> None:
    ward = Ward()
    ward.live(BEAT_MS)
    gone = ward.samples[Rank(0)].worker
    cluster = replace(ward.cluster, workers=ward.cluster.workers.drop(gone))
    assert WorkerId(gone) not in forget(ward.vitals, cluster).pulses


# The longest last.


def test_an_hour_of_steps_with_saves_evaluation_and_compilation_raises_no_alarm() -> None:
    ward = Ward()
    # Before the first commit the script compiles, one rank far longer than the others.
    for rank in range(RANKS):
        ward.set(rank, point=Point(0), step_ms=0.0)
    ward.wait_for(2, phase=WorkerPhase.COMPUTING)
    ward.live(300_000, busy=(2,))
    hour = ward.now_ms + 3_600_000
    while ward.now_ms < hour:
        for _ in range(200):
            ward.step()
        # Rank 0 saves for 20 s, outside any section, using the disk only; the others wait in the next step.
        ward.wait_for(0, phase=WorkerPhase.BETWEEN)
        ward.live(20_000)
        # All evaluate, and one of them is late by half a minute in a declared section.
        ward.wait_for(3, phase=WorkerPhase.SECTION)
        ward.live(30_000)
        # A new shape: one rank compiles for a minute.
        ward.wait_for(1, phase=WorkerPhase.COMPUTING)
        ward.live(60_000, busy=(1,))
    assert ward.alarms == []
