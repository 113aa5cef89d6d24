"""Bounded: a log that can harm nobody: bounded in size and rate, and a full disk is no error of whoever prints.

size   the file is renamed to NAME.1 when it has half of what is allowed; that which was there goes
rate   what comes faster for long is left out; the last of it is kept, and written as soon as it pauses
full   the same for as long as nothing can be written
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MB = 1_000_000
SIZE_MB, RATE_MB = 256.0, 16.0
BURST_S = 4.0  # a burst may have as much as is allowed in so long
TAIL = 1 << 16  # bytes: of what is left out, the last are written all the same, when they can be
WRITE_AGAIN_S = 0.1  # before it is tried again to write


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one log, in bytes and bytes per second; 0: none."""

    size: float = SIZE_MB * MB
    rate: float = RATE_MB * MB

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Bounds:
        """TORCHRELAY_LOG_MB and TORCHRELAY_LOG_RATE_MB; what is no number counts as not given."""
        return cls(
            _number(env, "TORCHRELAY_LOG_MB", SIZE_MB) * MB, _number(env, "TORCHRELAY_LOG_RATE_MB", RATE_MB) * MB
        )


def _number(env: Mapping[str, str], name: str, usual: float) -> float:
    try:
        return max(0.0, float(env.get(name, "")))
    except ValueError:
        return usual


class BoundedLog:
    """One log file. Others may write to it as well, rename it or remove it. No method raises OSError."""

    def __init__(self, path: Path, bounds: Bounds) -> None:
        self.path = path
        self.why = ""  # it could not be written to, the last time
        self._bounds = bounds
        self._file = -1
        self._file_id = (0, 0)
        self._credit = bounds.rate * BURST_S
        self._credited_s = time.monotonic()
        self._failed_s = 0.0  # when it could not be written to
        self._missing = 0  # bytes left out since the last that were written; the last of them are in the tail
        self._reason = ""
        self._tail = b""
        self._lost = 0  # bytes that could not be written, and never will be
        self._unwritable = False  # some of what is missing is so for that reason
        self._whole = True  # the last byte written ended a line

    @property
    def owes(self) -> bool:
        """Whether there is something that can be written as soon as the output pauses."""
        return bool(self._missing) and not self._failed_s

    @property
    def waits(self) -> bool:
        """Whether there is something that could not be written."""
        return bool(self._missing and self._failed_s)

    @property
    def unwritten(self) -> int:
        """Bytes that could not be written so far."""
        return self._lost + (self._missing if self._unwritable else 0)

    def write(self, data: bytes) -> None:
        """Write it, or leave it out."""
        now = time.monotonic()
        if self._failed_s and now - self._failed_s < WRITE_AGAIN_S:
            self._leave_out(data, self.why)
        elif self._too_fast(len(data), now):
            self._leave_out(data, f"more than {self._bounds.rate / MB:g} MB in a second, for long")
        else:
            self._put(data)

    def settle(self) -> None:
        """The output pauses: what was left out is said, and the last of it is written."""
        if self._missing:
            self._put(b"")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _too_fast(self, size: int, now: float) -> bool:
        rate = self._bounds.rate
        if not rate:
            return False
        self._credit = min(rate * BURST_S, self._credit + (now - self._credited_s) * rate)
        self._credited_s = now
        # Once it is too fast, so much is left out that it is said once and not for every line.
        if self._credit < max(size, rate if self._missing else 0):
            return True
        self._credit -= size
        return False

    def _leave_out(self, data: bytes, reason: str) -> None:
        self._missing += len(data)
        self._reason = reason
        self._unwritable |= bool(self._failed_s)
        self._tail = (self._tail + data)[-TAIL:]

    def _owed(self) -> bytes:
        """What is to be written first: how much is missing, and the last of it."""
        if not self._missing:
            return b""
        kept = self._tail
        if self._missing > len(kept):
            kept = kept.partition(b"\n")[2] or kept
        missing = self._missing - len(kept)
        if not missing:
            return kept
        head = b"" if self._whole else b"\n"
        return head + f"torchrelay: {missing:,} bytes are left out here: {self._reason}\n".encode() + kept

    def _put(self, data: bytes) -> None:
        owed, at = self._owed(), 0
        whole = owed + data
        try:
            self._open()
            while at < len(whole):
                at += os.write(self._file, whole[at:])
        except OSError as error:
            self._failed_s, self.why = time.monotonic(), error.strerror or str(error)
        if at:
            self._whole = whole[at - 1 : at] == b"\n"
        if at >= len(owed):
            self._forget_owed()
        if at < len(whole):
            self._leave_out(whole[max(at, len(owed)) :], self.why)
            return
        self._failed_s = 0.0
        self._turn_over()

    def _forget_owed(self) -> None:
        if self._unwritable:
            self._lost += max(0, self._missing - len(self._tail))
        self._missing, self._tail, self._unwritable = 0, b"", False

    def _open(self) -> None:
        """The file that has the name now. A link is not followed: who put it there could choose what we write to."""
        try:
            found = os.lstat(self.path)
            known = (found.st_dev, found.st_ino)
        except FileNotFoundError:
            known = (0, 0)
        if self._file >= 0 and known == self._file_id:
            return
        self.close()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self.path, flags, 0o600)
        found = os.fstat(self._file)
        self._file_id = (found.st_dev, found.st_ino)

    def _turn_over(self) -> None:
        size = self._bounds.size
        if size and os.fstat(self._file).st_size >= size / 2:
            try:
                self.path.replace(self.path.with_name(f"{self.path.name}.1"))
            except OSError:
                os.ftruncate(self._file, 0)
