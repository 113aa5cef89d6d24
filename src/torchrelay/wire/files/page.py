"""The page: a small shared file through which a worker tells its agent where it is, without a message.

The worker writes its step, phase and private state (RNG, loader position) into the page; the agent only reads. The
page lives in memory that outlives the worker, so the private state survives a SIGKILL. All of that memory is taken when
the page is made: where none is left, a write to a map ends the process (SIGBUS), and so does a read. Readers make no
map, as the page is another process's work: whatever is wrong with it, a reader gets an error and no signal.

Layout, little endian:

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

import errno
import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from torchrelay.protocol.health.stalls import Spot
from torchrelay.protocol.messages.events import PrivateRecord
from torchrelay.protocol.messages.ids import Point, WorkerPhase

MAGIC = 0x32_59_41_4C_45_52_54  # "TRELAY2"
WITHOUT_GROUPS = 0x31_59_41_4C_45_52_54  # "TRELAY1"
HEADER = 4096
GROUPS = 1024  # where the groups begin
MAX_GROUPS = 128  # of a rank with more, others cannot see what it waits for: nothing is said of any of them
SPOT = 3328
SLOT = 1 << 20  # bytes of one slot
SLOTS = 4
SIZE = HEADER + SLOTS * SLOT
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

    step: int  # optimizer updates committed; -1 before protect()
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


class BadPage(ValueError):
    """This is not a worker's page, or not yet, or it is damaged."""


def _full(size: int) -> PageFull:
    return PageFull(f"{size} bytes of private state, at most {MAX_RECORD} fit")


def reserve(path: Path) -> None:
    """Make the file of a page, with memory for all of it. Raises OSError; if there is no room, with what to do."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, SIZE)
    except OSError as error:
        os.ftruncate(descriptor, 0)
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(error.errno, no_room(path.parent) or f"no room in {path.parent}") from error
    finally:
        os.close(descriptor)


def no_room(folder: Path, pages: int = 1) -> str:
    """What to say where the pages of so many workers do not fit; empty if they do."""
    known = os.statvfs(folder)
    free, needed = known.f_bavail * known.f_frsize, pages * SIZE
    if not known.f_blocks or free >= needed:  # without any blocks: it has no limit
        return ""
    wanted = f"{pages} workers need" if pages > 1 else "a worker needs"
    return (
        f"{wanted} {needed / 1e6:.1f} MB of shared memory, and {folder} has {free / 1e6:.1f} MB left: "
        "remove what fills it (`df -h` and `ls` tell), or give it more (a container: --shm-size)"
    )


class Page:
    """One worker's page. The worker makes it (`create=True`) and writes; its agent opens it, and reads.

    To make it raises OSError (see `reserve`), to open it FileNotFoundError, and to read it `BadPage`.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        if create:
            reserve(path)
        self._writes = create
        self._file = os.open(path, (os.O_RDWR if create else os.O_RDONLY) | os.O_CLOEXEC)
        self._points: list[Point | None] = [None] * SLOTS  # what each slot holds
        self._ages = [0] * SLOTS  # its sequence
        self._sequence = 0
        self._start = self._end = HEADER + _SLOT_HEAD.size  # of the record kept last: its slot, and its end
        self._groups: Sequence[tuple[int, int]] | None = ()  # as they were written last
        if create:
            self._map = mmap.mmap(self._file, SIZE)
            blank = Status(
                step=-1,
                section=0,
                phase=WorkerPhase.BOOTING,
                entered_ns=0,
                committed_ns=0,
                step_ns=0,
                collectives=0,
                beat_ns=0,
                generation=0,
            )
            self.write_status(blank)

    def _read(self, at: int, size: int) -> bytes:
        """Some of its bytes, by a call of the kernel: that can fail, but not end this process. Raises `BadPage`."""
        try:
            data = os.pread(self._file, size, at)
        except OSError as error:
            raise BadPage(f"{self.path} cannot be read: {error.strerror}") from error
        if len(data) < size:
            raise BadPage(f"{self.path} is cut short: it is not a worker's page, or not yet")
        return data

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
        if _WORD.unpack(self._read(0, _WORD.size)) == (WITHOUT_GROUPS,):
            return Groups(None)
        count, begun = _GROUP.unpack(self._read(GROUPS, _GROUP.size))
        if count > MAX_GROUPS:
            return Groups(None, begun)
        held = self._read(GROUPS + _GROUP.size, count * _GROUP.size)
        return Groups(tuple(_GROUP.iter_unpack(held)), begun)

    def status(self) -> Status:
        """Read the status. Fields may be of two adjacent moments; each alone is whole."""
        magic, step, section, phase, entered, committed, took, collectives, beat, generation = _STATUS.unpack(
            self._read(0, _STATUS.size)
        )
        if magic not in (MAGIC, WITHOUT_GROUPS) or not 0 <= phase < len(_PHASES):
            raise BadPage(f"{self.path} is not a worker's page")
        return Status(
            step=step,
            section=section,
            phase=_PHASES[phase],
            entered_ns=entered,
            committed_ns=committed,
            step_ns=took,
            collectives=collectives,
            beat_ns=beat,
            generation=generation,
        )

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
        try:
            *at, size = _SPOT.unpack(self._read(SPOT, _SPOT.size))
            if not 0 < size <= MAX_SPOT or tuple(at) != self._stamp():
                return None
            return msgspec.msgpack.decode(self._read(SPOT + _SPOT.size, size), type=Spot)
        except (msgspec.MsgspecError, BadPage):
            return None  # it is being written

    def _stamp(self) -> tuple[int, int, int]:
        """What changes whenever the worker gets on."""
        status = self.status()
        begun: int = _GROUP.unpack(self._read(GROUPS, _GROUP.size))[1]
        return status.entered_ns, status.collectives, begun

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
            sequence, step, section, length, more = _SLOT_HEAD.unpack(self._read(start, _SLOT_HEAD.size))
            if sequence and sequence % 2 == 0 and length + more <= MAX_RECORD:
                data = self._read(start + _SLOT_HEAD.size, length + more)
                found.append((sequence, PrivateRecord(Point(step, section), data)))
        newest = {record.point: record for _, record in sorted(found, key=lambda pair: pair[0])}
        return tuple(newest[point] for point in sorted(newest))

    def close(self) -> None:
        if (file := self._file) >= 0:
            self._file = -1
            os.close(file)
        if self._writes:
            self._map.close()
