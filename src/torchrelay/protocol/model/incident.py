"""Incident: one interruption, what was decided and why, and how it was resolved."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from torchrelay.protocol.messages.ids import START, Generation, JobId, NodeId, Point, Rank, WorkerId
from torchrelay.protocol.model.table import Table

PARKS = "parking"  # the detector of an incident that a parking makes
COMES_BACK = "goes on from the parking after"  # the cause of the incident that a job begins with then


class Resolution(StrEnum):
    """How an incident ended."""

    OPEN = "open"
    RESUMED = "resumed"  # all went on with nothing lost; not proved yet: no point was committed by all since
    CLEAN = "clean"  # nothing was lost, and all ranks have committed a further point
    RESTARTED = "restarted"  # before the first commit: nothing was there to be lost
    ROLLED_BACK = "rolled back"  # to a snapshot in the memory of the nodes: some steps were made again
    FELL_BACK = "fell back"  # the job started again from the script's own checkpoint
    CALLED_OFF = "called off"  # a move that did not take place: nothing was lost, nobody connected anew
    PARKED = "parked"  # the job wrote itself down and ended; another run goes on from there
    ENDED = "ended"  # the job ended, as it would have without us


# Not settled: what comes may still change it.
UNSETTLED = frozenset({Resolution.OPEN, Resolution.RESUMED})


class Mark(StrEnum):
    """Moments of a recovery; the spans between them are its phases."""

    FAULT = "fault"  # when the pause began: the first fault, as its detector dates it, or one before it that was seen
    HEARD = "heard"  # the core heard of it
    INTERRUPTED = "interrupted"  # the first survivor has reported
    AGREED = "agreed"  # all survivors have reported
    STOOD = "stood"  # a move: the first worker stands at the boundary; the pause begins
    ACQUIRED = "acquired"  # every rank has a holder
    READY = "ready"  # everybody stands at the safepoint
    CUTOVER = "cutover"  # a move: the targets hold their ranks
    RECONFIGURED = "reconfigured"
    RESTORED = "restored"
    RESUMED = "resumed"  # the last that went on, so far


class Fault(Struct, frozen=True):
    """One thing that went wrong within an incident."""

    cause: str
    detector: str
    at_ms: int
    rank: Rank | None = None
    worker: WorkerId | None = None
    node: NodeId | None = None
    exact: bool = False  # somebody saw it happen; False: it was judged, from when something was seen for the last time


class Incident(Struct, frozen=True):
    """One interruption. `story` is every decision with its reason and its time in ms; for times see `Job.moment`."""

    number: int
    job: JobId
    generation: Generation
    faults: tuple[Fault, ...] = ()
    marks: Table[Mark, int] = Table()
    story: tuple[tuple[int, str], ...] = ()
    verdict: str = ""
    resume_point: Point | None = None
    sources: tuple[Rank, ...] = ()
    size: int = 0
    digest: str = ""
    eligible: bool = True  # False: a user's error or an operator's stop, listed but not counted
    resolution: Resolution = Resolution.OPEN
    kind: str = "unplanned"  # or planned, pre-emptive
    lost: int = 0  # committed steps that are made again, from a snapshot
    move: int | None = None  # the number of the move that made it, or that it came into
    shares: Table[Rank, int] = Table()  # bytes of tensors by source, where it was told
    went_on: Generation = Generation(0)  # in which all went on
    since: Point = START  # ... and after which point; what all commit after it proves that this was clean

    @property
    def name(self) -> str:
        return f"I-{self.number}"

    @property
    def cause(self) -> str:
        """What went wrong first."""
        return self.faults[0].cause

    def suffer(self, fault: Fault) -> Incident:
        """With one more fault. A fault that comes into a move makes it an unplanned interruption, and is its cause."""
        if self.kind == "unplanned" or fault.detector == f"move M-{self.move}":
            return replace(self, faults=(*self.faults, fault))
        return replace(self, faults=(fault, *self.faults), kind="unplanned", eligible=True)

    def mark(self, mark: Mark, now_ms: int) -> Incident:
        """The last time wins: a second fault starts the phases after it anew."""
        return replace(self, marks=self.marks.put(mark, now_ms))

    def receive(self, sources: Sequence[Rank], shares: Sequence[int], size: int, digest: str) -> Incident:
        """With a state of so many bytes that has arrived, in these shares."""
        table = self.shares
        for rank, share in zip(sources, shares, strict=False):
            table = table.put(rank, table.get(rank, 0) + share)
        every = tuple(sorted({*self.sources, *sources}))
        return replace(self, sources=every, shares=table, size=self.size + size, digest=digest)

    def tell(self, now_ms: int, text: str) -> Incident:
        """Add a decision to the story, unless it was the last thing said."""
        if self.story and self.story[-1][1] == text:
            return self
        return replace(self, story=(*self.story, (now_ms, text)))
