"""Roster: the nodes, the worker processes on them, and the seat of each rank."""

from __future__ import annotations

import re
from enum import StrEnum

from msgspec import Struct

from torchrelay.protocol.messages.events import PrivateRecord, WorkerParked, WorkerReported
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Point, Rank, WorkerId


class Life(StrEnum):
    """The life of a worker process. One that has ended is not in the roster any more."""

    STARTING = "starting"  # ordered, not heard of yet
    STARTED = "started"  # its link is up
    WARM = "warm"  # it has done all that can be done without a rank
    FENCING = "fencing"  # to be killed; nothing it says counts, its end is awaited


class Node(Struct, frozen=True, gc=False):
    """A node and the incarnation of its agent.

    `proven`: a worker of this incarnation was heard of. Before that it may have to load all that a worker is forked
    from, which takes seconds or a minute.
    """

    node: NodeId
    incarnation: str
    slots: int
    alive: bool = True
    proven: bool = False


class Worker(Struct, frozen=True, gc=False):
    """One life of one worker process."""

    worker: WorkerId
    node: NodeId
    slot: int
    job: JobId
    life: Life
    since_ms: int
    pid: int = 0
    address: str = ""
    store: str = ""
    rank: Rank | None = None  # the rank it holds, or held until it was fenced
    incoming_for: Rank | None = None  # the rank it will take: the target of a move
    prepared: bool = False  # a target that has built, and rehearsed, all that it can
    note: str = ""  # what it said about its rehearsal
    shard: str = ""  # which part of the state a target has joined with
    brought: Point | None = None  # the boundary at which a target stands
    guest: bool = False  # it was started in a slot in use (see `sharing`)

    @property
    def place(self) -> str:
        """In words, as operators write it: node-1/0."""
        return f"{self.node}/{self.slot}"


class Seat(Struct, frozen=True, gc=False):
    """What is known of a rank's holder. The second half is forgotten with each generation."""

    worker: WorkerId | None = None
    assigned_in: Generation = Generation(0)  # in which it took the rank as a replacement
    assigned_ms: int = 0
    replacement: bool = False  # has taken the rank from another, until all train: holds no state until it is restored
    resumed_in: Generation = Generation(0)  # in which this holder began to train, if it took the rank from another
    joined: bool = False
    shard: str = ""  # which part of the state it holds; unknown until a holder has joined
    finished: bool = False
    ended_at: Point | None = None  # the last point that it had committed when its script ended
    checksum: str = ""  # of its parameters then; empty: there was nothing to compare
    home: NodeId | None = None  # the node it was given at the start
    private: tuple[PrivateRecord, ...] = ()  # what former holders of this rank left
    place: tuple[NodeId, int] | None = None  # where all begin anew: the slot that its last holder had
    ended_ms: int = 0  # when the end of a former holder was heard last
    distrusted: frozenset[Rank] = frozenset()  # sources whose digest differed
    holds: Point | None = None  # the newest point known to be in its memory
    outgoing: WorkerId | None = (
        None  # who held it before a move: stands at the boundary and serves until all have the state
    )

    report: WorkerReported | None = None
    ready: bool = False
    reconfigured: bool = False
    resumed: bool = False
    failed: frozenset[Rank] = frozenset()  # sources that did not deliver in this generation
    serves: bool = False  # stood at the resume point when this generation was agreed on, so its state can be had
    asked_buddies: frozenset[WorkerId] = frozenset()  # who said that it has no copy of this rank's record
    silent_buddies: frozenset[WorkerId] = frozenset()  # who was asked for it, and has not answered
    parked: WorkerParked | None = None  # it has written this rank down

    def record_of(self, point: Point) -> PrivateRecord | None:
        """The private record that a former holder left of this point."""
        for record in reversed(self.private):
            if record.point == point:
                return record
        return None


STAYS = Seat.__struct_fields__.index("report")  # so many fields, the first ones, outlast a generation


def natural_key(name: str) -> tuple[tuple[bool, int | str], ...]:
    """A sort key under which node-2 comes before node-10, and numbers come before names."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((not part.isdecimal(), int(part) if part.isdecimal() else part) for part in parts)
