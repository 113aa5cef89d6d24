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
`stalls`.

A node is lost after a silence that its own beats set: see `silence`.
"""

from __future__ import annotations

from functools import cached_property

from torchrelay.protocol.health.pulses import FailureDetector, Pulse, Sample
from torchrelay.protocol.health.silent_nodes import SilentNodes
from torchrelay.protocol.health.stalls import Spot, Stalled, find_parting
from torchrelay.protocol.health.wait_for_graph import DEFAULT, Position, Wait, WaitForGraph
from torchrelay.protocol.messages.events import Event, NodeLost, PointCommitted, WorkerHung, WorkerRaised
from torchrelay.protocol.messages.ids import START, JobId, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.model.job import BEFORE_CUTOVER, RECOVERING, TRAINING, Job, JobPhase
from torchrelay.protocol.model.roster import Life, Seat
from torchrelay.protocol.model.state import Cluster

# Phases in which nobody trains, or all are about to stand: only what the kernel has stopped is in the way.
STANDING = RECOVERING | {JobPhase.STARTING, JobPhase.FINISHING}
# Ranks that stand as long as this at different calls of the script always will; and as so many of the longest steps.
ASTRAY_MS = 5_000
ASTRAY_STEPS = 3
MOST_ASTRAY_MS = 600_000
STALE_MS = 2_000  # a worker whose control thread is silent for so long may be elsewhere than it has said last
LEAST_STILL_MS = 3_000  # the shortest of all limits, but for one that the kernel has stopped
# Less than this share of one core counts as using no CPU time.
IDLE_SHARE = 0.05


class Company:
    """One job at one moment: what is asked for each of its workers, and found once."""

    def __init__(self, failure_detector: FailureDetector, job: Job, now_ms: int) -> None:
        self._failure_detector, self.job, self._now_ms = failure_detector, job, now_ms

    @cached_property
    def ranks(self) -> dict[WorkerId, Rank]:
        """Who holds which rank."""
        return {seat.worker: rank for rank, seat in self.job.seats.items() if seat.worker is not None}

    @cached_property
    def finished(self) -> bool:
        """Whether the script of a rank has ended."""
        return any(seat.finished for seat in self.job.seats.values())

    @cached_property
    def standing_shards(self) -> frozenset[str]:
        """Which shards of the state stand at the safepoint of the resume point."""
        seats = self.job.seats.values()
        return frozenset(seat.shard for seat in seats if seat.ready and seat.holds == self.job.resume_point)

    @cached_property
    def fresh(self) -> list[Pulse]:
        """The pulses of the job's holders that tell of now and of this generation."""
        found = (self._failure_detector.pulses.get(worker) for worker in self.ranks)
        return [
            pulse
            for pulse in found
            if pulse is not None
            if pulse.sample.generation == self.job.generation
            if self._now_ms - pulse.heard_ms < self._failure_detector.fresh_ms
        ]

    @cached_property
    def graph(self) -> WaitForGraph:
        """Who waits for whom."""
        stands = [stand for each in self.fresh if (stand := stand_of(each)) is not None]
        return WaitForGraph(stands, len(self.job.seats))


def judge(failure_detector: FailureDetector, cluster: Cluster, now_ms: int) -> tuple[Event, ...]:
    """The facts that follow from silence and standstill. The same ones again until the cluster has heard them.

    They are judgements, so under a freeze there are none of jobs that train: who only seems to be lost may go on.
    """
    if cluster.freezes and all(job.phase in TRAINING for job in cluster.jobs.values()):
        return ()
    found: list[Event] = []
    silent = SilentNodes(failure_detector, cluster, now_ms)
    for node in cluster.nodes.values():
        silence = silent.of(node)
        if silence is not None and silence.lost_in_ms == 0:
            reason = f"no beat for {silence.silent_ms / 1000:.1f} s (limit {silence.limit_ms / 1000:.1f} s)"
            lost = NodeLost(node=node.node, incarnation=node.incarnation, reason=reason, age_ms=silence.silent_ms)
            found.append(lost)
    companies = {name: Company(failure_detector, job, now_ms) for name, job in cluster.jobs.items()}
    still = anybody_still(failure_detector, cluster)
    if still:
        found.extend(judge_workers(failure_detector, cluster, companies, now_ms))
    for name, job in cluster.jobs.items():
        if still and job.phase is JobPhase.RUNNING:
            found.extend(judge_ways(companies[name]))
        if job.accounting.unproved:
            found.extend(proof(failure_detector, job))
    return tuple(found)


def judge_workers(
    failure_detector: FailureDetector, cluster: Cluster, companies: dict[JobId, Company], now_ms: int
) -> list[WorkerHung]:
    """Who hangs. Of a job that trains only one: the furthest behind, and of several the one that has stood longest.

    Others may have waited for it, and will say where they stand as soon as it is lost.
    """
    found: dict[JobId, list[WorkerHung]] = {}
    for worker in cluster.workers.values():
        pulse = failure_detector.pulses.get(worker.worker)
        if pulse is None or worker.life is Life.FENCING or now_ms - pulse.heard_ms >= failure_detector.fresh_ms:
            continue
        evidence = judge_worker(companies[worker.job], pulse, now_ms)
        if evidence:
            hung = WorkerHung(worker=worker.worker, evidence=evidence, age_ms=now_ms - pulse.still_ms)
            found.setdefault(worker.job, []).append(hung)
    for name, some in found.items():
        if companies[name].job.phase in TRAINING:
            found[name] = [min(some, key=lambda hung: (begun(failure_detector.pulses[hung.worker]), -hung.age_ms))]
    return [hung for some in found.values() for hung in some]


def begun(pulse: Pulse) -> tuple[Point, int]:
    """How far a worker has come: who waits in a collective has begun it, and the one that it waits for has not."""
    sample = pulse.sample
    return sample.point or START, sample.collectives + sum(dict(sample.groups or ()).values())


def anybody_still(failure_detector: FailureDetector, cluster: Cluster) -> bool:
    """Whether a rank's holder has stood still for so long, or a worker is stopped, that there is something to judge.

    Mostly none is, and then nobody looks at each. A spare always stands still.
    """
    for name, pulse in failure_detector.pulses.items():
        if pulse.stopped_ms is not None:
            return True
        if pulse.heard_ms - pulse.still_ms >= LEAST_STILL_MS:
            worker = cluster.workers.get(name)
            if worker is not None and worker.rank is not None:
                return True
    return False


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


# ---------------------------------------------------------------- hangs


def judge_ways(company: Company) -> tuple[Event, ...]:
    """The rank that has strayed, if ranks stand still at different calls of the script (see `stalls`)."""
    pulses = company.fresh
    limit = clamp(ASTRAY_STEPS * max((pulse.sample.step_ms for pulse in pulses), default=0), ASTRAY_MS, MOST_ASTRAY_MS)
    stood = (
        way_of(pulse)
        for pulse in pulses
        if pulse.heard_ms - pulse.still_ms >= limit and pulse.sample.beat_ms < STALE_MS
    )
    parted = find_parting(way for way in stood if way is not None)
    if parted is None:
        return ()
    one = parted.one
    return (
        WorkerRaised(
            worker=one.worker,
            job=company.job.spec.job,
            rank=one.rank,
            point=one.point,
            kind="undeclared",
            signature="strayed",
            summary=str(parted),
        ),
    )


def way_of(pulse: Pulse) -> Stalled | None:
    """Where a rank's holder stands; None if its agent does not know yet which rank it holds."""
    sample = pulse.sample
    if sample.rank is None:
        return None
    begun = {DEFAULT: sample.collectives, **dict(sample.groups or ())}
    spot = sample.spot or Spot()
    idle = not is_busy(pulse, pulse.heard_ms)
    return Stalled(sample.worker, sample.rank, sample.point, sample.phase, begun, spot, idle)


def judge_worker(company: Company, pulse: Pulse, now_ms: int) -> str:
    """Why this worker counts as hung; empty if it does not."""
    sample, job = pulse.sample, company.job
    if pulse.stopped_ms is not None and pulse.heard_ms - pulse.stopped_ms < stopped_limit(sample) / 2:
        return ""  # only just, or not seen for long enough: its agent may have been as late as it seems to be stopped
    if sample.worker not in company.ranks or job.phase in STANDING:
        # Nobody trains: only what the kernel has stopped is in the way (a spare too: it could not take a rank).
        return stopped_too_long(pulse, now_ms) or stuck(company, pulse)
    if job.phase not in TRAINING:
        return ""
    if (company.finished and sample.phase is not WorkerPhase.FINISHED) or job.phase in BEFORE_CUTOVER:
        # Who has finished enters no collective any more, and waits for all others to finish. And who is to halt but is
        # stopped says nothing of the new generation: nobody could be seen to wait for it.
        stopped = stopped_too_long(pulse, now_ms)
        if stopped:
            return stopped
    # How long it has stood is known up to its last sample: in a large job there is one in some seconds.
    seen_ms = pulse.heard_ms
    limit, how = patience(pulse, seen_ms)
    if limit is None or seen_ms - pulse.still_ms < limit:
        return ""
    since, waiters = waited_for(company, pulse, seen_ms)
    waited = seen_ms - since
    if waited < limit:
        return ""
    where = f" at {sample.spot.line}" if sample.spot is not None and sample.spot.line else ""
    return f"{how}{where} for {waited / 1000:.1f} s while {waiters} (patience {limit / 1000:.1f} s)"


def stuck(company: Company, pulse: Pulse) -> str:
    """Why this worker will not come to the safepoint; empty if it may. A library may wait for what cannot come."""
    job, rank, now_ms = company.job, company.ranks.get(pulse.sample.worker), pulse.heard_ms
    seat = job.seats[rank] if rank is not None else None
    if job.phase is not JobPhase.PREPARING or seat is None or seat.ready:
        return ""
    limit = safepoint_limit(pulse.sample, replaceable=stands_elsewhere(company, seat))
    if limit is None:
        return ""
    since = max(pulse.still_ms, job.phase_ms, pulse.back_ms)
    # Not of other threads: Gloo's may spin for ever, for a message that nobody waits for any more.
    idle = pulse.sample.main_ms - pulse.still_main_ms <= IDLE_SHARE * (now_ms - pulse.still_ms)
    if not idle or now_ms - since < limit:
        return ""
    return f"does not come out of its call for {(now_ms - since) / 1000:.1f} s (patience {limit / 1000:.1f} s)"


def stands_elsewhere(company: Company, seat: Seat) -> bool:
    """Whether another rank stands at the safepoint with the same state: nothing is lost with this one."""
    return bool(seat.shard) and seat.shard in company.standing_shards  # this one is not ready yet


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


def waited_for(company: Company, pulse: Pulse, now_ms: int) -> tuple[int, str]:
    """Since when others have waited for this worker while all of them stood still, and who, in words; now: none do."""
    if pulse.sample.generation == company.job.generation:
        stopped = pulse.stopped_ms is not None
        worker = pulse.sample.worker
        wait: Wait | None = company.graph.wait_for(worker) if stopped else company.graph.in_the_way(worker)
        if wait is not None:
            return wait.since_ms, str(wait)
        if stopped:
            return all_still(company, pulse, now_ms), "others wait for it"
    return now_ms, "nobody waits for it"


def stand_of(pulse: Pulse) -> Position | None:
    """Where a rank's holder stands; None if its agent does not know yet which rank it holds."""
    sample = pulse.sample
    if sample.rank is None:
        return None
    begun = {DEFAULT: sample.collectives, **dict(sample.groups or ())}
    return Position(sample.worker, sample.rank, begun, sample.elsewhere, sample.groups is not None, pulse.still_ms)


def all_still(company: Company, pulse: Pulse, now_ms: int) -> int:
    """Since when nobody has moved: a worker stopped inside a collective has entered it, so nobody is ahead of it.

    Now, if somebody is behind it, who may be the one that all wait for, or if somebody's sample is old.
    """
    everybody = company.fresh
    if len(everybody) < len(company.job.seats):
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
