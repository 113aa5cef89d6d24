"""What the protocol hears, in the past tense.

Facts belong to a process incarnation (`WorkerId`) or a resource and are not dropped for being old, but for what is said
of the collectives of a generation that is over.
Answers belong to a generation: an answer of another generation than the job's changes nothing.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct, structs

from torchrelay.protocol.messages.enclosed import JobSpec as JobSpec
from torchrelay.protocol.messages.enclosed import PrivateRecord as PrivateRecord
from torchrelay.protocol.messages.enclosed import Snapshot as Snapshot
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Point, Rank, WorkerId, WorkerPhase


class Event(Struct, frozen=True, gc=False, tag=True, kw_only=True):
    """Anything the protocol hears."""


class Fact(Event, frozen=True, tag=True, kw_only=True):
    """True of a process or a resource, whatever the generation."""


class Answer(Event, frozen=True, tag=True, kw_only=True):
    """A worker's answer to an order; fenced by the generation."""

    job: JobId
    generation: Generation
    worker: WorkerId
    rank: Rank


# ---------------------------------------------------------------- what comes with events


class Effect(StrEnum):
    """What a taint does to the place it lies on; the words are those of Kubernetes."""

    PREFER_NO_SCHEDULE = "PreferNoSchedule"  # taken last
    NO_SCHEDULE = "NoSchedule"  # nothing new is put there; what runs there stays
    NO_EXECUTE = "NoExecute"  # what runs there moves away


class WorkerSeen(Struct, frozen=True, gc=False, kw_only=True):
    """A living worker as its agent knows it; how a returning agent or orchestrator adopts it."""

    worker: WorkerId
    slot: int
    pid: int
    warm: bool = False
    job: JobId | None = None
    rank: Rank | None = None
    generation: Generation = Generation(0)
    address: str = ""
    store: str = ""


# ---------------------------------------------------------------- facts


class JobSubmitted(Fact, frozen=True, tag=True, kw_only=True):
    spec: JobSpec


class JobCancelled(Fact, frozen=True, tag=True, kw_only=True):
    job: JobId
    reason: str


class SignalAsked(Fact, frozen=True, tag=True, kw_only=True):
    """A signal is to be passed on to all ranks of a job.

    `grace_ms`: the job is to stop, and its ranks have so long to end by themselves; None: it goes on.
    """

    job: JobId
    number: int
    grace_ms: int | None = None
    reason: str


class ParkAsked(Fact, frozen=True, tag=True, kw_only=True):
    """The job is to write itself down at the next boundary, and to end: see `JobSpec.park_dir`.

    `grace_ms`: how long its nodes are there yet; None: as long as it takes. `number`: if it comes to nothing within
    that time, this signal is passed on to the ranks instead, so that the job ends as it would have without us.
    """

    job: JobId
    reason: str
    source: str
    grace_ms: int | None = None
    number: int = 0


class ParkingSealed(Fact, frozen=True, tag=True, kw_only=True):
    """The manifest of this parking is on the disk: the job can go on from there, and must not go on here."""

    job: JobId
    name: str


class SealFailed(Fact, frozen=True, tag=True, kw_only=True):
    """There is no manifest of this parking, and there will be none."""

    job: JobId
    name: str
    reason: str


class NodeJoined(Fact, frozen=True, tag=True, kw_only=True):
    """An agent connected, for the first time or again; `workers` are those alive on its node now."""

    node: NodeId
    incarnation: str
    slots: int
    workers: tuple[WorkerSeen, ...] = ()


class NodeLost(Fact, frozen=True, tag=True, kw_only=True):
    node: NodeId
    incarnation: str
    reason: str
    age_ms: int = 0  # how long ago it was heard for the last time


class TaintSet(Fact, frozen=True, tag=True, kw_only=True):
    """A node, or one slot of it, should be left, or not be used. A place has one taint of a key: again replaces it."""

    node: NodeId
    slot: int | None = None  # None: the whole node
    key: str
    value: str = ""
    effect: Effect = Effect.NO_EXECUTE
    reason: str = ""
    source: str  # who says so: a detector, an operator
    ttl_ms: int | None = None  # how long it lies; None: until it is cleared
    planned: bool = False  # a wish, not a warning: what moves, moves all at once or not at all
    yields: bool = False  # a detector's: one that lies there already, set by another source, stays as it is
    gone_in_ms: int | None = None  # the place is taken away in so long; None: it waits for us, or that is not known


class TaintCleared(Fact, frozen=True, tag=True, kw_only=True):
    """`healed`: its cause is gone without a repair (the taint was a mistake): no probation follows.

    `yields`: a detector's; only a taint that the same source has set is lifted.
    """

    node: NodeId
    slot: int | None = None
    key: str
    source: str
    healed: bool = False
    yields: bool = False


class MoveAsked(Fact, frozen=True, tag=True, kw_only=True):
    """An operator wants these ranks somewhere else, together; `to` a node, or wherever there is room."""

    job: JobId
    ranks: tuple[Rank, ...]
    to: NodeId | None = None
    reason: str
    source: str


class MoveWithdrawn(Fact, frozen=True, tag=True, kw_only=True):
    """What was asked for with `MoveAsked` is not wanted any more, for these ranks."""

    job: JobId
    ranks: tuple[Rank, ...]
    source: str


class FreezeSet(Fact, frozen=True, tag=True, kw_only=True):
    """Look on only. A move that has not cut over goes back, one that has is finished; faults end the job as without us.

    Several may hold a freeze (a file, an operator): each lifts its own.
    """

    source: str
    reason: str = ""


class FreezeCleared(Fact, frozen=True, tag=True, kw_only=True):
    source: str


class WorkerStarted(Fact, frozen=True, tag=True, kw_only=True):
    """A worker process runs in a slot and its link to the agent is up."""

    worker: WorkerId
    node: NodeId
    slot: int
    pid: int
    address: str = ""  # host:port of its state server
    store: str = ""  # host:port of the rendezvous store it can host
    job: JobId | None = None  # as its agent knows it
    parked: tuple[Rank, ...] = ()  # whose files of the parking that the job goes on from lie on its node
    all_parked: bool = False  # those of all ranks; `parked` is empty then


class WorkerWarm(Fact, frozen=True, tag=True, kw_only=True):
    """A spare has done all that can be done before it knows its rank."""

    worker: WorkerId


class WorkerPrepared(Fact, frozen=True, tag=True, kw_only=True):
    """The target of a move has built all that it can, has rehearsed, and waits for the place it is to go to."""

    worker: WorkerId
    note: str = ""  # what was rehearsed and how long it took, or why it was not, in words


class WorkerJoined(Fact, frozen=True, tag=True, kw_only=True):
    """The script called protect(). `shard` names the state it holds: equal names are replicas of one another.

    `snapshot_every`: steps between two snapshots, 0: none; None: a replacement is told only with its state.
    `snapshot_buddies`: how many nodes beside its own get a copy of each, if there are so many.
    """

    worker: WorkerId
    job: JobId
    rank: Rank
    shard: str = "all"
    snapshot_every: int | None = None
    snapshot_buddies: int = 1
    park_ms: int | None = None  # how long its node will take to write its ranks down, as measured; None: not measured


class WorkerExited(Fact, frozen=True, tag=True, kw_only=True):
    """A worker process ended. `private` is what its shared page held: the last points, at most four.

    `kept`: the snapshots in the memory of its node, which are still there; None: who tells of it does not know.
    """

    worker: WorkerId
    node: NodeId
    code: int | None = None
    signal: int | None = None
    cause: str = ""
    private: tuple[PrivateRecord, ...] = ()
    kept: tuple[Snapshot, ...] | None = None
    age_ms: int = 0  # how long ago it ended, as its agent measured


class WorkerRaised(Fact, frozen=True, tag=True, kw_only=True):
    """An exception in the script.

    kind `script`: the script's own error. `undeclared`: a collective outside any step or section was cut by a fault.
    `diverged`: the script of one that takes over a rank went another way than its predecessor's. `incomplete`: it
    raised in a turn whose earlier calls its predecessor had run alone, so that it may lack what they left. `refused`:
    torchrelay refuses to protect this script and says why. `signature` is equal for equal exceptions (type, message
    without numbers, innermost line of the script).
    """

    worker: WorkerId
    job: JobId
    rank: Rank
    point: Point | None
    kind: str
    signature: str
    summary: str
    fatal: bool = True  # its process is ending; False: it was interrupted anyway and stays
    age_ms: int = 0


class CollectiveFailed(Fact, frozen=True, tag=True, kw_only=True):
    """A worker's collective broke and no interrupt was under way: somebody's connection is gone."""

    worker: WorkerId
    job: JobId
    rank: Rank
    generation: Generation
    summary: str
    age_ms: int = 0


class ReplicasDiffer(Fact, frozen=True, tag=True, kw_only=True):
    """Ranks that are replicas of one another hold different bits after `point`; nobody passes the gate that follows.

    Said by the lowest rank that is not among `ranks`: those that differ from most. None named: there is no majority.
    `since`: ranks have changed hands after this point, a few steps before; None if that is longer ago.
    """

    worker: WorkerId
    job: JobId
    rank: Rank
    generation: Generation
    point: Point
    ranks: tuple[Rank, ...]
    evidence: str
    since: Point | None = None
    age_ms: int = 0


class WorkerHung(Fact, frozen=True, tag=True, kw_only=True):
    """Others wait for this worker, longer than any healthy step takes. Judged by the failure detector."""

    worker: WorkerId
    evidence: str
    age_ms: int = 0  # how long it had been stuck


class PointCommitted(Fact, frozen=True, tag=True, kw_only=True):
    """All ranks have committed this point in this generation. Told by the failure detector if it proves an incident."""

    job: JobId
    generation: Generation
    point: Point


class OnceRecorded(Fact, frozen=True, tag=True, kw_only=True):
    """A result of `once()`: done by this rank, never to be done again by its replacements.

    `restarts`: starts of the whole job from its checkpoint before that; after another one it is to be done again.
    """

    job: JobId
    rank: Rank
    name: str
    value: bytes
    restarts: int = 0


class Tick(Fact, frozen=True, tag=True, kw_only=True):
    """Time passed. The time itself is an argument of `advance`."""


class TimeLeftOut(Fact, frozen=True, tag=True, kw_only=True):
    """The orchestrator could not listen for so long, which its clock has left out: see `Job.moment`."""

    ms: int


# ---------------------------------------------------------------- answers


class WorkerReported(Answer, frozen=True, tag=True, kw_only=True):
    """Where a worker stands. A promise: after an interrupt it passes no gate until it is ordered to; after a halt it
    begins no call behind the one it is in.

    committed   the last point this worker committed; None if it holds no state (a replacement not yet restored)
    caught_up   for a replacement without state: the point its script has been brought to, else None
    pending     the point it is on the way to commit (in GATE, COMPUTING or SECTION), else None
    kept        the snapshots in the memory of its node; the newest complete one of each rank stays until all resume
    """

    committed: Point | None
    phase: WorkerPhase
    pending: Point | None = None
    caught_up: Point | None = None
    kept: tuple[Snapshot, ...] | None = None


class WorkerReady(Answer, frozen=True, tag=True, kw_only=True):
    """Stopped at the safepoint after `point` (None: before join, to be wired for the first time), nothing in flight.

    `private`: this rank's private record of `point`, if it was asked to hand over.
    """

    point: Point | None
    private: bytes = b""
    age_ms: int = 0


class RecordKept(Answer, frozen=True, tag=True, kw_only=True):
    """A buddy's copy of the private record of `ward` at `point`; empty if there is none."""

    ward: Rank
    point: Point
    private: bytes


class WorkerReconfigured(Answer, frozen=True, tag=True, kw_only=True):
    took_ms: float = 0.0


class ReconfigureFailed(Answer, frozen=True, tag=True, kw_only=True):
    reason: str


class StateRestored(Answer, frozen=True, tag=True, kw_only=True):
    """All of the state at `point` arrived and its digest equals the source's.

    `shares`: how many bytes of its tensors each source has brought, in the order of `sources`.
    """

    point: Point
    sources: tuple[Rank, ...]
    digest: str
    size: int  # bytes
    took_ms: float = 0.0
    shares: tuple[int, ...] = ()


class RestoreFailed(Answer, frozen=True, tag=True, kw_only=True):
    source: Rank
    reason: str
    mismatch: bool = False  # the digest differed: this source is not asked again


class WorkerResumed(Answer, frozen=True, tag=True, kw_only=True):
    """Training went on in this generation."""

    age_ms: int = 0


class WorkerFinished(Answer, frozen=True, tag=True, kw_only=True):
    """The script ended with 0 on this rank; the process stays and serves its state until it may leave.

    `point`: the last one that it has committed; None if it never joined. `held`: once ranks have changed hands, a sum
    over the parameters as the last call has left them; empty if they are not compared, or the script has changed them.
    """

    point: Point | None = None
    held: str = ""


class WorkerParked(Answer, frozen=True, tag=True, kw_only=True):
    """The files of this rank are written, and on the disk. Digests of the private record, and of state and manifest."""

    point: Point
    size: int  # bytes
    private: str
    digest: str
    node: NodeId
    torch: str = ""  # its version
    code: str = ""  # digest of the script that this rank runs; empty for a module
    took_ms: float = 0.0


class ParkFailed(Answer, frozen=True, tag=True, kw_only=True):
    reason: str


# What workers tell, as their agents pass it on: in a large job mostly many at a time, and then heard together.
WORKERS_TELL = (
    Answer, WorkerStarted, WorkerWarm, WorkerPrepared, WorkerJoined, WorkerExited, WorkerRaised, CollectiveFailed,
)  # fmt: skip

AnyEvent = (
    JobSubmitted
    | JobCancelled
    | SignalAsked
    | ParkAsked
    | ParkingSealed
    | SealFailed
    | NodeJoined
    | NodeLost
    | TaintSet
    | TaintCleared
    | MoveAsked
    | MoveWithdrawn
    | FreezeSet
    | FreezeCleared
    | WorkerStarted
    | WorkerWarm
    | WorkerPrepared
    | WorkerJoined
    | WorkerExited
    | WorkerRaised
    | CollectiveFailed
    | ReplicasDiffer
    | WorkerHung
    | PointCommitted
    | OnceRecorded
    | Tick
    | TimeLeftOut
    | WorkerReported
    | WorkerReady
    | RecordKept
    | WorkerReconfigured
    | ReconfigureFailed
    | StateRestored
    | RestoreFailed
    | WorkerResumed
    | WorkerFinished
    | WorkerParked
    | ParkFailed
)

# Those that say how long ago they happened (`age_ms`). Whoever keeps one, or finds it late, adds to it: by it the
# ledger dates when training stood and when it went on.
DATED = (WorkerExited, WorkerRaised, CollectiveFailed, ReplicasDiffer, WorkerReady, WorkerResumed)


def age_event(event: Event, ms: int) -> Event:
    """The event so much later; the same if it is not dated."""
    if ms <= 0 or not isinstance(event, DATED):
        return event
    return structs.replace(event, age_ms=event.age_ms + ms)
