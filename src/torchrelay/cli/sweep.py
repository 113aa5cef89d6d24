"""Sweep: at the end of a run nothing that it started is left, neither processes nor files in memory."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

import psutil

MEMORY = Path("/dev/shm")
PREFIX = "torchrelay-run-"
LOCK = "lock"


# ---------------------------------------------------------------- processes


def descendants() -> list[psutil.Process]:
    """All living processes below this one. With `adopt_orphans` none can hide behind a parent that has ended."""
    return [child for child in psutil.Process().children(recursive=True) if is_alive(child)]


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def sweep(deadline_s: float = 10.0) -> int:
    """SIGKILL everything below this process until nothing lives there. Returns how many there were.

    Zombies are left to whoever waits for them.
    """
    killed: set[int] = set()
    until = time.monotonic() + deadline_s
    while (left := descendants()) and time.monotonic() < until:
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
            killed.add(process.pid)
        time.sleep(0.005)
    return len(killed)


# ---------------------------------------------------------------- the folder for sockets and pages


class PrivateFolder:
    """A 0700 folder of a run's own: in memory if that can be had. Locked as long as the run lives."""

    def __init__(self, memory: Path = MEMORY) -> None:
        clear_leftovers(memory)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=memory))
        except OSError:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def clear_leftovers(memory: Path) -> None:
    """Remove the folders of runs that were killed: what lies in them takes memory."""
    for folder in memory.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or not whole yet
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue  # its run lives
        finally:
            os.close(lock)
