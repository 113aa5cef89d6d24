"""Own log: the log of a process of ours, bounded in size, in lines per second, and in the length of a line.

Whoever can make a process of ours log something must not fill a disk by it. When the file has grown it is copied to
NAME.1 and emptied, not renamed: others (a forkserver, a crash) write to the same open file.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from pathlib import Path
from typing import TextIO

SIZE = 8_000_000  # bytes, twice
LINES_S = 100.0
BURST = 2_000.0  # lines
LONGEST = 4_000  # characters


class OwnLog(logging.StreamHandler[TextIO]):
    """`stream` appends to the file at `path`; if it goes elsewhere, its size is not ours to bound."""

    def __init__(self, stream: TextIO, path: Path, size: int = SIZE) -> None:
        super().__init__(stream)
        self._path = path
        self._size = size
        self._credit = BURST
        self._credited_s = time.monotonic()
        self._left_out = 0  # lines, since the last one that was written

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        self._credit = min(BURST, self._credit + (now - self._credited_s) * LINES_S)
        self._credited_s = now
        if self._credit < (LINES_S if self._left_out else 1):
            self._left_out += 1
            return
        self._credit -= 1
        if before := self._left_out:
            said = logging.makeLogRecord({**vars(record), "msg": f"{before:,} lines are left out here", "args": ()})
            said.exc_info = said.exc_text = said.stack_info = None
            super().emit(said)
            if self._left_out > before:  # it could not be written: nor can this one
                return
            self._left_out = 0
        super().emit(record)
        self._turn_over()

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        rest = len(text) - LONGEST
        return text if rest <= 0 else f"{text[:LONGEST]} ... and {rest:,} more characters"

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002  logging's name
        """It could not be written, as a disk is full: it is counted."""
        self._left_out += 1

    def _turn_over(self) -> None:
        try:
            descriptor = self.stream.fileno()
            known = os.fstat(descriptor)
            if known.st_size < self._size or not os.path.samestat(known, os.stat(self._path)):
                return
            try:
                shutil.copyfile(self._path, self._path.with_name(f"{self._path.name}.1"))
            finally:
                os.ftruncate(descriptor, 0)
        except (OSError, ValueError):
            return  # no file, or no room: what is there stays
