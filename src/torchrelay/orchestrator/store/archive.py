"""Archive: what keeps a journal short to start from, whatever its age: snapshots, and old events packed away.

    snapshots   seq, by which shape of values (`snapshot.SHAPE`), digest, state. The newest few.
    archive     old events, so many in a row, compressed. Nothing is thrown away: reports and proofs read it all.

A start reads the newest snapshot that is whole and lies a little back, and the events after it: those that follow the
story have time to read on where they were. A recovery of a large job is tens of thousands of events: if that many would
be replayed, a newer one does when it lies a minute back. Without any snapshot all events are replayed, the archived
ones, too.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterator

import msgspec
from msgspec import Struct

from torchrelay.orchestrator.store import saved_cluster
from torchrelay.orchestrator.store.saved_cluster import SavedCluster

EVERY = 2_000  # events between two snapshots
BACK = 1_000  # events that are replayed, at least, if there are so many
MANY = 10_000  # more than a start should replay
SETTLED_MS = 60_000  # those that follow the story have read on by then
KEPT = 3
PACK = 1_000  # events in one row of the archive
PACKS = 8  # rows at a time: nobody waits long for them

TABLES = """
CREATE TABLE IF NOT EXISTS snapshots (
    seq INTEGER PRIMARY KEY, shape TEXT NOT NULL, digest BLOB NOT NULL, state BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS archive (first INTEGER PRIMARY KEY, last INTEGER NOT NULL, events BLOB NOT NULL);
"""

# For journals of before: no event in them was heard together with another.
TOGETHER = "ALTER TABLE events ADD COLUMN more INTEGER NOT NULL DEFAULT 0;"


class Row(Struct, array_like=True):
    """An event as it is kept: in msgpack. Rows that were packed before events were heard together have three fields."""

    seq: int
    at_ms: int
    event: bytes
    more: bool = False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Row])


def keep(db: sqlite3.Connection, seq: int, state: bytes) -> None:
    """Keep a snapshot, and the newest few of those before it. Inside a transaction."""
    row = (seq, saved_cluster.SHAPE, saved_cluster.digest(state), state)
    db.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?)", row)
    db.executemany("DELETE FROM snapshots WHERE seq = ?", [(old,) for old in _kept(db)[KEPT:]])


def pack(db: sqlite3.Connection) -> bool:
    """Pack away some of what is older than all snapshots. Inside a transaction. Returns whether there may be more."""
    kept = _kept(db)
    if len(kept) < KEPT:
        return False
    for _ in range(PACKS):
        query = "SELECT seq, at_ms, event, more FROM events WHERE seq <= ? ORDER BY seq LIMIT ?"
        rows = [_row(*found) for found in db.execute(query, (kept[KEPT - 1], PACK))]
        if len(rows) < PACK:
            return False
        packed = zlib.compress(_encoder.encode(rows), 3)
        db.execute("INSERT INTO archive VALUES (?, ?, ?)", (rows[0].seq, rows[-1].seq, packed))
        db.execute("DELETE FROM events WHERE seq <= ?", (rows[-1].seq,))
    return True


def newest(db: sqlite3.Connection, last_seq: int, last_ms: int) -> SavedCluster | None:
    """The newest snapshot that is whole, ours to read, and lies back; None if there is none."""
    if not _is_there(db, "snapshots"):
        return None
    try:
        for place in _starts(db, last_seq, last_ms):
            row = db.execute("SELECT state, digest, shape FROM snapshots WHERE seq = ?", (place,)).fetchone()
            found = saved_cluster.decode(*row)
            if found is not None and found.seq == place:
                return found
    except sqlite3.Error:
        return None  # a damaged page: the events themselves are read, or are damaged, too
    return None


def _starts(db: sqlite3.Connection, last_seq: int, last_ms: int) -> list[int]:
    """The snapshots that a start may begin with, the best first."""
    kept = _kept(db)
    back = [seq for seq in kept if seq <= last_seq - BACK]
    if last_seq - (back[0] if back else 0) <= MANY:
        return back
    return [seq for seq in kept if seq in back or (seq <= last_seq and _told_ms(db, seq) <= last_ms - SETTLED_MS)]


def _told_ms(db: sqlite3.Connection, seq: int) -> int:
    """When this event was heard; what is packed away was heard long ago."""
    row = db.execute("SELECT at_ms FROM events WHERE seq = ?", (seq,)).fetchone()
    return int(row[0]) if row else 0


def _kept(db: sqlite3.Connection) -> list[int]:
    """After which events there are snapshots, the newest first."""
    return [seq for (seq,) in db.execute("SELECT seq FROM snapshots ORDER BY seq DESC")]


def rows(db: sqlite3.Connection, after: int) -> Iterator[Row]:
    """All events after this one, oldest first. Raises sqlite3.Error or ValueError for what is damaged."""
    if _is_there(db, "archive"):
        for (packed,) in db.execute("SELECT events FROM archive WHERE last > ? ORDER BY first", (after,)):
            try:
                found = _decoder.decode(zlib.decompress(packed))
            except (zlib.error, msgspec.DecodeError) as error:
                raise ValueError(f"archived events cannot be read: {error}") from error
            yield from (row for row in found if row.seq > after)
    more = "more" if is_told_together(db) else "0"
    for found in db.execute(f"SELECT seq, at_ms, event, {more} FROM events WHERE seq > ? ORDER BY seq", (after,)):
        yield _row(*found)


def last(db: sqlite3.Connection) -> tuple[int, int]:
    """The number of the last event, and its moment."""
    row = db.execute("SELECT seq, at_ms FROM events ORDER BY seq DESC LIMIT 1").fetchone() or (0, 0)
    return int(row[0]), int(row[1])


def _row(seq: int, at_ms: int, event: bytes, more: int) -> Row:
    return Row(seq, at_ms, event, bool(more))


def is_told_together(db: sqlite3.Connection) -> bool:
    """Whether this journal says which events were heard together."""
    return any(name == "more" for _, name, *_ in db.execute("PRAGMA table_info(events)"))


def _is_there(db: sqlite3.Connection, table: str) -> bool:
    """Whether this journal has it: those of an older format have not."""
    return db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (table,)).fetchone() is not None
