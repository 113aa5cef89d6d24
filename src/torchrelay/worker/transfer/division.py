"""Division: which source brings which slice of a state. Whoever has brought one gets the next, so all end together.

Nobody is given a fixed part: a source that is twice as fast brings twice as much. When there is nothing left to give
out, and a source would need much longer for what it has than one that is idle, it is cut, and the idle one takes over.
A slice is given to another source only when nobody writes to its memory any more.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchrelay.protocol.messages.ids import Rank

LOOK_S = 0.02  # how often an idle source looks at the others
PATIENCE_S = 0.25  # by how much another one may be slower, beside what its slices take
SLOWER = 2.0  # times


@dataclass(eq=False)
class Bringer:
    """One source, while it brings slices. `cut` makes it stop soon; it then leaves by itself."""

    rank: Rank
    cut: Callable[[], None]
    held: dict[int, int] = field(default_factory=dict)  # slices that it was given, and how much came of each
    landed_s: float = 0.0  # when its last slice was there, or when it was given one, having none
    busy_s: float = 0.0  # in which it brought whole slices
    brought: int = 0  # bytes of these
    came: int = 0  # bytes since the last one
    dismissed: bool = False


class Division:
    """The slices of one state. All methods may be called from any thread; each bringer belongs to one."""

    def __init__(self, sizes: Sequence[int], clock: Callable[[], float] = time.monotonic) -> None:
        """`sizes`: of the slices, in bytes."""
        self._sizes = sizes
        self._clock = clock
        self._changed = threading.Condition()
        self._free = deque(range(len(sizes)))
        self._brought: dict[int, tuple[Rank, bytes]] = {}  # by slice: by whom, and its digest
        self._bringers: set[Bringer] = set()
        self.ended = False  # nobody is given anything any more

    def enter(self, rank: Rank, cut: Callable[[], None]) -> Bringer:
        """A source that has nothing yet."""
        bringer = Bringer(rank, cut)
        with self._changed:
            self._bringers.add(bringer)
        return bringer

    def claim(self, bringer: Bringer, *, wait: bool) -> int | None:
        """The next slice for it. None: nothing for now; with `wait`, nothing ever."""
        with self._changed:
            while not (self.ended or bringer.dismissed or self.complete):
                if self._free:
                    number = self._free.popleft()
                    if not bringer.held:
                        bringer.landed_s = self._clock()
                    bringer.held[number] = 0
                    return number
                if not wait:
                    return None
                self._hurry(bringer)
                self._changed.wait(LOOK_S)
            return None

    def count(self, bringer: Bringer, number: int, size: int) -> None:
        """So many bytes of this slice have come."""
        bringer.held[number] += size
        bringer.came += size

    def land(self, bringer: Bringer, number: int, digest: bytes) -> None:
        """This slice is there, and right."""
        with self._changed:
            now_s = self._clock()
            bringer.busy_s += now_s - bringer.landed_s
            bringer.landed_s, bringer.came = now_s, 0
            bringer.brought += self._sizes[number]
            del bringer.held[number]
            self._brought[number] = (bringer.rank, digest)
            self._changed.notify_all()

    def leave(self, bringer: Bringer, *, distrusted: bool = False) -> None:
        """It brings nothing any more, and writes nowhere. `distrusted`: what it has brought counts for nothing."""
        with self._changed:
            self._bringers.discard(bringer)
            again = set(bringer.held)
            bringer.held = {}
            if distrusted:
                again |= {number for number, (rank, _) in self._brought.items() if rank == bringer.rank}
                self._brought = {number: kept for number, kept in self._brought.items() if number not in again}
            self._free.extendleft(sorted(again, reverse=True))
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing is given out any more; who has something is cut. Returns when nobody writes any more."""
        with self._changed:
            self.ended = True
            for bringer in self._bringers:
                bringer.cut()
            self._changed.notify_all()
            while any(bringer.held for bringer in self._bringers):
                self._changed.wait()

    def wait(self, over: Callable[[], bool]) -> bool:
        """Wait until all slices are there, or this is true; it is asked now and then. Returns whether they are."""
        with self._changed:
            while not self.complete and not over():
                self._changed.wait(LOOK_S)
            return self.complete

    @property
    def complete(self) -> bool:
        """Whether all slices are there."""
        return len(self._brought) == len(self._sizes)

    def digests(self) -> list[bytes]:
        """Of all slices, in order, when they are there."""
        return [self._brought[number][1] for number in range(len(self._sizes))]

    def shares(self) -> dict[Rank, int]:
        """How many bytes of the state are from whom."""
        found: dict[Rank, int] = {}
        for number, (rank, _) in self._brought.items():
            found[rank] = found.get(rank, 0) + self._sizes[number]
        return found

    def _hurry(self, idle: Bringer) -> None:
        """Dismiss who would take much longer for what it has than the idle one."""
        now_s = self._clock()
        if not idle.brought:
            return  # how fast it is nobody knows
        for other in self._bringers:
            spent_s = now_s - other.landed_s
            if not other.held or other.dismissed or spent_s < PATIENCE_S:
                continue
            sizes = sum(self._sizes[number] for number in other.held)
            theirs_s = (sizes - sum(other.held.values())) * spent_s / max(other.came, 1)
            anew_s = sizes * idle.busy_s / idle.brought
            if theirs_s > SLOWER * anew_s + PATIENCE_S:
                other.dismissed = True
                other.cut()
