"""Failure detector: which nodes are silent and which workers hang. Its state is not journalled; its verdicts are facts.

Beats arrive twice a second and are not journalled. `judge` turns them into `NodeLost` and `WorkerHung`, which
are. A worker hangs only if others wait for it, and it waits for nobody: they have begun something in a group that it
has not (see `wait_for_graph`); or it is stopped by a signal inside a collective, and nobody moves.

    how it stands, while others wait       patience
    stopped by a signal                    5 steps, 1 s to 30 s
    computing, no CPU time used            20 steps, 10 s to 10 min; before the first commit 10 min
    computing, using CPU (compiling?)      100 steps, 2 min to 1 h; before the first commit 1 h
    between steps (saving, logging)        30 min
    in a declared section                  none: sections may take as long as they need

After a fault all workers come to a safepoint first. One whose main thread does not move and uses no CPU time is
stuck:

    computing                              20 steps, 3 s to 10 min; before the first commit 10 min
    the same, and nobody else who stands   20 steps, 5 s to 10 min; before the first commit 10 min
    at the safepoint has its shard
    in a declared section                  2 min

Ranks that have committed the same point are all on the way to the same next call. Who stands at different calls (5 s,
and 3 steps), or needs one whose script has ended, or waits in a collective that others do not make, never gets on: see
`ways`.

A node is lost after a silence that its own beats set: see `silence`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from msgspec import Struct, structs

from torchrelay.protocol.health.silence import LEAST_SILENCE_MS, Rhythm, Silence
from torchrelay.protocol.health.stalls import Spot, Stalled, find_parting
from torchrelay.protocol.health.wait_for_graph import DEFAULT, Position, Wait, WaitForGraph
from torchrelay.protocol.messages.events import Event, NodeLost, PointCommitted, WorkerHung, WorkerRaised
from torchrelay.protocol.messages.ids import START, Generation, JobId, NodeId, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.model.job import MOVING, RECOVERING, Job, JobPhase
from torchrelay.protocol.model.roster import Life, Node, Seat
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.model.table import Table


class Sample(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker as its agent sees it now. Ages and spans in milliseconds."""

    worker: WorkerId
    rank: Rank | None
    generation: Generation
    point: Point | None  # last committed; None before protect()
    phase: WorkerPhase
    phase_ms: int  # how long it has been in this phase
    step_ms: float  # how long its last step took
    collectives: int  # begun in the default group in this generation
    beat_ms: int  # how long its control thread has been silent
    process: str  # state letter of the kernel: R, S, D, T (stopped), Z
    cpu_ms: int  # CPU time used so far, children included
    main_ms: int = 0  # the same of its main thread and children alone
    elsewhere: int = 0  # begun in all other groups in this generation
    groups: tuple[tuple[int, int], ...] | None = None  # of each of these its key and how much; None: not told this time
    spot: Spot | None = None  # where it stands; None: not told this time, or not known


class Beat(Struct, frozen=True, tag=True, kw_only=True):
    """An agent's sign of life, with a sample of each worker."""

    node: NodeId
    incarnation: str
    samples: tuple[Sample, ...] = ()


# Phases in which nobody trains, or all are about to stand: only what the kernel has stopped is in the way.
STANDING = RECOVERING | {JobPhase.STARTING, JobPhase.FINISHING}
# Phases in which everybody trains, or is about to stand at the boundary of a move.
TRAINING = MOVING | {JobPhase.RUNNING}
BEAT_MS = 500  # what a beat costs, a job pays for: each takes some of the processors of those who train
# If all are silent for so long, nobody is lost before they have been for this long.
ALL_SILENT_MS = 2_000
DEAF_MS = 60_000
# A sample as old as this says nothing about now. Less than any patience: no standstill is judged by one sample.
FRESH_MS = 2 * BEAT_MS
# Ranks that stand as long as this at different calls of the script always will; and as so many of the longest steps.
ASTRAY_MS = 5_000
ASTRAY_STEPS = 3
MOST_ASTRAY_MS = 600_000
STALE_MS = 2_000  # a worker whose control thread is silent for so long may be elsewhere than it has said last
# Less than this share of one core counts as using no CPU time.
IDLE_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Pulse:
    """The newest sample of a worker, and since when it has not moved."""

    sample: Sample
    heard_ms: int
    still_ms: int  # when point, phase or collectives last changed
    still_cpu_ms: int  # its CPU time then
    stopped_ms: int | None = None  # since when the kernel has had it stopped
    advanced_ms: int | None = None  # when it was last seen to have committed a further point in its generation
    still_main_ms: int = 0  # the CPU time of its main thread and children then


@dataclass(frozen=True, slots=True)
class FailureDetector:
    """What the beats told."""

    heard: Table[tuple[NodeId, str], int] = Table()
    pulses: Table[WorkerId, Pulse] = Table()
    rhythms: Table[NodeId, Rhythm] = Table()


def place_of(sample: Sample) -> tuple[object, ...]:
    # Not the generation: a move that is called off makes a new one, and nobody has moved by that.
    return sample.point, sample.phase, sample.collectives, sample.elsewhere


def hear(failure_detector: FailureDetector, beat: Beat, now_ms: int) -> FailureDetector:
    """Take in a beat."""
    failure_detector = end_deafness(failure_detector, now_ms)
    pulses = dict(failure_detector.pulses)
    for sample in beat.samples:
        pulses[sample.worker] = feel(pulses.get(sample.worker), sample, now_ms)
    # An agent that was started anew has no gap before its first beat.
    gap = now_ms - failure_detector.heard.get((beat.node, beat.incarnation), now_ms)
    rhythm = failure_detector.rhythms.get(beat.node, Rhythm(now_ms)).note(gap, now_ms)
    return replace(
        failure_detector,
        heard=failure_detector.heard.put((beat.node, beat.incarnation), now_ms),
        pulses=Table(pulses),
        rhythms=failure_detector.rhythms.put(beat.node, rhythm),
    )


def end_deafness(failure_detector: FailureDetector, now_ms: int) -> FailureDetector:
    """Somebody is heard after nobody was for as long as would lose a node: for all of them silence counts from now."""
    gap = now_ms - max(failure_detector.heard.values(), default=now_ms)
    if gap < min((rhythm.limit_ms for rhythm in failure_detector.rhythms.values()), default=LEAST_SILENCE_MS):
        return failure_detector
    rhythms = Table((node, rhythm.note(gap, now_ms)) for node, rhythm in failure_detector.rhythms.items())
    return replace(failure_detector, heard=Table((key, now_ms) for key in failure_detector.heard), rhythms=rhythms)


def feel(before: Pulse | None, sample: Sample, now_ms: int) -> Pulse:
    """The pulse after a sample."""
    stopped = sample.process in ("T", "t")
    since = before.stopped_ms if before is not None else None
    stopped_ms = (since if since is not None else now_ms) if stopped else None
    if before is None:
        return Pulse(sample, now_ms, now_ms, sample.cpu_ms, stopped_ms, None, sample.main_ms)
    advanced_ms = now_ms if advanced(before.sample, sample) else before.advanced_ms
    if place_of(before.sample) != place_of(sample):
        return Pulse(sample, now_ms, now_ms, sample.cpu_ms, stopped_ms, advanced_ms, sample.main_ms)
    if sample.groups is None:  # they are not told in every beat, and have not changed
        sample = structs.replace(sample, groups=before.sample.groups)
    if sample.spot is None:
        sample = structs.replace(sample, spot=before.sample.spot)
    return replace(before, sample=sample, heard_ms=now_ms, stopped_ms=stopped_ms, advanced_ms=advanced_ms)


def advanced(before: Sample, now: Sample) -> bool:
    """Whether a worker has passed a gate between two samples. (A state that was restored came through none.)"""
    if before.point is None or now.point is None or before.generation != now.generation:
        return False
    return now.point > before.point


def forget(failure_detector: FailureDetector, cluster: Cluster) -> FailureDetector:
    """Drop the pulses of workers that have ended."""
    pulses = Table((worker, pulse) for worker, pulse in failure_detector.pulses.items() if worker in cluster.workers)
    return replace(failure_detector, pulses=pulses)


def judge(failure_detector: FailureDetector, cluster: Cluster, now_ms: int) -> tuple[Event, ...]:
    """The facts that follow from silence and standstill. The same ones again until the cluster has heard them.

    They are judgements, so under a freeze there are none of jobs that train: who only seems to be lost may go on.
    """
    if cluster.freezes and all(job.phase in TRAINING for job in cluster.jobs.values()):
        return ()
    found: list[Event] = []
    for node in cluster.nodes.values():
        silence = silence_of(failure_detector, cluster, node, now_ms)
        if silence is not None and silence.lost_in_ms == 0:
            reason = f"no beat for {silence.silent_ms / 1000:.1f} s (limit {silence.limit_ms / 1000:.1f} s)"
            lost = NodeLost(node=node.node, incarnation=node.incarnation, reason=reason, age_ms=silence.silent_ms)
            found.append(lost)
    pictures: dict[JobId, WaitForGraph] = {}
    for worker in cluster.workers.values():
        pulse = failure_detector.pulses.get(worker.worker)
        if pulse is None or worker.life is Life.FENCING or now_ms - pulse.heard_ms >= FRESH_MS:
            continue
        evidence = judge_worker(failure_detector, cluster.jobs[worker.job], pulse, now_ms, pictures)
        if evidence:
            age = now_ms - pulse.still_ms
            found.append(WorkerHung(worker=worker.worker, evidence=evidence, age_ms=age))
    for job in cluster.jobs.values():
        if job.phase is JobPhase.RUNNING:
            found.extend(judge_ways(failure_detector, job, now_ms))
        if job.unproved:
            found.extend(proof(failure_detector, job))
    return tuple(found)


def proof(failure_detector: FailureDetector, job: Job) -> tuple[Event, ...]:
    """That all ranks have committed a point after that from which they went on, if the newest beats show it."""
    holders = [seat.worker for seat in job.seats.values()]
    pulses = [failure_detector.pulses.get(worker) for worker in holders if worker is not None]
    samples = [pulse.sample for pulse in pulses if pulse is not None and pulse.sample.generation == job.generation]
    points = [sample.point for sample in samples if sample.point is not None]
    least = min(points, default=START)
    if len(points) < len(holders) or least <= (job.resume_point or START):
        return ()
    return (PointCommitted(job=job.spec.job, generation=job.generation, point=least),)


# ---------------------------------------------------------------- silence


def silence_of(failure_detector: FailureDetector, cluster: Cluster, node: Node, now_ms: int) -> Silence | None:
    """How it stands with a node that is not heard; None if it is, or if there is nothing to wait for."""
    heard = failure_detector.heard.get((node.node, node.incarnation))
    if not node.alive or heard is None or now_ms - heard < FRESH_MS:
        return None
    limit = failure_detector.rhythms.get(node.node, Rhythm(now_ms)).limit_ms
    proof = last_proof(failure_detector, cluster, node.node)
    proof = proof if proof is not None and proof > heard else None
    deaf = all_silent(failure_detector, cluster, now_ms)
    until = max(heard + limit, (proof or 0) + limit, heard + DEAF_MS if deaf else 0)
    return Silence(
        node.node, now_ms - heard, limit, max(0, until - now_ms), None if proof is None else now_ms - proof, deaf
    )


def last_proof(failure_detector: FailureDetector, cluster: Cluster, node: NodeId) -> int | None:
    """When ranks on other nodes last passed a gate of a running job that has ranks on this node."""
    times: list[int] = []
    for job in cluster.jobs.values():
        holders = [seat.worker for seat in job.seats.values()]
        here = {worker for worker in holders if worker is not None and node_of(cluster, worker) == node}
        if here and job.phase in TRAINING:
            others = [
                failure_detector.pulses.get(worker) for worker in holders if worker is not None and worker not in here
            ]
            times += [pulse.advanced_ms for pulse in others if pulse is not None and pulse.advanced_ms is not None]
    return max(times, default=None)


def node_of(cluster: Cluster, worker: WorkerId) -> NodeId | None:
    known = cluster.workers.get(worker)
    return known.node if known is not None else None


def all_silent(failure_detector: FailureDetector, cluster: Cluster, now_ms: int) -> bool:
    """Whether no living node has been heard of late."""
    living = [
        failure_detector.heard.get((node.node, node.incarnation)) for node in cluster.nodes.values() if node.alive
    ]
    return all(heard is not None and now_ms - heard >= ALL_SILENT_MS for heard in living)


# ---------------------------------------------------------------- hangs


def judge_ways(failure_detector: FailureDetector, job: Job, now_ms: int) -> tuple[Event, ...]:
    """The rank that has strayed, if ranks stand still at different calls of the script (see `ways`)."""
    pulses = fresh(failure_detector, job, now_ms)
    limit = clamp(ASTRAY_STEPS * max((pulse.sample.step_ms for pulse in pulses), default=0), ASTRAY_MS, MOST_ASTRAY_MS)
    stood = (
        way_of(pulse, now_ms)
        for pulse in pulses
        if now_ms - pulse.still_ms >= limit and pulse.sample.beat_ms < STALE_MS
    )
    parted = find_parting(way for way in stood if way is not None)
    if parted is None:
        return ()
    one = parted.one
    return (
        WorkerRaised(
            worker=one.worker,
            job=job.spec.job,
            rank=one.rank,
            point=one.point,
            kind="undeclared",
            signature="strayed",
            summary=str(parted),
        ),
    )


def way_of(pulse: Pulse, now_ms: int) -> Stalled | None:
    """Where a rank's holder stands; None if its agent does not know yet which rank it holds."""
    sample = pulse.sample
    if sample.rank is None:
        return None
    begun = {DEFAULT: sample.collectives, **dict(sample.groups or ())}
    spot = sample.spot or Spot()
    return Stalled(sample.worker, sample.rank, sample.point, sample.phase, begun, spot, not is_busy(pulse, now_ms))


def judge_worker(
    failure_detector: FailureDetector,
    job: Job,
    pulse: Pulse,
    now_ms: int,
    pictures: dict[JobId, WaitForGraph] | None = None,
) -> str:
    """Why this worker counts as hung; empty if it does not. `pictures`: of this moment, filled as they are needed."""
    sample = pulse.sample
    if pulse.stopped_ms is not None and pulse.heard_ms - pulse.stopped_ms < stopped_limit(sample) / 2:
        return ""  # only just, or not seen for long enough: its agent may have been as late as it seems to be stopped
    if job.rank_of(sample.worker) is None or job.phase in STANDING:
        # Nobody trains: only what the kernel has stopped is in the way (a spare too: it could not take a rank).
        return stopped_too_long(pulse, now_ms) or stuck(job, pulse, now_ms)
    if job.phase not in TRAINING:
        return ""
    finished = any(seat.finished for seat in job.seats.values()) and sample.phase is not WorkerPhase.FINISHED
    if finished or job.phase in MOVING:
        # Who has finished enters no collective any more, and waits for all others to finish. And who is to halt but is
        # stopped says nothing of the new generation: nobody could be seen to wait for it.
        stopped = stopped_too_long(pulse, now_ms)
        if stopped:
            return stopped
    limit, how = patience(pulse, now_ms)
    if limit is None or now_ms - pulse.still_ms < limit:
        return ""
    since, waiters = waited_for(failure_detector, job, pulse, now_ms, pictures if pictures is not None else {})
    waited = now_ms - since
    if waited < limit:
        return ""
    where = f" at {sample.spot.line}" if sample.spot is not None and sample.spot.line else ""
    return f"{how}{where} for {waited / 1000:.1f} s while {waiters} (patience {limit / 1000:.1f} s)"


def stuck(job: Job, pulse: Pulse, now_ms: int) -> str:
    """Why this worker will not come to the safepoint; empty if it may. A library may wait for what cannot come."""
    rank = job.rank_of(pulse.sample.worker)
    seat = job.seats[rank] if rank is not None else None
    if job.phase is not JobPhase.PREPARING or seat is None or seat.ready:
        return ""
    limit = safepoint_limit(pulse.sample, replaceable=stands_elsewhere(job, seat))
    if limit is None:
        return ""
    since = max(pulse.still_ms, job.phase_ms)
    # Not of other threads: Gloo's may spin for ever, for a message that nobody waits for any more.
    idle = pulse.sample.main_ms - pulse.still_main_ms <= IDLE_SHARE * (now_ms - pulse.still_ms)
    if not idle or now_ms - since < limit:
        return ""
    return f"does not come out of its call for {(now_ms - since) / 1000:.1f} s (patience {limit / 1000:.1f} s)"


def stands_elsewhere(job: Job, seat: Seat) -> bool:
    """Whether another rank stands at the safepoint with the same state: nothing is lost with this one."""
    return bool(seat.shard) and any(
        other.ready and other.holds == job.resume_point and other.shard == seat.shard for other in job.seats.values()
    )


def safepoint_limit(sample: Sample, *, replaceable: bool) -> float | None:
    """How long an interrupted worker may stand still before its safepoint, in ms; None: as long as the core lets it.

    `replaceable`: see `stands_elsewhere`. Then it costs a recovery and a place to lose it; else it may cost the state.
    Never less than it takes until the worker has cut its connections in any case (`worker/process_groups/sockets`).
    """
    if sample.phase is WorkerPhase.SECTION:
        return 120_000
    if sample.phase not in (WorkerPhase.COMPUTING, WorkerPhase.GATE):
        return None
    return clamp(20 * sample.step_ms, 3_000 if replaceable else 5_000, 600_000) if sample.step_ms else 600_000


def stopped_too_long(pulse: Pulse, now_ms: int) -> str:
    limit = stopped_limit(pulse.sample)
    if pulse.stopped_ms is None or now_ms - pulse.stopped_ms < limit:
        return ""
    return f"stopped for {(now_ms - pulse.stopped_ms) / 1000:.1f} s (patience {limit / 1000:.1f} s)"


def fresh(failure_detector: FailureDetector, job: Job, now_ms: int) -> list[Pulse]:
    """The pulses of the job's holders that tell of now and of this generation."""
    holders = {seat.worker for seat in job.seats.values()}
    return [
        pulse
        for worker, pulse in failure_detector.pulses.items()
        if worker in holders
        if pulse.sample.generation == job.generation
        if now_ms - pulse.heard_ms < FRESH_MS
    ]


def waited_for(
    failure_detector: FailureDetector, job: Job, pulse: Pulse, now_ms: int, pictures: dict[JobId, WaitForGraph]
) -> tuple[int, str]:
    """Since when others have waited for this worker while all of them stood still, and who, in words; now: none do."""
    if pulse.sample.generation == job.generation:
        if job.spec.job not in pictures:
            stands = [stand for each in fresh(failure_detector, job, now_ms) if (stand := stand_of(each)) is not None]
            pictures[job.spec.job] = WaitForGraph(stands, len(job.seats))
        picture = pictures[job.spec.job]
        stopped = pulse.stopped_ms is not None
        worker = pulse.sample.worker
        wait: Wait | None = picture.wait_for(worker) if stopped else picture.in_the_way(worker)
        if wait is not None:
            return wait.since_ms, str(wait)
        if stopped:
            return all_still(failure_detector, job, pulse, now_ms), "others wait for it"
    return now_ms, "nobody waits for it"


def stand_of(pulse: Pulse) -> Position | None:
    """Where a rank's holder stands; None if its agent does not know yet which rank it holds."""
    sample = pulse.sample
    if sample.rank is None:
        return None
    begun = {DEFAULT: sample.collectives, **dict(sample.groups or ())}
    return Position(sample.worker, sample.rank, begun, sample.elsewhere, sample.groups is not None, pulse.still_ms)


def all_still(failure_detector: FailureDetector, job: Job, pulse: Pulse, now_ms: int) -> int:
    """Since when nobody has moved: a worker stopped inside a collective has entered it, so nobody is ahead of it.

    Now, if somebody is behind it, who may be the one that all wait for, or if somebody's sample is old.
    """
    everybody = fresh(failure_detector, job, now_ms)
    if len(everybody) < len(job.seats):
        return now_ms
    if any(other.sample.collectives < pulse.sample.collectives for other in everybody):
        return now_ms
    return max(other.still_ms for other in everybody)


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
    if is_busy(pulse, now_ms):
        return (clamp(100 * step, 120_000, 3_600_000) if step else 3_600_000), "computing without an end"
    return (clamp(20 * step, 10_000, 600_000) if step else 600_000), "standing still"


def is_busy(pulse: Pulse, now_ms: int) -> bool:
    """Whether it has computed since it stands still."""
    return pulse.sample.cpu_ms - pulse.still_cpu_ms > IDLE_SHARE * (now_ms - pulse.still_ms)


def stopped_limit(sample: Sample) -> float:
    """How long the kernel may have a worker stopped, in ms."""
    return clamp(5 * sample.step_ms, 1_000, 30_000)


def clamp(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))
