"""Procfs: what the kernel tells of the processes of this machine, as proc(5) has it."""

from __future__ import annotations

import os
import pwd
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

PAGE = 4096
TICKS = os.sysconf("SC_CLK_TCK")  # in a second
ENDED = ("Z", "X")  # states of a process that has ended and is not reaped yet


class ProcessGone(LookupError):
    """There is no such process any more."""


@dataclass(frozen=True, slots=True)
class Stat:
    """A line of /proc/<pid>/stat, as far as we need it."""

    state: str  # R, S, D, T, t, Z, ...
    parent: int
    session: int
    cpu_ticks: int  # user and system, waited-for children included
    started: int  # ticks since boot; with the pid it names a process for ever


class Process(NamedTuple):
    """A process, told apart from a later one with the same id by when it was started (ticks since boot)."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process that has this id now. Raises `ProcessGone`."""
        return cls(pid, read_stat(pid).started)

    def send(self, number: int) -> None:
        """Send a signal. Raises `ProcessGone`, and `PermissionError` if it is another user's."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError as error:
            raise ProcessGone(self.pid) from error
        try:
            # Compared after the handle is held: from here on the id cannot come to mean another process.
            if Process.of(self.pid) != self:
                raise ProcessGone(self.pid)
            signal.pidfd_send_signal(handle, number)
        except ProcessLookupError as error:
            raise ProcessGone(self.pid) from error
        finally:
            os.close(handle)


def read_proc(path: str) -> str | None:
    """What the kernel tells in a small file of a process; None if it has gone, or is hidden as another user's.

    Done several times a second for each worker, so with four calls of the kernel, where a file object makes nine.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return b"".join(iter(lambda: os.read(descriptor, PAGE), b"")).decode(errors="replace")
        finally:
            os.close(descriptor)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def read_stat(pid: int, *, main_thread: bool = False) -> Stat:
    """Of a process, or of its main thread alone. Raises `ProcessGone`."""
    text = read_proc(f"/proc/{pid}/task/{pid}/stat" if main_thread else f"/proc/{pid}/stat")
    if text is None:
        raise ProcessGone(pid)
    rest = text[text.rindex(")") + 2 :].split()  # the name before may hold blanks and brackets
    ticks = sum(int(part) for part in rest[11:15])
    return Stat(rest[0], int(rest[1]), int(rest[3]), ticks, int(rest[19]))


def is_alive(pid: int) -> bool:
    """Whether it has not ended; one that waits to be reaped has."""
    try:
        return read_stat(pid).state not in ENDED
    except ProcessGone:
        return False


def command_line(pid: int) -> list[str]:
    """Its words; none if it has ended. Raises `ProcessGone`."""
    text = read_proc(f"/proc/{pid}/cmdline")
    if text is None:
        raise ProcessGone(pid)
    return text.removesuffix("\0").split("\0") if text else []


def describe(pid: int) -> str:
    """Its name and its user, as far as they can be seen."""
    name, status = read_proc(f"/proc/{pid}/comm"), read_proc(f"/proc/{pid}/status")
    if name is None or status is None:
        return f"process {pid}"
    uid = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Uid:"))
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:  # a container whose user has no name
        user = str(uid)
    return f"process {pid} ({name.strip()}, of user {user})"


def started_at(pid: int) -> float:
    """When it was started, in seconds since 1970 by the clock of now. Raises `ProcessGone`."""
    boot = next(line for line in (read_proc("/proc/stat") or "").splitlines() if line.startswith("btime "))
    return int(boot.split()[1]) + read_stat(pid).started / TICKS


# ---------------------------------------------------------------- all of them


def all_processes() -> Iterator[tuple[int, Stat]]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                yield int(name), read_stat(int(name))
            except ProcessGone:
                continue


def children_of(parent: int) -> Iterator[int]:
    return (pid for pid, stat in all_processes() if stat.parent == parent)


def living_below(pid: int) -> list[Process]:
    """The processes below this one that have not ended, parents first."""
    left, found, parents = dict(all_processes()), list[Process](), {pid}
    while parents:
        below = {child: stat for child, stat in left.items() if stat.parent in parents}
        found += [Process(child, stat.started) for child, stat in below.items() if stat.state not in ENDED]
        parents = set(below)
        for child in below:  # nothing leads back: an id may have been given to another process while we read
            del left[child]
    return found
