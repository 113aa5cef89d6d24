"""Folder: where a job's parkings lie. It is its owner's alone, and one run uses it at a time.

    DIR/in-use                    locked by the run that writes there, or goes on from there
    DIR/parked.json               the manifest of the newest whole parking (`manifest`)
    DIR/resumed.json              which run has gone on from it
    DIR/parked-<key>-<n>/         the files of one parking: a snapshot of each rank (`wire.files.snapshot_store`)

A parking is written into a new folder, and the manifest is written last: a folder without one is of no use. The former
parking stays until the manifest of the next is there. On nodes that share nothing each has a DIR of its own.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path

from torchrelay.wire.files.owned import OTHERS

IN_USE = "in-use"
NAME = re.compile(r"parked-[0-9a-f]{16}-\d+")
KEY = re.compile(r"[0-9a-f]{16}")
PROBE = 16 << 20  # bytes that are written to see how fast that is


class NotOurs(OSError):
    """The folder cannot be used for parkings: what is wrong, and what to do."""


class InUse(Exception):
    """Another run uses the folder: which one."""


def new_key() -> str:
    """A name for the parkings of a run that no other run has."""
    return secrets.token_hex(8)


def make_folder(folder: Path) -> None:
    """Make it, for its owner alone; one that is there already must be so. Raises `NotOurs`, or another OSError."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    found = os.stat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise NotOurs(f"{folder} is no folder: choose another one")
    if found.st_uid != os.geteuid():
        raise NotOurs(f"{folder} belongs to another user (uid {found.st_uid}): choose one of yours")
    if stat.S_IMODE(found.st_mode) & OTHERS:
        mode = stat.S_IMODE(found.st_mode)
        raise NotOurs(f"{folder} is open to others (mode {mode:o}): `chmod 700` it, or choose a new one")


def lock(folder: Path, words: str) -> int:
    """Use this folder until the process ends, or the descriptor is closed. `words`: who we are.

    Raises `InUse`, and OSError if it cannot be locked.
    """
    descriptor = os.open(folder / IN_USE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, words.encode(), 0)
    except BlockingIOError as error:
        who = os.pread(descriptor, 500, 0).decode("utf-8", "replace")
        os.close(descriptor)
        raise InUse(who or "another run") from error
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def user_of(key: str) -> str:
    """Who uses a folder, for people, and for those that act for the same run."""
    return f"process {os.getpid()} on {socket.gethostname()}, run {key}"


def clear_parkings(folder: Path, keep: frozenset[str]) -> None:
    """Remove the folders of all parkings but these. To be called by a run that begins, and has locked the folder."""
    for path in parkings_in(folder):
        if path.name not in keep:
            shutil.rmtree(path, ignore_errors=True)


def clear_older(folder: Path, name: str, former: str) -> None:
    """Remove what `name` makes useless: earlier tries of its run; what was written before `former`, if that is here.

    Whoever calls this may be late: a rank that was cut off, an orchestrator that was stopped. What is newer is another
    one's, and may be the whole parking that counts.
    """
    key, number = parts_of(name)
    with suppress(OSError):
        before = (folder / former).stat().st_mtime_ns if former and (folder / former).is_dir() else 0
        for path in parkings_in(folder):
            others_key, others = parts_of(path.name)
            old = others < number if others_key == key else path.stat().st_mtime_ns < before
            if old and path.name not in (name, former):
                shutil.rmtree(path, ignore_errors=True)


def parkings_in(folder: Path) -> list[Path]:
    """The folders of parkings. What is not one of ours is left alone."""
    try:
        return [path for path in folder.iterdir() if NAME.fullmatch(path.name) and is_folder(path)]
    except OSError:
        return []


def is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def parts_of(name: str) -> tuple[str, int]:
    """The key of the run, and the number of the parking in it."""
    _, key, number = name.split("-")
    return key, int(number)


def sync_folder(folder: Path) -> None:
    """What was made, renamed or removed in it is on the disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, and to the disk, for its owner alone. Raises OSError."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(draft, flags, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def bytes_per_s(folder: Path, size: int) -> float:
    """How fast files are written there, by writing one of `size` bytes at most. Raises OSError."""
    size = max(1 << 16, min(size, PROBE))
    probe = folder / f".probe.{secrets.token_hex(8)}"
    data = os.urandom(1 << 16)
    begun = time.monotonic()
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        for _ in range(size // len(data)):
            os.write(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        probe.unlink(missing_ok=True)
    return size // len(data) * len(data) / max(1e-6, time.monotonic() - begun)
