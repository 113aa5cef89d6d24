"""Buddies: copies of a rank's private record with ranks on other nodes, so that it outlives its node.

In each gate, before the all-reduce, every rank sends its record to its buddies and takes in those of its wards. All
have come before the all-reduce is entered: whoever passes the gate knows that all records of its point lie on more than
one node.
After a rewire the buddies may be others, and get the record of the point where all stand before anybody goes on.

Records go over connections of their own, one from each ward to each buddy, made at every rewire and proved as transfers
are. At most one record is under way on each: nobody sends the next before the buddy has been in the all-reduce, too.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import Store

from torchrelay.protocol.events import PrivateRecord
from torchrelay.protocol.ids import Generation, Point, Rank
from torchrelay.protocol.orders import Rewire
from torchrelay.worker import groups
from torchrelay.worker.stream import Stream, StreamBroken
from torchrelay.worker.transfer import open_lane

if TYPE_CHECKING:
    from torchrelay.worker.session import Session

_HEAD = struct.Struct("<qqq")  # point, and bytes of the record
AT_ONCE = 64 << 10  # bytes taken in with one system call: a record is 11 KB or so, and more with BatchNorm
AGAIN_S = 0.05  # between attempts to reach a buddy, to which all its wards come at once

Parts = Sequence[bytes | memoryview]


class Parted(RuntimeError):
    """The connection to a buddy or a ward is of no use any more."""


class Buddies:
    """The buddies and the wards of one rank.

    The main thread sends and receives; threads of the state server bring connections of wards; the control thread reads
    what is kept, and cuts.
    """

    def __init__(self) -> None:
        self.addresses: list[str] = []  # of the state servers of our buddies
        self.active = False  # whether anybody is one of ours: asked in every gate
        self._changed = threading.Condition()
        self._generation = Generation(0)
        self._came: dict[tuple[Generation, Rank], socket.socket] = {}  # from wards, not taken up yet
        self._cut_off = False  # for whoever waits for wards
        self._to: list[socket.socket] = []
        self._from: dict[Rank, socket.socket] = {}
        self._kept: dict[Rank, tuple[PrivateRecord, ...]] = {}  # of each ward the last two points, older first
        self._memory = bytearray(AT_ONCE)

    # ------------------------------------------------------------ the main thread

    def share(
        self, session: Session, order: Rewire, store: Store, point: Point | None, record: bytes, timeout_s: float
    ) -> None:
        """All are connected anew: connect with those in the order, and exchange the records of where all stand.

        What we have of former wards is kept until the next gate: up to then their new buddies may fail to get it.
        Raises `RewireError`.
        """
        self._part()
        if not order.buddies and not order.wards:
            return
        deadline = time.monotonic() + timeout_s
        try:
            self._meet(session, order, store, deadline)
            self._exchange(point, (record,))
        except RuntimeError as error:  # the store's own errors derive from it
            raise groups.RewireError(f"exchanging private records: {error}") from error
        for lane in (*self._to, *self._from.values()):
            _limit(lane, 0)  # in a gate nobody knows how long others take
        self.active = True

    def at_gate(self, point: Point, record: Parts) -> None:
        """Send our record of the point about to be committed, take in those of our wards. Raises `Parted`."""
        # Who waits here counts as in the gate: the rank that is waited for has fewer collectives.
        groups.count_aside(-1)
        self._exchange(point, record)
        groups.count_aside(1)
        if len(self._kept) > len(self._from):
            # The others have long had their first exchange of this generation: they are not ours any more.
            self._kept = {ward: kept for ward, kept in self._kept.items() if ward in self._from}

    def _exchange(self, point: Point | None, record: Parts) -> None:
        head = _HEAD.pack(*((point.step, point.section) if point is not None else (0, 0)), sum(map(len, record)))
        message = [head, *record]
        size = len(head) + sum(map(len, record))
        try:
            late = [sender for lane in self._to if (sender := _send(lane, message, size)) is not None]
            for ward, lane in self._from.items():
                self._take(ward, lane)
        except OSError as error:
            raise Parted(f"a private record could not be sent to a buddy or taken from a ward: {error}") from error
        for sender in late:
            sender.finish()

    def _take(self, ward: Rank, lane: socket.socket) -> None:
        memory = self._memory
        came = _receive(lane, memoryview(memory), _HEAD.size)
        step, section, size = _HEAD.unpack_from(memory)
        whole = _HEAD.size + size
        if whole > len(memory):
            self._memory = memory = memory + bytes(whole - len(memory))
        if came < whole:
            _receive(lane, memoryview(memory)[came:whole], whole - came)
        if size:
            # What is not older was never committed, and its call is redone.
            older = [kept for kept in self._kept.get(ward, ()) if kept.point < Point(step, section)]
            data = bytes(memoryview(memory)[_HEAD.size : whole])
            self._kept[ward] = (*older[-1:], PrivateRecord(Point(step, section), data))

    # ------------------------------------------------------------ meeting

    def _meet(self, session: Session, order: Rewire, store: Store, deadline: float) -> None:
        store.set(f"torchrelay/{order.generation}/lane/{order.rank}", session.server.address)
        with self._changed:
            self._generation, self._cut_off = order.generation, False
        secret = session.welcome.secret
        for buddy in order.buddies:
            address = store.get(f"torchrelay/{order.generation}/lane/{buddy}").decode()
            self.addresses.append(address)
            self._to.append(self._reach(address, secret, order, deadline))
        with self._changed:
            for ward in order.wards:
                self._from[ward] = self._await(ward, deadline)
        for lane in (*self._to, *self._from.values()):
            _limit(lane, max(0.001, deadline - time.monotonic()))

    def _reach(self, address: str, secret: bytes, order: Rewire, deadline: float) -> socket.socket:
        while True:
            try:
                return open_lane(address, secret, order.generation, order.rank, deadline).release()
            except StreamBroken as error:
                if self._cut_off or time.monotonic() + AGAIN_S > deadline:
                    raise Parted(f"the buddy at {address} is not reached: {error}") from error
                time.sleep(AGAIN_S)

    def _await(self, ward: Rank, deadline: float) -> socket.socket:
        while (lane := self._came.pop((self._generation, ward), None)) is None:
            left = deadline - time.monotonic()
            if self._cut_off or left <= 0:
                raise Parted(f"rank {ward} did not come with its private record")
            self._changed.wait(left)
        return lane

    def _part(self) -> None:
        """Let go of the connections of the generation before."""
        self.active = False
        self.addresses = []
        with self._changed:
            over = [*self._to, *self._from.values()]
            self._to, self._from = [], {}
        for lane in over:
            lane.close()

    def close(self) -> None:
        """Let go of all connections."""
        self._part()
        with self._changed:
            while self._came:
                self._came.popitem()[1].close()

    # ------------------------------------------------------------ other threads

    def adopt(self, generation: Generation, ward: Rank, stream: Stream) -> None:
        """A ward has connected to our state server; perhaps before we have heard that it is one."""
        with self._changed:
            lane = stream.release()
            for old in [key for key in self._came if key[0] < generation or key == (generation, ward)]:
                self._came.pop(old).close()
            self._came[generation, ward] = lane
            self._changed.notify_all()

    def kept(self, ward: Rank, point: Point) -> bytes:
        """The record of this rank at this point; empty if there is none."""
        return next((record.data for record in self._kept.get(ward, ()) if record.point == point), b"")

    def cut(self) -> int:
        """Whoever waits for a buddy or a ward fails at once. Returns how many connections were cut."""
        with self._changed:
            self._cut_off = True
            self._changed.notify_all()
            return sum(map(_shut_down, (*self._to, *self._from.values())))


# ---------------------------------------------------------------- one connection


class _Sender(threading.Thread):
    """Sends what did not fit into the socket's memory: two who send to each other must read meanwhile."""

    def __init__(self, lane: socket.socket, data: bytes) -> None:
        super().__init__(name="torchrelay buddy", daemon=True)
        self._lane = lane
        self._data = data
        self._error: OSError | None = None
        self.start()

    def run(self) -> None:
        try:
            self._lane.sendall(self._data)
        except OSError as error:
            self._error = error

    def finish(self) -> None:
        """Wait until it is sent. Raises `Parted`."""
        self.join()
        if self._error is not None:
            raise Parted(f"a private record could not be sent: {self._error}") from self._error


def _send(lane: socket.socket, message: Parts, size: int) -> _Sender | None:
    """Send without waiting; returns who sends the rest, if there is one."""
    try:
        sent = lane.sendmsg(message, (), socket.MSG_DONTWAIT)
    except BlockingIOError:
        sent = 0
    return None if sent == size else _Sender(lane, b"".join(message)[sent:])


def _receive(lane: socket.socket, memory: memoryview, least: int) -> int:
    """Fill memory with `least` bytes, or more if they are there; returns how many."""
    came = 0
    while came < least:
        count = lane.recv_into(memory[came:])
        if count == 0:
            raise ConnectionError("the ward has closed the connection")
        came += count
    return came


def _limit(lane: socket.socket, seconds: float) -> None:
    """How long one system call may wait; 0: for ever."""
    packed = struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))
    lane.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)
    lane.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)


def _shut_down(lane: socket.socket) -> bool:
    try:
        lane.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False  # it was not connected any more
    return True
