"""Journal: every event that the orchestrator heard, in order, on disk before it has any effect.

The state is this file replayed. SQLite in WAL mode with `synchronous=NORMAL`: an append survives the end of the
process at any moment (SIGKILL too), and costs some ten microseconds. It does not wait for the disk, so a power cut may
take the last moments with it. On one machine that ends the run anyway; an orchestrator apart from its nodes must wait
for the disk before it announces a generation (not built yet).

    about     format, and the job's secret
    events    seq, at_ms (the orchestrator's own time, see `clock`), the event in msgpack
    anchors   which wall-clock time belongs to which at_ms; one more whenever the two drift apart
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sqlite3
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
from msgspec import Struct

from torchrelay.protocol.events import AnyEvent, Event
from torchrelay.protocol.ids import Generation, JobId, Point

# SQLite keeps both in the file's header: whose file it is ("trly"), and the version of the tables in it.
APPLICATION = 0x74726C79
FORMAT = 1

_TABLES = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE events (seq INTEGER PRIMARY KEY, at_ms INTEGER NOT NULL, event BLOB NOT NULL);
CREATE TABLE anchors (at_ms INTEGER NOT NULL, wall_ms INTEGER NOT NULL, pid INTEGER NOT NULL);
"""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyEvent)


class JournalRefused(Exception):
    """The journal cannot be used as it is: held by another process, not ours, newer, or damaged. Says what to do."""


class JournalUnavailable(Exception):
    """An append did not reach the disk (full, read-only, failing). Nothing was written; it may be tried again."""


class Entry(Struct, frozen=True):
    """One event as it was heard. `seq` counts from 1 without gaps; `at_ms` never goes back."""

    seq: int
    at_ms: int
    event: AnyEvent


class Anchor(Struct, frozen=True):
    """At `at_ms` of the orchestrator's time the wall clock said `wall_ms` (since 1970), in the process `pid`."""

    at_ms: int
    wall_ms: int
    pid: int


# By job: the newest point that was heard of, and in which generation.
Reached = dict[JobId, tuple[Generation, Point]]


class History(Struct, frozen=True):
    """What a journal holds, read without taking it. `reached`: see `Journal.remember`."""

    entries: tuple[Entry, ...]
    anchors: tuple[Anchor, ...]
    reached: Reached


def wall_ms(anchors: tuple[Anchor, ...] | list[Anchor], at_ms: int) -> int:
    """The wall-clock time of a moment, in ms since 1970; 0 if nothing anchors it."""
    if not anchors:
        return 0
    place = bisect_right(anchors, at_ms, key=lambda anchor: anchor.at_ms)
    anchor = anchors[max(0, place - 1)]
    return anchor.wall_ms + at_ms - anchor.at_ms


class Journal:
    """The journal of one orchestrator, which is the only one to write to it as long as it is open.

    Raises `JournalRefused` if the file cannot be opened as a journal of ours.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _take_lock(path)
        try:
            self._db = _connect(path)
        except BaseException:
            os.close(self._lock)
            raise
        try:
            self.anchors = list(_read_anchors(self._db))
            last = self._db.execute("SELECT seq, at_ms FROM events ORDER BY seq DESC LIMIT 1").fetchone() or (0, 0)
        except sqlite3.Error as error:
            self.close()
            raise JournalRefused(_damaged(path, str(error))) from error
        self.last_seq: int = last[0]
        self.last_ms: int = max(last[1], self.anchors[-1].at_ms if self.anchors else 0)

    # ------------------------------------------------------------ writing

    def append(self, event: Event, at_ms: int) -> int:
        """Write one event; returns its number. Raises `JournalUnavailable`, and then nothing has changed."""
        seq = self.last_seq + 1
        self._write("INSERT INTO events VALUES (?, ?, ?)", (seq, at_ms, _encoder.encode(event)))
        self.last_seq, self.last_ms = seq, max(at_ms, self.last_ms)
        return seq

    def anchor(self, at_ms: int, wall_ms: int) -> None:
        """Note which wall-clock time belongs to `at_ms`. Raises `JournalUnavailable`."""
        found = Anchor(at_ms, wall_ms, os.getpid())
        self._write("INSERT INTO anchors VALUES (?, ?, ?)", (found.at_ms, found.wall_ms, found.pid))
        self.anchors.append(found)

    def secret(self) -> str:
        """The job's secret (hexadecimal), made when first asked for; the same after a restart."""
        made = secrets.token_hex(32)
        self._write("INSERT OR IGNORE INTO about VALUES ('secret', ?)", (made,))
        value: str = self._db.execute("SELECT value FROM about WHERE name = 'secret'").fetchone()[0]
        return value

    def remember(self, reached: Reached) -> None:
        """Keep how far the jobs were, for who reads the journal later: beats are not journalled."""
        text = msgspec.json.encode(reached).decode()
        self._write("INSERT INTO about VALUES ('reached', ?) ON CONFLICT DO UPDATE SET value = excluded.value", (text,))

    def reached(self) -> Reached:
        """What was remembered last."""
        return _read_reached(self._db)

    def _write(self, sql: str, values: tuple[object, ...]) -> None:
        try:
            self._db.execute(sql, values)
        except sqlite3.Error as error:
            raise JournalUnavailable(f"{self.path}: {error}") from error

    # ------------------------------------------------------------ reading

    def entries(self) -> Iterator[Entry]:
        """Everything heard so far, oldest first. Raises `JournalRefused` at the first entry that is damaged."""
        return _read_entries(self._db, self.path)

    def wall_ms(self, at_ms: int) -> int:
        """The wall-clock time of a moment, in ms since 1970."""
        return wall_ms(self.anchors, at_ms)

    def close(self) -> None:
        """Close the file and let go of the lock."""
        self._db.close()
        os.close(self._lock)


def read_history(path: Path) -> History:
    """Read a journal that may be in use by its orchestrator. Raises `JournalRefused`, or FileNotFoundError."""
    if not path.exists():
        raise FileNotFoundError(f"no journal at {path}")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)) as db:
            _check_format(db, path)
            return History(tuple(_read_entries(db, path)), tuple(_read_anchors(db)), _read_reached(db))
    except sqlite3.Error as error:
        raise JournalRefused(_damaged(path, str(error))) from error


# ---------------------------------------------------------------- opening


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


def _take_lock(path: Path) -> int:
    """The descriptor that holds the lock. The kernel lets go of it when the process ends, however it ends."""
    lock = path.with_name(path.name + ".lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise JournalRefused(f"cannot open {lock}: {error.strerror}; choose a folder that you may write to") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        message = f"{path} is in use by another orchestrator (pid {owner})"
        raise JournalRefused(f"{message}: end that one first, or use another --run-dir") from None
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _connect(path: Path) -> sqlite3.Connection:
    """Open or make the file. In autocommit mode each statement is a transaction of its own."""
    db: sqlite3.Connection | None = None
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        db = sqlite3.connect(path, isolation_level=None)
        if not db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() and _header(db) == (0, 0):
            _make(db)
        _check_format(db, path)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        return db
    except (sqlite3.Error, OSError, JournalRefused) as error:
        if db is not None:
            db.close()
        if isinstance(error, JournalRefused):
            raise
        if isinstance(error, OSError) or "full" in str(error):
            raise JournalRefused(f"cannot write {path}: {error}; free some space or use another --run-dir") from error
        raise JournalRefused(_damaged(path, str(error))) from error


def _make(db: sqlite3.Connection) -> None:
    header = f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {FORMAT};"
    db.executescript(f"BEGIN IMMEDIATE; {_TABLES} {header} COMMIT;")


def _header(db: sqlite3.Connection) -> tuple[int, int]:
    """Whose file it is, and the version of its tables."""
    application: int = db.execute("PRAGMA application_id").fetchone()[0]
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    return application, version


def _check_format(db: sqlite3.Connection, path: Path) -> None:
    application, version = _header(db)
    if application != APPLICATION:
        raise JournalRefused(f"{path} is a database, but not a journal of torchrelay: use another --run-dir")
    if version > FORMAT:
        message = f"{path} has format {version}, this torchrelay knows {FORMAT}: use the torchrelay that wrote it"
        raise JournalRefused(message)


def _read_anchors(db: sqlite3.Connection) -> Iterator[Anchor]:
    return (Anchor(*row) for row in db.execute("SELECT at_ms, wall_ms, pid FROM anchors ORDER BY at_ms, rowid"))


def _read_reached(db: sqlite3.Connection) -> Reached:
    row = db.execute("SELECT value FROM about WHERE name = 'reached'").fetchone()
    try:
        return msgspec.json.decode(row[0], type=Reached) if row else {}
    except msgspec.DecodeError:
        return {}  # nothing depends on it


def _read_entries(db: sqlite3.Connection, path: Path) -> Iterator[Entry]:
    expected = 1
    try:
        for seq, at_ms, data in db.execute("SELECT seq, at_ms, event FROM events ORDER BY seq"):
            if seq != expected:
                raise JournalRefused(_damaged(path, f"event {expected} is missing"))
            yield Entry(seq, at_ms, _decoder.decode(data))
            expected += 1
    except msgspec.DecodeError as error:
        raise JournalRefused(_damaged(path, f"event {expected} cannot be read: {error}")) from error
    except sqlite3.Error as error:
        raise JournalRefused(_damaged(path, str(error))) from error


def _damaged(path: Path, what: str) -> str:
    return f"{path} is damaged or not a journal ({what}): move it away, or use another --run-dir"
