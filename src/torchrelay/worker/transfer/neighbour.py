"""Neighbour: the state of a worker on the same machine is read straight out of its memory, by process_vm_readv(2).

That is one copy where a connection makes two, and several threads make it. Who asks for a state says on which machine
it is. If that is the source's own, it tells where its tensors lie and what stands at one place of its memory; if the
reader finds the same there, it reads the rest, and if not, the bytes come over the connection as ever.

The connection stays meanwhile: both ends show signs of life over it, the source withdraws by cutting it, and gives its
digest only when the reader has said that it is done. So a digest that matches says that nothing was written meanwhile.
TORCHRELAY_NEIGHBOURS=0 turns it off.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from torchrelay.worker.tensors import memory
from torchrelay.worker.tensors.digest import Digest
from torchrelay.worker.transfer.stream import Filled, Piece, Stream, StreamBroken, View, cut_views

_PLACE = struct.Struct("@QQ")  # address and bytes
PLACE_BYTES = _PLACE.size
NONCE_BYTES = 16
ALIVE, DONE = b".", b"!"
SIGN_S = 0.05  # between two signs of life
MAX_PLACES = 1 << 20
MOST_VECTORS = 64  # of one system call; the kernel takes up to 1024
MOST_THREADS = 4  # that read: together they are faster than one thread that adds to the digest
PIECE = 8 << 20  # bytes that one thread reads; smaller ones take longer, as threads wait for one another more often
AHEAD = 4  # pieces that are read before they are needed
_PR_SET_PTRACER = 0x59616D61
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_libc = ctypes.CDLL(None, use_errno=True)
if hasattr(_libc, "process_vm_readv"):
    _libc.process_vm_readv.restype = ctypes.c_ssize_t


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def machine_id() -> str:
    """By which workers find out that they see the same processes; empty if that cannot be told, or is not wanted."""
    if os.environ.get("TORCHRELAY_NEIGHBOURS") == "0" or not hasattr(_libc, "process_vm_readv"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def threads() -> int:
    """How many threads read at once."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


# ---------------------------------------------------------------- the source


class Shown:
    """Where tensors lie, and a nonce beside them by which a reader knows that it looks at the right process."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._nonce = ctypes.create_string_buffer(os.urandom(NONCE_BYTES), NONCE_BYTES)
        self._tensors = list(tensors)
        places = [memory.places(tensor) for tensor in self._tensors]
        self._places = [place for found in places if found is not None for place in found]
        # Else something of it must be copied to be sent, or it lies in too many pieces to tell.
        self.whole = all(found is not None for found in places) and len(self._places) <= MAX_PLACES

    def __len__(self) -> int:
        return len(self._places)

    def told(self) -> bytes:
        """The nonce, then where it lies, then where the tensors lie: `PLACE_BYTES` each."""
        places = [(ctypes.addressof(self._nonce), NONCE_BYTES), *self._places]
        return self._nonce.raw + b"".join(_PLACE.pack(*place) for place in places)

    def watch(self, stream: Stream, digest: Digest) -> None:
        """Add the tensors to the digest while they are read, and return when the reader is done with them."""
        signs = _Signs(stream)
        for tensor in self._tensors:
            for view in memory.outgoing(tensor):
                for piece in _pieces(view):
                    digest.add(piece)
                    signs.show()
        _await_done(stream)
        stream.send_bytes(DONE)


def permit_reader(pid: int) -> None:
    """Let this process read our memory, where the kernel wants that to be said (Yama's ptrace_scope 1); 0: nobody.

    Only there, as it takes the place of what the script may have permitted to others.
    """
    try:
        restricted = _YAMA.read_text().strip() == "1"
    except OSError:
        return
    if restricted:
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


# ---------------------------------------------------------------- the reader


class Reader:
    """Reads what a source has shown."""

    def __init__(self, stream: Stream, pid: int, told: bytes | bytearray) -> None:
        self._signs = _Signs(stream)
        self._pid = pid
        self._nonce = bytes(told[:NONCE_BYTES])
        self._places = deque(_PLACE.unpack_from(told, at) for at in range(NONCE_BYTES, len(told), PLACE_BYTES))
        self._at = 0  # in the place that is being read

    def may(self) -> bool:
        """Whether we are allowed to read, and it is the right process. To be asked once, before anything is read."""
        found = bytearray(NONCE_BYTES)
        try:
            self._read(memoryview(found), self._aim(NONCE_BYTES))
        except StreamBroken:
            return False
        return bytes(found) == self._nonce

    def receive_views(
        self, views: Iterable[tuple[View, Filled]], digest: Digest, progress: Callable[[int], None]
    ) -> None:
        """Fill memory in order, add what it holds then to the digest, and tell how many bytes came.

        While a piece is added, other threads read the next ones. None of them reads any more when this returns, or
        raises `StreamBroken`.
        """
        waiting: deque[tuple[Piece, Future[None]]] = deque()

        def land() -> None:
            piece, done = waiting.popleft()
            done.result()
            progress(piece.land(digest))
            self._signs.show()

        with ThreadPoolExecutor(threads(), "reader") as pool:
            for piece in cut_views(views, PIECE):
                aimed = self._aim(len(piece.memory))
                try:
                    waiting.append((piece, pool.submit(self._read, piece.memory, aimed)))
                except RuntimeError as error:
                    raise StreamBroken(f"nothing can be read: {error}") from error  # no thread can be started
                if len(waiting) > AHEAD:
                    land()
            while waiting:
                land()

    def _aim(self, size: int) -> list[_Vector]:
        """The places of the next bytes, so many. Raises `StreamBroken`."""
        found = []
        while size:
            if not self._places:
                raise StreamBroken("it has shown less than it serves")
            base, length = self._places[0]
            count = min(size, length - self._at)
            found.append(_Vector(base + self._at, count))
            size, self._at = size - count, self._at + count
            if self._at >= length:
                self._places.popleft()
                self._at = 0
        return found

    def _read(self, view: View, origin: list[_Vector]) -> None:
        """Fill this memory with what lies there. Raises `StreamBroken`."""
        for start in range(0, len(origin), MOST_VECTORS):
            batch = origin[start : start + MOST_VECTORS]
            size = sum(vector.length for vector in batch)
            target = _Vector(ctypes.addressof(ctypes.c_char.from_buffer(view)), size)
            count: int = _libc.process_vm_readv(
                ctypes.c_int(self._pid),
                ctypes.byref(target),
                ctypes.c_ulong(1),
                (_Vector * len(batch))(*batch),
                ctypes.c_ulong(len(batch)),
                ctypes.c_ulong(0),
            )
            if count != size:
                why = os.strerror(ctypes.get_errno()) if count < 0 else f"{max(count, 0)} bytes of {size}"
                raise StreamBroken(f"its memory cannot be read: {why}")
            view = view[size:]

    def end(self, stream: Stream) -> None:
        """Say that all is read, and wait until the source has found nothing wrong with that."""
        stream.send_bytes(DONE)
        _await_done(stream)


class _Signs:
    """Signs of life, now and then. To show one fails when the connection was cut."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._last_s = time.monotonic()

    def show(self) -> None:
        now = time.monotonic()
        if now - self._last_s >= SIGN_S:
            self._last_s = now
            self._stream.send_bytes(ALIVE)


def _await_done(stream: Stream) -> None:
    while (sign := bytes(stream.receive_bytes(1))) != DONE:
        if sign != ALIVE:
            raise StreamBroken("it says something else than that it is alive or done")


def _pieces(view: View) -> Iterator[View]:
    for start in range(0, len(view), 1 << 24):
        yield view[start : start + (1 << 24)]
