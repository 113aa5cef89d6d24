"""Parts: what is written into a journal in one go, and how the same is written into a copy of it elsewhere.

A row says of which kind it is and what stands in it. Whoever copies knows what each kind writes: no statement comes
over the network. Snapshots, and events packed away, are left out: the one who writes the copy on makes its own.
"""

from __future__ import annotations

import secrets
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
from msgspec import Struct

from torchrelay.orchestrator.store.tables import JournalRefused, connect, damaged
from torchrelay.protocol.succession.succession import CopyId, Succession

Value = int | str | bytes
SUCCESSION = "succession"
STATEMENTS = {
    "event": "INSERT INTO events VALUES (?, ?, ?, ?)",
    "call": "INSERT INTO audit VALUES (?, ?, ?, ?, ?)",
    "anchor": "INSERT INTO anchors VALUES (?, ?, ?)",
    "about": "INSERT INTO about VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value",
    "secret": "INSERT OR IGNORE INTO about VALUES ('secret', ?)",
}


class Row(Struct, frozen=True, array_like=True):
    """One row of one table."""

    kind: str
    values: tuple[Value, ...]


def read_succession(db: sqlite3.Connection) -> Succession | None:
    """The newest that the head had proposed; None if its orchestrator was always alone."""
    row = db.execute("SELECT value FROM about WHERE name = ?", (SUCCESSION,)).fetchone()
    return msgspec.json.decode(row[0], type=Succession) if row else None


def kept_succession(path: Path) -> Succession | None:
    """What stands in the journal at this path; None if there is none. Raises `JournalRefused` if it cannot be read."""
    if not path.exists() or not path.stat().st_size:
        return None
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            return read_succession(db)
    except (sqlite3.Error, msgspec.DecodeError) as error:  # without it, it would begin alone
        raise JournalRefused(damaged(path, str(error))) from error


# ---------------------------------------------------------------- copies have names

COPY = "copy"  # a file of the run's folder
BOOT = Path("/proc/sys/kernel/random/boot_id")


def own_copy(run_dir: Path) -> CopyId:
    """The name of this folder's journal among its copies.

    It is another one after a start of the machine: a journal may lose its end with the power, see `journal`.
    """
    boot = BOOT.read_text().strip()
    try:
        name, _, since = (run_dir / COPY).read_text().strip().partition(" ")
    except FileNotFoundError:
        name, since = "", ""
    if not name or since != boot:
        name = secrets.token_hex(8)
        write_copy_name(run_dir, name)
    return CopyId(name)


def write_copy_name(run_dir: Path, name: str) -> None:
    """From now on this folder's journal has this name."""
    draft = run_dir / f".{COPY}"
    draft.write_text(f"{name} {BOOT.read_text().strip()}\n")
    draft.replace(run_dir / COPY)


ASKED = "asked"  # a file, too


def asked_before(run_dir: Path) -> int:
    """The highest lease that this folder's orchestrator has asked for. It must not propose twice under one."""
    try:
        return int((run_dir / ASKED).read_text())
    except FileNotFoundError:
        return 0


def note_asked(run_dir: Path, lease: int) -> None:
    """It is going to ask for this lease. The process may be lost after that; with the machine the copy's name is."""
    draft = run_dir / f".{ASKED}"
    draft.write_text(f"{lease}\n")
    draft.replace(run_dir / ASKED)


# ---------------------------------------------------------------- a copy that is written on


class Copy:
    """A copy of another one's journal: a file that is one as soon as it is closed. Raises as `Journal` does.

    `part`: the newest of the head's parts that is in it.
    """

    def __init__(self, path: Path, whole: bytes, part: int) -> None:
        path.write_bytes(whole)
        path.chmod(0o600)
        self.part = part
        self._db = connect(path)

    def write(self, part: int, rows: tuple[Row, ...]) -> None:
        """Write the next part. Raises ValueError if it is another one, or none of ours; sqlite3.Error."""
        if part != self.part + 1:
            raise ValueError(f"part {part} of the journal came after part {self.part}")
        if unknown := {row.kind for row in rows} - STATEMENTS.keys():
            raise ValueError(f"no rows of a journal: {', '.join(sorted(unknown))}")
        if not all(isinstance(value, Value) for row in rows for value in row.values):
            raise ValueError("rows of a journal hold numbers, texts and bytes")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for row in rows:
                self._db.execute(STATEMENTS[row.kind], row.values)
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")
        self.part = part

    def succession(self) -> Succession | None:
        """The newest one that the head had proposed."""
        return read_succession(self._db)

    def close(self) -> None:
        """Close the file."""
        self._db.close()
