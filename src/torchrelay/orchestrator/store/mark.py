"""Mark: beside the journal stands which journal it is, and how far it was written. A lost one is not begun anew.

`RUN_DIR/journal.mark` is written after each event, so it never tells of more than the journal had. A journal that has
less is an older state of itself (its `-wal` was removed, a backup was put back): workers and orders are missing in it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from msgspec import Struct

SUFFIX = ".mark"
# A line of one length, so that writing it anew is one call and leaves no rest of the one before.
_LINE = "{journal} {lease:010d} {seq:015d}\n"
_FORM = re.compile(r"([0-9a-f]{32}) (\d{10}) (\d{15})\n")


class Mark(Struct, frozen=True):
    """The journal's own name, and the lease and the last event of whoever wrote to it last."""

    journal: str
    lease: int = 0
    seq: int = 0


def read_mark(journal: Path) -> Mark | None:
    """What is known of the journal at this path; None if nothing is, or if it cannot be read."""
    try:
        found = _FORM.fullmatch(journal.with_suffix(SUFFIX).read_text("ascii"))
    except (OSError, ValueError):
        return None
    return Mark(found[1], int(found[2]), int(found[3])) if found else None


def shortfall(path: Path, known: Mark, found: Mark | None) -> str:
    """Why this is not the journal that the run had; empty if it is. `found`: None if there is no file."""
    remedy = "Put it back; until then nobody decides, and training goes on to its end"
    if found is None:
        return f"{path} is gone, and with it all that the orchestrator has decided. {remedy}"
    if found.journal != known.journal:
        return f"{path} is not the journal that this run had (it was lost, or replaced). {remedy}"
    if found.lease < known.lease or found.seq < known.seq:
        missing = f"it ends with event {found.seq}, but {known.seq} were heard"
        if found.seq >= known.seq:
            missing = f"its lease is {found.lease}, but {known.lease} was held"
        mark = path.with_suffix(SUFFIX)
        return f"{path} is an older state of itself ({missing}). {remedy}. (To go on from it: remove {mark})"
    return ""


class MarkFile:
    """The file, open for writing. Raises OSError if it cannot be opened."""

    def __init__(self, journal: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(journal.with_suffix(SUFFIX), flags, 0o600)

    def write(self, mark: Mark) -> None:
        """Say it. A disk that has no room for it is no reason not to act: the journal itself was written."""
        line = _LINE.format(journal=mark.journal, lease=mark.lease, seq=mark.seq)
        try:
            os.pwrite(self._descriptor, line.encode("ascii"), 0)
        except OSError:
            pass  # what stands there tells of less, which is true as well

    def close(self) -> None:
        os.close(self._descriptor)
