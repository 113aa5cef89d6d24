"""Slices: the bytes of a state's tensors as one long stretch, and how it is cut, so that several sources can send it.

Both ends cut alike, by the tensors alone: every `SLICE` bytes, except within a tensor that lies in memory with gaps.
The digest of a state is that of its manifest's digest and its slices' digests in order, so it is the same for the same
bytes, whether they came from one source or from many.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

from torch import Tensor

from torchrelay.worker.tensors import memory
from torchrelay.worker.tensors.digest import Digest

# Small enough that the last ones, for which some sources have to wait, are few of all; large enough that asking for
# each costs nothing.
SLICE = 8 << 20


class Body:
    """The tensors of a state, as one stretch of bytes from 0 to `size`."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if memory.size(tensor)]
        self._ends = list(accumulate(memory.size(tensor) for tensor in self._tensors))
        self.size = self._ends[-1] if self._ends else 0  # in bytes

    def cuts(self, most: int | None = None) -> list[int]:
        """Where it is cut: 0, ..., `size`. A slice has at most so many bytes (`SLICE`), or holds a tensor with gaps."""
        most = SLICE if most is None else most
        found, at = [0], most
        while at < self.size:
            at = self._after_gaps(at)
            found.append(at)
            at = (at // most + 1) * most
        return found if found[-1] == self.size else [*found, self.size]

    def outgoing(self, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes from start to stop, to be read. Raises `ValueError` if they are none of it or cut into gaps."""
        for tensor, first, last in self._of(start, stop):
            yield from memory.outgoing(tensor, first, last)

    def incoming(self, start: int, stop: int) -> Iterator[tuple[memoryview, Callable[[], None] | None]]:
        """Where these bytes belong, as `memory.incoming` has it."""
        for tensor, first, last in self._of(start, stop):
            yield from memory.incoming(tensor, first, last)

    def _of(self, start: int, stop: int) -> Iterator[tuple[Tensor, int, int]]:
        """The tensors with bytes from start to stop, and which of their own bytes these are."""
        if not 0 <= start < stop <= self.size:
            raise ValueError(f"bytes {start} to {stop} are asked for, of {self.size}")
        for number in range(bisect_right(self._ends, start), bisect_left(self._ends, stop) + 1):
            tensor, end = self._tensors[number], self._ends[number]
            begin = end - memory.size(tensor)
            first, last = max(0, start - begin), min(stop, end) - begin
            if last - first < end - begin and not memory.divisible(tensor):
                raise ValueError(f"bytes {start} to {stop} are asked for, and cut a tensor that lies in pieces")
            yield tensor, first, last

    def _after_gaps(self, at: int) -> int:
        """The first place from here on where it may be cut."""
        number = bisect_right(self._ends, at)
        tensor, end = self._tensors[number], self._ends[number]
        inside = end - memory.size(tensor) < at
        return end if inside and not memory.divisible(tensor) else at


class SlicedDigest(Digest):
    """The digest of a state whose slices are added in order, in pieces of any size."""

    def __init__(self, head: Digest, cuts: Sequence[int]) -> None:
        """`head`: the manifest's."""
        super().__init__()
        self._left = [stop - start for start, stop in pairwise(cuts)][::-1]  # bytes to come, of the next slice last
        self._slice = Digest()
        super().add(head.raw())

    def add(self, data: bytes | bytearray | memoryview) -> None:
        """Add the next bytes. They must not be more than were announced."""
        view = memoryview(data).cast("B")
        while view:
            count = min(len(view), self._left[-1])
            self._slice.add(view[:count])
            self._left[-1] -= count
            view = view[count:]
            if not self._left[-1]:
                self._left.pop()
                self.add_slice(self._slice.raw())
                self._slice = Digest()

    def add_slice(self, digest: bytes) -> None:
        """Add a whole slice by its digest."""
        super().add(digest)
