"""A process on a machine, as the test holds it: like `subprocess.Popen`, but a child of the machine's init."""

from __future__ import annotations

import array
import json
import os
import select
import signal
import socket
import struct
import subprocess
from collections.abc import Mapping, Sequence
from io import TextIOWrapper
from threading import Lock
from types import TracebackType
from typing import IO, Any

from tests.support.machines.init import START
from tests.support.machines.waiting import wait_readable
from tests.support.patience import longer

Stream = int | IO[Any] | None  # as `subprocess.Popen` takes them


class Process:
    """A process that was started on a machine. It leads a session of its own."""

    def __init__(
        self,
        control: socket.socket,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str = "/root",
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = None,
        stderr: Stream = None,
    ) -> None:
        """Raises `OSError` if it cannot be started: what the machine's init got."""
        self.args = list(command)
        self.returncode: int | None = None
        self._hearing = Lock()
        self.stdin: TextIOWrapper | None = None
        self.stdout: TextIOWrapper | None = None
        self.stderr: TextIOWrapper | None = None
        self._told, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._told.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        request = os.memfd_create("request")
        fds = [told.fileno(), request]
        given: list[int] = []  # to be closed here once init has them
        try:
            self._put_streams(fds, given, (stdin, stdout, stderr))
            os.write(request, json.dumps({"command": self.args, "cwd": cwd, "env": dict(env)}).encode())
            os.lseek(request, 0, os.SEEK_SET)
            control.sendmsg([START], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
        finally:
            for fd in (request, *given):
                os.close(fd)
            told.close()
        try:
            self.pid = self._started()  # as the test sees it
        except BaseException:
            self._told.close()
            self.close()
            raise

    def _put_streams(self, fds: list[int], given: list[int], streams: tuple[Stream, ...]) -> None:
        for number, stream in enumerate(streams):
            if stream == subprocess.PIPE:
                reading, writing = os.pipe()
                mine, theirs = (writing, reading) if number == 0 else (reading, writing)
                given.append(theirs)
                setattr(self, ("stdin", "stdout", "stderr")[number], as_text(mine, writes=number == 0))
                fds.append(theirs)
            elif stream == subprocess.DEVNULL:
                given.append(os.open(os.devnull, os.O_RDWR))
                fds.append(given[-1])
            elif stream == subprocess.STDOUT:
                fds.append(fds[-1])
            else:
                fds.append(number if stream is None else stream if isinstance(stream, int) else stream.fileno())

    def _started(self) -> int:
        wait_readable(self._told.fileno(), f"start of {self.args[0]}")
        words, extra, _, _ = self._told.recvmsg(4096, socket.CMSG_SPACE(struct.calcsize("3i")))
        if not words:
            raise ConnectionResetError(f"the machine ended while {self.args[0]} was started")
        if words.startswith(b"["):
            number, said, name = json.loads(words)
            raise OSError(number, said, name)
        pid: int = struct.unpack("3i", extra[0][2])[0]
        return pid

    def poll(self) -> int | None:
        """Its exit code, if it has ended and init has told so; -9 if the machine was switched off."""
        if self.returncode is None and self._has_told(0):
            self._hear_end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            limit = None if timeout is None else longer(timeout)
            if not self._has_told(limit):
                raise subprocess.TimeoutExpired(self.args, limit or 0)
            self._hear_end()
        assert self.returncode is not None
        return self.returncode

    def _has_told(self, limit: float | None) -> bool:
        try:
            return bool(select.select([self._told], [], [], limit)[0])
        except ValueError:
            return True  # another thread has heard it, and closed the socket

    def _hear_end(self) -> None:
        with self._hearing:
            if self.returncode is not None:
                return
            try:
                words = self._told.recv(64)
            except ConnectionResetError:
                words = b""
            self.returncode = int(words) if words else -signal.SIGKILL
            self._told.close()

    def send_signal(self, number: int) -> None:
        """Nothing happens if it has ended."""
        if self.poll() is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass  # it ended meanwhile

    def signal_group(self, number: int) -> None:
        """To it and to all it started that has not left its process group."""
        if self.poll() is None:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                pass  # it ended meanwhile

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """It is killed if it has not ended, and its streams are closed."""
        self.signal_group(signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Close the test's ends of its streams."""
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass  # it did not read all


def as_text(fd: int, *, writes: bool) -> TextIOWrapper:
    """The test's end of a pipe; what is written goes at the end of each line."""
    return TextIOWrapper(os.fdopen(fd, "wb" if writes else "rb"), encoding="utf-8", line_buffering=writes)
