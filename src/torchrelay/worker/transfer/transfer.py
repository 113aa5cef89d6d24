"""Transfer: fetch another worker's record or state, and be sure of every bit of it.

State lands in the live tensors; its digest, over what lies there then, is compared with the source's. What lies in the
memory of the same machine is read there (`neighbour`). What is large and lies elsewhere is taken from all who have it
at once (`gathering`); what is small comes from one, as asking the others would take longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from msgspec import Struct
from torch import Tensor

from torchrelay.protocol.messages.ids import START, Generation, Point, Rank
from torchrelay.protocol.messages.orders import Source
from torchrelay.worker.tensors.digest import SIZE, Digest
from torchrelay.worker.transfer.gathering import Gathering
from torchrelay.worker.transfer.neighbour import MAX_PLACES, NONCE_BYTES, PLACE_BYTES, Reader
from torchrelay.worker.transfer.request import (
    STALL_S,
    Cancel,
    Request,
    TransferCancelled,
    TransferFailed,
    compare_digests,
    misfit_error,
)
from torchrelay.worker.transfer.serving import EXAMPLE, LANE, RECORD, STATE, VALUES, StateServer
from torchrelay.worker.transfer.slices import Body, SlicedDigest
from torchrelay.worker.transfer.stream import READ, SEND, TAKE, Serving, Stream, StreamBroken
from torchrelay.worker.transfer.tls import Tls

__all__ = [
    "STALL_S",
    "Cancel",
    "Received",
    "StateServer",
    "TransferCancelled",
    "TransferFailed",
    "ask_for",
    "fetch_example",
    "fetch_record",
    "fetch_state",
    "fetch_values",
    "misfit_error",
    "open_lane",
]

MAX_HEAD = 256 << 20  # bytes of a record, or of a state's plain values
GATHERED = 32 << 20  # bytes of tensors from which on all sources are asked

Progress = Callable[[int, int], None]  # bytes that came, bytes in all


class Received(Struct, frozen=True):
    """What arrived. `digest`: of all bytes as sent and as landed; `size`: in bytes; `shares`: bytes by source."""

    digest: str
    size: int
    took_s: float
    shares: Mapping[Rank, int]

    @property
    def sources(self) -> tuple[Rank, ...]:
        """The ranks it is from, lowest first."""
        return tuple(sorted(self.shares))


class Receiver(Protocol):
    """Who takes a state: `State`."""

    def receive(self, data: bytes | bytearray | memoryview) -> list[Tensor]:
        """The tensors that the bytes shall land in, for this manifest."""

    def commit_received(self) -> None:
        """All bytes have landed and are right."""


def fetch_record(
    sources: Sequence[Source],
    secret: bytes,
    generation: Generation,
    point: Point,
    timeout_s: float = 60.0,
    *,
    cancel: Cancel | None = None,
    stall_s: float = STALL_S,
    tls: Tls | None = None,
) -> bytes:
    """The record of `point`, from the first source that gives it. Raises `TransferFailed` of the last one tried."""
    request = Request(secret, generation, point, RECORD, time.monotonic() + timeout_s, stall_s, cancel or Cancel(), tls)
    return request.from_any(sources, _take_bytes)


def fetch_values(
    sources: Sequence[Source],
    secret: bytes,
    generation: Generation,
    point: Point,
    timeout_s: float = 60.0,
    *,
    cancel: Cancel | None = None,
    tls: Tls | None = None,
) -> bytes:
    """Plain values of the state at `point` (see `returned`). Raises `TransferFailed` of the last source tried."""
    request = Request(secret, generation, point, VALUES, time.monotonic() + timeout_s, STALL_S, cancel or Cancel(), tls)
    return request.from_any(sources, _take_bytes)


def fetch_example(
    sources: Sequence[Source],
    secret: bytes,
    timeout_s: float = 10.0,
    *,
    cancel: Cancel | None = None,
    tls: Tls | None = None,
) -> bytes:
    """What steps are called with, from the first source that can tell. Raises `TransferFailed` if none can."""
    deadline = time.monotonic() + timeout_s
    request = Request(secret, Generation(0), START, EXAMPLE, deadline, STALL_S, cancel or Cancel(), tls)
    return request.from_any(sources, _take_bytes)


def open_lane(
    address: str,
    secret: bytes,
    generation: Generation,
    purpose: str,
    own: Rank,
    deadline: float,
    cancel: Cancel,
    tls: Tls | None = None,
) -> Stream:
    """A connection, proved, over which rank `own` sends what this purpose asks for. Raises `StreamBroken`."""
    request = Request(secret, generation, START, f"{LANE}{purpose} {own}", deadline, STALL_S, cancel, tls)
    stream = request.connect(Source(own, address))
    try:
        cancel.attach(stream)
        request.ask(stream)
    except BaseException:
        cancel.detach(stream)
        stream.close()
        raise
    cancel.detach(stream)
    return stream


@contextmanager
def ask_for(
    source: Source,
    secret: bytes,
    generation: Generation,
    point: Point,
    want: str,
    deadline: float,
    cancel: Cancel,
    tls: Tls | None = None,
) -> Iterator[Stream]:
    """A connection on which both have proved themselves, and `want` is granted. Raises `StreamBroken`."""
    request = Request(secret, generation, point, want, deadline, STALL_S, cancel, tls)
    stream = request.connect(source)
    try:
        cancel.attach(stream)
        request.ask(stream)
        yield stream
    finally:
        cancel.detach(stream)
        stream.close()


def _take_bytes(stream: Stream, serving: Serving, _: Source) -> bytes:
    head = bytes(_receive_head(stream, serving))
    digest = Digest()
    digest.add(head)
    compare_digests(stream.receive_bytes(SIZE), digest.raw(), "what came")
    return head


def fetch_state(
    sources: Sequence[Source],
    secret: bytes,
    generation: Generation,
    point: Point,
    state: Receiver,
    *,
    want: str = STATE,
    host: str = "",
    progress: Progress | None = None,
    failed: Callable[[TransferFailed], None] = lambda _: None,
    timeout_s: float = 600.0,
    cancel: Cancel | None = None,
    stall_s: float = STALL_S,
    tls: Tls | None = None,
) -> Received:
    """Take the state at `point` into `state`, and commit it if its digest is right.

    From the first source that answers, or, if it is large and lies on another machine, from all of them at once.
    `want`: another name for a state that is kept elsewhere, as in `snapshot_upload`; it comes from one.
    `tls`: of this process, if what goes between workers is encrypted; the sources then have it, too.
    `host`: our own; who is there as well is asked first. `failed`: is told, from any thread, of a source whose digest
    differed while others bring what it should have brought.

    Raises `TransferFailed`: at once if a digest differs and no other source can mend it, else of the last source
    tried. `state` may then be half overwritten, and only another state makes it whole.
    """
    start = time.monotonic()
    request = Request(secret, generation, point, want, start + timeout_s, stall_s, cancel or Cancel(), tls)
    near = sorted(sources, key=lambda source: source.address.rpartition(":")[0] != host)
    arrival = _Arrival(request, near, state, progress, failed)
    digest, size, shares = request.from_any(near, arrival.take, until=lambda: arrival.gathered)
    return Received(digest, size, time.monotonic() - start, shares)


class _Arrival:
    """One state that is to arrive."""

    def __init__(
        self,
        request: Request,
        sources: Sequence[Source],
        state: Receiver,
        progress: Progress | None,
        failed: Callable[[TransferFailed], None],
    ) -> None:
        self._request, self._sources, self._state = request, sources, state
        self._progress, self._failed = progress, failed
        self.gathered = False  # all sources were asked

    def take(self, stream: Stream, serving: Serving, source: Source) -> tuple[str, int, dict[Rank, int]]:
        """The digest, the bytes, and how many of them came from whom."""
        head = _receive_head(stream, serving)
        head_digest = Digest()
        head_digest.add(head)
        places = self._state.receive(head)
        body = Body(places)
        if body.size != serving.body:
            raise StreamBroken(f"{serving.body} bytes of tensors were announced where {body.size} belong")
        alone = {source.rank: body.size}
        if self._request.want != STATE:
            # It follows without further words, with the digest that it had when it was put away.
            digest, shares = self._receive(stream, None, head_digest, body), alone
        else:
            reader = _reader(stream, serving)
            others = self._sources[self._sources.index(source) + 1 :]
            if reader is None and others and body.size >= GATHERED:
                stream.send_bytes(TAKE)
                self.gathered = True
                gathering = Gathering(self._request, head_digest, places, self._progress)
                digest, shares = gathering.gather(source.rank, stream, others, self._failed)
            else:
                stream.send_bytes(SEND if reader is None else READ)
                sliced = SlicedDigest(head_digest, body.cuts())
                digest, shares = self._receive(stream, reader, sliced, body), alone
        self._state.commit_received()
        return digest, serving.head + serving.body, shares

    def _receive(self, stream: Stream, reader: Reader | None, digest: Digest, body: Body) -> str:
        """All of it from one source: read where it lies, or sent. The digest of all that has come."""
        came = 0

        def count(size: int) -> None:
            nonlocal came
            came += size
            if self._progress is not None:
                self._progress(came, body.size)

        if body.size:
            (reader or stream).receive_views(body.incoming(0, body.size), digest, count)
        if reader is not None:
            reader.end(stream)
        compare_digests(stream.receive_bytes(SIZE), digest.raw(), "what came")
        return digest.text()


def _reader(stream: Stream, serving: Serving) -> Reader | None:
    """Who reads the tensors out of the source's memory; None if they must be sent."""
    if not serving.pid:
        return None
    if not 0 <= serving.places <= MAX_PLACES:
        raise StreamBroken(f"tensors in {serving.places} places were announced, at most {MAX_PLACES} are taken")
    told = stream.receive_bytes(NONCE_BYTES + (1 + serving.places) * PLACE_BYTES)
    reader = Reader(stream, serving.pid, told)
    return reader if reader.may() else None


def _receive_head(stream: Stream, serving: Serving) -> bytearray:
    if serving.head > MAX_HEAD:
        raise StreamBroken(f"{serving.head} bytes of plain values are announced, at most {MAX_HEAD} are taken")
    return stream.receive_bytes(serving.head)
