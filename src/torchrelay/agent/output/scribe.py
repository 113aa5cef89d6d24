"""Scribe: a process beside the forkserver that brings what workers print into their logs.

Workers, their children, and whatever these start print into pipes: a print waits for nobody but the scribe, and a full
disk is no error of theirs. The forkserver keeps the pipes, so that one scribe can go on where another was killed.

    worker -> pipe -> scribe -> logs/<worker>.log, and from its mark on logs/rank-<r>.log
"""

from __future__ import annotations

import fcntl
import mmap
import os
import selectors
import signal
import socket
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from torchrelay.wire.files.bounded import BoundedLog, Bounds

PIECE = 1 << 20
LONGEST_RANK = 12  # digits, and the end of the line
PAUSE_S = 0.02  # an output that says nothing for so long pauses
AGAIN_S = 0.5
END_S = 2.0  # without a forkserver, for what is still in the pipes, since the last of it was read
MOST_END_S = 12.0  # for all of it
LEFT_OUT = "left-out.json"  # in the node's folder


class Source(Struct, frozen=True):
    """A pipe, as the forkserver tells of it; the descriptor comes with it."""

    worker: str
    key: bytes  # after which the rank follows
    log: str
    rank: int | None = None  # it has been told already


class Named(Struct, frozen=True):
    """A worker has said which rank it is."""

    worker: str
    rank: int


class LeftOut(Struct, frozen=True):
    """What could not be written to a log."""

    log: str
    size: int
    why: str


@dataclass
class Stream:
    """A worker's output, and where it goes."""

    source: Source
    log: BoundedLog
    rest: bytes = b""  # could be the beginning of the mark
    named: bool = False


class Scribe:
    """Serves one forkserver, until that has ended and the pipes are empty. Never raises OSError for a log."""

    def __init__(self, control: socket.socket, busy: mmap.mmap, folder: Path, bounds: Bounds) -> None:
        self._control = control
        self._busy = busy
        self._folder = folder
        self._bounds = bounds
        self._streams: dict[int, Stream] = {}
        self._logs: dict[Path, BoundedLog] = {}
        self._selector = selectors.DefaultSelector()
        self._until: float | None = None
        self._last = 0.0
        self._told: tuple[LeftOut, ...] = ()
        self._told_s = 0.0  # when it was tried last

    def add(self, descriptor: int, source: Source) -> None:
        path = Path(source.log) if source.rank is None else rank_log(source, source.rank)
        self._streams[descriptor] = Stream(source, self._log(path), named=source.rank is not None)
        self._selector.register(descriptor, selectors.EVENT_READ)

    def run(self) -> None:
        self._selector.register(self._control, selectors.EVENT_READ)
        while self._until is None or (self._streams and time.monotonic() < self._until):
            ready = self._selector.select(self._patience())
            self._busy[0] = 1  # who sees a pipe empty must see this, too, until it is written
            self._busy[1] = (self._busy[1] + bool(ready)) % 256  # who waits for our end sees that we go on
            for key, _ in ready:
                if key.fileobj is self._control:
                    self._hear()
                else:
                    self._read(key.fd)
            if not ready:
                self._settle()
            self._tell()  # before the forkserver may report an end: people are told what is missing right after it
            self._busy[0] = any(log.owes for log in self._logs.values())
        for log in self._logs.values():
            log.settle()
        self._tell(now=True)

    def _patience(self) -> float | None:
        if any(log.owes for log in self._logs.values()):
            return PAUSE_S
        waits = any(log.waits for log in self._logs.values())
        untold = self._left_out() != self._told
        return AGAIN_S if waits or untold or self._until is not None else None

    def _settle(self) -> None:
        for log in self._logs.values():
            log.settle()

    def _hear(self) -> None:
        """Take the pipes that the forkserver hands over; without it, end soon."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, 65536, 1)
        except OSError:
            data, descriptors = b"", []
        if not data:
            self._selector.unregister(self._control)
            self._until = time.monotonic() + END_S
            self._last = time.monotonic() + MOST_END_S
            return
        self.add(descriptors[0], msgspec.msgpack.decode(data, type=Source))

    def _read(self, descriptor: int) -> None:
        stream = self._streams[descriptor]
        data = os.read(descriptor, PIECE)
        if data:
            self._take(stream, data)
            if self._until is not None:
                self._until = min(self._last, time.monotonic() + END_S)
            return
        stream.log.write(stream.rest)
        stream.log.settle()
        self._tell(now=True)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        del self._streams[descriptor]

    def _take(self, stream: Stream, data: bytes) -> None:
        if stream.named:
            stream.log.write(data)
            return
        data = stream.rest + data
        before, mark, after = data.partition(stream.source.key)
        number, end, rest = after.partition(b"\n")
        if mark and (end or len(number) <= LONGEST_RANK):
            stream.rest = b"" if end else mark + after
            if before:
                stream.log.write(before)
            if end:
                self._name(stream, int(number), rest)
            return
        kept = beginning_of(stream.source.key, data)
        stream.rest = data[len(data) - kept :]
        if kept < len(data):
            stream.log.write(data[: len(data) - kept])

    def _name(self, stream: Stream, rank: int, rest: bytes) -> None:
        stream.log.settle()
        # Said first: whoever goes on in our place must know it before anything stands in that log.
        try:
            self._control.send(msgspec.msgpack.encode(Named(stream.source.worker, rank)))
        except OSError:
            pass  # the forkserver has ended: nobody will
        stream.log, stream.named = self._log(rank_log(stream.source, rank)), True
        if rest:
            stream.log.write(rest)

    def _log(self, path: Path) -> BoundedLog:
        return self._logs.setdefault(path, BoundedLog(path, self._bounds))

    def _left_out(self) -> tuple[LeftOut, ...]:
        logs = self._logs.values()
        return tuple(LeftOut(log.path.name, log.unwritten, log.why) for log in logs if log.unwritten)

    def _tell(self, *, now: bool = False) -> None:
        """Note in the node's folder what could not be written, for whoever tells people; `now`, or twice a second.

        A folder without room for the note is tried again: what stands there last is what was true last.
        """
        if not now and time.monotonic() - self._told_s < AGAIN_S:
            return
        found = self._left_out()
        if found == self._told:
            return
        self._told_s = time.monotonic()
        draft = self._folder / f".{LEFT_OUT}.{os.getpid()}"
        try:
            draft.write_bytes(msgspec.json.encode(found))
            draft.replace(self._folder / LEFT_OUT)
        except OSError:
            return  # this place is full, too
        self._told = found


def beginning_of(key: bytes, data: bytes) -> int:
    """How many bytes at the end of this could begin the key."""
    return next((size for size in range(min(len(key) - 1, len(data)), 0, -1) if data.endswith(key[:size])), 0)


def rank_log(source: Source, rank: int) -> Path:
    return Path(source.log).with_name(f"rank-{rank}.log")


def read_left_out(folder: Path) -> tuple[LeftOut, ...]:
    """What could not be written by the scribe of a node."""
    try:
        return msgspec.json.decode((folder / LEFT_OUT).read_bytes(), type=tuple[LeftOut, ...])
    except (OSError, msgspec.DecodeError):
        return ()


def become_scribe(control: socket.socket, busy: mmap.mmap, folder: Path, sources: dict[int, Source]) -> None:
    """In a child of the forkserver: serve it to its end. Never returns."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.setsid()
        scribe = Scribe(control, busy, folder, Bounds.of(os.environ))
        for descriptor, source in sources.items():
            scribe.add(descriptor, source)
        scribe.run()
    except BaseException:  # noqa: BLE001  the top of the process: the forkserver starts another
        traceback.print_exc()
    finally:
        os._exit(0)


def enlarge(descriptor: int) -> None:
    """A pipe that holds more, so that bursts wait for nobody."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIECE)
    except OSError:
        pass  # the user has too many
