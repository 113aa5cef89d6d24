"""Large collectives: each rank sends to the next one and receives from the one before, in segments.

Reducing, a block goes round once and each rank adds its own values: block b begins at rank b + 1 and is whole at rank
b. Gathering, it goes round once more. So each value is put together in the order of the ring, whatever the time or
the path, and every rank sends its share and no more. While a segment is put together the next ones travel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from torchrelay.netpath.transport.mesh import Mesh, Stream
from torchrelay.netpath.transport.reduction import Reduction

SEGMENT = 512 << 10  # bytes
MOST_SEGMENTS = 32  # of a block; no more than may be under way, or two ranks could wait for one another
AHEAD = 3  # receives that are posted


class _Ring:
    """One collective's neighbours, and the segments on their way."""

    def __init__(self, mesh: Mesh, until: float) -> None:
        self.rank, self.size, self.until = mesh.rank, mesh.size, until
        # Connecting lets others connect to us meanwhile, so all may begin with this.
        self.right = mesh.to((mesh.rank + 1) % mesh.size, until)
        self.left = mesh.of((mesh.rank - 1) % mesh.size, until)

    def send(self, segment: torch.Tensor) -> None:
        self.right.post(segment, self.until)

    def send_all(self, block: torch.Tensor) -> None:
        for segment in _segments(block):
            self.send(segment)

    def receive(self, segment: torch.Tensor) -> None:
        self.left.post(segment, self.until)


def all_reduce(mesh: Mesh, values: torch.Tensor, reduction: Reduction, until: float) -> None:
    """Put the values of all ranks together, in place."""
    ring = _Ring(mesh, until)
    blocks = equal(values, mesh.size)
    ring.send_all(blocks[(mesh.rank - 1) % mesh.size])
    partial = _reduce(ring, blocks, reduction)
    ring.right.finish(until, partial)  # what comes now replaces what these were sent from
    _gather(ring, blocks)
    ring.right.finish(until)


def reduce_scatter(
    mesh: Mesh, blocks: Sequence[torch.Tensor], result: torch.Tensor, reduction: Reduction, until: float
) -> None:
    """Put the ranks' values for this one together; `blocks` has those for each rank, and stays as it is."""
    ring = _Ring(mesh, until)
    ring.send_all(blocks[(mesh.rank - 1) % mesh.size])
    _reduce(ring, blocks, reduction, result)
    ring.right.finish(until)


def all_gather(mesh: Mesh, blocks: Sequence[torch.Tensor], until: float) -> None:
    """Bring the block of each rank to all; `blocks` has this rank's own in its place."""
    ring = _Ring(mesh, until)
    ring.send_all(blocks[mesh.rank])
    _gather(ring, blocks)
    ring.right.finish(until)


def broadcast(mesh: Mesh, values: torch.Tensor, root: int, until: float) -> None:
    """Bring the root's values to all: each rank hands a segment on when it has come."""
    place = (mesh.rank - root) % mesh.size
    segments = list(_segments(values))
    right = mesh.to((mesh.rank + 1) % mesh.size, until) if place + 1 < mesh.size else None
    if place == 0:
        for segment in segments:
            _post(right, segment, until)
    else:
        left = mesh.of((mesh.rank - 1) % mesh.size, until)
        for segment in segments[:AHEAD]:
            left.post(segment, until)
        for number, segment in enumerate(segments):
            left.finish_oldest(until)
            if number + AHEAD < len(segments):
                left.post(segments[number + AHEAD], until)
            _post(right, segment, until)
    if right is not None:
        right.finish(until)


def _post(stream: Stream | None, segment: torch.Tensor, until: float) -> None:
    if stream is not None:
        stream.post(segment, until)


# ---------------------------------------------------------------- rounds


def _reduce(
    ring: _Ring, blocks: Sequence[torch.Tensor], reduction: Reduction, result: torch.Tensor | None = None
) -> int:
    """Let blocks go round; `result` gets this rank's. Returns how many messages were ever sent with parts of sums.

    Without `result` sums replace the rank's own values, and this rank's block is handed on, too.
    """
    rounds = [(ring.rank - 2 - step) % ring.size for step in range(ring.size - 1)]
    own = [segment for block in rounds for segment in _segments(blocks[block])]
    final = list(_segments(blocks[ring.rank] if result is None else result))
    scratch = _Scratch(ring, max(blocks, key=torch.numel), AHEAD if result is None else AHEAD + MOST_SEGMENTS)
    coming: deque[torch.Tensor] = deque()
    partial = ring.right.posted
    for number, mine in enumerate(own):
        while len(coming) < AHEAD and number + len(coming) < len(own):
            coming.append(scratch.take(own[number + len(coming)].numel()))
            ring.receive(coming[-1])
        ring.left.finish_oldest(ring.until)
        came = coming.popleft()
        whole = number - (len(own) - len(final))  # from 0 on the sum is whole
        total = final[whole] if whole >= 0 else came if result is not None else mine
        reduction.into(total, came, mine)
        if whole < 0:
            ring.send(total)
            partial = ring.right.posted
        else:
            reduction.finish(total)
            if result is None:
                ring.send(total)
        scratch.back(sent=total is came)
    return partial


def _gather(ring: _Ring, blocks: Sequence[torch.Tensor]) -> None:
    """Receive all blocks but the own one, which was sent, and hand them on."""
    rounds = [(ring.rank - 1 - step) % ring.size for step in range(ring.size - 1)]
    segments = [segment for block in rounds for segment in _segments(blocks[block])]
    kept = len(list(_segments(blocks[rounds[-1]])))  # the next rank's own
    for segment in segments[:AHEAD]:
        ring.receive(segment)
    for number, segment in enumerate(segments):
        ring.left.finish_oldest(ring.until)
        if number + AHEAD < len(segments):
            ring.receive(segments[number + AHEAD])
        if number < len(segments) - kept:
            ring.send(segment)


class _Scratch:
    """Memory for what comes in, used in turn: a piece that was sent from is used again when that has got through.

    With more pieces than a block has segments somebody in the ring can always go on.
    """

    def __init__(self, ring: _Ring, longest: torch.Tensor, count: int) -> None:
        self._right, self._until = ring.right, ring.until
        self._dtype = longest.dtype
        self._elements = max((segment.numel() for segment in _segments(longest)), default=0)
        self._count = count
        self._free: deque[tuple[torch.Tensor, int]] = deque()  # and how many messages must have got through
        self._made = 0
        self._taken: deque[torch.Tensor] = deque()

    def take(self, elements: int) -> torch.Tensor:
        """The next piece, for so many elements. Raises as `Stream.finish`."""
        if self._made < self._count:
            self._made += 1
            piece = torch.empty(self._elements, dtype=self._dtype)
        else:
            piece, sent = self._free.popleft()
            if sent:
                self._right.finish(self._until, sent)
        self._taken.append(piece)
        return piece[:elements]

    def back(self, *, sent: bool) -> None:
        """The piece that was taken first is not needed any more. `sent`: except for the last message, sent from it."""
        self._free.append((self._taken.popleft(), self._right.posted if sent else 0))


# ---------------------------------------------------------------- cutting


def equal(values: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Cut into so many parts, the first ones at most one element longer."""
    least, more = divmod(values.numel(), parts)
    return list(torch.split(values, [least + (part < more) for part in range(parts)]))


def _segments(block: torch.Tensor) -> Iterator[torch.Tensor]:
    """Cut a block into segments, the same at both ends; none if it is empty."""
    step = max(SEGMENT // block.element_size(), -(-block.numel() // MOST_SEGMENTS))
    for start in range(0, block.numel(), step):
        yield block[start : start + step]
