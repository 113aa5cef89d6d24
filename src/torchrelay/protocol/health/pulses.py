"""Pulses: what the beats of agents told of their workers, and when each node was heard. Not journalled."""

from __future__ import annotations

from msgspec import Struct, structs
from msgspec.structs import replace

from torchrelay.protocol.health.silence import LEAST_SILENCE_MS, Rhythm
from torchrelay.protocol.health.stalls import Spot
from torchrelay.protocol.messages.ids import Generation, NodeId, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.model.table import Table

BEAT_MS = 500  # what a beat costs, a job pays for: each takes some of the processors of those who train
# So many nodes beat that often. Of more, each beats less often: the orchestrator hears as many in a second.
NODES_AT_FULL_PACE = 250
# A sample as old as this says nothing about now. Less than any patience: no standstill is judged by one sample.
FRESH_MS = 2 * BEAT_MS
FEW_STRANGERS = 64


class Sample(Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A worker as its agent sees it now. Ages and spans in milliseconds."""

    worker: WorkerId
    rank: Rank | None
    generation: Generation
    point: Point | None  # last committed; None before protect()
    phase: WorkerPhase
    phase_ms: int  # how long it has been in this phase
    step_ms: float  # how long its last step took
    collectives: int  # begun in the default group in this generation
    beat_ms: int  # how long its control thread has been silent (not to be taken for the agent's own beat)
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


class Pulse(Struct, frozen=True, gc=False):
    """The newest sample of a worker, and since when it has not moved."""

    sample: Sample
    heard_ms: int
    still_ms: int  # when point, phase or collectives last changed
    still_cpu_ms: int  # its CPU time then
    stopped_ms: int | None = None  # since when the kernel has had it stopped
    advanced_ms: int | None = None  # when it was last seen to have committed a further point in its generation
    still_main_ms: int = 0  # the CPU time of its main thread and children then
    back_ms: int = 0  # since when its samples come without a gap: in one no order reaches it


class FailureDetector(Struct, frozen=True):
    """What the beats told."""

    heard: Table[tuple[NodeId, str], int] = Table()
    pulses: Table[WorkerId, Pulse] = Table()
    rhythms: Table[NodeId, Rhythm] = Table()
    newest_ms: int | None = None  # when anything was heard last; None: look at `heard`
    beat_ms: int = BEAT_MS  # between two beats of a node

    @property
    def fresh_ms(self) -> int:
        """A sample as old as this says nothing about now."""
        return 2 * self.beat_ms

    def last_heard_ms(self, now_ms: int) -> int:
        """When the last beat was heard of any node; now, if none ever was."""
        return self.newest_ms if self.newest_ms is not None else max(self.heard.values(), default=now_ms)


def pace_ms(nodes: int) -> int:
    """How long a node waits between two beats in a job of so many, in ms."""
    return BEAT_MS * max(1, -(-nodes // NODES_AT_FULL_PACE))


def place_of(sample: Sample) -> tuple[object, ...]:
    # Not the generation: a move that is called off makes a new one, and nobody has moved by that.
    return sample.point, sample.phase, sample.collectives, sample.elsewhere


def hear(failure_detector: FailureDetector, beat: Beat, now_ms: int) -> FailureDetector:
    """Take in a beat."""
    failure_detector = end_deafness(failure_detector, now_ms)
    pulses, fresh_ms = failure_detector.pulses, failure_detector.fresh_ms
    pulses = pulses.put_all((one.worker, feel(pulses.get(one.worker), one, now_ms, fresh_ms)) for one in beat.samples)
    # An agent that was started anew has no gap before its first beat.
    gap = now_ms - failure_detector.heard.get((beat.node, beat.incarnation), now_ms)
    rhythm = failure_detector.rhythms.get(beat.node, Rhythm(now_ms)).note(gap, now_ms)
    return replace(
        failure_detector,
        heard=failure_detector.heard.put((beat.node, beat.incarnation), now_ms),
        pulses=pulses,
        rhythms=failure_detector.rhythms.put(beat.node, rhythm),
        newest_ms=now_ms,
    )


def end_deafness(failure_detector: FailureDetector, now_ms: int) -> FailureDetector:
    """Somebody is heard after nobody was for as long as would lose a node: for all of them silence counts from now."""
    gap = now_ms - failure_detector.last_heard_ms(now_ms)
    if gap < LEAST_SILENCE_MS:  # no limit is shorter: mostly there is nothing to look at
        return failure_detector
    if gap < min((rhythm.limit_ms() for rhythm in failure_detector.rhythms.values()), default=LEAST_SILENCE_MS):
        return failure_detector
    rhythms = Table((node, rhythm.note(gap, now_ms)) for node, rhythm in failure_detector.rhythms.items())
    heard = Table((key, now_ms) for key in failure_detector.heard)
    return replace(failure_detector, heard=heard, rhythms=rhythms, newest_ms=now_ms)


def feel(before: Pulse | None, sample: Sample, now_ms: int, fresh_ms: int = FRESH_MS) -> Pulse:
    """The pulse after a sample. After `fresh_ms` without one there was a gap."""
    stopped = sample.process in ("T", "t")
    since = before.stopped_ms if before is not None else None
    stopped_ms = (since if since is not None else now_ms) if stopped else None
    if before is None:
        return Pulse(sample, now_ms, now_ms, sample.cpu_ms, stopped_ms, None, sample.main_ms, now_ms)
    back_ms = now_ms if now_ms - before.heard_ms >= fresh_ms else before.back_ms
    advanced_ms = now_ms if advanced(before.sample, sample) else before.advanced_ms
    if place_of(before.sample) != place_of(sample):
        return Pulse(sample, now_ms, now_ms, sample.cpu_ms, stopped_ms, advanced_ms, sample.main_ms, back_ms)
    if sample.groups is None:  # they are not told in every beat, and have not changed
        sample = structs.replace(sample, groups=before.sample.groups)
    if sample.spot is None:
        sample = structs.replace(sample, spot=before.sample.spot)
    return replace(
        before, sample=sample, heard_ms=now_ms, stopped_ms=stopped_ms, advanced_ms=advanced_ms, back_ms=back_ms
    )


def advanced(before: Sample, now: Sample) -> bool:
    """Whether a worker has passed a gate between two samples. (A state that was restored came through none.)"""
    if before.point is None or now.point is None or before.generation != now.generation:
        return False
    return now.point > before.point


def forget(failure_detector: FailureDetector, before: Cluster, after: Cluster) -> FailureDetector:
    """Drop the pulses of workers that have ended between two states."""
    pulses = failure_detector.pulses
    for worker, _, now in after.workers.differences(before.workers):
        if now is None:
            pulses = pulses.drop(worker)
    return failure_detector if pulses is failure_detector.pulses else replace(failure_detector, pulses=pulses)


def forget_strangers(failure_detector: FailureDetector, cluster: Cluster) -> FailureDetector:
    """Drop the pulses of workers that nobody counts on, when there are many: agents tell of them, too."""
    if len(failure_detector.pulses) <= 2 * len(cluster.workers) + FEW_STRANGERS:
        return failure_detector
    known = Table((worker, one) for worker, one in failure_detector.pulses.items() if worker in cluster.workers)
    return replace(failure_detector, pulses=known)
