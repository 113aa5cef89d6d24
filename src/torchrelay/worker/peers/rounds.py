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

from torchrelay.protocol.messages.ids import Point, Rank
from torchrelay.worker.peers.lanes import Ends, Parted, parted_error, receive_into

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
        self._ends: Ends | None = None  # not connected yet
        self._partners: list[tuple[Rank, Rank]] = []
        self._memory = memoryview(bytearray(_TOLD.size))

    def connect(self, rank: Rank, world_size: int, ends: Ends) -> None:
        """All are connected anew: these are the lanes from now on, in the order of `partners`. Raises `ValueError`."""
        told, heard = partners(rank, world_size)
        if len(ends.to) != len(told) or list(ends.by) != heard:
            raise ValueError(
                f"rank {rank} of {world_size} has {len(ends.to)} lanes out, and lanes from {list(ends.by)}"
            )
        self._partners = list(zip(told, heard, strict=True))
        self._ends = ends

    def exchange(self, point: Point, lacking: bool) -> bool | None:
        """Returns when all ranks have entered: whether none of them lacks anything; None if they are at other points.

        Raises `Parted`. After any exception these lanes are of no use: others may have heard half of what we know.
        """
        ends = self._ends
        if ends is None:
            raise Parted("the ranks are not connected for gates")
        least = greatest = (point.step, point.section)
        memory = self._memory
        trouble = ""
        try:
            for (told, heard), to, by in zip(self._partners, ends.to, ends.by.values(), strict=True):
                trouble = f"rank {told} cannot be told in the gate"
                to.sendall(_TOLD.pack(*least, *greatest, lacking))
                trouble = f"rank {heard} is not heard in the gate"
                came = by.recv_into(memory)
                if came < _TOLD.size:
                    receive_into(by, memory, _TOLD.size, came)
                step, section, last_step, last_section, lacks = _TOLD.unpack(memory)
                least, greatest = min(least, (step, section)), max(greatest, (last_step, last_section))
                lacking = lacking or lacks
        except OSError as error:
            ends.part()
            raise parted_error(trouble, error) from error
        except BaseException:
            ends.part()
            raise
        return not lacking if least == greatest else None
