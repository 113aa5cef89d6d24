"""The comms between the ranks of a group: connected when they are first used, and of no use any more after a fault.

Each rank has one listener, and puts its handle in the store. Who sends to a rank for the first time looks its handle
up, connects, and says in a first message who it is and which lane this is: collectives have one, each tag of send and
recv another. A comm is one direction, and its messages come in order, so no message says what it is.

After a fault of a process, or a collective that was given up, nobody knows which messages have come: the mesh is
broken, all who wait in it fail, and it is replaced as a whole.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from torchrelay.netpath.native.binding import REMOTE, Comm, Connecting, Listener, NetError, Request

_HELLO = struct.Struct("<8sIIQ")  # magic; who connects; unused; lane
_MAGIC = b"TRNMESH1"
LEAST_PAUSE_S, MOST_PAUSE_S = 0.0005, 0.02  # between two looks at whether somebody has connected
LAST_WORDS_S = 1.0  # how long closing waits at least for small messages that are on their way
COLLECTIVES = 0  # their lane; tag t of send and recv is lane t + 1


class Broken(dist.DistBackendError):
    """A group's connections are of no use any more; the text says why. Connect them anew, or end."""


class Meeting(Protocol):
    """What a mesh needs of a c10d store."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class Stream:
    """Messages over one comm in order; their memory is kept until they are done.

    Used by one thread at a time, and aborted by any. Then it is closed when no call is inside any more, and
    the peer is told.
    """

    def __init__(self, comm: Comm, peer: int, look: Callable[[], None] | None = None, *, sends: bool) -> None:
        """`look` is called now and then by who waits; what it raises ends the waiting."""
        self.peer = peer
        self._look = look
        self.posted = 0  # messages, in all
        self._slow = f"rank {peer} {'has not taken what was sent to it' if sends else 'has sent nothing'}"
        self._comm = comm
        self._sends = sends
        self._begin = comm.isend if sends else comm.irecv
        self._under_way: deque[tuple[Request, int, object]] = deque()
        self._lock = threading.Lock()
        self._inside = 0  # calls
        self._aborted = False

    def post(self, memory: torch.Tensor, until: float) -> None:
        """Begin a message from, or into, this memory (contiguous). Waits for older ones if too many are under way.

        Raises as `finish`.
        """
        size = memory.nbytes
        with self:
            if self._sends:
                self._reap()
            while (request := self._begin(memory.data_ptr(), size)) is None:
                self._finish_oldest(until)
            self._under_way.append((request, size, memory))
            self.posted += 1

    def finish_oldest(self, until: float) -> None:
        """Wait for the oldest message. Raises as `finish`."""
        with self:
            self._finish_oldest(until)

    def finish(self, until: float, first: int | None = None) -> None:
        """Wait for all messages, or for the first so many of all that were ever posted.

        Raises `NetError` if they do not get through, `TimeoutError`, and `ValueError` if one has another length.
        """
        with self:
            while len(self._under_way) > (0 if first is None else self.posted - first):
                self._finish_oldest(until)

    def _finish_oldest(self, until: float) -> None:
        request, size, _ = self._under_way[0]
        try:
            while not request.wait(until):
                if time.monotonic() >= until:
                    raise TimeoutError(self._slow)
                if self._look is not None:
                    self._look()
        except NetError as error:
            raise self._of_peer(error) from error
        self._under_way.popleft()
        if request.size != size:
            raise ValueError(f"rank {self.peer} has sent {request.size} bytes where {size} were expected")

    def peek(self) -> None:
        """Raise `NetError` if the oldest message will not get through. Nobody else may be inside."""
        with self:
            self._oldest_is_done()

    def _oldest_is_done(self) -> bool:
        try:
            return bool(self._under_way) and self._under_way[0][0].done()
        except NetError as error:
            raise self._of_peer(error) from error

    def _of_peer(self, error: NetError) -> NetError:
        return error if error.peer is not None else NetError(error.code, f"rank {self.peer}: {error}", self.peer)

    def _reap(self) -> None:
        """Let go of the memory of what has been sent."""
        while self._oldest_is_done():
            self._under_way.popleft()

    def abort(self) -> None:
        """Whoever waits fails at once, and whoever comes; the peer is told. From any thread."""
        with self._lock:
            self._aborted = True
            self._comm.abort()
            self._close_if_left()

    def __enter__(self) -> None:
        with self._lock:
            if self._aborted:
                raise NetError(REMOTE, f"the connection with rank {self.peer} was given up", self.peer)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            self._close_if_left()

    def _close_if_left(self) -> None:
        if self._aborted and not self._inside and self._comm.close():
            self._under_way.clear()


class _Arrival:
    """A comm that somebody has connected, and that has not said yet whose it is."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.text = torch.zeros(_HELLO.size, dtype=torch.uint8)
        request = comm.irecv(self.text.data_ptr(), _HELLO.size)
        assert request is not None, "nothing is under way in a new comm"
        self._request = request

    def said(self) -> tuple[int, int] | None:
        """Who it is, and which lane; None as long as that has not come. Raises `ValueError`, `NetError`."""
        if not self._request.done():
            return None
        if self._request.size != _HELLO.size:
            raise ValueError("a comm began with another message than a greeting")
        magic, rank, _, lane = _HELLO.unpack(bytes(self.text.tolist()))
        if magic != _MAGIC:
            raise ValueError(
                "a comm began with the greeting of another version: install the same torchrelay everywhere"
            )
        return rank, lane


class Mesh:
    """The connections of one rank with the others of its group, from one meeting to the next."""

    def __init__(self, meeting: Meeting, rank: int, size: int, name: str) -> None:
        """`name` is the group's, for messages. Raises `NotBuilt`, `NetError`, and what the store raises."""
        self.rank, self.size, self.name = rank, size, name
        self._meeting = meeting
        self._label = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        self._listener = Listener()
        self._lock = threading.Lock()  # of who listens, and of what is changed by more than one thread
        self._out: dict[tuple[int, int], Stream] = {}
        self._in: dict[tuple[int, int], Stream] = {}
        self._arrivals: list[_Arrival] = []
        self._unsaid = False  # somebody's connection has ended before its greeting
        self._why = ""
        self.on_break: list[Callable[[], None]] = []  # called once, from any thread, when the mesh breaks
        try:
            meeting.set(f"netpath/{rank}", self._listener.handle.hex())
        except BaseException:
            self._listener.close()
            raise

    # ------------------------------------------------------------ streams

    def to(self, peer: int, until: float, lane: int = COLLECTIVES) -> Stream:
        """The way to a rank; connects the first time. Raises `Broken`, `TimeoutError`, `NetError`."""
        stream = self._out.get((peer, lane))
        return stream if stream is not None else self._connect(peer, lane, until)

    def of(self, peer: int, until: float, lane: int = COLLECTIVES) -> Stream:
        """The way from a rank; waits the first time until it has connected. Raises as `to`."""
        stream = self._in.get((peer, lane))
        pauses = _pauses()
        while stream is None:
            self._look_round()
            stream = self._in.get((peer, lane))
            if stream is None:
                self._rest(next(pauses), until, peer)
        return stream

    def _connect(self, peer: int, lane: int, until: float) -> Stream:
        key, pauses = f"netpath/{peer}", _pauses()
        while not self._meeting.check([key]):
            self._rest(next(pauses), until, peer)
        connecting = Connecting(bytes.fromhex(self._meeting.get(key).decode()), self._label)
        pauses = _pauses()
        try:
            while (comm := connecting.poll()) is None:
                self._look_round()
                self._rest(next(pauses), until, peer)
        except BaseException:
            connecting.give_up()
            raise
        stream = Stream(comm, peer, self._look_for(lane), sends=True)
        with self._lock:
            self._out[peer, lane] = stream
            if self._why:
                stream.abort()
        greeting = _HELLO.pack(_MAGIC, self.rank, 0, lane)
        stream.post(torch.tensor(list(greeting), dtype=torch.uint8), until)
        return stream

    def _look_for(self, lane: int) -> Callable[[], None] | None:
        return self._peek if lane == COLLECTIVES else None

    def _peek(self) -> None:
        """Who waits for one rank in a collective hears from the others, too, that it will not end."""
        for (_, lane), stream in (*self._out.items(), *self._in.items()):
            if lane == COLLECTIVES:
                stream.peek()

    def _look_round(self) -> None:
        """Take in who has connected. Raises `Broken`, `NetError`, `ValueError`."""
        with self._lock:
            self.check()
            while (comm := self._listener.accept(self._label)) is not None:
                self._arrivals.append(_Arrival(comm))
            for arrival in tuple(self._arrivals):
                try:
                    said = arrival.said()
                except NetError:
                    arrival.comm.close()
                    self._arrivals.remove(arrival)
                    self._unsaid = True
                    continue
                if said is not None:
                    self._arrivals.remove(arrival)
                    self._in[said] = Stream(arrival.comm, said[0], self._look_for(said[1]), sends=False)

    def _rest(self, pause_s: float, until: float, peer: int) -> None:
        self.check()
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"rank {peer} has not connected")
        if self._unsaid:
            # A rank lets go of a connection only with all of its own, so it will not come again: it may be this one.
            raise NetError(REMOTE, "a rank has connected, and broken off before it had said which one it is")
        time.sleep(min(pause_s, left))

    # ------------------------------------------------------------ the end

    @property
    def broken(self) -> str:
        """Why it is broken; empty if it is not."""
        return self._why

    def check(self) -> None:
        """Raise `Broken` if it is."""
        if self._why:
            raise Broken(f"torchrelay.netpath: the connections of group '{self.name}' are broken: {self._why}")

    def break_off(self, why: str) -> None:
        """Let all who wait in it fail now, and who waits for us elsewhere. From any thread; the first reason stays."""
        with self._lock:
            if self._why:
                return
            self._why = why
            for stream in (*self._out.values(), *self._in.values()):
                stream.abort()
            for arrival in self._arrivals:
                arrival.comm.close()
            self._arrivals.clear()
            self._listener.close()
        for told in tuple(self.on_break):
            told()

    def close(self, until: float) -> None:
        """Let go of all comms, when nobody uses it any more; see `speak_out`."""
        if not self._why:
            self.speak_out(until)
        self.break_off("the group was closed")

    def speak_out(self, until: float) -> None:
        """Small messages are not waited for when they are sent, but here: for a moment, or longer, to `until`.

        A rank that has done its part of a collective may end long before another one comes to it.
        """
        until = max(until, time.monotonic() + LAST_WORDS_S)
        for stream in tuple(self._out.values()):
            try:
                stream.finish(until)
            except (NetError, TimeoutError):  # the peer is gone, and does not need it
                continue


def _pauses() -> Any:
    """Seconds to rest between looks: longer and longer."""
    return itertools.chain(
        itertools.takewhile(lambda pause: pause < MOST_PAUSE_S, (LEAST_PAUSE_S * 1.3**k for k in itertools.count())),
        itertools.repeat(MOST_PAUSE_S),
    )
