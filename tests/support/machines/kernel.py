"""Calls of the Linux kernel that Python 3.11 has no words for: namespaces, mounts, and the death of a parent."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 0x1
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000

_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_MOUNT_ATTR_RDONLY = 0x1
_SYS_MOUNT_SETATTR = 442  # the same on all architectures
_MNT_DETACH = 2
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("user_namespace", ctypes.c_uint64),
    )


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Have namespaces of one's own; for `CLONE_NEWPID`, the next child has."""
    _checked(_libc.unshare(flags), "unshare")


def set_namespace(fd: int, kind: int) -> None:
    """This thread enters a namespace; for `CLONE_NEWPID`, its next children do."""
    _checked(_libc.setns(fd, kind), "setns")


def mount(source: str | Path, target: str | Path, kind: str = "", flags: int = 0, options: str = "") -> None:
    """As mount(2)."""
    words = [os.fsencode(word) for word in (source, target, kind)]
    _checked(_libc.mount(*words, ctypes.c_ulong(flags), os.fsencode(options)), f"mount {source} on {target}")


def bind(source: str | Path, target: str | Path) -> None:
    """Show a folder, with all that is mounted below it, or a file at another place too."""
    mount(source, target, flags=MS_BIND | MS_REC)


def make_read_only(target: str | Path) -> None:
    """All mounts from here on downwards can only be read."""
    wish = _MountAttributes(set=_MOUNT_ATTR_RDONLY)
    size = ctypes.c_size_t(ctypes.sizeof(wish))
    numbers = ctypes.c_long(_SYS_MOUNT_SETATTR), ctypes.c_int(_AT_FDCWD), ctypes.c_uint(_AT_RECURSIVE)
    path = ctypes.c_char_p(os.fsencode(target))
    _checked(_libc.syscall(numbers[0], numbers[1], path, numbers[2], ctypes.byref(wish), size), f"{target} read-only")


def change_root(root: Path) -> None:
    """This mount is the root from now on, and the one of before is gone."""
    os.chdir(root)
    _checked(_libc.pivot_root(b".", b"."), f"pivot_root {root}")
    _checked(_libc.umount2(b".", _MNT_DETACH), "umount of the host's root")
    os.chdir("/")


def die_with_parent() -> None:
    """SIGKILL comes when the thread that started this process ends."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def call_oneself(name: str) -> None:
    """What `ps` says of this process."""
    _checked(_libc.prctl(_PR_SET_NAME, os.fsencode(name)[:15], 0, 0, 0), "prctl")


@contextmanager
def in_network_of(pid: int) -> Iterator[None]:
    """This thread, and what it starts meanwhile, is in the network namespace of that process."""
    own = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY)
    try:
        other = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        try:
            set_namespace(other, CLONE_NEWNET)
            yield
        finally:
            set_namespace(own, CLONE_NEWNET)
            os.close(other)
    finally:
        os.close(own)
