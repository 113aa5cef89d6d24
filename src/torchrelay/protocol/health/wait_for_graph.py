"""Waiting: who waits for whom, across all groups, and for whom all wait in the end.

All members of a group begin the same in it, in the same order. So who has begun more in a group than another member
waits for that one there, now or soon. It may wait for somebody else in its turn, in another group:

    rank 0  waits in {0, 1} for  rank 1  waits in {1, 3} for  rank 3, which has begun less than others in every group
                                                              that it shares with them, and waits for nobody

The last one of such a chain is in the way of all. It is one that somebody waits for, and that waits for nobody: no
chain need be followed. That holds only if it is known of all what they have begun: who seems to wait for nobody may
wait for the one of whom nothing is known. Of one that has used the default group alone it is enough to know that.

What was begun and is not waited for (a message that was sent and goes its way) looks like waiting, too. Who hangs after
having begun what another comes to only later, and is waited for by it elsewhere, makes a circle, and is not found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from torchrelay.protocol.messages.ids import Rank, WorkerId

DEFAULT = 0  # the key of the default group; no other one has it


class Position(Struct, frozen=True):
    """A worker that holds a rank.

    begun      by the key of a group, how much it has begun there, the default group included
    elsewhere  how much in all groups but the default one
    whole      whether `begun` has all of its groups
    since_ms   when it last moved
    """

    worker: WorkerId
    rank: Rank
    begun: Mapping[int, int]
    elsewhere: int
    whole: bool
    since_ms: int


class Wait(Struct, frozen=True):
    """That others wait for a worker: since when all of them and it have stood still, who they are, and where."""

    since_ms: int
    by: tuple[Rank, ...]
    among: tuple[Rank, ...]  # the ranks of a group in which they wait; empty for the default group

    def __str__(self) -> str:
        """For people: "others wait for it", or "rank 0 waits for it in a group of ranks 0, 2"."""
        if not self.among:
            return "others wait for it"
        return f"{named(self.by)} wait{'s' if len(self.by) == 1 else ''} for it in a group of {named(self.among)}"


class WaitForGraph:
    """Of one job, at one moment: where its ranks stand. Made once, then asked for each worker."""

    def __init__(self, stands: Iterable[Position], ranks: int) -> None:
        """`ranks`: how many the job has."""
        self._stands = {stand.worker: stand for stand in stands}
        self._whole = len(self._stands) == ranks and all(stand.whole for stand in self._stands.values())
        self._most: dict[int, int] = {}
        self._least: dict[int, int] = {}
        for stand in self._stands.values():
            for key, begun in stand.begun.items():
                self._most[key] = max(begun, self._most.get(key, begun))
                self._least[key] = min(begun, self._least.get(key, begun))

    def waits(self, worker: WorkerId) -> bool:
        """Whether this worker waits for somebody, as far as is known."""
        return any(begun > self._least[key] for key, begun in self._stands[worker].begun.items())

    def wait_for(self, worker: WorkerId) -> Wait | None:
        """That others wait for this worker, whether or not it waits itself; None if nobody does."""
        one = self._stands.get(worker)
        if one is None:
            return None
        keys = [key for key, begun in one.begun.items() if self._most[key] > begun]
        if not keys:
            return None
        ahead = {
            key: [other for other in self._stands.values() if other.begun.get(key, 0) > one.begun[key]] for key in keys
        }
        first = min((other.since_ms, key) for key, others in ahead.items() for other in others)
        _, key = first
        members = [stand.rank for stand in self._stands.values() if key in stand.begun]
        return Wait(
            max(one.since_ms, first[0]),
            tuple(sorted(other.rank for other in ahead[key])),
            () if key == DEFAULT else tuple(sorted(members)),
        )

    def in_the_way(self, worker: WorkerId) -> Wait | None:
        """That others wait for this worker, and it waits for nobody; None if that is not so, or cannot be known."""
        wait = self.wait_for(worker)
        if wait is None or self.waits(worker):
            return None
        return wait if self._whole or not self._stands[worker].elsewhere else None


def named(ranks: tuple[Rank, ...]) -> str:
    """ "rank 3", or "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
