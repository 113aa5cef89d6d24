"""Output: what workers print on other machines stands in the run's folder, too, so that the launcher can show it."""

from __future__ import annotations

import os
import re
import stat
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from torchrelay.api.shown import Lines, Place
from torchrelay.protocol.messages.ids import NodeId, Rank
from torchrelay.wire.files.bounded import MB, BoundedLog, Bounds
from torchrelay.wire.files.tails import plain, text_of
from torchrelay.wire.messages.channel import OutputFrame, Printed

RANK = re.compile(r"rank-\d{1,9}\.log")
WORKER = re.compile(r"\.\d{1,9}\.\d{1,19}\.log")  # after the node's name
# Whatever agents say: no more files than these, and the more there are, the smaller: 10 GB altogether, at the most.
MOST_LOGS = 50_000
LARGEST, SMALLEST, TOGETHER = 32 * MB, 0.064 * MB, 1_000 * MB
RATE = 2 * MB


class Output:
    """Logs in one folder. Raises nothing: a full disk here is no reason to part with an agent."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._logs: dict[str, BoundedLog] = {}
        self._printed: defaultdict[NodeId, dict[str, Printed]] = defaultdict(dict)

    def write(self, node: NodeId, frame: OutputFrame) -> bool:
        """Add lines of a node to a log. False if that is no name of a log of its workers, or there are too many."""
        upto = frame.upto
        if not is_of(node, upto.log) or (upto.log not in self._logs and len(self._logs) >= MOST_LOGS):
            return False
        self._printed[node][upto.log] = upto
        log = self._logs.get(upto.log)
        if log is None:
            log = self._logs[upto.log] = BoundedLog(self._folder / upto.log, bounds(len(self._logs) + 1))
        log.write("".join(f"{line}\n" for line in frame.lines).encode("utf-8", "replace"))
        log.settle()
        log.close()  # a job has more ranks than a process may have open files
        return True

    def printed(self, node: NodeId) -> tuple[Printed, ...]:
        """What has come of a node's logs."""
        return tuple(self._printed.get(node, {}).values())


def is_of(node: NodeId, name: str) -> bool:
    """Whether this is the name of a log of a node's workers. Other logs are not theirs to write."""
    return bool(RANK.fullmatch(name) or (name.startswith(node) and WORKER.fullmatch(name.removeprefix(node))))


def bounds(logs: int) -> Bounds:
    """Of the newest of so many logs."""
    return Bounds(size=min(LARGEST, max(SMALLEST, TOGETHER / logs)), rate=RATE)


# ---------------------------------------------------------------- read from elsewhere

LOG = re.compile(r"rank-([0-9]{1,9})\.log(\.1)?")
CHUNK = 64 << 10  # bytes of one log, before the others have their turn
SKIPPED = "torchrelay: lines are left out here: the log was renamed twice before they were read"


class LogFile(NamedTuple):
    """One file of a rank's log, as it is at the moment."""

    number: int
    size: int
    name: str


class Reader:
    """What ranks have printed, from the places given on, each line once. Between two looks it holds no file or line.

    Whoever asks names ranks by number: no other file can be read.
    """

    def __init__(self, folder: Path, places: Iterable[Place] = ()) -> None:
        self._folder = folder
        self._places = {one.rank: (one.file, one.end) for one in places}
        self._last = Rank(-1)  # the rank that was read last

    def read(self, most: int, *, last: bool = False) -> list[Lines]:
        """New lines, about so many bytes, each rank in its turn. `last`: no more is written, unfinished lines count."""
        found = []
        files = self._files()
        ranks = sorted(files)
        at = bisect(ranks, self._last)
        for rank in (*ranks[at:], *ranks[:at]):
            if most <= 0:
                break
            lines = self._look(rank, files[rank], last=last)
            if lines is not None:
                most -= sum(map(len, lines.lines)) + 1
                found.append(lines)
                self._last = rank
        return found

    def left(self) -> int:
        """How many bytes were not read."""
        return sum(
            file.size - begin for rank, files in self._files().items() for file, begin in self._unread(rank, files)
        )

    def _files(self) -> dict[Rank, list[LogFile]]:
        """The files of each rank, older ones first."""
        found: defaultdict[Rank, list[LogFile]] = defaultdict(list)
        with suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                if name := LOG.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        about = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(about.st_mode):
                            found[Rank(int(name[1]))].append(LogFile(about.st_ino, about.st_size, entry.name))
        for files in found.values():
            files.sort(key=lambda file: file.name, reverse=True)
        return found

    def _unread(self, rank: Rank, files: Sequence[LogFile]) -> Iterator[tuple[LogFile, int]]:
        """The files with something new, and from where on."""
        number, end = self._places.get(rank, (0, 0))
        known = [file.number for file in files]
        for file in files[known.index(number) if number in known else 0 :]:
            begin = end if file.number == number and end <= file.size else 0  # one that is shorter was emptied
            if file.size > begin:
                yield file, begin

    def _look(self, rank: Rank, files: Sequence[LogFile], *, last: bool) -> Lines | None:
        for file, begin in self._unread(rank, files):
            data = self._read(file, begin)
            ended = (last or file is not files[-1]) and begin + len(data) >= file.size
            if not ended and len(data) < CHUNK:
                data = data[: data.rfind(b"\n") + 1]
            elif not ended:
                data = data[: data.rfind(b"\n") + 1] or data  # a line that is longer is cut
            if data:
                return self._told(rank, files, Lines(rank, file.number, begin + len(data), lines_in(data)))
        return None

    def _told(self, rank: Rank, files: Sequence[LogFile], lines: Lines) -> Lines:
        number, _ = self._places.get(rank, (0, 0))
        self._places[rank] = lines.file, lines.end
        if number and number not in [file.number for file in files]:
            return Lines(rank, lines.file, lines.end, (SKIPPED, *lines.lines))
        return lines

    def _read(self, file: LogFile, begin: int) -> bytes:
        """Some bytes; none if another file has this name by now: the next look finds it."""
        try:
            descriptor = os.open(self._folder / file.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return b""
        try:
            return os.pread(descriptor, CHUNK, begin) if os.fstat(descriptor).st_ino == file.number else b""
        finally:
            os.close(descriptor)


def lines_in(data: bytes) -> tuple[str, ...]:
    return tuple(plain(text_of(line)) for line in data.removesuffix(b"\n").split(b"\n"))
