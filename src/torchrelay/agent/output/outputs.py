"""Outputs: the forkserver's side of its scribe: pipes for workers, and another scribe if one is killed."""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import secrets
import signal
import socket
import termios
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from torchrelay.agent.output.scribe import Named, Source, become_scribe, enlarge
from torchrelay.protocol.messages.ids import WorkerId

SETTLE_S = 0.25  # that the report of an end may wait for what the worker printed last
END_S = 3.0
AGAIN_S = 0.05  # before another scribe is tried, when there was no room for one


class Outputs:
    """The pipes of the workers that run. Single-threaded.

    leave   called in the child that becomes the scribe: closes all that is the forkserver's
    pid     of the scribe; 0 as long as there is no room for one: then `control` says that it has ended
    """

    def __init__(self, folder: Path, leave: Callable[[], None]) -> None:
        self._folder = folder
        self._leave = leave
        self._pipes: dict[WorkerId, tuple[int, Source]] = {}
        self._busy = mmap.mmap(-1, mmap.PAGESIZE)
        self.pid = 0
        self.control = self._start()

    def _start(self) -> socket.socket:
        control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        try:
            child = os.fork()
        except OSError:  # too many processes, or too little memory, as when the last one was killed: no worker's fault
            self.pid = 0
            time.sleep(AGAIN_S)
            other.close()
            return control
        self.pid = child
        if child == 0:
            control.close()
            self._leave()
            become_scribe(other, self._busy, self._folder, dict(self._pipes.values()))
        other.close()
        return control

    def open(self, worker: WorkerId, log: str) -> tuple[int, bytes]:
        """A pipe for a worker: the end to write to, and the key of its mark. Raises OSError."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        enlarge(writing)
        source = Source(worker, b"\0torchrelay " + secrets.token_hex(16).encode() + b" rank ", log)
        self._pipes[worker] = reading, source
        try:
            socket.send_fds(self.control, [msgspec.msgpack.encode(source)], [reading])
        except OSError:
            pass  # the scribe has ended: the next one finds it among the pipes
        return writing, source.key

    def hear(self) -> bool:
        """Listen to the scribe. True if it has ended and another one was started, or tried: `control` is a new one."""
        try:
            data = self.control.recv(65536)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.control.close()
            self.control = self._start()
            return True
        named = msgspec.msgpack.decode(data, type=Named)
        if known := self._pipes.get(WorkerId(named.worker)):
            self._pipes[WorkerId(named.worker)] = known[0], msgspec.structs.replace(known[1], rank=named.rank)
        return False

    def settle(self, worker: WorkerId) -> None:
        """It has ended: wait a moment until all that it printed is in its log."""
        pipe = self._pipes.pop(worker, None)
        if pipe is None:
            return
        until = time.monotonic() + SETTLE_S
        while (waiting(pipe[0]) or self._busy[0]) and time.monotonic() < until:
            time.sleep(0.0005)
        os.close(pipe[0])

    def close(self) -> None:
        """No worker runs any more: the scribe writes what is left, and ends."""
        self.control.close()
        for reading, _ in self._pipes.values():
            os.close(reading)
        until = time.monotonic() + END_S
        try:
            while self.pid and os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > until:
                    os.kill(self.pid, signal.SIGKILL)
                time.sleep(0.001)
        except (ChildProcessError, ProcessLookupError):
            pass

    def abandon(self) -> None:
        """In a forked worker: these are the forkserver's."""
        self.control.close()
        for reading, _ in self._pipes.values():
            os.close(reading)


def waiting(descriptor: int) -> int:
    """Bytes in a pipe."""
    count = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, count)
    return count[0]
