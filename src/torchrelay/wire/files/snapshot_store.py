"""Snapshot store: snapshots in a node's memory: files in the folder where its pages are, so they outlive its workers.

Of a rank there are two at most: one that all ranks have, and one that is being made or was made last. The memory of
one that is of no use any more is used again, as memory that was touched before is sooner written.

A file's name is what it is a snapshot of, once it is complete. It holds, little endian:

    0      8 bytes of magic, u64 lengths of private record, head and body, 16 bytes of digest over head and body, and
           16 over the private record
    4096   the private record, the head (the state's manifest), the body (its tensors)
"""

from __future__ import annotations

import errno
import itertools
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import xxhash

from torchrelay.protocol.messages.events import Snapshot
from torchrelay.protocol.messages.ids import Point, Rank

MAGIC = b"TRSHELF1"
HEADER = 4096
DIGEST = 16
PIECE = 1 << 20  # bytes that are hashed and then written while they are in the cache
LEFT = 0.1  # of the memory's size stays free
_HEAD = struct.Struct(f"<8sQQQ{DIGEST}s{DIGEST}s")
_PART = ".part"
_turn = itertools.count()


class NoRoom(OSError):
    """The memory of the node is full, or may not be used so far."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a snapshot, in bytes."""

    private: int
    head: int
    body: int

    @property
    def whole(self) -> int:
        return self.private + self.head + self.body


class Draft:
    """A snapshot that is being written: `write` all of it, in order, then `finish`. With `with`: else it is dropped.

    By system calls and not by a map: to map and unmap a file costs as much CPU as it takes to fill it.
    """

    def __init__(self, path: Path, target: Path, sizes: Sizes, *, durable: bool = False) -> None:
        """`durable`: on a disk, and there when it is finished. Raises `NoRoom`."""
        self._path, self._target, self._sizes, self._durable = path, target, sizes, durable
        self._at = 0  # bytes that are there
        self._private, self._hash = xxhash.xxh3_128(), xxhash.xxh3_128()
        self._file = -1
        try:
            (_find_room if durable else _leave_room)(path, HEADER + sizes.whole)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if not durable:  # on a disk it would be written twice
                _reserve(self._file, HEADER + sizes.whole)
        except OSError as error:
            self.drop()
            raise error if isinstance(error, NoRoom) else self._no_room(error) from error

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            self.drop()

    def write(self, data: bytes | memoryview) -> None:
        """The next bytes: of the private record, the head, or the body. Raises `NoRoom`."""
        view = memoryview(data).cast("B")
        private = max(0, min(len(view), self._sizes.private - self._at))
        self._private.update(view[:private])
        self._put(view[:private])
        for start in range(private, len(view), PIECE):
            piece = view[start : start + PIECE]
            self._hash.update(piece)
            self._put(piece)

    def _put(self, piece: memoryview) -> None:
        try:
            while piece:
                count = os.pwrite(self._file, piece, HEADER + self._at)
                self._at += count
                piece = piece[count:]
        except OSError as error:
            raise self._no_room(error) from error

    def digest(self) -> bytes:
        """Of head and body, as far as they have been written."""
        return self._hash.digest()

    def finish(self) -> None:
        """It is whole: from now on it is on the snapshot store, in the place of an older one of the same point.

        Raises `NoRoom` if it is to be durable, and the disk does not take it.
        """
        sizes = self._sizes
        assert self._at == sizes.whole, f"{self._at} of {sizes.whole} bytes were written"
        private = self._private.digest()
        header = _HEAD.pack(MAGIC, sizes.private, sizes.head, sizes.body, self.digest(), private)
        if not self._durable:
            os.pwrite(self._file, header, 0)
            self._path.rename(self._target)
            self._close()
            return
        try:
            os.pwrite(self._file, header.ljust(HEADER, b"\0"), 0)
            os.fsync(self._file)  # a disk over the network says only now that it is full
            self._close()
            self._path.rename(self._target)
        except OSError as error:
            raise self._no_room(error) from error

    def drop(self) -> None:
        """It came to nothing."""
        self._path.unlink(missing_ok=True)
        self._close()

    def _close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _no_room(self, error: OSError) -> NoRoom:
        return NoRoom(error.errno, f"no room for {self._sizes.whole:,} bytes in {self._path.parent}: {error.strerror}")


def _reserve(file: int, size: int) -> None:
    """So many bytes are in this file, and memory for them, so that what comes finds room. Raises `OSError`."""
    known = os.fstat(file)
    if known.st_size != size:
        os.ftruncate(file, size)
    if known.st_size < size or known.st_blocks * 512 < size:  # to ask for what is there costs as much as to write it
        os.posix_fallocate(file, 0, size)


def _find_room(path: Path, size: int) -> None:
    """Raises `NoRoom`."""
    known = os.statvfs(path.parent)
    if known.f_bavail * known.f_frsize < size:
        raise NoRoom(errno.ENOSPC, f"{path.parent} has no room for {size:,} bytes")


def _leave_room(path: Path, size: int) -> None:
    """Others need this memory, too: loader workers die of a full /dev/shm. Raises `NoRoom`."""
    there = path.stat().st_size if path.exists() else 0
    known = os.statvfs(path.parent)
    left = known.f_bavail * known.f_frsize + there - size
    if left < known.f_blocks * known.f_frsize * LEFT:
        path.unlink(missing_ok=True)
        text = f"{size:,} bytes in {path.parent} would leave less than {LEFT:.0%} of that memory to others"
        raise NoRoom(errno.ENOSPC, text)


class Kept:
    """A complete snapshot, to be read. While it is open its memory may be written over, but it stays there."""

    def __init__(self, path: Path) -> None:
        """Raises `OSError` if it is not there, and `ValueError` if it is none."""
        self.file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._read(path)
        except BaseException:
            self.close()
            raise

    def _read(self, path: Path) -> None:
        header = os.pread(self.file, _HEAD.size, 0)
        if len(header) < _HEAD.size:
            raise ValueError(f"{path} is no snapshot")
        magic, private, head, body, self.digest, of_private = _HEAD.unpack(header)
        self.sizes = Sizes(private, head, body)
        if magic != MAGIC or os.fstat(self.file).st_size != HEADER + self.sizes.whole:
            raise ValueError(f"{path} is no snapshot")
        self.private = os.pread(self.file, private, HEADER)
        if xxhash.xxh3_128(self.private).digest() != of_private:
            raise ValueError(f"{path} is damaged")

    @property
    def places(self) -> tuple[int, int, int]:
        """Where private record, head and body begin in `file`."""
        return HEADER, HEADER + self.sizes.private, HEADER + self.sizes.private + self.sizes.head

    def close(self) -> None:
        """It is read no more."""
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)


class SnapshotStore:
    """The snapshots of one node, of all ranks. Several processes use it; each rank's are written by one at a time."""

    def __init__(self, folder: Path, *, parked: Path | None = None, durable: bool = False) -> None:
        """`parked`: a folder with files that can be handed out, too, and are told of apart. `durable`: see `Draft`."""
        self._folder = folder
        self._parked = parked
        self._durable = durable

    def kept(self) -> tuple[Snapshot, ...] | None:
        """All complete snapshots; None if that cannot be told now (no descriptor is left, say)."""
        try:
            found = [_named(name) for name in os.listdir(self._folder)]
        except FileNotFoundError:
            return ()
        except OSError:
            return None
        return tuple(sorted((one for one in found if one is not None), key=lambda o: (o.restarts, o.rank, o.point)))

    def open(self, what: Snapshot) -> Kept | None:
        """This snapshot, to be read; None if it is not there."""
        places = [self._path(what)] if self._parked is None else [self._path(what), self._parked / name_of(what)]
        for path in places:
            try:
                return Kept(path)
            except (OSError, ValueError):
                continue
        return None

    def begin(self, what: Snapshot, sizes: Sizes, keep: Point | None) -> Draft:
        """Write this snapshot. Of this rank that of `keep` stays, and no other; all, if `keep` is None.

        Raises `NoRoom`.
        """
        part = self._folder / f"{_PART}-{what.rank}-{os.getpid()}-{next(_turn)}"
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._sweep(what.rank)
            if keep is not None:
                self._make_way(what, keep, part, HEADER + sizes.whole)
        except OSError as error:
            raise NoRoom(error.errno, f"{self._folder} cannot be used: {error.strerror}") from error
        return Draft(part, self._path(what), sizes, durable=self._durable)

    def _make_way(self, what: Snapshot, keep: Point, part: Path, size: int) -> None:
        """Of this rank only that of `keep` stays; the memory of another one is used again, if it is not larger."""
        for other in self.kept() or ():
            if other.rank != what.rank or (other.restarts == what.restarts and other.point in (keep, what.point)):
                continue
            path = self._path(other)
            try:
                # Who reads it still must find memory there, whatever is in it: no file is made shorter.
                if path.stat().st_size <= size:
                    path.rename(part)  # over one that was to be used again: that one is free now
                else:
                    path.unlink()
            except FileNotFoundError:
                pass  # somebody else has cleared it away

    def _sweep(self, rank: Rank) -> None:
        """Remove what processes that have ended since have begun of this rank."""
        for path in self._folder.glob(f"{_PART}-{rank}-*"):
            if not Path("/proc", path.name.split("-")[2]).exists():
                path.unlink(missing_ok=True)

    def clear_before(self, point: Point, restarts: int) -> None:
        """All ranks have newer ones: what is older than this point, or of another start of the job, is of no use."""
        for other in self.kept() or ():
            if other.restarts != restarts or other.point < point:
                self._path(other).unlink(missing_ok=True)

    def clear_after(self, point: Point, restarts: int) -> None:
        """All go back to this point: what was taken later is of steps that are made again."""
        for other in self.kept() or ():
            if other.restarts == restarts and other.point > point:
                self._path(other).unlink(missing_ok=True)

    def clear(self) -> None:
        """A job begins: what is here is another's."""
        for other in self.kept() or ():
            self._path(other).unlink(missing_ok=True)

    def _path(self, what: Snapshot) -> Path:
        return self._folder / name_of(what)


def snapshot_store_in(folder: Path, parked: str = "") -> SnapshotStore:
    """The snapshot store of the node whose pages lie in this folder. `parked`: where a parking lies beside it."""
    return SnapshotStore(folder / "snapshots", parked=Path(parked) if parked else None)


def name_of(what: Snapshot) -> str:
    """The name of its file."""
    return f"{what.restarts}.{what.rank}.{what.point.step}.{what.point.section}"


def _named(name: str) -> Snapshot | None:
    fields = name.split(".")
    if len(fields) != 4 or not all(field.isdecimal() for field in fields):
        return None
    restarts, rank, step, section = map(int, fields)
    return Snapshot(Rank(rank), Point(step, section), restarts)
