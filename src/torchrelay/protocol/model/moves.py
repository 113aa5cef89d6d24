"""Moves: what a planned or pre-emptive migration is, as a value.

`rules/migration` decides which ranks should move and prepares their targets, `placement/boundary` stops the job and
cuts over, `recovery/ending` is where a fault comes in between. A move that is stopped in vain goes back to PREPARING
and is tried again (`boundary.in_vain`, `call_off`). One that is not to go on is closed (`migration.abandon`); what it
was to do then rests for a while (`boundary.give_up`).
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from torchrelay.protocol.messages.events import Effect
from torchrelay.protocol.messages.ids import NodeId, Rank, WorkerId
from torchrelay.protocol.model.table import Table


class MoveKind(StrEnum):
    """Why a rank is moved that has not failed."""

    PLANNED = "planned"  # somebody wishes it: all of it at once, or not at all
    PRE_EMPTIVE = "pre-emptive"  # its place is about to fail: as many ranks as there is room for


class MoveState(StrEnum):
    """How far a move is. The first four are open."""

    WAITING = "waiting"  # for room, or for its turn; why is said in the story
    PREPARING = "preparing"  # targets come up while training goes on
    STOPPING = "stopping"  # all are on the way to the boundary
    CUT_OVER = "cut over"  # the targets hold their ranks
    DONE = "done"
    CALLED_OFF = "called off"  # not wanted any more, frozen, or the job began anew or ended
    RECOVERED = "recovered"  # a fault came first: its recovery has moved ranks that were to move
    FAILED = "failed"  # tried too often


KEPT_MOVES = 64
OPEN_MOVES = frozenset({MoveState.WAITING, MoveState.PREPARING, MoveState.STOPPING, MoveState.CUT_OVER})


class Taint(Struct, frozen=True):
    """What is held against a place. `slot` None: the whole node."""

    node: NodeId
    slot: int | None
    key: str
    value: str
    effect: Effect
    reason: str
    source: str
    since_ms: int
    until_ms: int | None = None
    planned: bool = False
    gone_ms: int | None = None  # when the place is taken away, if that is known

    @property
    def place(self) -> str:
        """In words, as operators write it: node-1, or node-1/0."""
        return str(self.node) if self.slot is None else f"{self.node}/{self.slot}"

    def covers(self, node: NodeId, slot: int) -> bool:
        """Whether it lies on this slot."""
        return self.node == node and self.slot in (None, slot)


# A place and a key have one taint.
TaintId = tuple[NodeId, int | None, str]


class Request(Struct, frozen=True):
    """An operator wants one rank elsewhere: away from its place, or on a node. See `requests`."""

    rank: Rank
    worker: WorkerId  # who holds the rank
    node: NodeId  # and where: it is to leave this place
    slot: int
    to: NodeId | None
    reason: str
    source: str
    group: int  # ranks asked for together move together
    asked_ms: int


class Move(Struct, frozen=True):
    """One migration. `story` is every decision with its reason and its time in ms."""

    number: int
    kind: MoveKind
    ranks: tuple[Rank, ...]
    reason: str
    asked_ms: int
    state: MoveState = MoveState.WAITING
    outgoing_workers: Table[Rank, WorkerId] = (
        Table()
    )  # who held the ranks before; ranks that a fault took first stay here
    moved: tuple[Rank, ...] = ()  # ranks that it has moved, while others went back and are still to be moved
    to: Table[Rank, NodeId] = Table()  # where those want to go that do not go just anywhere
    targets: Table[Rank, WorkerId] = Table()
    shares: bool = False  # its ranks may go to slots that others use, if there is no other room
    tries: int = 0  # targets and boundaries that came to nothing
    again_ms: int = 0  # not before this time
    ended_ms: int | None = None
    incident: int | None = None  # the number of the interruption it made
    story: tuple[tuple[int, str], ...] = ()

    @property
    def name(self) -> str:
        return f"M-{self.number}"

    @property
    def open(self) -> bool:
        return self.state in OPEN_MOVES

    def tell(self, now_ms: int, text: str) -> Move:
        """Add a decision to the story, unless it was the last thing said."""
        if self.story and self.story[-1][1] == text:
            return self
        return replace(self, story=(*self.story, (now_ms, text))[-64:])

    def begin(self, now_ms: int, source: str) -> Move:
        """Tell why it is wished, and who says so."""
        return self.tell(now_ms, self.reason if source in self.reason else f"{self.reason} ({source})")

    def enter(self, state: MoveState, now_ms: int, text: str) -> Move:
        return replace(self, state=state).tell(now_ms, text)

    def close(self, state: MoveState, now_ms: int, text: str) -> Move:
        return replace(self, state=state, ended_ms=now_ms, targets=Table()).tell(now_ms, text)
