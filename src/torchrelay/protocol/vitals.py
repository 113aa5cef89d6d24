"""Vitals: who is silent, and who hangs. Kept apart from the journalled state; its verdicts are facts for it.

Beats arrive a few times a second and are not journalled. `judge` turns them into `NodeLost` and `WorkerHung`, which
are. A worker hangs only if others wait for it: they have entered a collective that it has not; or it is stopped by a
signal inside one, and nobody moves.

    how it stands, while others wait       patience
    stopped by a signal                    5 steps, 1.5 s to 30 s
    computing, no CPU time used            20 steps, 10 s to 10 min; before the first commit 10 min
    computing, using CPU (compiling?)      100 steps, 2 min to 1 h; before the first commit 1 h
    between steps (saving, logging)        30 min
    in a declared section                  none: sections may take as long as they need

Ranks that have committed the same point are all on the way to the same next call. If one computes a step and another
is in a section, and neither moves, the script has taken different ways on them, and none of them will ever get on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from msgspec import Struct

from torchrelay.protocol.events import Event, NodeLost, WorkerHung, WorkerRaised
from torchrelay.protocol.ids import Generation, NodeId, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.job import RECOVERING, Job, JobPhase
from torchrelay.protocol.roster import Life
from torchrelay.protocol.state import Cluster
from torchrelay.protocol.table import Table


class Sample(Struct, frozen=True, kw_only=True):
    """A worker as its agent sees it now. Ages and spans in milliseconds."""

    worker: WorkerId
    rank: Rank | None
    generation: Generation
    point: Point | None  # last committed; None before join()
    phase: WorkerPhase
    phase_ms: int  # how long it has been in this phase
    step_ms: float  # how long its last step took
    collectives: int  # started on the default group in this generation
    beat_ms: int  # how long its control thread has been silent
    process: str  # state letter of the kernel: R, S, D, T (stopped), Z
    cpu_ms: int  # CPU time used so far, children included


class Beat(Struct, frozen=True, tag=True, kw_only=True):
    """An agent's sign of life, with a sample of each worker."""

    node: NodeId
    incarnation: str
    samples: tuple[Sample, ...] = ()


# Phases in which nobody trains.
STANDING = RECOVERING | {JobPhase.STARTING, JobPhase.FINISHING}
# A node is lost after this many silent beats of BEAT_MS.
BEAT_MS = 250
SILENT_BEATS = 60
# A sample older than this says nothing about now.
FRESH_MS = 4 * BEAT_MS
# Calls that commit nothing as long as this, at different calls of the script, never will.
ASTRAY_MS = 5_000
CALLS = {WorkerPhase.COMPUTING: "a step", WorkerPhase.SECTION: "a section"}
# Less than this share of one core counts as using no CPU time.
IDLE_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Pulse:
    """The newest sample of a worker, and since when it has not moved."""

    sample: Sample
    heard_ms: int
    still_ms: int  # when point, phase, generation or collectives last changed
    still_cpu_ms: int  # its CPU time then
    stopped_ms: int | None = None  # since when the kernel has had it stopped


@dataclass(frozen=True, slots=True)
class Vitals:
    """What the beats told."""

    heard: Table[tuple[NodeId, str], int] = Table()
    pulses: Table[WorkerId, Pulse] = Table()


def place_of(sample: Sample) -> tuple[object, ...]:
    return sample.point, sample.phase, sample.generation, sample.collectives


def hear(vitals: Vitals, beat: Beat, now_ms: int) -> Vitals:
    """Take in a beat."""
    pulses = dict(vitals.pulses)
    for sample in beat.samples:
        pulses[sample.worker] = feel(pulses.get(sample.worker), sample, now_ms)
    return replace(vitals, heard=vitals.heard.put((beat.node, beat.incarnation), now_ms), pulses=Table(pulses))


def feel(before: Pulse | None, sample: Sample, now_ms: int) -> Pulse:
    """The pulse after a sample."""
    stopped = sample.process in ("T", "t")
    since = before.stopped_ms if before is not None else None
    stopped_ms = (since if since is not None else now_ms) if stopped else None
    if before is None or place_of(before.sample) != place_of(sample):
        return Pulse(sample, now_ms, now_ms, sample.cpu_ms, stopped_ms)
    return Pulse(sample, now_ms, before.still_ms, before.still_cpu_ms, stopped_ms)


def forget(vitals: Vitals, cluster: Cluster) -> Vitals:
    """Drop the pulses of workers that have ended."""
    pulses = Table((worker, pulse) for worker, pulse in vitals.pulses.items() if worker in cluster.workers)
    return replace(vitals, pulses=pulses)


def judge(vitals: Vitals, cluster: Cluster, now_ms: int) -> tuple[Event, ...]:
    """The facts that follow from silence and standstill. The same ones again until the cluster has heard them."""
    found: list[Event] = []
    for node in cluster.nodes.values():
        heard = vitals.heard.get((node.node, node.incarnation))
        if node.alive and heard is not None and now_ms - heard >= SILENT_BEATS * BEAT_MS:
            reason = f"no beat for {(now_ms - heard) / 1000:.1f} s"
            found.append(NodeLost(node=node.node, incarnation=node.incarnation, reason=reason))
    for worker in cluster.workers.values():
        pulse = vitals.pulses.get(worker.worker)
        if pulse is None or worker.life is Life.FENCING or now_ms - pulse.heard_ms > FRESH_MS:
            continue
        evidence = judge_worker(vitals, cluster.jobs[worker.job], pulse, now_ms)
        if evidence:
            age = now_ms - pulse.still_ms
            found.append(WorkerHung(worker=worker.worker, evidence=evidence, age_ms=age))
    for job in cluster.jobs.values():
        if job.phase is JobPhase.RUNNING:
            found.extend(judge_ways(vitals, job, now_ms))
    return tuple(found)


def judge_ways(vitals: Vitals, job: Job, now_ms: int) -> tuple[Event, ...]:
    """The rank that has strayed, if ranks stand still at different calls after the same point."""
    still: dict[Point, dict[WorkerPhase, list[Sample]]] = {}
    for pulse in fresh(vitals, job, now_ms):
        sample = pulse.sample
        if sample.phase in CALLS and sample.point is not None and now_ms - pulse.still_ms >= ASTRAY_MS:
            still.setdefault(sample.point, {}).setdefault(sample.phase, []).append(sample)
    for point, ways in still.items():
        if len(ways) > 1:
            few, many = sorted(ways.values(), key=len)
            return (strayed(job, point, few[0], many[0]),)
    return ()


def strayed(job: Job, point: Point, one: Sample, other: Sample) -> Event:
    assert one.rank is not None, "it holds a seat"
    summary = (
        f"after {point} rank {one.rank} goes on with {CALLS[one.phase]}, and rank {other.rank} with "
        f"{CALLS[other.phase]}: the script has taken different ways. Let its way depend on run.committed and on "
        "results of calls, not on counters of its own such as enumerate()"
    )
    return WorkerRaised(
        worker=one.worker, job=job.spec.job, rank=one.rank, point=point, kind="undeclared", signature="strayed",
        summary=summary,
    )  # fmt: skip


def judge_worker(vitals: Vitals, job: Job, pulse: Pulse, now_ms: int) -> str:
    """Why this worker counts as hung; empty if it does not."""
    sample = pulse.sample
    if job.rank_of(sample.worker) is None or job.phase in STANDING:
        # Nobody trains: only what the kernel has stopped is in the way (a spare too: it could not take a rank).
        return stopped_too_long(pulse, now_ms)
    if job.phase is not JobPhase.RUNNING:
        return ""
    if any(seat.finished for seat in job.seats.values()) and sample.phase is not WorkerPhase.FINISHED:
        # Who has finished enters no collective any more, and waits for all others to finish.
        stopped = stopped_too_long(pulse, now_ms)
        if stopped:
            return stopped
    waited = waited_for(vitals, job, pulse, now_ms)
    if waited is None and pulse.stopped_ms is not None:
        waited = all_still(vitals, job, pulse, now_ms)
    if waited is None:
        return ""
    limit, how = patience(pulse, now_ms)
    if limit is None or waited < limit:
        return ""
    return f"{how} for {waited / 1000:.1f} s while others wait for it (patience {limit / 1000:.1f} s)"


def stopped_too_long(pulse: Pulse, now_ms: int) -> str:
    limit = stopped_limit(pulse.sample)
    if pulse.stopped_ms is None or now_ms - pulse.stopped_ms < limit:
        return ""
    return f"stopped for {(now_ms - pulse.stopped_ms) / 1000:.1f} s (patience {limit / 1000:.1f} s)"


def fresh(vitals: Vitals, job: Job, now_ms: int) -> list[Pulse]:
    """The pulses of the job's holders that tell of now and of this generation."""
    holders = {seat.worker for seat in job.seats.values()}
    return [
        pulse
        for worker, pulse in vitals.pulses.items()
        if worker in holders
        if pulse.sample.generation == job.generation
        if now_ms - pulse.heard_ms <= FRESH_MS
    ]


def waited_for(vitals: Vitals, job: Job, pulse: Pulse, now_ms: int) -> float | None:
    """How long others have waited for this worker, in ms: they are ahead of it in collectives, and all stand still."""
    ahead = [other for other in fresh(vitals, job, now_ms) if other.sample.collectives > pulse.sample.collectives]
    if not ahead or pulse.sample.generation != job.generation:
        return None
    return now_ms - max(pulse.still_ms, min(other.still_ms for other in ahead))


def all_still(vitals: Vitals, job: Job, pulse: Pulse, now_ms: int) -> float | None:
    """How long nobody has moved, in ms: a worker stopped inside a collective has entered it, so nobody is ahead of it.

    None if somebody is behind it, who may be the one that all wait for, or if somebody's sample is old.
    """
    everybody = fresh(vitals, job, now_ms)
    if len(everybody) < len(job.seats):
        return None
    if any(other.sample.collectives < pulse.sample.collectives for other in everybody):
        return None
    return now_ms - max(other.still_ms for other in everybody)


def patience(pulse: Pulse, now_ms: int) -> tuple[float | None, str]:
    """How long others may wait for it, in ms (None: for ever), and how it stands, in words."""
    sample = pulse.sample
    step = sample.step_ms
    if pulse.stopped_ms is not None:
        return stopped_limit(sample), "stopped by a signal"
    if sample.phase is WorkerPhase.SECTION:
        return None, "in a section"
    if sample.phase not in (WorkerPhase.COMPUTING, WorkerPhase.GATE, WorkerPhase.UPDATING):
        return 1_800_000, f"{sample.phase}"
    used = sample.cpu_ms - pulse.still_cpu_ms
    busy = used > IDLE_SHARE * (now_ms - pulse.still_ms)
    if busy:
        return (clamp(100 * step, 120_000, 3_600_000) if step else 3_600_000), "computing without an end"
    return (clamp(20 * step, 10_000, 600_000) if step else 600_000), "standing still"


def stopped_limit(sample: Sample) -> float:
    """How long the kernel may have a worker stopped, in ms."""
    return clamp(5 * sample.step_ms, 1_500, 30_000)


def clamp(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))
