"""Archive: what keeps a journal short to start from, whatever its age: snapshots, and old events packed away.

    snapshots   seq, by which shape of values (`snapshot.SHAPE`), digest, state. The newest few.
    archive     old events, so many in a row, compressed. Nothing is thrown away: reports and proofs read it all.

A start reads the newest snapshot that is whole and lies a little back, and the events after it: those that follow the
story have time to read on where they were. Without any snapshot all events are replayed, the archived ones, too.
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
    """Keep a snapshot, and pack away what is older than all that are kept. Inside a transaction."""
    row = (seq, saved_cluster.SHAPE, saved_cluster.digest(state), state)
    db.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?)", row)
    newest = [found for (found,) in db.execute("SELECT seq FROM snapshots ORDER BY seq DESC")]
    db.executemany("DELETE FROM snapshots WHERE seq = ?", [(old,) for old in newest[KEPT:]])
    if len(newest) < KEPT:
        return
    for _ in range(PACKS):
        query = "SELECT seq, at_ms, event, more FROM events WHERE seq <= ? ORDER BY seq LIMIT ?"
        rows = [_row(*found) for found in db.execute(query, (newest[KEPT - 1], PACK))]
        if len(rows) < PACK:
            return
        packed = zlib.compress(_encoder.encode(rows), 3)
        db.execute("INSERT INTO archive VALUES (?, ?, ?)", (rows[0].seq, rows[-1].seq, packed))
        db.execute("DELETE FROM events WHERE seq <= ?", (rows[-1].seq,))


def newest(db: sqlite3.Connection, last_seq: int) -> SavedCluster | None:
    """The newest snapshot that is whole, ours to read, and lies so far back; None if there is none."""
    if not _is_there(db, "snapshots"):
        return None
    query = "SELECT seq, shape, digest, state FROM snapshots WHERE seq <= ? ORDER BY seq DESC"
    try:
        for seq, shape, digest, state in db.execute(query, (last_seq - BACK,)):
            found = saved_cluster.decode(state, digest, shape)
            if found is not None and found.seq == seq:
                return found
    except sqlite3.Error:
        return None  # a damaged page: the events themselves are read, or are damaged, too
    return None


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


def _row(seq: int, at_ms: int, event: bytes, more: int) -> Row:
    return Row(seq, at_ms, event, bool(more))


def is_told_together(db: sqlite3.Connection) -> bool:
    """Whether this journal says which events were heard together."""
    return any(name == "more" for _, name, *_ in db.execute("PRAGMA table_info(events)"))


def _is_there(db: sqlite3.Connection, table: str) -> bool:
    """Whether this journal has it: those of an older format have not."""
    return db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (table,)).fetchone() is not None
