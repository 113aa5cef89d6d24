"""Sweep: at the end of a run nothing that it started is left, neither processes nor files in memory."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

from torchrelay.wire.files.procfs import Process, ProcessGone, describe, living_below

MEMORY = Path("/dev/shm")
PREFIX = "torchrelay-run-"
LOCK = "lock"


# ---------------------------------------------------------------- processes


def sweep(deadline_s: float = 10.0) -> list[str]:
    """SIGKILL everything below this process until nothing lives there. Returns what could not be ended, in words.

    Set-uid programs that became another user are not ours to end. Zombies are left to whoever waits for them.
    With `adopt_orphans` no process can hide behind a parent that has ended.
    """
    until = time.monotonic() + deadline_s
    while (left := living_below(os.getpid())) and time.monotonic() < until:
        if not any([killed(process) for process in left]):  # all of them, not up to the first
            break
        time.sleep(0.005)
    return [describe(process.pid) for process in left]


def killed(process: Process) -> bool:
    """Whether it could be told to end, or has ended."""
    try:
        process.send(signal.SIGKILL)
    except PermissionError:
        return False
    except ProcessGone:
        pass
    return True


# ---------------------------------------------------------------- the folder for sockets and pages


class PrivateFolder:
    """A 0700 folder of a run's own: in memory if that can be had. Locked as long as the run lives."""

    def __init__(self, memory: Path = MEMORY) -> None:
        clear_leftovers(memory)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=memory))
        except OSError:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = take(self.path)

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def take(folder: Path) -> int:
    """Make a folder's lock, which is held from the moment at which it is there. Returns its descriptor.

    Whoever clears leftovers looks at folders with a lock only: there must be none that is not held yet.
    """
    draft = folder / f"{LOCK}.draft"
    lock = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    draft.rename(folder / LOCK)
    return lock


def clear_leftovers(memory: Path) -> None:
    """Remove the folders of runs that were killed: what lies in them takes memory.

    Only our own: root could remove those of everybody.
    """
    for folder in memory.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or not whole yet
        try:
            if os.fstat(lock).st_uid != os.getuid():
                continue
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue  # its run lives
        finally:
            os.close(lock)
