"""Serving: threads of a worker that give its record and its state to other workers of the job.

The state is read straight from the live tensors, so it is published only while the main thread stands still, and
`withdraw` returns only when nobody reads it any more.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec import Struct
from torch import Tensor

from torchrelay.errors import TorchrelayError
from torchrelay.protocol.messages.ids import START, Generation, Point, Rank
from torchrelay.wire.trust import trust
from torchrelay.worker.state.state import State
from torchrelay.worker.tensors.digest import Digest
from torchrelay.worker.transfer.neighbour import Shown, machine_id, permit_reader
from torchrelay.worker.transfer.slices import Body, SlicedDigest
from torchrelay.worker.transfer.stream import (
    READ,
    SEND,
    TAKE,
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
    close_in_children,
    server_context,
)
from torchrelay.worker.transfer.tls import Tls

log = logging.getLogger(__name__)

RECORD, VALUES, STATE, SLICES, EXAMPLE = "record", "values", "state", "slices", "example"
SHELVE, SNAPSHOT = "shelve ", "snapshot "  # and the rank and restarts: a snapshot is given, or asked for
LANE = "lane "  # with its purpose and the rank that asks, which stays connected (see `lanes`)
_LANE = re.compile(rf"{LANE}[a-z]{{1,16}} [0-9]{{1,9}}")
GREETING_S = 5.0  # how long a stranger may take to prove that it is none
STALL_S = 10.0  # how long a client may read nothing
SIGN_OF_LIFE_S = 0.5
MAX_CLIENTS = 32
MAX_STRANGERS = 32  # that have not proved themselves yet; the oldest goes when there is one more


class _Offer(Struct):
    """What is published, for one generation and point."""

    generation: Generation
    point: Point
    record: Callable[[], bytes] | None = None
    state: State | None = None
    values: bytes | None = None
    manifest: tuple[bytes, list[Tensor]] | None = None  # made when first asked for; the state stands still


class StateServer:
    """Serves one worker's record and state over TCP, on one address of its host only."""

    def __init__(self, secret: bytes, host: str = "127.0.0.1", *, tls: Tls | None = None, wait_s: float = 60.0) -> None:
        """`tls`: whoever comes must speak it; without, nobody can. `wait_s`: how long a request waits for what is
        not published yet. Raises `OSError` if it cannot listen."""
        self._secret = secret
        self._tls = tls
        self._wait_s = wait_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family, backlog=MAX_CLIENTS)
        close_in_children(self._listening)
        port = self._listening.getsockname()[1]
        self.host = f"[{host}]" if ":" in host else host  # as in addresses
        self.address = f"{self.host}:{port}"
        self._changed = threading.Condition()
        self._offer: _Offer | None = None
        self.adopt: Callable[[Generation, str, Rank, Stream], None] | None = None  # who takes lanes
        self.shelve: Callable[[Stream, Generation, Ask], None] | None = None  # who takes and hands out snapshots
        self.example: Callable[[], bytes] = bytes  # what steps are called with, told to whom it asks at any time
        self._readers: set[Stream] = set()
        self._clients: set[Stream] = set()
        self._strangers: dict[int, Stream] = {}  # those that have not proved themselves yet, oldest first
        self._proved = 0  # how many have
        self._closed = False
        self._manifest_lock = threading.Lock()
        self._permitting = threading.Lock()  # our memory may be read by one neighbour at a time: the kernel knows one
        threading.Thread(target=self._accept, name="state server", daemon=True).start()

    # ------------------------------------------------------------ for the main thread

    def publish(
        self,
        generation: Generation,
        point: Point,
        record: Callable[[], bytes] | None = None,
        state: State | None = None,
        values: bytes | None = None,
    ) -> None:
        """Offer the record of a point, the state at it, its values; what is offered already for the same stays.

        `record` is called in another thread when it is asked for. Another generation or point replaces all, and cuts
        the transfers of the one before.
        """
        with self._changed:
            offer = self._offer
            if offer is None or (offer.generation, offer.point) != (generation, point):
                self._end_readers()
                offer = self._offer = _Offer(generation, point)
            offer.record = record or offer.record
            offer.state = state or offer.state
            offer.values = values or offer.values
            self._changed.notify_all()

    def withdraw(self) -> None:
        """Offer nothing any more; returns when nobody reads the tensors. A transfer under way is cut."""
        with self._changed:
            self._offer = None
            self._end_readers()

    def close(self) -> None:
        """Withdraw, stop listening, and let go of all who wait."""
        self.withdraw()
        with self._changed:
            self._closed = True
            clients = list(self._clients)
            self._changed.notify_all()
        for stream in clients:
            stream.cut()
        try:
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes accept(); close alone would not
        except OSError:
            pass  # closed before
        self._listening.close()

    def _end_readers(self) -> None:
        for stream in self._readers:
            stream.cut()
        while self._readers:
            self._changed.wait()

    # ------------------------------------------------------------ threads

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listening.accept()
            except OSError:
                if self._closed or self._listening.fileno() < 0:
                    return
                time.sleep(0.05)  # out of descriptors, say: others may be closed by then
                continue
            with self._changed:
                full = self._proved >= MAX_CLIENTS or self._closed
                if not full and len(self._strangers) >= MAX_STRANGERS:
                    self._strangers.pop(next(iter(self._strangers))).cut()
            if full:
                connected.close()
                continue
            try:
                stream = Stream(connected, stall_s=GREETING_S, deadline=time.monotonic() + GREETING_S)
            except OSError:
                connected.close()  # it has hung up already
                continue
            with self._changed:
                self._clients.add(stream)
                self._strangers[id(stream)] = stream
            threading.Thread(target=self._serve, args=(stream,), name="state client", daemon=True).start()

    def _serve(self, stream: Stream) -> None:
        lane = False
        try:
            generation, ask = self._greet(stream)
            with self._proven(stream):
                if ask.want == EXAMPLE:
                    self._show(stream)
                    return
                if ask.want.startswith((SHELVE, SNAPSHOT)) and self.shelve is not None:
                    self.shelve(stream, generation, ask)
                    return
                if ask.want.startswith(LANE) and self.adopt is not None:
                    stream.send(Serving(generation, ask.point, 0, 0))
                    _, purpose, rank = ask.want.split(" ")
                    self.adopt(generation, purpose, Rank(int(rank)), stream)
                    lane = True
                    return
                offer = self._await_offer(stream, generation, ask)
                with self._reading(stream, offer):
                    self._give(stream, offer, ask)
        except StreamBroken as error:
            log.debug("a client of the state server left: %s", error)
        finally:
            with self._changed:
                self._clients.discard(stream)
                self._strangers.pop(id(stream), None)
            if not lane:
                stream.close()

    @contextmanager
    def _proven(self, stream: Stream) -> Iterator[None]:
        with self._changed:
            self._strangers.pop(id(stream), None)
            self._proved += 1
        try:
            yield
        finally:
            with self._changed:
                self._proved -= 1

    def _greet(self, stream: Stream) -> tuple[Generation, Ask]:
        """Prove our own knowledge of the secret and check the client's. Raises `StreamBroken` if it has none."""
        if self._tls is not None:
            stream.encrypt(self._tls, server_side=True, within_s=GREETING_S)
        hello = stream.receive()
        if not isinstance(hello, Hello) or hello.version != VERSION or len(hello.nonce) != trust.NONCE_BYTES:
            raise StreamBroken("it does not greet as a worker does")
        nonce = trust.new_nonce()
        proof = trust.prove(self._secret, hello.nonce, nonce, server_context(stream.binding, hello.generation))
        stream.send(Challenge(nonce, proof))
        ask = stream.receive()
        if not isinstance(ask, Ask) or not _known(ask.want):
            raise StreamBroken("it asks for nothing that is known")
        context = client_context(stream.binding, hello.generation, ask.want, ask.point, ask.machine, ask.pid)
        if not trust.verify(self._secret, hello.nonce, nonce, context, ask.proof):
            log.warning("a client of the state server could not prove that it belongs to this job")
            raise StreamBroken("it does not know the job's secret")
        return hello.generation, ask

    def _await_offer(self, stream: Stream, generation: Generation, ask: Ask) -> _Offer:
        """Wait until what is asked for is published. Raises `StreamBroken` if it never will be, having said why."""
        deadline = time.monotonic() + self._wait_s
        stream.allow(STALL_S, deadline + STALL_S)
        while True:
            with self._changed:
                offer, why = self._find(generation, ask)
                if why is None and offer is None and time.monotonic() < deadline and not self._closed:
                    self._changed.wait(SIGN_OF_LIFE_S)
                    offer, why = self._find(generation, ask)
            if offer is not None:
                return offer
            if why is None and (self._closed or time.monotonic() >= deadline):
                wanted = f"the {ask.want} at {ask.point} in generation {generation}"
                why = f"{wanted} was not published in {self._wait_s:.0f} s"
            if why is not None:
                stream.send(RefusedAnswer(why))
                raise StreamBroken(why)
            stream.send(Waiting())

    def _find(self, generation: Generation, ask: Ask) -> tuple[_Offer | None, str | None]:
        """The offer that was asked for; or None, and why it will never come if that is known."""
        offer = self._offer
        if offer is None or offer.generation < generation:
            return None, None
        if offer.generation > generation:
            return None, f"generation {generation} is over: this worker is in {offer.generation}"
        if offer.point != ask.point:
            return None, f"this worker is at {offer.point}, not at {ask.point}"
        small = {RECORD: offer.record, VALUES: offer.values}
        there: object = small.get(ask.want, offer.state)
        return (offer if there is not None else None), None

    @contextmanager
    def _reading(self, stream: Stream, offer: _Offer) -> Iterator[None]:
        with self._changed:
            if self._offer is not offer:
                raise StreamBroken("it was withdrawn")
            self._readers.add(stream)
        try:
            yield
        finally:
            with self._changed:
                self._readers.discard(stream)
                self._changed.notify_all()

    def _give(self, stream: Stream, offer: _Offer, ask: Ask) -> None:
        """Send what is published, or show where it lies, and the digest of what was sent or read."""
        try:
            head, tensors = self._told(offer, ask.want)
        except (TypeError, ValueError, TorchrelayError) as error:
            log.error("the %s cannot be served: %s", ask.want, error)
            stream.send(RefusedAnswer(f"its {ask.want} cannot be told: {error}"))
            return
        stream.allow(STALL_S, float("inf"))
        if ask.want in (RECORD, VALUES):
            _send(stream, offer.generation, offer.point, head)
            return
        state = _Given(offer.generation, offer.point, head, tensors)
        if ask.want == SLICES:
            state.announce(stream)
            state.serve_slices(stream)
            return
        shown = Shown(tensors) if ask.machine and ask.machine == machine_id() and ask.pid > 0 else None
        if shown is not None and shown.whole and self._permitting.acquire(blocking=False):
            try:
                permit_reader(ask.pid)
                state.serve(stream, shown)
            finally:
                permit_reader(0)
                self._permitting.release()
        else:
            state.serve(stream, None)

    def _show(self, stream: Stream) -> None:
        """Send what steps are called with. That is no matter of a generation or point."""
        stream.allow(STALL_S, time.monotonic() + STALL_S)
        try:
            told = self.example()
        except RuntimeError as error:  # the script adds a module, say, while we look at them
            told = b""
            log.info("what steps are called with cannot be told now: %s", error)
        if told:
            _send(stream, Generation(0), START, told)
        else:
            stream.send(RefusedAnswer("it has not called a step yet"))

    def _told(self, offer: _Offer, want: str) -> tuple[bytes, list[Tensor]]:
        if want == RECORD:
            assert offer.record is not None, "an offer without a record was found for a record"
            return offer.record(), []
        if want == VALUES:
            assert offer.values is not None, "an offer without values was found for values"
            return offer.values, []
        assert offer.state is not None, "an offer without a state was found for a state"
        with self._manifest_lock:  # several may ask at once; telling it once is enough
            if offer.manifest is None:
                offer.manifest = offer.state.manifest()
            return offer.manifest


def snapshot_of(rank: Rank, restarts: int) -> str:
    """By which a snapshot of this rank is asked for."""
    return f"{SNAPSHOT}{rank} {restarts}"


def _known(want: str) -> bool:
    return (
        want in (RECORD, VALUES, STATE, SLICES, EXAMPLE)
        or want.startswith((SHELVE, SNAPSHOT))
        or _LANE.fullmatch(want) is not None
    )


def _send(stream: Stream, generation: Generation, point: Point, head: bytes) -> None:
    """What is served, and its digest."""
    stream.send(Serving(generation, point, len(head), 0))
    digest = Digest()
    stream.send_views([memoryview(head)], digest)
    stream.send_bytes(digest.raw())


class _Given:
    """A state as it is given to one client."""

    def __init__(self, generation: Generation, point: Point, head: bytes, tensors: list[Tensor]) -> None:
        self._generation, self._point, self._head = generation, point, head
        self._body = Body(tensors)
        self._head_digest = Digest()
        self._head_digest.add(head)

    def announce(self, stream: Stream, shown: Shown | None = None) -> None:
        pid, places = (0, 0) if shown is None else (os.getpid(), len(shown))
        stream.send(Serving(self._generation, self._point, len(self._head), self._body.size, pid, places))

    def serve(self, stream: Stream, shown: Shown | None) -> None:
        """The manifest, then the tensors in the way that is wanted, and the digest of what was sent or read."""
        self.announce(stream, shown)
        stream.send_bytes(self._head)
        if shown is not None:
            stream.send_bytes(shown.told())
        way = bytes(stream.receive_bytes(1))
        if way == TAKE:
            self.serve_slices(stream)
            return
        digest = SlicedDigest(self._head_digest, self._body.cuts())
        if way == READ and shown is not None:
            shown.watch(stream, digest)
        elif way != SEND:
            raise StreamBroken("it wants the state in a way that is not known")
        elif self._body.size:
            stream.send_views(self._body.outgoing(0, self._body.size), digest)
        stream.send_bytes(digest.raw())

    def serve_slices(self, stream: Stream) -> None:
        """The manifest's digest, then whichever bytes are asked for, each time with their digest."""
        stream.send_bytes(self._head_digest.raw())
        while True:
            start, stop = stream.receive_range()
            digest = Digest()
            try:
                stream.send_views(self._body.outgoing(start, stop), digest)
            except ValueError as error:
                raise StreamBroken(str(error)) from error
            stream.send_bytes(digest.raw())
