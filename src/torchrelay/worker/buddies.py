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

from torchrelay.protocol.events import PrivateRecord
from torchrelay.protocol.ids import Point, Rank
from torchrelay.worker import groups
from torchrelay.worker.lanes import Ends, Parted, parted, receive

RECORDS = "records"  # the purpose of these lanes
_HEAD = struct.Struct("<qqq")  # point, and bytes of the record
AT_ONCE = 64 << 10  # bytes taken in with one system call: a record is 11 KB or so, and more with BatchNorm

Parts = Sequence[bytes | memoryview]


class Buddies:
    """The buddies and the wards of one rank.

    The main thread sends and receives; the control thread reads what is kept.
    """

    def __init__(self) -> None:
        self.addresses: list[str] = []  # of the state servers of our buddies
        self.active = False  # whether anybody is one of ours: asked in every gate
        self._ends = Ends()
        self._kept: dict[Rank, tuple[PrivateRecord, ...]] = {}  # of each ward the last two points, older first
        self._memory = bytearray(AT_ONCE)

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
        if len(self._kept) > len(wards):
            # The others have long had their first exchange of this generation: they are not ours any more.
            self._kept = {ward: kept for ward, kept in self._kept.items() if ward in wards}

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
        memory = self._memory
        came = receive(lane, memoryview(memory), _HEAD.size)
        step, section, size = _HEAD.unpack_from(memory)
        whole = _HEAD.size + size
        if whole > len(memory):
            self._memory = memory = memory + bytes(whole - len(memory))
        if came < whole:
            receive(lane, memoryview(memory)[came:whole], whole - came)
        if size:
            # What is not older was never committed, and its call is redone.
            older = [kept for kept in self._kept.get(ward, ()) if kept.point < Point(step, section)]
            data = bytes(memoryview(memory)[_HEAD.size : whole])
            self._kept[ward] = (*older[-1:], PrivateRecord(Point(step, section), data))

    # ------------------------------------------------------------ other threads

    def kept(self, ward: Rank, point: Point) -> bytes:
        """The record of this rank at this point; empty if there is none."""
        return next((record.data for record in self._kept.get(ward, ()) if record.point == point), b"")


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
