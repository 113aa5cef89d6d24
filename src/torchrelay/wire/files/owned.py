"""Owned: small files in folders where others may write, too. What is not a plain file of ours is not even looked into.

A stranger could put anything there under a name that we look for: a pipe that never answers, or a link to a file that
only we can read.
"""

from __future__ import annotations

import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

MAX_TEXT = 1_000  # bytes read of a file
OTHERS = 0o077
OTHERS_WRITE = 0o022


class Foreign(Exception):
    """What lies there is not a plain file of ours, or of root: what it is instead."""


@dataclass(frozen=True, slots=True)
class Owned:
    """The beginning of a file, and whose it is."""

    text: str
    uid: int
    changed_s: float  # since 1970


def read_owned(path: Path, most: int = MAX_TEXT) -> Owned:
    """Its first bytes. Raises FileNotFoundError, `Foreign`, or another OSError: it is ours, and cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError:
        check(os.lstat(path))
        raise
    try:
        found = os.fstat(descriptor)  # of what is open, not of what the path may name by now
        check(found)
        return Owned(
            os.read(descriptor, min(most, found.st_size)).decode("utf-8", "replace"), found.st_uid, found.st_mtime
        )
    finally:
        os.close(descriptor)


def check(found: os.stat_result) -> None:
    """Raises `Foreign`."""
    if stat.S_ISLNK(found.st_mode):
        raise Foreign("it is a link")
    if not stat.S_ISREG(found.st_mode):
        raise Foreign("it is no ordinary file")
    if found.st_uid not in (os.getuid(), 0):
        raise Foreign(f"it belongs to another user (uid {found.st_uid})")
    if found.st_nlink > 1:  # a stranger cannot write to a file of ours, but may give it a second name
        raise Foreign("it is a second name of another file")


def open_to_others(folder: Path) -> str:
    """What is wrong with a folder that is to hold secrets, and what to do; empty if nobody else gets in.

    One of ours that is empty, and in which nobody else may write, is closed. Raises OSError.
    """
    found = os.stat(folder)
    if found.st_uid != os.geteuid():
        return (
            f"{folder} belongs to another user (uid {found.st_uid}), who could change what is in it: use one of yours"
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & OTHERS and not mode & OTHERS_WRITE and not os.listdir(folder):
        os.chmod(folder, mode & ~OTHERS)
    elif mode & OTHERS:
        return f"{folder} is open to others (mode {mode:o}): use a new folder, or look through it and `chmod 700` it"
    return ""


def write_owned(path: Path, text: str) -> None:
    """Write it whole or not at all, in place of whatever lies there. Raises OSError."""
    draft = path.with_name(f".{path.name.lstrip('.')}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(draft, flags, 0o644)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
