"""Tables: a journal's file is made, opened and recognised."""

from __future__ import annotations

import os
import secrets
import sqlite3
from pathlib import Path

from torchrelay.orchestrator.store import archive
from torchrelay.protocol.rules.cluster import RULES_VERSION

# SQLite keeps both in the file's header: whose file it is ("trly"), and the version of the tables in it.
APPLICATION = 0x74726C79
FORMAT = 4  # 1: without lease and audit; 2: without snapshots and archive; 3: each event was heard alone
AUDITED = 2

_TABLES = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE events (
    seq INTEGER PRIMARY KEY, at_ms INTEGER NOT NULL, event BLOB NOT NULL, more INTEGER NOT NULL DEFAULT 0);
CREATE TABLE anchors (at_ms INTEGER NOT NULL, wall_ms INTEGER NOT NULL, pid INTEGER NOT NULL);
"""
_AUDIT = """
CREATE TABLE IF NOT EXISTS audit (
    wall_ms INTEGER NOT NULL, who TEXT NOT NULL, call TEXT NOT NULL, what TEXT NOT NULL, seq INTEGER NOT NULL);
"""


class JournalRefused(Exception):
    """The journal cannot be used as it is: held by another process, not ours, newer, or damaged. Says what to do."""


def connect(path: Path) -> sqlite3.Connection:
    """Open or make the file. In autocommit mode each statement is a transaction of its own."""
    db: sqlite3.Connection | None = None
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        db = sqlite3.connect(path, isolation_level=None)
        if not db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() and header(db) == (0, 0):
            make(db)
        check_format(db, path)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        if header(db)[1] < FORMAT:
            together = "" if archive.is_told_together(db) else archive.TOGETHER
            db.executescript(
                f"BEGIN IMMEDIATE; {_AUDIT} {archive.TABLES} {together} PRAGMA user_version = {FORMAT}; COMMIT;"
            )
        return db
    except (sqlite3.Error, OSError, JournalRefused) as error:
        if db is not None:
            db.close()
        if isinstance(error, JournalRefused):
            raise
        if isinstance(error, OSError) or "full" in str(error):
            raise JournalRefused(f"cannot write {path}: {error}; free some space or use another --run-dir") from error
        raise JournalRefused(damaged(path, str(error))) from error


def make(db: sqlite3.Connection) -> None:
    header = f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {FORMAT};"
    rules = f"INSERT INTO about VALUES ('rules', '{RULES_VERSION}'), ('name', '{secrets.token_hex(16)}');"
    db.executescript(f"BEGIN IMMEDIATE; {_TABLES} {_AUDIT} {archive.TABLES} {rules} {header} COMMIT;")


def header(db: sqlite3.Connection) -> tuple[int, int]:
    """Whose file it is, and the version of its tables."""
    application: int = db.execute("PRAGMA application_id").fetchone()[0]
    format_: int = db.execute("PRAGMA user_version").fetchone()[0]
    return application, format_


def check_format(db: sqlite3.Connection, path: Path) -> None:
    application, found = header(db)
    if application != APPLICATION:
        raise JournalRefused(f"{path} is a database, but not a journal of torchrelay: use another --run-dir")
    if found > FORMAT:
        message = f"{path} has format {found}, this torchrelay knows {FORMAT}: use the torchrelay that wrote it"
        try:
            row = db.execute("SELECT value FROM about WHERE name = 'version'").fetchone()
        except sqlite3.Error:
            row = None  # who knows what a later format has
        raise JournalRefused(message + (f" ({row[0]})" if row else ""))


def damaged(path: Path, what: str) -> str:
    return f"{path} is damaged or not a journal ({what}): move it away, or use another --run-dir"
