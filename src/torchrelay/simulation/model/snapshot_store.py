"""Snapshot store: snapshots in the memory of a simulated node. They outlive its processes, and end with its power."""

from __future__ import annotations

from dataclasses import dataclass

from torchrelay.protocol.messages.events import Snapshot
from torchrelay.protocol.messages.ids import Point, Rank
from torchrelay.simulation.model import script as sc


@dataclass(frozen=True)
class Shot:
    """A snapshot of a rank: its state and record after a point, and where its script was."""

    state: sc.RankState
    record: bytes
    base: int
    index: int


class SnapshotStore:
    """Of each rank two at most: one that all ranks have, and one that is being made."""

    def __init__(self) -> None:
        self._shots: dict[Snapshot, Shot] = {}
        self.parked: dict[Snapshot, Shot] = {}  # files of a parking, which are told of apart

    @property
    def kept(self) -> tuple[Snapshot, ...]:
        """What lies here, as it is told."""
        return tuple(sorted(self._shots, key=lambda one: (one.restarts, one.rank, one.point)))

    def find(self, rank: Rank, point: Point, restarts: int) -> Shot | None:
        what = Snapshot(rank, point, restarts)
        return self._shots.get(what) or self.parked.get(what)

    def put(self, what: Snapshot, shot: Shot, keep: Point | None) -> None:
        """Keep this one, and that of `keep`, which is known to be complete everywhere; no other of this rank.

        A replacement knows of none: then all are kept, until it has passed a gate.
        """
        for other in self.kept if keep is not None else ():
            if other.rank == what.rank and (other.restarts != what.restarts or other.point not in (keep, what.point)):
                del self._shots[other]
        self._shots[what] = shot

    def clear_before(self, point: Point, restarts: int) -> None:
        """All ranks have a newer one: what is older is of no use."""
        for other in self.kept:
            if other.restarts != restarts or other.point < point:
                del self._shots[other]

    def clear_after(self, point: Point, restarts: int) -> None:
        """All go back to this point: what was taken later is of steps that are made again."""
        for other in self.kept:
            if other.restarts == restarts and other.point > point:
                del self._shots[other]

    def clear(self) -> None:
        self._shots.clear()
