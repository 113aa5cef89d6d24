"""Shelf: the snapshots in the memory of a node: files in the folder where its pages are, so they outlive its workers.

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
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import xxhash

from torchrelay.protocol.events import Snapshot
from torchrelay.protocol.ids import Point, Rank

MAGIC = b"TRSHELF1"
HEADER = 4096
DIGEST = 16
LEFT = 0.1  # of the memory's size stays free
_HEAD = struct.Struct(f"<8sQQQ{DIGEST}s{DIGEST}s")
_PART = ".part"
_turn = itertools.count()


class NoRoom(OSError):
    """The memory of the node is full, or may not be used so far."""


# All pages at once: one by one they would cost three times as much as what is written to them.
POPULATE = getattr(mmap, "MAP_POPULATE", 0)


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
    """A snapshot that is being written: fill `memory`, then `finish`."""

    def __init__(self, path: Path, target: Path, sizes: Sizes) -> None:
        """Raises `NoRoom`."""
        self._path, self._target, self._sizes = path, target, sizes
        size = HEADER + sizes.whole
        file = -1
        try:
            _leave_room(path, size)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.ftruncate(file, size)
            os.posix_fallocate(file, 0, size)  # else the kernel would kill us in the middle
            self._map = mmap.mmap(file, size, flags=mmap.MAP_SHARED | POPULATE)
        except OSError as error:
            path.unlink(missing_ok=True)
            if isinstance(error, NoRoom):
                raise
            text = f"no room for {sizes.whole:,} bytes in {path.parent}: {error.strerror}"
            raise NoRoom(error.errno, text) from error
        finally:
            if file >= 0:
                os.close(file)
        self.memory = memoryview(self._map)[HEADER:]

    def finish(self, digest: bytes) -> None:
        """It is whole: from now on it is on the shelf, in the place of an older one of the same point."""
        sizes = self._sizes
        private = xxhash.xxh3_128(self.memory[: sizes.private]).digest()
        _HEAD.pack_into(self._map, 0, MAGIC, sizes.private, sizes.head, sizes.body, digest, private)
        self._path.rename(self._target)
        self._release()

    def drop(self) -> None:
        """It came to nothing."""
        self._path.unlink(missing_ok=True)
        self._release()

    def _release(self) -> None:
        try:
            self.memory.release()
            self._map.close()
        except BufferError:
            pass  # a traceback holds a part of it: it goes with that


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
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | POPULATE, prot=mmap.PROT_READ)
        magic, private, head, body, self.digest, of_private = _HEAD.unpack_from(self._map)
        self.sizes = Sizes(private, head, body)
        if magic != MAGIC or len(self._map) != HEADER + self.sizes.whole:
            self._map.close()
            raise ValueError(f"{path} is no snapshot")
        whole = memoryview(self._map)[HEADER:]
        self.private = bytes(whole[:private])
        if xxhash.xxh3_128(self.private).digest() != of_private:
            raise ValueError(f"{path} is damaged")
        self.head = whole[private : private + head]
        self.body = whole[private + head :]

    def close(self) -> None:
        self.head.release()
        self.body.release()
        # Somebody may still read a part of it: then it is closed with that.


class Shelf:
    """The snapshots of one node, of all ranks. Several processes use it; each rank's are written by one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

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
        try:
            return Kept(self._path(what))
        except (OSError, ValueError):
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
        return Draft(part, self._path(what), sizes)

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
        return self._folder / f"{what.restarts}.{what.rank}.{what.point.step}.{what.point.section}"


def shelf_in(folder: Path) -> Shelf:
    """The shelf of the node whose pages lie in this folder."""
    return Shelf(folder / "snapshots")


def _named(name: str) -> Snapshot | None:
    fields = name.split(".")
    if len(fields) != 4 or not all(field.isdecimal() for field in fields):
        return None
    restarts, rank, step, section = map(int, fields)
    return Snapshot(Rank(rank), Point(step, section), restarts)
