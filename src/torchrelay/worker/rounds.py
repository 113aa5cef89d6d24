"""Rounds: how all ranks know that all have come to the gate, on the CPU.

In round k each rank tells the one that is 2^k further what it knows, and hears the one that is as far before it. After
ceil(log2(n)) rounds everybody has heard from everybody: the dissemination barrier of Hensgen, Finkel and Manber
(1988). What is told may be merged twice (the least and the greatest point, and whether anybody lacks something), so
the number of ranks need be no power of two.

A main thread that waits here is woken by the message itself. In an all-reduce of Gloo it is woken by Gloo's thread, and
that by a message, at each of 2(n - 1) hops.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from torchrelay.protocol.ids import Point, Rank
from torchrelay.worker.lanes import Ends, Parted, receive

GATE = "gate"  # the purpose of these lanes
_TOLD = struct.Struct("<qqqq?")  # the least and the greatest point, and whether anybody lacks something


def partners(rank: Rank, world_size: int) -> tuple[list[Rank], list[Rank]]:
    """Whom a rank tells, round by round, and whom it hears."""
    steps = list(_distances(world_size))
    return (
        [Rank((rank + step) % world_size) for step in steps],
        [Rank((rank - step) % world_size) for step in steps],
    )


def _distances(world_size: int) -> Iterator[int]:
    step = 1
    while step < world_size:
        yield step
        step *= 2


class Rounds:
    """The rounds of one rank."""

    def __init__(self) -> None:
        self._ends = Ends()
        self._memory = memoryview(bytearray(_TOLD.size))

    def connect(self, ends: Ends) -> None:
        """All are connected anew: these are the lanes from now on, in the order of `partners`."""
        self._ends = ends

    def exchange(self, point: Point, lacking: bool) -> bool | None:
        """Returns when all ranks have entered: whether none of them lacks anything; None if they are at other points.

        Raises `Parted`.
        """
        least = greatest = (point.step, point.section)
        memory = self._memory
        try:
            for to, by in zip(self._ends.to, self._ends.by.values(), strict=True):
                to.sendall(_TOLD.pack(*least, *greatest, lacking))
                receive(by, memory, _TOLD.size)
                step, section, last_step, last_section, lacks = _TOLD.unpack(memory)
                least, greatest = min(least, (step, section)), max(greatest, (last_step, last_section))
                lacking = lacking or lacks
        except OSError as error:
            raise Parted(f"a rank is not heard in the gate: {error}") from error
        return not lacking if least == greatest else None
