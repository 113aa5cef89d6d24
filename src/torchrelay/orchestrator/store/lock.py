"""Lock: one orchestrator at a time writes a journal, where the file system has locks."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

# What a file system says that has no locks.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class Locked(Exception):
    """The lock cannot be had: why, and what to do."""


def is_written(path: Path) -> bool:
    """Whether an orchestrator is writing this journal now."""
    try:
        descriptor = os.open(path.with_name(path.name + ".lock"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def take_lock(path: Path, *, take_over: bool) -> int:
    """The descriptor that holds the lock. The kernel lets go of it when the process ends. Raises `Locked`.

    Where there are no locks the lease alone keeps two orchestrators apart.
    """
    lock = path.with_name(path.name + ".lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Locked(f"cannot open {lock}: {error.strerror}; choose a folder that you may write to") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if take_over:
            return descriptor
        owner = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        message = f"{path} is in use by another orchestrator (pid {owner})"
        raise Locked(f"{message}: end that one first, or use another --run-dir") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(descriptor)
            raise Locked(f"cannot lock {lock}: {error.strerror}; use another --run-dir") from error
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
