"""The page: a small shared file through which a worker tells its agent where it is, without a message.

The worker writes its step, phase and private state (RNG, loader position) into the page; the agent only reads. The
page lives in memory that outlives the worker, so the private state survives a SIGKILL. Layout, little endian:

    0      header   u64 magic, then Status (below) as fixed u64/f64 fields
    1024   groups   u64 how many, u64 how much was begun in all of them; then for each, up to MAX_GROUPS, u64 its key
                    and u64 how much was begun in it
    3328   spot     i64 when the phase was entered, i64 and u64 what was begun in the default group and in all others,
                    when the control thread looked where the main thread stands; u64 length, and where that is (msgpack)
    4096   slot 0   u64 sequence, i64 step, i64 section, u64 length, u64 length of the supplement, then the private
                    record's bytes, then those of its supplement
    4096+S slot 1   the same, and so on

A slot is valid when its sequence is even and not 0: the writer makes it odd, writes, and makes it even again. The
supplement (what is known when the call has returned) is added to a valid slot: its bytes first, then its length. Slots
take turns; a worker that is in a gate may still be taken back to the point before the last one it has committed, so
four slots hold all that can be asked for. A call that is redone writes its point again, however often: then in place of
that point's older record, so that the points before it stay.

The magic carries the version. A worker keeps its code while its agent is renewed, so pages of version 1, which have no
groups, are read as well.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from torchrelay.protocol.events import PrivateRecord
from torchrelay.protocol.ids import Point, WorkerPhase
from torchrelay.protocol.ways import Spot

MAGIC = 0x32_59_41_4C_45_52_54  # "TRELAY2"
WITHOUT_GROUPS = 0x31_59_41_4C_45_52_54  # "TRELAY1"
HEADER = 4096
GROUPS = 1024  # where the groups begin
MAX_GROUPS = 128  # of a rank with more, others cannot see what it waits for: nothing is said of any of them
SPOT = 3328
SLOT = 1 << 20  # bytes of one slot; the file is sparse, only what is written takes memory
SLOTS = 4
_SLOT_HEAD = struct.Struct("<QqqQQ")
_SUPPLEMENT_AT = 32  # of the supplement's length in the slot's head
_WORD = struct.Struct("<Q")
_ENTER = struct.Struct("<qq")
_COMMIT = struct.Struct("<qqqqqq")
_BEAT = struct.Struct("<qqq")
_STATUS = struct.Struct("<Qqqqqqqqqq")
_GROUP = struct.Struct("<QQ")
_SPOT = struct.Struct("<qqQQ")
MAX_SPOT = HEADER - SPOT - _SPOT.size
_PHASES = tuple(WorkerPhase)

MAX_RECORD = SLOT - _SLOT_HEAD.size


class Status(Struct, frozen=True, kw_only=True):
    """Where a worker is. Times are CLOCK_MONOTONIC nanoseconds of its node."""

    step: int  # optimizer updates committed; -1 before join()
    section: int  # sections committed since
    phase: WorkerPhase
    entered_ns: int  # when the phase was entered
    committed_ns: int  # when the last commit happened; 0 if none
    step_ns: int  # how long the last step took, entry to commit
    collectives: int  # begun in the default group in this generation
    beat_ns: int  # the control thread's last sign of life
    generation: int


class Groups(Struct, frozen=True):
    """What a worker has begun in its groups, but the default one.

    known   for each its key, which is the same on all members, and how much was begun in it in this generation; None if
            there are more than a page holds, or if the worker does not tell
    begun   in all of them: it changes when the worker gets on
    """

    known: tuple[tuple[int, int], ...] | None
    begun: int = 0


class PageFull(ValueError):
    """The private record is larger than a slot."""


def _full(size: int) -> PageFull:
    return PageFull(f"{size} bytes of private state, at most {MAX_RECORD} fit")


class Page:
    """One worker's page. The worker opens it with `create=True` and writes; its agent opens and reads it."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        flags = os.O_RDWR | (os.O_CREAT if create else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            if create:
                os.ftruncate(descriptor, HEADER + SLOTS * SLOT)
            self._map = mmap.mmap(descriptor, HEADER + SLOTS * SLOT)
        finally:
            os.close(descriptor)
        self._points: list[Point | None] = [None] * SLOTS  # what each slot holds
        self._ages = [0] * SLOTS  # its sequence
        self._sequence = 0
        self._start = self._end = HEADER + _SLOT_HEAD.size  # of the record kept last: its slot, and its end
        self._groups: Sequence[tuple[int, int]] | None = ()  # as they were written last
        if create:
            blank = Status(
                step=-1, section=0, phase=WorkerPhase.BOOTING, entered_ns=0, committed_ns=0, step_ns=0,
                collectives=0, beat_ns=0, generation=0,
            )  # fmt: skip
            self.write_status(blank)

    # ------------------------------------------------------------ status

    def write_status(self, status: Status) -> None:
        """Write all fields of the status at once (start-up, and tests)."""
        fields = (status.step, status.section, _PHASES.index(status.phase), status.entered_ns, status.committed_ns)
        rest = (status.step_ns, status.collectives, status.beat_ns, status.generation)
        _STATUS.pack_into(self._map, 0, MAGIC, *fields, *rest)

    def enter(self, phase: WorkerPhase, now_ns: int) -> None:
        """The main thread enters a phase."""
        _ENTER.pack_into(self._map, 24, _PHASES.index(phase), now_ns)

    def commit(self, point: Point, phase: WorkerPhase, now_ns: int, step_ns: int) -> None:
        """A point is committed, and the main thread enters the phase that follows."""
        _COMMIT.pack_into(self._map, 8, point.step, point.section, _PHASES.index(phase), now_ns, now_ns, step_ns)

    def beat(
        self, now_ns: int, collectives: int, generation: int, groups: Sequence[tuple[int, int]] | None = ()
    ) -> None:
        """The control thread is alive.

        `groups`: all but the default one, each with its key and how much was begun in it; None: it cannot be told.
        """
        _BEAT.pack_into(self._map, 56, collectives, now_ns, generation)
        if groups == self._groups:
            return
        self._groups = groups
        if groups is None:
            _GROUP.pack_into(self._map, GROUPS, MAX_GROUPS + 1, 1)
            return
        _GROUP.pack_into(self._map, GROUPS, len(groups), sum(begun for _, begun in groups))
        for at, group in enumerate(groups[:MAX_GROUPS], 1):
            _GROUP.pack_into(self._map, GROUPS + at * _GROUP.size, *group)

    def groups(self) -> Groups:
        """What was begun in which groups; now and then of two adjacent moments."""
        if _WORD.unpack_from(self._map, 0) == (WITHOUT_GROUPS,):
            return Groups(None)
        count, begun = _GROUP.unpack_from(self._map, GROUPS)
        if count > MAX_GROUPS:
            return Groups(None, begun)
        held = self._map[GROUPS + _GROUP.size : GROUPS + (1 + count) * _GROUP.size]
        return Groups(tuple(_GROUP.iter_unpack(held)), begun)

    def status(self) -> Status:
        """Read the status. Fields may be of two adjacent moments; each alone is whole."""
        magic, step, section, phase, entered, committed, took, collectives, beat, generation = _STATUS.unpack_from(
            self._map, 0
        )
        if magic not in (MAGIC, WITHOUT_GROUPS):
            raise ValueError(f"{self.path} is not a worker's page")
        return Status(
            step=step, section=section, phase=_PHASES[phase], entered_ns=entered, committed_ns=committed,
            step_ns=took, collectives=collectives, beat_ns=beat, generation=generation,
        )  # fmt: skip

    # ------------------------------------------------------------ the spot

    def mark_spot(self, spot: Spot) -> None:
        """Say where the main thread stands. It holds until that moves: then what it was marked with has changed."""
        data = msgspec.msgpack.encode(spot)
        at = self._stamp()
        if len(data) > MAX_SPOT:
            return
        _SPOT.pack_into(self._map, SPOT, *at, 0)
        begin = SPOT + _SPOT.size
        self._map[begin : begin + len(data)] = data
        _SPOT.pack_into(self._map, SPOT, *at, len(data))

    def spot(self) -> Spot | None:
        """Where the main thread stands, if it has been marked since it last moved."""
        *at, size = _SPOT.unpack_from(self._map, SPOT)
        if not 0 < size <= MAX_SPOT or tuple(at) != self._stamp():
            return None
        begin = SPOT + _SPOT.size
        try:
            return msgspec.msgpack.decode(self._map[begin : begin + size], type=Spot)
        except msgspec.MsgspecError:
            return None  # it is being written

    def _stamp(self) -> tuple[int, int, int]:
        """What changes whenever the worker gets on."""
        status = self.status()
        return status.entered_ns, status.collectives, _GROUP.unpack_from(self._map, GROUPS)[1]

    # ------------------------------------------------------------ private records

    def keep(self, point: Point, *parts: bytes | memoryview) -> None:
        """Keep the private record of `point`, which is these parts in a row; those of the last points stay whole.

        Raises `PageFull`.
        """
        size = sum(map(len, parts))
        if size > MAX_RECORD:
            raise _full(size)
        slot = self._slot_for(point)
        start = HEADER + slot * SLOT
        self._sequence += 2
        _SLOT_HEAD.pack_into(self._map, start, self._sequence - 1, point.step, point.section, size, 0)
        end = start + _SLOT_HEAD.size
        for part in parts:
            begin, end = end, end + len(part)
            self._map[begin:end] = part
        _WORD.pack_into(self._map, start, self._sequence)
        self._points[slot], self._ages[slot] = point, self._sequence
        self._start, self._end = start, end

    def supplement(self, data: bytes) -> None:
        """Add to the record that was kept last: readers get this behind it. Once for each. Raises `PageFull`."""
        end = self._end + len(data)
        if end > self._start + SLOT:
            raise _full(end - self._start - _SLOT_HEAD.size)
        self._map[self._end : end] = data
        _WORD.pack_into(self._map, self._start + _SUPPLEMENT_AT, len(data))

    def _slot_for(self, point: Point) -> int:
        """The slot to write: the oldest of all, or the older of two that this point has already."""
        ages = self._ages
        oldest = ages.index(min(ages))
        if point not in self._points:
            return oldest
        same = [slot for slot in range(SLOTS) if self._points[slot] == point]
        return min(same, key=ages.__getitem__) if len(same) >= 2 else oldest

    def records(self) -> tuple[PrivateRecord, ...]:
        """The newest whole record of each point, older points first. Called when the writer has ended."""
        found: list[tuple[int, PrivateRecord]] = []
        for slot in range(SLOTS):
            start = HEADER + slot * SLOT
            sequence, step, section, length, more = _SLOT_HEAD.unpack_from(self._map, start)
            if sequence and sequence % 2 == 0 and length + more <= MAX_RECORD:
                data = self._map[start + _SLOT_HEAD.size : start + _SLOT_HEAD.size + length + more]
                found.append((sequence, PrivateRecord(Point(step, section), bytes(data))))
        newest = {record.point: record for _, record in sorted(found, key=lambda pair: pair[0])}
        return tuple(newest[point] for point in sorted(newest))

    def close(self) -> None:
        self._map.close()
