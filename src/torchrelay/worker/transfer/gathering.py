"""Gathering: a large state is taken from several sources at once, slice by slice, straight into tensor memory.

The first source has given the manifest. The others must have the same one, by its digest; they, too, stand still. Each
has a thread and a connection here, and always knows its next slice before the one before it has come. A source that
breaks or stalls is replaced by one that was not asked yet, if there is any, and its slices are brought by others; so
are all slices of one whose bytes and digest differ.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, zip_longest

from torch import Tensor

from torchrelay.errors import StateMismatchError
from torchrelay.protocol.messages.ids import Rank
from torchrelay.protocol.messages.orders import Source
from torchrelay.worker.tensors.digest import SIZE, Digest
from torchrelay.worker.transfer.request import DigestDiffers, Request, TransferFailed, compare_digests
from torchrelay.worker.transfer.serving import SLICES
from torchrelay.worker.transfer.slices import Body, SlicedDigest
from torchrelay.worker.transfer.stream import Stream, StreamBroken

log = logging.getLogger(__name__)

MOST_SOURCES = 8  # at once; more than that a node can hardly take in, and each has a thread here
THREAD = "bringer"
AHEAD = 2  # slices that one source was asked for

Failed = Callable[[TransferFailed], None]  # told of a source that is not to be asked again


class Gathering:
    """One state, from the source that has given the manifest, and from others."""

    def __init__(
        self, request: Request, head: Digest, tensors: Sequence[Tensor], progress: Callable[[int, int], None] | None
    ) -> None:
        """`head`: the digest of the manifest. `tensors`: where it shall land."""
        self._request = replace(request, want=SLICES)
        self._head = head
        self._body = Body(tensors)
        self._cuts = self._body.cuts()
        self._slices = list(pairwise(self._cuts))
        self._division = Division([stop - start for start, stop in self._slices])
        self._progress = progress
        self._lock = threading.Lock()
        self._came = 0
        self._working = 0  # threads
        self._failures: list[TransferFailed] = []

    def gather(
        self, first: Rank, stream: Stream, others: Sequence[Source], failed: Failed
    ) -> tuple[str, dict[Rank, int]]:
        """Take it all: its digest, and how many bytes are from whom. `stream`: to the first source, which waits.

        Raises the last `TransferFailed`, or that of a source whose digest differed, if the sources do not suffice.
        """
        compare_digests(stream.receive_bytes(SIZE), self._head.raw(), "the manifest that came")
        waiting = deque(spread(others))
        bringer = self._division.enter(first, stream.cut)
        works: list[Callable[[], None]] = [partial(self._bring, bringer, stream, waiting, failed)]
        works += [partial(self._bring_next, waiting, failed)] * min(len(waiting), MOST_SOURCES - 1)
        self._start(works)
        complete = self._division.wait(lambda: not self._working or self._request.cancel.cancelled)
        self._division.end()
        if not complete:
            raise self._last_failure(first)
        digest = SlicedDigest(self._head, self._cuts)
        for one in self._division.digests():
            digest.add_slice(one)
        return digest.text(), self._division.shares()

    def _start(self, works: Sequence[Callable[[], None]]) -> None:
        self._working = len(works)
        for number, work in enumerate(works):
            try:
                threading.Thread(target=work, name=THREAD, daemon=True).start()
            except RuntimeError as error:  # there can be no more: those that there are do it
                log.warning("a state is taken from %d sources only: %s", number, error)
                self._end_threads(len(works) - number)
                return

    def _last_failure(self, first: Rank) -> TransferFailed:
        if self._request.cancel.cancelled or not self._failures:
            return self._request.failed(first, StreamBroken("nobody is left to bring it"))
        return next((one for one in self._failures if one.mismatch), self._failures[-1])

    # ------------------------------------------------------------ threads

    def _bring(self, first: Bringer, stream: Stream, waiting: deque[Source], failed: Failed) -> None:
        """Take from the first source; when it has failed, from those that were not asked yet."""
        try:
            self._try(first.rank, lambda: self._take(first, stream), failed)
        finally:
            self._bring_next(waiting, failed)

    def _bring_next(self, waiting: deque[Source], failed: Failed) -> None:
        try:
            while not (self._division.ended or self._division.complete):
                try:
                    source = waiting.popleft()
                except IndexError:
                    return
                self._try(source.rank, partial(self._take_from, source), failed)
        finally:
            self._end_threads(1)

    def _end_threads(self, count: int) -> None:
        with self._lock:
            self._working -= count

    def _try(self, rank: Rank, take: Callable[[], None], failed: Failed) -> None:
        """Note it if this source fails; what it had goes to others."""
        try:
            take()
        except (StreamBroken, StateMismatchError, ValueError) as error:
            failure = self._request.failed(rank, error)
            if self._division.ended:
                return
            log.info("%s", failure)
            with self._lock:
                self._failures.append(failure)
            if failure.mismatch:
                failed(failure)

    def _take_from(self, source: Source) -> None:
        stream = self._request.connect(source)
        try:
            self._request.cancel.attach(stream)
            self._request.ask(stream)
            if bytes(stream.receive_bytes(SIZE)) != self._head.raw():
                raise StreamBroken("its state is laid out in another way than that of the first source")
            self._take(self._division.enter(source.rank, stream.cut), stream)
        finally:
            self._request.cancel.detach(stream)
            stream.close()

    def _take(self, bringer: Bringer, stream: Stream) -> None:
        """Take slices from this source until there are none left. Raises `StreamBroken`."""
        try:
            self._take_slices(bringer, stream)
        except DigestDiffers:
            self._division.leave(bringer, distrusted=True)
            raise
        finally:
            self._division.leave(bringer)

    def _take_slices(self, bringer: Bringer, stream: Stream) -> None:
        asked: deque[int] = deque()
        while True:
            while len(asked) < AHEAD:
                number = self._division.claim(bringer, wait=not asked)
                if number is None:
                    break
                stream.send_range(*self._slices[number])
                asked.append(number)
            if not asked:
                return
            self._receive(bringer, stream, asked.popleft())

    def _receive(self, bringer: Bringer, stream: Stream, number: int) -> None:
        digest = Digest()

        def count(size: int) -> None:
            self._division.count(bringer, number, size)
            if self._progress is not None:
                with self._lock:
                    self._came += size
                    self._progress(min(self._came, self._body.size), self._body.size)

        stream.receive_views(self._body.incoming(*self._slices[number]), digest, count)
        compare_digests(stream.receive_bytes(SIZE), digest.raw(), f"slice {number} of {len(self._slices)}")
        self._division.land(bringer, number, digest.raw())


def spread(sources: Sequence[Source]) -> list[Source]:
    """The same sources, such that the first ones are on as many hosts as possible: one host has one link."""
    hosts: dict[str, list[Source]] = {}
    for source in sources:
        hosts.setdefault(source.address.rpartition(":")[0], []).append(source)
    turns = zip_longest(*hosts.values())
    return [source for turn in turns for source in turn if source is not None]


# ---------------------------------------------------------------- which source brings which slice

# Whoever has brought one gets the next, so all end together.
#
# Nobody is given a fixed part: a source that is twice as fast brings twice as much. When there is nothing left to give
# out, and a source would need much longer for what it has than one that is idle, it is cut, and the idle one takes
# over. A slice is given to another source only when nobody writes to its memory any more.

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
