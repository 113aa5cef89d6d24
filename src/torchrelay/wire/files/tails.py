"""Tails: follows the log files of a run while they grow. One file per rank: `rank-<r>.log`, all its holders in turn."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from torchrelay.protocol.messages.ids import Rank

RANK_LOG = re.compile(r"rank-(\d+)\.log")
# Read at most so much of one file before the others have their turn, and take so long a line as one.
CHUNK = 1 << 20
BEHIND = 4 << 20  # bytes: a reader that is so far behind goes on with the last chunk, and says how much it has left out
LISTED_S = 1.0  # after which a folder is listed again, also if it does not seem to have changed


@dataclass
class Tail:
    """One file, and how far it has been read. When it is renamed, as logs are that have grown, the next one follows."""

    path: Path
    offset: int = 0
    rest: bytes = b""  # a line that has not ended yet
    file: int = -1
    chunk: int = CHUNK
    behind: int = BEHIND

    def read(self, last: bool = False) -> list[str]:
        """The lines that were completed since; with `last` all of them, and also one without an end."""
        found: list[str] = []
        while self._open():
            before = self.offset
            found += self._read_on()
            turned = self._turned()
            if turned:
                self.close()
            elif not last or self.offset == before:
                break
        if self.rest and (last or len(self.rest) > self.chunk):
            found.append(text_of(self.rest))
            self.rest = b""
        return found

    def position(self) -> tuple[int, int]:
        """The file's number, and its first byte that was not told. (0, 0): there is no file yet."""
        return (os.fstat(self.file).st_ino, self.offset - len(self.rest)) if self.file >= 0 else (0, 0)

    def seek(self, file: int, offset: int) -> None:
        """Go on at a position. The file may have been renamed since; if it is gone, begin with the one that is there.

        Raises OSError if it cannot be opened.
        """
        self.close()
        self.rest = b""
        for path in (self.path, self.path.with_name(f"{self.path.name}.1")):
            try:
                self.file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            if os.fstat(self.file).st_ino == file:
                self.offset = offset
                return
            self.close()

    def close(self) -> None:
        """What comes next is in another file."""
        if self.file >= 0:
            os.close(self.file)
        self.file, self.offset = -1, 0

    def _open(self) -> bool:
        if self.file < 0:
            try:
                self.file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
        return True

    def _read_on(self) -> list[str]:
        size, left_out = os.fstat(self.file).st_size, 0
        if size < self.offset:  # cut short: somebody emptied it
            self.offset, self.rest = 0, b""
        if size - self.offset > self.behind:
            left_out = size - self.chunk - self.offset + len(self.rest)
            self.offset, self.rest = size - self.chunk, b""
        chunk = os.pread(self.file, self.chunk, self.offset)
        self.offset += len(chunk)
        if left_out:
            part, _, chunk = chunk.partition(b"\n")
            left_out += len(part) + 1
        *whole, self.rest = (self.rest + chunk).split(b"\n")
        told = [f"torchrelay: {left_out:,} bytes are left out here, see {self.path}"] if left_out else []
        return told + [text_of(line) for line in whole]

    def _turned(self) -> bool:
        """Whether all of this file has been read, and another one has its name."""
        known = os.fstat(self.file)
        if known.st_size > self.offset:
            return False
        try:
            now = self.path.stat()
        except FileNotFoundError:
            return False
        return (now.st_dev, now.st_ino) != (known.st_dev, known.st_ino)


def text_of(line: bytes) -> str:
    """A line as it would stand on a terminal in the end: of progress bars, what was drawn last."""
    return line.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode("utf-8", "replace")


def plain(line: str) -> str:
    """A line that no terminal obeys: control characters become question marks."""
    if line.isprintable():
        return line
    return "".join(letter if letter.isprintable() or letter == "\t" else "?" for letter in line)


class LogTail:
    """Follows every `rank-<r>.log` in a folder, from `from_start` or from what is there now."""

    def __init__(self, folder: Path, *, from_start: bool = True) -> None:
        self._folder = folder
        self._tails: dict[Rank, Tail] = {}
        self._listed: tuple[int, float] | None = None  # when the folder had changed last, and when we listed it
        self._stopped = asyncio.Event()
        if not from_start:
            for rank, path in rank_logs(folder).items():
                self._tails[rank] = Tail(path, offset=path.stat().st_size)

    def read(self, last: bool = False) -> list[tuple[Rank, str]]:
        """All lines since the last call, rank by rank; with `last` also unfinished ones."""
        self._find_new(last)
        return [(rank, line) for rank in sorted(self._tails) for line in self._tails[rank].read(last)]

    def _find_new(self, last: bool) -> None:
        """Files that have come since. Most looks find a folder that has not changed, and need not list it.

        Once in a while it is listed all the same: not every file system says that it has changed, or at once.
        """
        now_s = time.monotonic()
        try:
            changed_ns = self._folder.stat().st_mtime_ns
        except FileNotFoundError:
            return
        if not last and self._listed is not None:
            before_ns, listed_s = self._listed
            if changed_ns == before_ns and now_s - listed_s < LISTED_S:
                return
        self._listed = changed_ns, now_s
        for rank, path in rank_logs(self._folder).items():
            self._tails.setdefault(rank, Tail(path))

    async def follow(self, every_s: float = 0.1) -> AsyncIterator[tuple[Rank, str]]:
        """Lines as they are written, until `stop()`; then what is left."""
        while not self._stopped.is_set():
            for found in self.read():
                yield found
            try:
                async with asyncio.timeout(every_s):
                    await self._stopped.wait()
            except TimeoutError:
                pass
        while found_last := self.read():
            for found in found_last:
                yield found
        for found in self.read(last=True):
            yield found

    def stop(self) -> None:
        """Nothing more will be written."""
        self._stopped.set()


def rank_logs(folder: Path) -> dict[Rank, Path]:
    """The rank's log files that are there."""
    matches = ((RANK_LOG.fullmatch(path.name), path) for path in folder.iterdir()) if folder.is_dir() else ()
    return {Rank(int(match[1])): path for match, path in matches if match}


def last_lines(path: Path, count: int = 20) -> list[str]:
    """The last lines of a log; nothing if there is no such file. For what a worker said before it had a rank."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - (64 << 10)))
            return [text_of(line) for line in file.read().rstrip(b"\n").split(b"\n")[-count:]]
    except FileNotFoundError:
        return []
