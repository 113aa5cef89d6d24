"""What the protocol says, in the imperative. Every order may be given twice and obeyed twice.

Orders to a worker carry its id and the generation; a worker that has heard of a later generation ignores them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum

from msgspec import Struct

from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Point, Rank, WorkerId


class Order(Struct, frozen=True, gc=False, tag=True, kw_only=True):
    """Anything the protocol wants done."""

    node: NodeId  # whose agent carries it out or passes it on


class WorkerOrder(Order, frozen=True, tag=True, kw_only=True):
    """For a worker; its agent only passes it on."""

    worker: WorkerId
    job: JobId
    generation: Generation


class Verdict(StrEnum):
    """What a fault means for the step or section under way."""

    REDO = "redo"
    ROLL_FORWARD = "roll forward"
    GO_ON = "go on"  # nothing is wrong: commit what it takes to stand after the boundary


class Source(Struct, frozen=True, gc=False):
    """A rank that can serve state, and where its state server listens (host:port)."""

    rank: Rank
    address: str


# ---------------------------------------------------------------- to the agent


class StartWorker(Order, frozen=True, tag=True, kw_only=True):
    """Keep a worker process with this id in this slot. Done once: an id that ended is never started again."""

    worker: WorkerId
    slot: int
    job: JobId
    guest: bool = False  # others run in this slot


class Fence(Order, frozen=True, tag=True, kw_only=True):
    """Make sure that this worker can act no more: SIGKILL, then report its exit. Unknown ids are reported as ended."""

    worker: WorkerId


class PassOn(Order, frozen=True, tag=True, kw_only=True):
    """Send this signal to a worker, once: its agent remembers the number `nth`."""

    worker: WorkerId
    number: int
    nth: int


# ---------------------------------------------------------------- to a worker, through its agent


class Assign(WorkerOrder, frozen=True, tag=True, kw_only=True):
    """Take this rank. `replacement`: the job is already trained to some point; `restarts`: starts of the whole job.

    `local_rank`: the slot on its node, another one than its predecessor's. The script does not see it: under the
    LOCAL_RANK of its rank it finds the slot's device.

    `examples`: for the target of a move, who trains now and can show what a step is called with. While training goes
    on there is time to rehearse.
    """

    rank: Rank
    world_size: int
    local_world_size: int
    local_rank: int
    replacement: bool
    restarts: int = 0
    once: tuple[tuple[str, bytes], ...] = ()
    examples: tuple[Source, ...] = ()


class Interrupt(WorkerOrder, frozen=True, tag=True, kw_only=True):
    """Stop what communicates, report, and move from then on by order only."""

    rank: Rank
    reason: str


class Interrupts(Order, frozen=True, tag=True, kw_only=True):
    """`Interrupt` for many workers of one node. In a large job what all are asked at once is said once a node."""

    job: JobId
    generation: Generation
    reason: str
    holders: tuple[tuple[Rank, WorkerId], ...]

    def each(self) -> Iterator[Interrupt]:
        """As if each had been said alone."""
        return (self._one(rank, worker) for rank, worker in self.holders)

    def of_rank(self, rank: Rank) -> Interrupt:
        """What it says to the holder of this rank, which is among them."""
        return next(self._one(one, worker) for one, worker in self.holders if one == rank)

    def _one(self, rank: Rank, worker: WorkerId) -> Interrupt:
        return Interrupt(
            node=self.node,
            worker=worker,
            job=self.job,
            generation=self.generation,
            rank=rank,
            reason=self.reason,
        )


class Halt(WorkerOrder, frozen=True, tag=True, kw_only=True):
    """Nothing is wrong. Report, finish the call that is under way, and begin none after it until told how far to go."""

    rank: Rank
    reason: str


class Decide(WorkerOrder, frozen=True, tag=True, kw_only=True):
    """The verdict: reach `point` (rolling forward if in that gate), and stop at the safepoint after it.

    `hand_over`: say what a replacement needs, too (`WorkerReady.private`).
    """

    rank: Rank
    verdict: Verdict
    point: Point
    hand_over: bool = False


class Recall(WorkerOrder, frozen=True, tag=True, kw_only=True):
    """Hand out the private record of a lost rank that this worker keeps as its buddy, or in a snapshot on its node."""

    rank: Rank
    ward: Rank
    point: Point
    restarts: int = 0


class Replay(WorkerOrder, frozen=True, tag=True, kw_only=True):
    """Replacement: bring the script to the safepoint after `point` with this private state; sources have the record.

    `snapshot`: what the sources have is a snapshot, as for `Restore`.
    """

    rank: Rank
    point: Point
    private: bytes
    sources: tuple[Source, ...]
    snapshot: bool = False


class Reconfigure(WorkerOrder, frozen=True, tag=True, kw_only=True):
    """Connect all groups anew through the store at `store` (host:port), which its owner hosts for this generation.

    `buddies` keep a copy of this rank's private record from now on, and this rank one of each of its `wards`.
    """

    rank: Rank
    store: str
    buddies: tuple[Rank, ...] = ()
    wards: tuple[Rank, ...] = ()


class Restore(WorkerOrder, frozen=True, tag=True, kw_only=True):
    """Fetch the state at `point` from these sources and check its digest.

    `snapshot`: not what the sources hold themselves, but the copy of this rank's own state that lies on their nodes.
    """

    rank: Rank
    point: Point
    sources: tuple[Source, ...]
    snapshot: bool = False


class Resume(WorkerOrder, frozen=True, tag=True, kw_only=True):
    """Train on from `point` (None: go on with the script, at the first wiring).

    After a halt that was called off: from wherever the worker is; `point` is then the boundary, if there was one.
    """

    rank: Rank
    point: Point | None


class Park(WorkerOrder, frozen=True, tag=True, kw_only=True):
    """All stand after `point`: write state and private record into `folder`, which is new. Nothing else changes.

    `keep`: another parking beside it, which is whole and stays.
    """

    rank: Rank
    point: Point
    folder: str
    keep: str = ""


class Leave(WorkerOrder, frozen=True, tag=True, kw_only=True):
    """All ranks have finished: exit with `code`."""

    code: int


AnyOrder = (
    StartWorker
    | Fence
    | PassOn
    | Assign
    | Interrupt
    | Halt
    | Decide
    | Recall
    | Replay
    | Reconfigure
    | Restore
    | Resume
    | Park
    | Leave
)


def singly(some: Iterable[Order]) -> Iterator[Order]:
    """The same orders, with those for many said to each alone."""
    for order in some:
        if isinstance(order, Interrupts):
            yield from order.each()
        else:
            yield order
