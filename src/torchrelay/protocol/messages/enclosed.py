"""Enclosed: values that come with events: what the user asked for, and what ranks leave behind."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from torchrelay.protocol.messages.ids import JobId, Point, Rank


class Resumed(Struct, frozen=True, kw_only=True):
    """A parking that a job goes on from: where its files are, and what the core knew besides."""

    folder: str
    point: Point
    restarts: int = 0  # starts of the whole job from the script's own checkpoint before it
    every: int = 0  # steps between two snapshots
    buddies: int = 1
    once: tuple[tuple[Rank, tuple[tuple[str, bytes], ...]], ...] = ()  # what ranks have done once: see `OnceRecorded`


class JobSpec(Struct, frozen=True, kw_only=True):
    """What the user asked for. Times in milliseconds."""

    job: JobId
    world_size: int
    nproc_per_node: int
    nodes: int = 1  # how many must have joined before ranks are placed for the first time
    spares: int = 0
    # Start a fresh worker in the slot of one that died (a process fault is not a fault of its place).
    refill: bool = True
    # How often the whole job may start again from the script's own checkpoint.
    max_restarts: int = 0
    # How often a slot may lose its worker within `slot_window_ms` before it is cordoned.
    slot_faults: int = 3
    slot_window_ms: int = 600_000
    # How long a job waits for a spare before it falls back or ends.
    spare_wait_ms: int = 600_000
    # How long several ranks' exceptions are collected before a spare is spent on one of them.
    raise_grace_ms: int = 250
    # How long a worker may take to report after an interrupt (its control thread answers at once).
    report_ms: int = 5_000
    # How long a worker may take from its assignment, or from its verdict, to the safepoint where it is reconfigured.
    ready_ms: int = 600_000
    # How long connecting and restoring may take before the generation is tried again.
    reconfigure_ms: int = 60_000
    restore_ms: int = 600_000
    # A failed collective without any lost worker: how long the cause may take to show.
    collective_grace_ms: int = 1_000
    # Planned and pre-emptive moves of ranks within an hour; 0: none at all, less than 0: no limit.
    moves_per_hour: int = 60
    # How long a place is taken last, after a fault of it was repaired. Doubled by each further fault within a month.
    probation_ms: int = 604_800_000
    # Whether ranks move back, by themselves, to the node they began on when its probation is over.
    return_home: bool = False
    # How many ranks may share a slot when no spare is left; 1: none do, and the job waits for one.
    ranks_per_slot: int = 1
    # The folder into which the job writes itself if it has to leave all its nodes, on each of them; empty: it does not.
    park_dir: str = ""
    # A name for its parkings that no other run has; with the generation it is that of the folder of one.
    park_key: str = ""
    # How long writing may take at least, before all go on as before; and how long the ranks have after a signal.
    park_ms: int = 600_000
    grace_ms: int = 30_000
    # From which parking the job goes on; None: it begins anew.
    resumes: Resumed | None = None

    @property
    def parking_of_workers(self) -> Resumed | None:
        """What workers are told of it: the rest comes with their ranks."""
        return None if self.resumes is None else replace(self.resumes, once=())


class PrivateRecord(Struct, frozen=True, gc=False):
    """A rank's private state (RNG, loader position) at a point: opaque bytes that outlived their process."""

    point: Point
    data: bytes


class Snapshot(Struct, frozen=True, gc=False):
    """A complete copy of a rank's state and private record at a point, in the memory of a node.

    `restarts`: starts of the whole job from the script's own checkpoint before it; points are counted anew in each.
    """

    rank: Rank
    point: Point
    restarts: int = 0
