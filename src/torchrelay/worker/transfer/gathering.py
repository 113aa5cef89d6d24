"""Gathering: a large state is taken from several sources at once, slice by slice, straight into tensor memory.

The first source has given the manifest. The others must have the same one, by its digest; they, too, stand still. Each
has a thread and a connection here, and always knows its next slice before the one before it has come. A source that
breaks or stalls is replaced by one that was not asked yet, if there is any, and its slices are brought by others; so
are all slices of one whose bytes and digest differ.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, zip_longest

from torch import Tensor

from torchrelay.errors import StateMismatchError
from torchrelay.protocol.messages.ids import Rank
from torchrelay.protocol.messages.orders import Source
from torchrelay.worker.tensors.digest import SIZE, Digest
from torchrelay.worker.tensors.slices import Body, SlicedDigest
from torchrelay.worker.transfer.division import Bringer, Division
from torchrelay.worker.transfer.request import DigestDiffers, Request, TransferFailed, compare
from torchrelay.worker.transfer.serving import SLICES
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
        compare(stream.receive_bytes(SIZE), self._head.raw(), "the manifest that came")
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
        compare(stream.receive_bytes(SIZE), digest.raw(), f"slice {number} of {len(self._slices)}")
        self._division.land(bringer, number, digest.raw())


def spread(sources: Sequence[Source]) -> list[Source]:
    """The same sources, such that the first ones are on as many hosts as possible: one host has one link."""
    hosts: dict[str, list[Source]] = {}
    for source in sources:
        hosts.setdefault(source.address.rpartition(":")[0], []).append(source)
    turns = zip_longest(*hosts.values())
    return [source for turn in turns for source in turn if source is not None]
