"""Request: something that is wanted of another worker, at a generation and point. Reach it, prove who we are, ask."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torchrelay.errors import StateMismatchError, TorchrelayError
from torchrelay.protocol.messages.ids import Generation, Point, Rank
from torchrelay.protocol.messages.orders import Source
from torchrelay.wire.trust import trust
from torchrelay.worker.transfer.neighbour import machine_id
from torchrelay.worker.transfer.serving import GREETING_S, STATE
from torchrelay.worker.transfer.stream import (
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
from torchrelay.worker.transfer.tls import Tls

STALL_S = 5.0  # how long no byte may come from a source before it counts as stalled

T = TypeVar("T")
Take = Callable[[Stream, Serving, Source], T]  # what to do with what a source serves


class TransferFailed(TorchrelayError):
    """A source did not deliver.

    mismatch   everything came, but its digest is another than the source's: do not ask this source again
    misfit     what the source has does not fit what this script has built: no other source has anything else
    """

    def __init__(self, source: Rank, reason: str, mismatch: bool = False, misfit: bool = False) -> None:
        super().__init__(f"rank {source} did not deliver: {reason}")
        self.source = source
        self.reason = reason
        self.mismatch = mismatch
        self.misfit = misfit


def misfit_error(failed: TransferFailed) -> StateMismatchError:
    """What is raised if no source can have what fits."""
    return StateMismatchError(
        f"{failed.reason}. What steps register or resize, such as a buffer of the first forward pass, a replacement "
        "does not have: make it before protect()"
    )


class TransferCancelled(TransferFailed):
    """We cut it ourselves."""


class DigestDiffers(StreamBroken):
    """All bytes came, and they are others than were sent."""


class Cancel:
    """A handle for another thread: `cancel()` ends the fetch that was given it, now or when it starts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: set[Stream] = set()
        self.cancelled = False

    def cancel(self) -> None:
        """End it at once. May be called twice."""
        with self._lock:
            self.cancelled = True
            for stream in self._streams:
                stream.cut()

    def attach(self, stream: Stream) -> None:
        """By the fetch: a stream to cut."""
        with self._lock:
            self._streams.add(stream)
            if self.cancelled:
                stream.cut()

    def detach(self, stream: Stream) -> None:
        """By the fetch: this stream is over."""
        with self._lock:
            self._streams.discard(stream)


@dataclass(frozen=True)
class Request:
    """One thing that is wanted, from whichever source."""

    secret: bytes
    generation: Generation
    point: Point
    want: str
    deadline: float  # monotonic, in seconds
    stall_s: float
    cancel: Cancel
    tls: Tls | None = None  # of a run over several machines, unless its network is trusted

    def from_any(self, sources: Sequence[Source], take: Take[T], until: Callable[[], bool] = lambda: False) -> T:
        """The first success. Raises the last failure, or at once what no other source can mend.

        `until`: whether the other sources were asked meanwhile.
        """
        if not sources:
            raise ValueError("nobody to fetch from")
        for source in sources[:-1]:
            try:
                return self.run(source, take)
            except TransferFailed as error:
                if error.mismatch or until() or self.cancel.cancelled or time.monotonic() > self.deadline:
                    raise
        return self.run(sources[-1], take)

    def run(self, source: Source, take: Take[T]) -> T:
        """Fetch from this source. Raises `TransferFailed`."""
        try:
            stream = self.connect(source)
            try:
                self.cancel.attach(stream)
                return take(stream, self.ask(stream), source)
            finally:
                self.cancel.detach(stream)
                stream.close()
        except (StreamBroken, StateMismatchError, ValueError) as error:
            raise self.failed(source.rank, error) from error

    def failed(self, source: Rank, error: Exception) -> TransferFailed:
        """What is said of a source with which this went wrong."""
        if self.cancel.cancelled:
            return TransferCancelled(source, "the transfer was cancelled")
        return TransferFailed(
            source, str(error), mismatch=isinstance(error, DigestDiffers), misfit=isinstance(error, StateMismatchError)
        )

    def connect(self, source: Source) -> Stream:
        """Raises `StreamBroken`."""
        host, _, port = source.address.rpartition(":")
        left = min(GREETING_S, self.deadline - time.monotonic())
        if left <= 0 or self.cancel.cancelled:
            raise StreamBroken("the time for it is over")
        try:
            connected = socket.create_connection((host.strip("[]"), int(port)), timeout=left)
            return Stream(connected, stall_s=self.stall_s, deadline=self.deadline)
        except OSError as error:
            raise StreamBroken(f"{source.address} cannot be reached: {error.strerror or error}") from error

    def ask(self, stream: Stream) -> Serving:
        """Exchange proofs, ask, and wait until it is served. Raises `StreamBroken`."""
        if self.tls is not None:
            stream.encrypt(self.tls, server_side=False, within_s=GREETING_S)
        nonce = trust.new_nonce()
        stream.send(Hello(VERSION, self.generation, nonce))
        challenge = stream.receive()
        context = server_context(stream.binding, self.generation)
        if not isinstance(challenge, Challenge) or not trust.verify(
            self.secret, nonce, challenge.nonce, context, challenge.proof
        ):
            raise StreamBroken("it could not prove that it belongs to this job")  # or somebody stands between us
        where, pid = (machine_id(), os.getpid()) if self.want == STATE else ("", 0)
        context = client_context(stream.binding, self.generation, self.want, self.point, where, pid)
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


def compare_digests(theirs: bytes | bytearray, ours: bytes, what: str) -> None:
    """Raises `DigestDiffers` if the digest of what came is another than that of what was sent."""
    if bytes(theirs) != ours:
        raise DigestDiffers(f"the digest of {what} is {ours.hex()}, and {bytes(theirs).hex()} was sent")
