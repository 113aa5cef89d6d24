"""Buddies: copies of a rank's private record with ranks on other nodes, so that it outlives its node.

In each gate, before all tell one another that they have come, every rank sends its record to its buddies and takes in
those of its wards: whoever passes the gate knows that all records of its point lie on more than one node.
After a reconfigure the buddies may be others, and get the record of the point where all stand before anybody goes on.

Records go over lanes, one from each ward to each buddy. At most one record is under way on each: nobody sends the next
before the buddy has passed the gate's beginning, too.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence

from torchrelay.protocol.messages.ids import Point, Rank
from torchrelay.worker.peers.lanes import Ends, Parted, parted_error, receive_into, send_now
from torchrelay.worker.process_groups import groups
from torchrelay.worker.transfer.stream import Connected

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
        buddies may fail to get it. Raises `ReconfigureError`.
        """
        self.addresses = list(addresses)
        self._ends = ends
        self.active = False
        if not ends.to and not ends.by:
            return
        try:
            self._exchange(point, (record,))
        except Parted as error:
            raise groups.ReconfigureError(f"exchanging private records: {error}") from error
        self.active = True

    def at_gate(self, point: Point, record: Parts) -> None:
        """Send our record of the point about to be committed, take in those of our wards. Raises `Parted`."""
        self._exchange(point, record)
        wards = self._ends.by
        if len(self._copies) > len(wards):
            # The others have long had their first exchange of this generation: they are not ours any more.
            self._copies = {ward: copies for ward, copies in self._copies.items() if ward in wards}

    def _exchange(self, point: Point | None, record: Parts) -> None:
        size = sum(map(len, record))
        head = _HEAD.pack(point.step, point.section, size) if point is not None else _HEAD.pack(0, 0, size)
        message = [head, *record]
        size += len(head)
        late: list[_Sender] = []
        trouble = "a private record cannot be sent to a buddy"
        try:
            for lane in self._ends.to:
                left = send_now(lane, message, size)
                if left is not None:
                    late.append(_Sender(lane, left))
            for ward, lane in self._ends.by.items():
                trouble = f"the private record of rank {ward} does not come"
                self._take(ward, lane)
            trouble = ""
            for sender in late:
                sender.finish()
        except OSError as error:
            self._ends.part()  # a record may be half sent, or half received
            if not trouble:
                raise
            raise parted_error(trouble, error) from error
        except BaseException:
            self._ends.part()
            raise

    def _take(self, ward: Rank, lane: Connected) -> None:
        copies = self._copies.get(ward)
        if copies is None:
            copies = self._copies[ward] = _Copies()
        memory = copies.spare
        came = lane.recv_into(memory)
        if came < _HEAD.size:
            came = receive_into(lane, memory, _HEAD.size, came)
        step, section, size = _HEAD.unpack_from(memory)
        whole = _HEAD.size + size
        if whole > len(memory):
            memory = copies.grow(whole, came)
        if came < whole:
            receive_into(lane, memory[:whole], whole, came)
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
            kept = self._kept
            while kept and kept[-1][0] >= point:
                kept.pop()  # it was never committed, and its call is redone
            del kept[:-1]
            kept.append((point, self._spare, size))
            other = kept[0][1]
            self._spare = 3 - other - self._spare if len(kept) == 2 else (self._spare + 1) % 3

    def points(self) -> list[Point]:
        """Whose records are there, older first."""
        with self._lock:
            return [point for point, _, _ in self._kept]

    def of(self, point: Point) -> bytes:
        """The record of this point; empty if there is none. From any thread."""
        with self._lock:
            found = (bytes(self._memories[at][_HEAD.size : size]) for kept, at, size in self._kept if kept == point)
            return next(found, b"")


# ---------------------------------------------------------------- one connection


class _Sender(threading.Thread):
    """Sends what did not fit into the socket's memory: two who send to each other must read meanwhile."""

    def __init__(self, lane: Connected, data: bytes) -> None:
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
            raise parted_error("a private record cannot be sent to a buddy", self._error) from self._error
