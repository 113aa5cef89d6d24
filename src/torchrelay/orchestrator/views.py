"""Views: what operators are shown, read off the state. The service sends them as JSON; the command line decodes them.

Everything here is a pure function of a `Scene`, so a view can also be made from a journal whose orchestrator is away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import TypeVar

from msgspec import Struct

from torchrelay.orchestrator.journal import Anchor, wall_ms
from torchrelay.protocol.ids import Generation, JobId, NodeId, Point, Rank, WorkerId
from torchrelay.protocol.incident import Fault, Incident, Mark, Resolution
from torchrelay.protocol.job import Job
from torchrelay.protocol.roster import Life, Seat, Worker, natural
from torchrelay.protocol.state import Cluster
from torchrelay.protocol.vitals import Pulse, Vitals

# The phases of a recovery one after another: each ends at its mark and begins where the one before it ended, so that
# they add up to the pause. What runs at the same time counts for the earlier one.
PHASES: tuple[tuple[str, Mark], ...] = (
    ("detect", Mark.HEARD),
    ("interrupt", Mark.INTERRUPTED),
    ("agree", Mark.AGREED),
    ("acquire", Mark.READY),
    ("rewire", Mark.REWIRED),
    ("restore", Mark.RESTORED),
    ("resume", Mark.RESUMED),
)


@dataclass(frozen=True, slots=True)
class Scene:
    """All that views are made from. `reached`: the newest point that beats told of, and in which generation."""

    cluster: Cluster
    vitals: Vitals
    reached: Mapping[JobId, tuple[Generation, Point]]
    anchors: tuple[Anchor, ...]
    now_ms: int

    def at(self, moment_ms: int) -> str:
        """The moment on the wall clock, ISO 8601 with the local offset; empty if unknown."""
        wall = self.wall_ms(moment_ms)
        return datetime.fromtimestamp(wall / 1000).astimezone().isoformat(timespec="milliseconds") if wall else ""

    def wall_ms(self, moment_ms: int) -> int:
        """The same in ms since 1970; 0 if unknown."""
        return wall_ms(self.anchors, moment_ms)


class SpareTally(Struct, frozen=True, kw_only=True):
    """Spares of a job: wanted in all, warm now, and on their way."""

    wanted: int
    warm: int
    starting: int


class IncidentTally(Struct, frozen=True, kw_only=True):
    """Incidents of a job. `eligible` leaves out users' errors and operators' stops; `clean` is of these."""

    total: int
    eligible: int
    clean: int
    open: int


class OutcomeView(Struct, frozen=True, kw_only=True):
    """How a job ended."""

    code: int
    reason: str


class JobStatus(Struct, frozen=True, kw_only=True):
    """A job at a glance. `step`: newest committed anywhere, None before join(); `step_ms`: median of ranks."""

    job: JobId
    phase: str
    why: str
    generation: Generation
    world_size: int
    step: int | None
    step_ms: float | None
    spares: SpareTally
    incidents: IncidentTally
    restarts: int
    joined: bool  # some rank has called join()
    waiting_s: float | None
    outcome: OutcomeView | None


class NodeStatus(Struct, frozen=True, kw_only=True):
    """A node; `silent_ms` since its last beat, None if there was none yet."""

    node: NodeId
    alive: bool
    slots: int
    silent_ms: int | None


class Status(Struct, frozen=True, kw_only=True):
    """The whole cluster at a glance. `degraded` says why nothing is decided at the moment; empty if all is well."""

    version: str
    pid: int
    at: str
    seq: int
    degraded: str
    jobs: tuple[JobStatus, ...]
    nodes: tuple[NodeStatus, ...]


class RankStatus(Struct, frozen=True, kw_only=True):
    """A rank and its worker, or a spare (`rank` None), or a rank without a worker (`worker` None).

    `state`: what the worker does (see `WorkerPhase`), or how far its start is; `vacant` without a worker.
    """

    rank: Rank | None
    worker: WorkerId | None
    node: NodeId | None
    slot: int | None
    pid: int | None
    state: str
    generation: Generation | None
    step: int | None
    section: int | None
    step_ms: float | None
    in_state_ms: int | None
    process: str | None  # state letter of the kernel
    cpu_ms: int | None
    silent_ms: int | None  # since its last sample
    newcomer: bool


class Ranks(Struct, frozen=True, kw_only=True):
    """The roster of a job, ranks first, then its spares."""

    job: JobId
    generation: Generation
    phase: str
    ranks: tuple[RankStatus, ...]


class FaultView(Struct, frozen=True, kw_only=True):
    """One thing that went wrong."""

    at: str
    cause: str
    detector: str
    rank: Rank | None
    worker: WorkerId | None
    node: NodeId | None


class Told(Struct, frozen=True, kw_only=True):
    """A decision with its reason, `after_ms` after the first fault."""

    at: str
    after_ms: int
    text: str


class IncidentView(Struct, frozen=True, kw_only=True):
    """One interruption. Times of phases in ms; a phase that did not happen (yet) is absent."""

    name: str
    job: JobId
    generation: Generation
    at: str
    resolution: str
    eligible: bool
    faults: tuple[FaultView, ...]
    verdict: str
    target: str  # the point from which training went on; empty if none was found
    sources: tuple[Rank, ...]
    bytes: int
    digest: str
    phases: dict[str, int]
    pause_ms: int | None  # from the first fault until all trained again
    story: tuple[Told, ...]
    summary: str


class Incidents(Struct, frozen=True, kw_only=True):
    """All incidents of a job, oldest first."""

    job: JobId
    incidents: tuple[IncidentView, ...]


# ---------------------------------------------------------------- jobs and nodes


def view_job(scene: Scene, job: Job) -> JobStatus:
    spec = job.spec
    spares = scene.cluster.spares(spec.job)
    warm = sum(spare.life is Life.WARM for spare in spares)
    pulses = [scene.vitals.pulses.get(seat.worker) for seat in job.seats.values() if seat.worker is not None]
    times = [pulse.sample.step_ms for pulse in pulses if pulse is not None and pulse.sample.step_ms > 0]
    reached = scene.reached.get(spec.job)
    waiting = None if job.waiting_ms is None else (scene.now_ms - job.waiting_ms) / 1000
    return JobStatus(
        job=spec.job,
        phase=job.phase,
        why=job.why,
        generation=job.generation,
        world_size=spec.world_size,
        step=None if reached is None else reached[1].step,
        step_ms=round(median(times), 3) if times else None,
        spares=SpareTally(wanted=spec.spares, warm=warm, starting=len(spares) - warm),
        incidents=tally(job.incidents),
        restarts=job.restarts,
        joined=reached is not None or any(seat.joined for seat in job.seats.values()),
        waiting_s=waiting,
        outcome=None if job.outcome is None else OutcomeView(code=job.outcome.code, reason=job.outcome.reason),
    )


def tally(incidents: tuple[Incident, ...]) -> IncidentTally:
    eligible = [incident for incident in incidents if incident.eligible]
    return IncidentTally(
        total=len(incidents),
        eligible=len(eligible),
        clean=sum(incident.resolution is Resolution.CLEAN for incident in eligible),
        open=sum(incident.resolution is Resolution.OPEN for incident in incidents),
    )


def view_nodes(scene: Scene) -> tuple[NodeStatus, ...]:
    found = []
    for node in sorted(scene.cluster.nodes.values(), key=lambda node: natural(node.node)):
        heard = scene.vitals.heard.get((node.node, node.incarnation))
        silent = None if heard is None else scene.now_ms - heard
        found.append(NodeStatus(node=node.node, alive=node.alive, slots=node.slots, silent_ms=silent))
    return tuple(found)


# ---------------------------------------------------------------- ranks


def view_ranks(scene: Scene, job: Job) -> Ranks:
    rows = [view_rank(scene, rank, seat) for rank, seat in sorted(job.seats.items())]
    waiting = sorted(scene.cluster.spares(job.spec.job), key=lambda spare: natural(spare.worker))
    rows += [view_worker(scene, spare, None, newcomer=False) for spare in waiting]
    return Ranks(job=job.spec.job, generation=job.generation, phase=job.phase, ranks=tuple(rows))


def view_rank(scene: Scene, rank: Rank, seat: Seat) -> RankStatus:
    worker = None if seat.worker is None else scene.cluster.workers.get(seat.worker)
    if worker is not None:
        return view_worker(scene, worker, rank, newcomer=seat.newcomer)
    return RankStatus(
        rank=rank, worker=None, node=None, slot=None, pid=None, state="vacant", generation=None, step=None,
        section=None, step_ms=None, in_state_ms=None, process=None, cpu_ms=None, silent_ms=None, newcomer=False,
    )  # fmt: skip


def view_worker(scene: Scene, worker: Worker, rank: Rank | None, *, newcomer: bool) -> RankStatus:
    pulse = scene.vitals.pulses.get(worker.worker)
    sample = None if pulse is None else pulse.sample
    point = None if sample is None else sample.point
    return RankStatus(
        rank=rank,
        worker=worker.worker,
        node=worker.node,
        slot=worker.slot,
        pid=worker.pid or None,
        state=state_of(worker, rank, pulse),
        generation=None if sample is None else sample.generation,
        step=None if point is None else point.step,
        section=None if point is None else point.section,
        step_ms=None if sample is None or point is None else sample.step_ms,
        in_state_ms=None if sample is None else sample.phase_ms,
        process=None if sample is None else sample.process,
        cpu_ms=None if sample is None else sample.cpu_ms,
        silent_ms=None if pulse is None else scene.now_ms - pulse.heard_ms,
        newcomer=newcomer,
    )


def state_of(worker: Worker, rank: Rank | None, pulse: Pulse | None) -> str:
    """What a worker does, in one word; what its start is waiting for if it has no rank or was never heard."""
    if worker.life is Life.FENCING or rank is None or pulse is None:
        return worker.life
    return pulse.sample.phase


# ---------------------------------------------------------------- incidents


def view_incidents(scene: Scene, job: Job) -> Incidents:
    return Incidents(job=job.spec.job, incidents=tuple(view_incident(scene, one) for one in job.incidents))


def view_incident(scene: Scene, incident: Incident) -> IncidentView:
    begun = incident.marks.get(Mark.FAULT, 0)
    return IncidentView(
        name=incident.name,
        job=incident.job,
        generation=incident.generation,
        at=scene.at(begun),
        resolution=incident.resolution,
        eligible=incident.eligible,
        faults=tuple(view_fault(scene, fault) for fault in incident.faults),
        verdict=incident.verdict,
        target="" if incident.target is None else str(incident.target),
        sources=incident.sources,
        bytes=incident.size,
        digest=incident.digest,
        phases=phases_of(incident),
        pause_ms=pause_of(incident),
        story=tuple(Told(at=scene.at(at), after_ms=at - begun, text=text) for at, text in incident.story),
        summary=summarize(incident),
    )


def view_fault(scene: Scene, fault: Fault) -> FaultView:
    return FaultView(
        at=scene.at(fault.at_ms), cause=fault.cause, detector=fault.detector, rank=fault.rank, worker=fault.worker,
        node=fault.node,
    )  # fmt: skip


def phases_of(incident: Incident) -> dict[str, int]:
    """How long each phase took, in ms."""
    begun = incident.marks.get(Mark.FAULT)
    if begun is None:
        return {}
    ends = [("", begun)]
    for phase, mark in PHASES:
        at = incident.marks.get(mark)
        if at is not None:
            ends.append((phase, max(at, ends[-1][1])))
    return {phase: end - start for (_, start), (phase, end) in pairwise(ends)}


def pause_of(incident: Incident) -> int | None:
    begun, resumed = incident.marks.get(Mark.FAULT), incident.marks.get(Mark.RESUMED)
    if begun is None or resumed is None or incident.resolution is Resolution.OPEN:
        return None
    return resumed - begun


F = TypeVar("F", Fault, FaultView)
# Told by a worker whose peer is gone, often before anybody else knows: what its cause was is told later.
SYMPTOM = "collective"


def causes(faults: Sequence[F]) -> tuple[F, ...]:
    """The faults without those that only follow from others; all if there is nothing else."""
    return tuple(fault for fault in faults if fault.detector != SYMPTOM) or tuple(faults)


def summarize(incident: Incident) -> str:
    """One line: what happened, and how it was resolved."""
    what = "; ".join(describe(fault) for fault in causes(incident.faults))
    pause = pause_of(incident)
    took = f" in {pause / 1000:.2f} s" if pause is not None else ""
    how = [f"{incident.name} {incident.resolution}{took}", what]
    if incident.resolution is Resolution.CLEAN and incident.verdict:
        how.append(incident.verdict)
    if incident.sources:
        how.append(f"{size_text(incident.size)} of state from rank {incident.sources[0]}")
    if incident.resolution in (Resolution.FELL_BACK, Resolution.ENDED, Resolution.RESTARTED) and incident.story:
        how += [text for _, text in incident.story[:-1]][-1:]
    return ", ".join(part for part in how if part)


def size_text(size: int) -> str:
    """Bytes for people: 12 B, 27.1 kB, 1.2 GB."""
    amount = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1_000 or unit == "GB":
            break
        amount /= 1_000
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def describe(fault: Fault) -> str:
    who = f"rank {fault.rank}" if fault.rank is not None else fault.worker or fault.node or "the job"
    return f"{who}: {fault.cause}"
