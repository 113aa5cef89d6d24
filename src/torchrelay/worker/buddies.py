"""Buddies: copies of a rank's private record with ranks on other nodes, so that it outlives its node.

In each gate, before all tell one another that they have come, every rank sends its record to its buddies and takes in
those of its wards: whoever passes the gate knows that all records of its point lie on more than one node.
After a rewire the buddies may be others, and get the record of the point where all stand before anybody goes on.

Records go over lanes, one from each ward to each buddy. At most one record is under way on each: nobody sends the next
before the buddy has passed the gate's beginning, too.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Sequence

from torchrelay.protocol.ids import Point, Rank
from torchrelay.worker import groups
from torchrelay.worker.lanes import Ends, Parted, parted, receive

RECORDS = "records"  # the purpose of these lanes
_HEAD = struct.Struct("<qqq")  # point, and bytes of the record
ROOM = 16 << 10  # bytes for a record at first: it is 11 KB or so, and more with BatchNorm

Parts = Sequence[bytes | memoryview]


class Buddies:
    """The buddies and the wards of one rank.

    The main thread sends and receives; the control thread reads what is kept.
    """

    def __init__(self) -> None:
        self.addresses: list[str] = []  # of the state servers of our buddies
        self.active = False  # whether anybody is one of ours: asked in every gate
        self._ends = Ends()
        self._copies: dict[Rank, _Copies] = {}  # by ward

    # ------------------------------------------------------------ the main thread

    def share(self, ends: Ends, addresses: Sequence[str], point: Point | None, record: bytes) -> None:
        """All are connected anew: these are the lanes from now on, and the records of where all stand are exchanged.

        `addresses`: of the buddies. What we have of former wards is kept until the next gate: up to then their new
        buddies may fail to get it. Raises `RewireError`.
        """
        self.addresses = list(addresses)
        self._ends = ends
        self.active = False
        if not ends.to and not ends.by:
            return
        try:
            self._exchange(point, (record,))
        except Parted as error:
            raise groups.RewireError(f"exchanging private records: {error}") from error
        self.active = True

    def at_gate(self, point: Point, record: Parts) -> None:
        """Send our record of the point about to be committed, take in those of our wards. Raises `Parted`."""
        self._exchange(point, record)
        wards = self._ends.by
        if len(self._copies) > len(wards):
            # The others have long had their first exchange of this generation: they are not ours any more.
            self._copies = {ward: copies for ward, copies in self._copies.items() if ward in wards}

    def _exchange(self, point: Point | None, record: Parts) -> None:
        head = _HEAD.pack(*((point.step, point.section) if point is not None else (0, 0)), sum(map(len, record)))
        message = [head, *record]
        size = len(head) + sum(map(len, record))
        try:
            late = self._send(message, size)
            self._receive()
            for sender in late:
                sender.finish()
        except BaseException:
            self._ends.part()  # a record may be half sent, or half received
            raise

    def _send(self, message: Parts, size: int) -> list[_Sender]:
        try:
            return [sender for lane in self._ends.to if (sender := _send(lane, message, size)) is not None]
        except OSError as error:
            raise parted("a private record cannot be sent to a buddy", error) from error

    def _receive(self) -> None:
        for ward, lane in self._ends.by.items():
            try:
                self._take(ward, lane)
            except OSError as error:
                raise parted(f"the private record of rank {ward} does not come", error) from error

    def _take(self, ward: Rank, lane: socket.socket) -> None:
        copies = self._copies.get(ward)
        if copies is None:
            copies = self._copies[ward] = _Copies()
        memory = copies.spare
        came = receive(lane, memory, _HEAD.size)
        step, section, size = _HEAD.unpack_from(memory)
        whole = _HEAD.size + size
        if whole > len(memory):
            memory = copies.grow(whole, came)
        if came < whole:
            receive(lane, memory[came:whole], whole - came)
        if size:
            copies.keep(Point(step, section), whole)

    # ------------------------------------------------------------ other threads

    def kept(self, ward: Rank, point: Point) -> bytes:
        """The record of this rank at this point; empty if there is none."""
        copies = self._copies.get(ward)
        return b"" if copies is None else copies.of(point)


class _Copies:
    """The records of one ward: of its last two points, and room for the next one, which is taken in where it stays."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # nobody reads what is about to be written over
        self._memories = [memoryview(bytearray(ROOM)) for _ in range(3)]
        self._kept: list[tuple[Point, int, int]] = []  # older first: in which memory, and how much of it
        self._spare = 0

    @property
    def spare(self) -> memoryview:
        """Where the next one is to come."""
        return self._memories[self._spare]

    def grow(self, size: int, came: int) -> memoryview:
        """Room for so many bytes, of which the first have come already."""
        larger = memoryview(bytearray(max(size, 2 * len(self.spare))))
        larger[:came] = self.spare[:came]
        self._memories[self._spare] = larger
        return larger

    def keep(self, point: Point, size: int) -> None:
        """What has come into the spare memory is the record of this point."""
        with self._lock:
            # What is not older was never committed, and its call is redone.
            older = [kept for kept in self._kept if kept[0] < point]
            self._kept = [*older[-1:], (point, self._spare, size)]
            taken = [at for _, at, _ in self._kept]
            self._spare = next(at for at in range(len(self._memories)) if at not in taken)

    def points(self) -> list[Point]:
        """Whose records are there, older first."""
        return [point for point, _, _ in self._kept]

    def of(self, point: Point) -> bytes:
        """The record of this point; empty if there is none. From any thread."""
        with self._lock:
            found = (bytes(self._memories[at][_HEAD.size : size]) for kept, at, size in self._kept if kept == point)
            return next(found, b"")


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
            raise parted("a private record cannot be sent to a buddy", self._error) from self._error


def _send(lane: socket.socket, message: Parts, size: int) -> _Sender | None:
    """Send without waiting; returns who sends the rest, if there is one."""
    try:
        sent = lane.sendmsg(message, (), socket.MSG_DONTWAIT)
    except BlockingIOError:
        sent = 0
    return None if sent == size else _Sender(lane, b"".join(message)[sent:])
