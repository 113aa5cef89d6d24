"""Transfer: fetch another worker's record or state, and be sure of every bit of it.

State lands in the live tensors; its digest, over what lies there then, is compared with the source's at the end. What
lies in the memory of the same machine is read there (`neighbour`).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from msgspec import Struct
from torch import Tensor

from torchrelay.errors import StateMismatch, TorchrelayError
from torchrelay.protocol.ids import START, Generation, Point, Rank
from torchrelay.protocol.orders import Source
from torchrelay.wire import trust
from torchrelay.worker import memory
from torchrelay.worker.digest import SIZE, Digest
from torchrelay.worker.neighbour import MAX_PLACES, NONCE_BYTES, PLACE_BYTES, READ, SEND, Reader, machine
from torchrelay.worker.serving import EXAMPLE, GREETING_S, LANE, RECORD, STATE, StateServer
from torchrelay.worker.stream import (
    VERSION,
    Ask,
    Challenge,
    Hello,
    RefusedAnswer,
    Serving,
    Stream,
    StreamBroken,
    Waiting,
    client_context,
    server_context,
)

__all__ = [
    "Cancel",
    "Received",
    "StateServer",
    "TransferCancelled",
    "TransferFailed",
    "ask_for",
    "fetch_example",
    "fetch_record",
    "fetch_state",
    "open_lane",
]

STALL_S = 5.0  # how long no byte may come from a source before it counts as stalled
MAX_HEAD = 256 << 20  # bytes of a record, or of a state's plain values

T = TypeVar("T")
Progress = Callable[[int, int], None]  # bytes that came, bytes in all
Take = Callable[[Stream, Serving], T]  # what to do with what a source serves


class TransferFailed(TorchrelayError):
    """A source did not deliver.

    mismatch   everything came, but its digest is another than the source's: do not ask this source again
    """

    def __init__(self, source: Rank, reason: str, mismatch: bool = False) -> None:
        super().__init__(f"rank {source} did not deliver: {reason}")
        self.source = source
        self.reason = reason
        self.mismatch = mismatch


class TransferCancelled(TransferFailed):
    """We cut it ourselves."""


class Received(Struct, frozen=True):
    """What arrived. `digest`: of all bytes as sent and as landed; `size`: in bytes; `sources`: the ranks it is from."""

    digest: str
    size: int
    took_s: float
    sources: tuple[Rank, ...]


class Receiver(Protocol):
    """Who takes a state: `State`."""

    def receive(self, data: bytes | bytearray | memoryview) -> list[Tensor]:
        """The tensors that the bytes shall land in, for this manifest."""

    def commit_received(self) -> None:
        """All bytes have landed and are right."""


class Cancel:
    """A handle for another thread: `cancel()` ends the fetch that was given it, now or when it starts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self.cancelled = False

    def cancel(self) -> None:
        """End it at once. May be called twice."""
        with self._lock:
            self.cancelled = True
            if self._stream is not None:
                self._stream.cut()

    def attach(self, stream: Stream | None) -> None:
        """By the fetch: the stream to cut, or None when it is over."""
        with self._lock:
            self._stream = stream
            if stream is not None and self.cancelled:
                stream.cut()


def fetch_record(
    sources: Sequence[Source],
    secret: bytes,
    generation: Generation,
    point: Point,
    timeout_s: float = 60.0,
    *,
    cancel: Cancel | None = None,
    stall_s: float = STALL_S,
) -> bytes:
    """The record of `point`, from the first source that gives it. Raises `TransferFailed` of the last one tried."""
    fetch = _Fetch(secret, generation, point, RECORD, time.monotonic() + timeout_s, stall_s, cancel or Cancel())
    return fetch.from_any(sources, _take_bytes)[0]


def fetch_example(
    sources: Sequence[Source], secret: bytes, timeout_s: float = 10.0, *, cancel: Cancel | None = None
) -> bytes:
    """What steps are called with, from the first source that can tell. Raises `TransferFailed` if none can."""
    deadline = time.monotonic() + timeout_s
    fetch = _Fetch(secret, Generation(0), START, EXAMPLE, deadline, STALL_S, cancel or Cancel())
    return fetch.from_any(sources, _take_bytes)[0]


def open_lane(address: str, secret: bytes, generation: Generation, own: Rank, deadline: float) -> Stream:
    """A connection to a buddy, proved, over which rank `own` sends its private records. Raises `StreamBroken`."""
    fetch = _Fetch(secret, generation, START, f"{LANE}{own}", deadline, STALL_S, Cancel())
    stream = fetch._connect(Source(own, address))
    try:
        fetch._ask(stream)
    except BaseException:
        stream.close()
        raise
    return stream


@contextmanager
def ask_for(
    source: Source, secret: bytes, generation: Generation, point: Point, want: str, deadline: float, cancel: Cancel
) -> Iterator[Stream]:
    """A connection on which both have proved themselves, and `want` is granted. Raises `StreamBroken`."""
    fetch = _Fetch(secret, generation, point, want, deadline, STALL_S, cancel)
    stream = fetch._connect(source)
    try:
        cancel.attach(stream)
        fetch._ask(stream)
        yield stream
    finally:
        cancel.attach(None)
        stream.close()


def _take_bytes(stream: Stream, serving: Serving) -> bytes:
    digest = Digest()
    head = bytes(_receive_head(stream, serving, digest))
    _compare(stream, digest)
    return head


def fetch_state(
    sources: Sequence[Source],
    secret: bytes,
    generation: Generation,
    point: Point,
    state: Receiver,
    *,
    want: str = STATE,
    progress: Progress | None = None,
    timeout_s: float = 600.0,
    cancel: Cancel | None = None,
    stall_s: float = STALL_S,
) -> Received:
    """Take the state at `point` from the first source that gives it, into `state`; commit it if its digest is right.

    `want`: another name for a state that is kept elsewhere, as in `shelving`.

    Raises `TransferFailed`: at once if a digest differs, else of the last source tried. `state` may then be half
    overwritten, and only another state makes it whole.
    """
    start = time.monotonic()

    def take(stream: Stream, serving: Serving) -> tuple[str, int]:
        digest = Digest()
        places = state.receive(_receive_head(stream, serving, digest))
        expected = sum(memory.size(tensor) for tensor in places)
        if expected != serving.body:
            raise StreamBroken(f"{serving.body} bytes of tensors were announced where {expected} belong")
        came = 0

        def count(size: int) -> None:
            nonlocal came
            came += size
            if progress is not None:
                progress(came, serving.body)

        views = (place for tensor in places for place in memory.incoming(tensor))
        reader = _reader(stream, serving)
        (reader or stream).receive_views(views, digest, count)
        if reader is not None:
            reader.end(stream)
        _compare(stream, digest)
        state.commit_received()
        return digest.text(), serving.head + serving.body

    fetch = _Fetch(secret, generation, point, want, start + timeout_s, stall_s, cancel or Cancel())
    (digest, size), rank = fetch.from_any(sources, take)
    return Received(digest, size, time.monotonic() - start, (rank,))


class _DigestDiffers(StreamBroken):
    """All bytes came, and they are others than were sent."""


def _reader(stream: Stream, serving: Serving) -> Reader | None:
    """Who reads the tensors out of the source's memory; None if they are sent. Told to the source, if it asks."""
    if not serving.pid:
        return None
    if not 0 <= serving.places <= MAX_PLACES:
        raise StreamBroken(f"tensors in {serving.places} places were announced, at most {MAX_PLACES} are taken")
    told = stream.receive_bytes(NONCE_BYTES + (1 + serving.places) * PLACE_BYTES)
    reader = Reader(stream, serving.pid, told)
    may = reader.may()
    stream.send_bytes(READ if may else SEND)
    return reader if may else None


def _receive_head(stream: Stream, serving: Serving, digest: Digest) -> bytearray:
    if serving.head > MAX_HEAD:
        raise StreamBroken(f"{serving.head} bytes of plain values are announced, at most {MAX_HEAD} are taken")
    head = stream.receive_bytes(serving.head)
    digest.add(head)
    return head


def _compare(stream: Stream, digest: Digest) -> None:
    theirs = bytes(stream.receive_bytes(SIZE))
    if theirs != digest.raw():
        raise _DigestDiffers(f"the digest of what came is {digest.text()}, and {theirs.hex()} was sent")


@dataclass(frozen=True)
class _Fetch:
    """One thing that is wanted, from whichever source."""

    secret: bytes
    generation: Generation
    point: Point
    want: str
    deadline: float
    stall_s: float
    cancel: Cancel

    def from_any(self, sources: Sequence[Source], take: Take[T]) -> tuple[T, Rank]:
        """The first success, and whose it is. Raises the last failure, or at once what no other source can mend."""
        if not sources:
            raise ValueError("nobody to fetch from")
        for source in sources[:-1]:
            try:
                return self.run(source, take), source.rank
            except TransferFailed as error:
                if error.mismatch or self.cancel.cancelled or time.monotonic() > self.deadline:
                    raise
        return self.run(sources[-1], take), sources[-1].rank

    def run(self, source: Source, take: Take[T]) -> T:
        """Fetch from this source. Raises `TransferFailed`."""
        try:
            stream = self._connect(source)
            try:
                self.cancel.attach(stream)
                return take(stream, self._ask(stream))
            finally:
                self.cancel.attach(None)
                stream.close()
        except (StreamBroken, StateMismatch, ValueError) as error:
            if self.cancel.cancelled:
                raise TransferCancelled(source.rank, "the transfer was cancelled") from error
            raise TransferFailed(source.rank, str(error), isinstance(error, _DigestDiffers)) from error

    def _connect(self, source: Source) -> Stream:
        host, _, port = source.address.rpartition(":")
        left = min(GREETING_S, self.deadline - time.monotonic())
        if left <= 0 or self.cancel.cancelled:
            raise StreamBroken("the time for it is over")
        try:
            connected = socket.create_connection((host.strip("[]"), int(port)), timeout=left)
            return Stream(connected, stall_s=self.stall_s, deadline=self.deadline)
        except OSError as error:
            raise StreamBroken(f"{source.address} cannot be reached: {error.strerror or error}") from error

    def _ask(self, stream: Stream) -> Serving:
        """Exchange proofs, ask, and wait until it is served. Raises `StreamBroken`."""
        nonce = trust.new_nonce()
        stream.send(Hello(VERSION, self.generation, nonce))
        challenge = stream.receive()
        context = server_context(self.generation)
        if not isinstance(challenge, Challenge) or not trust.verify(
            self.secret, nonce, challenge.nonce, context, challenge.proof
        ):
            raise StreamBroken("it could not prove that it belongs to this job")
        where, pid = (machine(), os.getpid()) if self.want == STATE else ("", 0)
        context = client_context(self.generation, self.want, self.point, where, pid)
        proof = trust.prove(self.secret, nonce, challenge.nonce, context)
        stream.send(Ask(proof, self.want, self.point, where, pid))
        answer: object = Waiting()
        while isinstance(answer, Waiting):
            answer = stream.receive()
        if isinstance(answer, RefusedAnswer):
            raise StreamBroken(answer.reason)
        if not isinstance(answer, Serving) or (answer.generation, answer.point) != (self.generation, self.point):
            raise StreamBroken(f"it answers with something else than {self.want} {self.point}")
        return answer
