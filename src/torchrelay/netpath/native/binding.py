"""The calls of netpath.h for Python: comms, listeners, requests, the machine's paths.

Who waits lets other threads run, waits for a slice of time, so that signals are heard, and comes back at once when the
comm is aborted. A request must not be asked after its comm was closed: whoever waits for requests closes.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from dataclasses import dataclass

from torchrelay.netpath.native.library import Library, load

HANDLE_BYTES = 128
MAX_PATHS = 4
MAX_REQUESTS = 64  # of a comm under way
SLICE_MS = 100  # between two looks at signals
BRIEF_BYTES = 16 << 10  # a send of more copies for so long that other threads should run meanwhile
_TEXT = 64

_pointer = ctypes.c_void_p


class NetError(RuntimeError):
    """A call of the library has failed. `code` is the library's number, as NCCL counts; `peer` the rank, if known."""

    def __init__(self, code: int, text: str, peer: int | None = None) -> None:
        super().__init__(text)
        self.code = code
        self.peer = peer


SYSTEM, INTERNAL, INVALID, REMOTE = 2, 3, 5, 6


def _check(library: Library, code: int) -> None:
    if code:
        raise NetError(code, library.error())


# ---------------------------------------------------------------- the engine of this process


class _Engine:
    """Started by the first who needs it; ends with the process, when nobody uses it any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = 0

    def start(self) -> Library:
        """The library, with its engine running in this process. Raises `NotBuilt` and `NetError`."""
        library = load()
        with self._lock:
            if self._process != os.getpid():
                _check(library, library.free.np_start(None))
                if self._process == 0:
                    atexit.register(self._stop)
                self._process = os.getpid()
        return library

    def _stop(self) -> None:
        if self._process == os.getpid():
            self._process = 0
            load().free.np_stop()


_engine = _Engine()


def start() -> Library:
    """The library, with its engine running in this process until it ends. Raises `NotBuilt` and `NetError`."""
    return _engine.start()


# ---------------------------------------------------------------- requests and comms


class Request:
    """A message that is under way."""

    __slots__ = ("_done", "_library", "_pointer", "_size", "size")

    def __init__(self, library: Library, pointer: int) -> None:
        self._library = library
        self._pointer = pointer
        self._done = ctypes.c_int()
        self._size = ctypes.c_size_t()
        self.size = -1  # bytes of the message, when it is done

    def done(self) -> bool:
        """Whether it has got through. Raises `NetError` if it never will."""
        if self.size < 0:
            _check(self._library, self._library.brief.np_test(self._pointer, self._done, self._size))
            self._take()
        return self.size >= 0

    def wait(self, until: float) -> bool:
        """Wait for a while until it has got through, to `until` (time.monotonic) at most. Returns whether it has.

        Raises `NetError` if it never will, at once when the comm is aborted.
        """
        if self.size < 0:
            left_ms = int((until - time.monotonic()) * 1000) + 1
            code = self._library.free.np_wait(self._pointer, max(0, min(SLICE_MS, left_ms)), self._done, self._size)
            _check(self._library, code)
            self._take()
        return self.size >= 0

    def _take(self) -> None:
        if self._done.value:
            self.size = self._size.value


class Comm:
    """One direction between two processes: messages in order, each exactly once."""

    __slots__ = ("_library", "_pointer")

    def __init__(self, library: Library, pointer: int) -> None:
        self._library = library
        self._pointer: int | None = pointer

    def isend(self, address: int, size: int) -> Request | None:
        """Send `size` bytes of memory, which must stay as it is until the request is done.

        None if `MAX_REQUESTS` are under way. Raises `NetError`.
        """
        calls = self._library.brief if size <= BRIEF_BYTES else self._library.free
        made = _pointer()
        _check(self._library, calls.np_isend(self._pointer, address, size, made))
        return None if made.value is None else Request(self._library, made.value)

    def irecv(self, address: int, size: int) -> Request | None:
        """Take in the next message, of `size` bytes at most. None if `MAX_REQUESTS` are under way.

        Raises `NetError`.
        """
        made = _pointer()
        _check(self._library, self._library.brief.np_irecv(self._pointer, address, size, made))
        return None if made.value is None else Request(self._library, made.value)

    def abort(self) -> None:
        """All its requests fail at once, and those that come. From any thread."""
        if self._pointer is not None:
            self._library.free.np_abort(self._pointer)

    def close(self) -> bool:
        """Drop what is not done: its memory is not touched any more. Returns whether it was open."""
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            self._library.free.np_close(pointer)
        return pointer is not None


class Connecting:
    """A comm to whoever has given a handle, on its way."""

    def __init__(self, handle: bytes, label: int) -> None:
        self._library = start()
        self._handle = ctypes.create_string_buffer(handle, HANDLE_BYTES)  # the library notes in it what it has begun
        self._label = label

    def poll(self) -> Comm | None:
        """The comm, when a path of it is up. Raises `NetError` if the listener is another one, or gone."""
        made = _pointer()
        _check(self._library, self._library.free.np_connect(self._handle, self._label, made))
        return None if made.value is None else Comm(self._library, made.value)

    def give_up(self) -> None:
        """It is not wanted any more."""
        self._library.free.np_forget(self._handle)


class Listener:
    """Takes comms from whoever has its handle."""

    def __init__(self) -> None:
        self._library = start()
        handle, made = ctypes.create_string_buffer(HANDLE_BYTES), _pointer()
        _check(self._library, self._library.free.np_listen(handle, made))
        self._pointer = made.value
        self.handle = handle.raw

    def accept(self, label: int) -> Comm | None:
        """A comm that somebody has connected, if there is one. Raises `NetError`."""
        assert self._pointer is not None, "it was closed"
        made = _pointer()
        _check(self._library, self._library.free.np_accept(self._pointer, label, made))
        return None if made.value is None else Comm(self._library, made.value)

    def close(self) -> None:
        """Comms that were not accepted are closed."""
        if self._pointer is not None:
            self._library.free.np_close_listener(self._pointer)
            self._pointer = None


# ---------------------------------------------------------------- the machine's paths


class _PathInfo(ctypes.Structure):
    _fields_ = (
        ("interface", ctypes.c_char * _TEXT),
        ("address", ctypes.c_char * _TEXT),
        ("speed_mbps", ctypes.c_uint32),
        ("up", ctypes.c_uint32),
    )


class _PathCounts(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("sent_bytes", "received_bytes", "sent_again", "duplicates")),
        *((name, ctypes.c_uint64) for name in ("downs", "ups", "corrupt")),
        ("live", ctypes.c_uint32),
        ("round_trip", ctypes.c_uint32),
    )


@dataclass(frozen=True)
class Path:
    """A local path: its interface (empty: not known), address, speed in Mb/s (0: not known), and what went over it."""

    interface: str
    address: str
    speed_mbps: int
    up: bool
    sent_bytes: int
    received_bytes: int
    sent_again: int  # chunks that went once more, as their path was lost or silent
    duplicates: int  # chunks that came twice
    downs: int  # connections lost
    ups: int  # connected anew after that
    corrupt: int  # chunks with a wrong checksum
    live: int  # connections
    round_trip_us: int


def paths() -> list[Path]:
    """The paths of this machine that are used, and their counters over all comms of this process."""
    library = start()
    infos, counts = (_PathInfo * MAX_PATHS)(), (_PathCounts * MAX_PATHS)()
    number = library.free.np_paths(infos, MAX_PATHS)
    library.free.np_counts(counts, MAX_PATHS)
    return [
        Path(
            info.interface.decode(),
            info.address.decode(),
            info.speed_mbps,
            bool(info.up),
            count.sent_bytes,
            count.received_bytes,
            count.sent_again,
            count.duplicates,
            count.downs,
            count.ups,
            count.corrupt,
            count.live,
            count.round_trip,
        )
        for info, count in zip(infos[:number], counts[:number], strict=True)
    ]


def inject(faults: str) -> None:
    """Cause faults of our own paths, for tests: "path0:drop@0s+5s"; "" ends them. Raises `NetError` for bad words."""
    library = start()
    _check(library, library.free.np_inject(faults.encode()))
