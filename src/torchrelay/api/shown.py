"""Shown: what operators are shown, as values. The service sends them as JSON; the command line decodes them.

Nothing but values: a verb that prints some of them must not load the protocol for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol, TypeVar

from msgspec import Struct

from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Rank, WorkerId
from torchrelay.wire.messages.pathnews import NetworkNews

# The longest time that anybody may ask for: ten years, in ms.
LONGEST_MS = 10 * 365 * 86_400_000

# ---------------------------------------------------------------- places


class FreezeView(Struct, frozen=True, kw_only=True):
    """Who wants that nothing is moved, and why."""

    source: str
    reason: str


class TaintView(Struct, frozen=True, kw_only=True):
    """What is held against a place; `left_s` None: until it is cleared."""

    place: str
    node: NodeId
    slot: int | None
    key: str
    value: str
    effect: str
    reason: str
    source: str
    since: str
    age_s: float
    left_s: float | None
    planned: bool

    @property
    def text(self) -> str:
        """As operators write it: node-1 gpu/ecc=63:NoExecute."""
        return f"{self.place} {self.key}{'=' if self.value else ''}{self.value}:{self.effect}"


class SlotView(Struct, frozen=True, kw_only=True):
    """What a slot holds: `rank`, `outgoing` (held one until a move), `target` (of a move), `spare`, `ending`, `free`,
    `cordoned` (it lost too many workers), or `closed` (free, but a taint refuses). `why`: for the last two. `guests`:
    workers that share it with the first, as no spare is left.
    """

    slot: int
    holds: str
    rank: Rank | None
    worker: WorkerId | None
    life: str
    move: str
    why: str
    guests: tuple[WorkerId, ...] = ()


class FailureView(Struct, frozen=True, kw_only=True):
    """Faults of a place that are remembered; `slot` None: of the node."""

    slot: int | None
    times: tuple[str, ...]


class NodeView(Struct, frozen=True, kw_only=True):
    """A node with its slots, and what is held against it. `lost_since`: empty while it is alive, or if unknown."""

    node: NodeId
    alive: bool
    lost_since: str
    silent_ms: int | None
    incarnation: str
    slots: tuple[SlotView, ...]
    taints: tuple[TaintView, ...]
    failures: tuple[FailureView, ...]
    silence: str = ""  # how it stands with a node that is not heard, in words


class Nodes(Struct, frozen=True, kw_only=True):
    """All nodes, and the freezes that hold for them."""

    nodes: tuple[NodeView, ...]
    freezes: tuple[FreezeView, ...]


class SpareView(Struct, frozen=True, kw_only=True):
    """A worker without a rank. `target_of`: of which rank, in which `move`; `refused`: the taint that keeps it idle."""

    worker: WorkerId
    node: NodeId
    slot: int
    state: str
    target_of: Rank | None
    move: str
    prepared: bool
    note: str
    refused: str


class Spares(Struct, frozen=True, kw_only=True):
    """The spares of a job, and how many are wanted."""

    job: JobId
    wanted: int
    spares: tuple[SpareView, ...]


# ---------------------------------------------------------------- network paths


class NodeNetwork(Struct, frozen=True, kw_only=True):
    """A node's network paths, as its agent told of them `age_s` ago; `taints`: what lies there because of them."""

    node: NodeId
    alive: bool
    age_s: float
    news: NetworkNews
    taints: tuple[TaintView, ...] = ()


class NetworkView(Struct, frozen=True, kw_only=True):
    """The network paths of all nodes whose agents tell of them."""

    nodes: tuple[NodeNetwork, ...]


# ---------------------------------------------------------------- moves


class Leg(Struct, frozen=True, kw_only=True):
    """The way of one rank in a move: from a place and, once it is known, to a place."""

    rank: Rank
    worker: WorkerId | None = None
    node: NodeId | None = None
    slot: int | None = None
    to_worker: WorkerId | None = None
    to_node: NodeId | None = None
    to_slot: int | None = None
    prepared: bool = False

    @property
    def from_text(self) -> str:
        return "?" if self.node is None else f"{self.node}/{self.slot}"

    @property
    def to_text(self) -> str:
        if self.to_node is None:
            return "?"
        return str(self.to_node) if self.to_slot is None else f"{self.to_node}/{self.to_slot}"


class Told(Struct, frozen=True, kw_only=True):
    """A decision with its reason, `after_ms` after the beginning."""

    at: str
    after_ms: int
    text: str


class MoveView(Struct, frozen=True, kw_only=True):
    """One migration. `why`: what was said of it last; `pause_ms`: how long training stood still, if it did."""

    name: str
    job: JobId
    kind: str
    state: str
    open: bool
    ranks: tuple[Rank, ...]
    legs: tuple[Leg, ...]
    reason: str
    asked: str
    ended: str
    tries: int
    why: str
    incident: str
    pause_ms: int | None
    story: tuple[Told, ...]


class Moves(Struct, frozen=True, kw_only=True):
    """The moves of a job, oldest first."""

    job: JobId
    moves: tuple[MoveView, ...]


class Change(Struct, frozen=True, kw_only=True):
    """What a changing call does. `plan` says it in words; the same whether or not it was carried out.

    changes   False: all is as wished already
    waits     why it cannot happen now; empty if it can
    legs      the ranks that go, from where to where
    move      the name under which it can be explained; empty as long as there is none
    """

    verb: str
    applied: bool
    changes: bool
    plan: tuple[str, ...]
    waits: str = ""
    legs: tuple[Leg, ...] = ()
    move: str = ""
    explain: str = ""  # what to ask `torchrelay explain` for


class WhyView(Struct, frozen=True, kw_only=True):
    """Why something is as it is, or is not: what speaks for it and against it, read off the state."""

    about: str
    lines: tuple[str, ...]
    story: tuple[Told, ...] = ()


class AuditEntry(Struct, frozen=True, kw_only=True):
    """One changing call. `seq`: the last event that it led to; 0 if it led to none."""

    at: str
    who: str
    call: str
    what: str
    seq: int


class Audit(Struct, frozen=True, kw_only=True):
    """Every changing call, oldest first."""

    calls: tuple[AuditEntry, ...]


# ---------------------------------------------------------------- jobs, ranks, incidents


class SpareTally(Struct, frozen=True, kw_only=True):
    """Spares of a job: wanted in all, warm now, and on their way."""

    wanted: int
    warm: int
    starting: int


class IncidentTally(Struct, frozen=True, kw_only=True):
    """Incidents of a job. `eligible` leaves out what has an `Exclusion`; `clean` is of these."""

    total: int
    eligible: int
    clean: int
    open: int


class OutcomeView(Struct, frozen=True, kw_only=True):
    """How a job ended."""

    code: int
    reason: str


class JobStatus(Struct, frozen=True, kw_only=True):
    """A job at a glance. `step`: newest committed anywhere, None before protect(); `step_ms`: median of ranks."""

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
    joined: bool  # some rank has called protect()
    waiting_s: float | None
    outcome: OutcomeView | None
    move: MoveView | None = None  # the one that is open
    freezes: tuple[FreezeView, ...] = ()
    taints: tuple[TaintView, ...] = ()
    lease: int = 0  # the orchestrator's number: only the highest one acts
    parking: str = ""  # where the job may be written down, or how that stands; empty: it may not
    sharing: tuple[Rank, ...] = ()  # ranks that run in the slots of others, as no spare is left


class NodeStatus(Struct, frozen=True, kw_only=True):
    """A node; `silent_ms` since its last beat, None if there was none yet.

    gap_ms     the longest gap between its beats of late
    limit_ms   the silence after which it is lost, which comes of that
    silence    how it stands with it while it is not heard, in words; empty if it is
    """

    node: NodeId
    alive: bool
    slots: int
    silent_ms: int | None
    gap_ms: int | None = None
    limit_ms: int | None = None
    silence: str = ""


class Status(Struct, frozen=True, kw_only=True):
    """The whole cluster at a glance. `degraded` says why nothing is decided at the moment; empty if all is well."""

    version: str
    pid: int
    at: str
    seq: int
    degraded: str
    lease: int
    jobs: tuple[JobStatus, ...]
    nodes: tuple[NodeStatus, ...]
    remarks: tuple[str, ...] = ()  # what differs between machines


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
    replacement: bool
    shard: str = ""  # the name of the state it holds: equal names are replicas; empty before protect()
    shares_with: WorkerId | None = None  # in whose slot it is a guest


class Ranks(Struct, frozen=True, kw_only=True):
    """The roster of a job, ranks first, then its spares."""

    job: JobId
    generation: Generation
    phase: str
    ranks: tuple[RankStatus, ...]
    snapshot_every: int = 0  # steps between two snapshots of a rank's state; 0: none are taken
    snapshot_buddies: int = 1  # nodes that have a copy of each, beside its own, if there are so many


class Exclusion(StrEnum):
    """Why an incident is listed and not counted in the clean ratio. See `orchestrator.views.views`."""

    USER_BUG = "user bug"  # the same exception at the same point, on two workers
    REFUSED = "script refused"  # it does what cannot be protected, and was told so
    OPERATOR = "operator stop"
    STORAGE = "storage outage"  # the operating system said so to the script
    PARKED = "parked"  # the job wrote itself down and ended, or went on from there: no fault
    CALLED_OFF = "move called off"  # nobody connected anew and nothing was lost: no interruption
    UNPROVED = "not proved"  # every script ended with 0, and none had committed anything after it
    UNTOLD = "not told"  # by an older version, which kept only that it does not count


class FaultView(Struct, frozen=True, kw_only=True):
    """One thing that went wrong."""

    at: str
    cause: str
    detector: str
    rank: Rank | None
    worker: WorkerId | None
    node: NodeId | None


class IncidentView(Struct, frozen=True, kw_only=True):
    """One interruption. Times of phases in ms; a phase that did not happen (yet) is absent."""

    name: str
    job: JobId
    generation: Generation
    at: str
    resolution: str
    eligible: bool
    kind: str
    move: str  # the move that made it, or that it came into; empty if none
    faults: tuple[FaultView, ...]
    verdict: str
    resume_point: str  # the point from which training went on; empty if none was found
    sources: tuple[Rank, ...]
    shares: dict[Rank, int]  # bytes of tensors by source
    bytes: int
    digest: str
    lost: int  # committed steps that were made again, from snapshots
    phases: dict[str, int]
    pause_ms: int | None  # from the first fault, or in a move from the first that stood, until all trained again
    story: tuple[Told, ...]
    summary: str
    cause: str  # of the first fault, or of the move
    excluded: str = ""  # an `Exclusion` if it is not eligible; empty from an older version, too
    evidence: str = ""  # what shows that


class Incidents(Struct, frozen=True, kw_only=True):
    """All incidents of a job, oldest first."""

    job: JobId
    incidents: tuple[IncidentView, ...]


# ---------------------------------------------------------------- words


class Detected(Protocol):
    """Something that somebody has told."""

    @property
    def detector(self) -> str: ...


F = TypeVar("F", bound=Detected)
# Told by a worker whose peer is gone, often before anybody else knows: what its cause was is told later.
SYMPTOM = "collective"


def root_causes(faults: Sequence[F]) -> tuple[F, ...]:
    """The faults without those that only follow from others; all if there is nothing else."""
    return tuple(fault for fault in faults if fault.detector != SYMPTOM) or tuple(faults)


def size_text(size: int) -> str:
    """Bytes for people: 12 B, 27.1 kB, 1.2 GB."""
    amount = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1_000 or unit == "GB":
            break
        amount /= 1_000
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def span_text(seconds: float) -> str:
    """A longer span for people: 40 s, 12 min, 3 h, 2 d."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


# ---------------------------------------------------------------- following a run from elsewhere


class HeirView(Struct, frozen=True, kw_only=True):
    """A node that may take the head's place, and where its orchestrator would be reached."""

    node: str
    url: str


class Head(Struct, frozen=True, kw_only=True):
    """Where the orchestrator acts, as far as the one that was asked knows.

    acts     it is the one that was asked
    node     one of the run's nodes; empty if the launcher's machine is none
    run_dir  its folder on that machine, if it acts
    out_of_reach  heirs without which it can order nothing at the moment
    """

    acts: bool
    node: str
    url: str
    lease: int
    run_dir: str = ""
    heirs: tuple[HeirView, ...] = ()
    out_of_reach: tuple[str, ...] = ()


class Lines(Struct, frozen=True, array_like=True):
    """What a rank has printed. `file`, `end`: how far its log was read then, which is where to go on."""

    rank: Rank
    file: int
    end: int
    lines: tuple[str, ...]


class Place(Struct, frozen=True, array_like=True):
    """How far the log of a rank was read."""

    rank: Rank
    file: int
    end: int
