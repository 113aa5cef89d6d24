"""Processes as tests see them: by id and start, with what the kernel tells of them."""

from __future__ import annotations

import signal
from collections.abc import Iterator

from torchrelay.wire.files.procfs import (
    Process,
    ProcessGone,
    all_processes,
    command_line,
    is_alive,
    read_proc,
    read_stat,
)


class Seen:
    """A process that is there, or was."""

    def __init__(self, pid: int) -> None:
        """Raises `ProcessGone`."""
        self.process, self.pid = Process.of(pid), pid

    def send_signal(self, number: int) -> None:
        """Raises `ProcessGone`."""
        self.process.send(number)

    def kill(self) -> None:
        """Raises `ProcessGone`."""
        self.send_signal(signal.SIGKILL)

    def is_alive(self) -> bool:
        """Whether it is still this process, and has not ended."""
        try:
            return is_alive(self.pid) and Process.of(self.pid) == self.process
        except ProcessGone:
            return False

    def words(self) -> list[str]:
        """Its command line; none if it has ended."""
        try:
            return command_line(self.pid)
        except ProcessGone:
            return []

    def variables(self) -> dict[str, str]:
        """Its environment as it was started with; none if it has ended or is another user's."""
        pairs = (line.partition("=") for line in (read_proc(f"/proc/{self.pid}/environ") or "").split("\0"))
        return {name: value for name, _, value in pairs}


def exists(pid: int) -> bool:
    """Whether there is such a process, be it one that waits to be reaped."""
    return read_proc(f"/proc/{pid}/stat") is not None


def is_stopped(pid: int) -> bool:
    return read_stat(pid).state == "T"


def all_seen() -> Iterator[Seen]:
    for pid, _ in all_processes():
        try:
            yield Seen(pid)
        except ProcessGone:
            continue
