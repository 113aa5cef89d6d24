"""Tokens: the file in which one lies, readable by its owner only. Apart from `trust`: a verb needs no more."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_MAX_TOKEN = 1024  # bytes read of a token file


class TrustError(ValueError):
    """A token file that must not be used as it is; the message says what to do."""


def write_token(path: Path, token: str) -> Path:
    """Write a token where only its owner can read it (0600), whole or not at all. Replaces an older one."""
    return write_private(path, token + "\n")


def write_private(path: Path, text: str) -> Path:
    """Write a file that only its owner can read (0600), whole or not at all. Replaces an older one. Raises OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    # Made with its final mode: there is no moment in which others could open it.
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    return path


def read_token(path: Path) -> str:
    """Read a token. Raises `TrustError`, with the remedy, if there is none or if others can read or have made it."""
    text = read_private(path, _MAX_TOKEN + 1)
    token = text.decode("ascii", "replace").strip()
    if not token or len(text) > _MAX_TOKEN or not token.isprintable() or " " in token:
        raise TrustError(f"{path} does not hold a token. Start the run again, or copy its token file.")
    return token


def read_private(path: Path, most: int) -> bytes:
    """At most so many bytes of a file that nobody else can read or has made. Raises `TrustError`, with the remedy."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise TrustError(f"no token at {path}: {error.strerror}. Name the run's folder or its token file.") from error
    try:
        _check_owner_only(path, os.fstat(descriptor))  # of what is open, not of what the path may name by now
        return os.read(descriptor, most)
    finally:
        os.close(descriptor)


def _check_owner_only(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise TrustError(f"{path} is no ordinary file. Name a file that holds a token.")
    if found.st_uid not in (os.geteuid(), 0):
        raise TrustError(f"{path} belongs to another user (uid {found.st_uid}). Use a token file of your own.")
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise TrustError(f"others can read the token at {path} (mode {mode:o}). Run: chmod 600 {path}")
