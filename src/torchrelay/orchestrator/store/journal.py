"""Journal: every event that the orchestrator heard, in order, on disk before it has any effect.

The state is this file replayed. SQLite in WAL mode with `synchronous=NORMAL`: an append survives the end of the
process at any moment (SIGKILL too), and costs some ten microseconds. It does not wait for the disk: a power cut may
take the last moments with it, and on one machine ends the run anyway. (One apart from its nodes would have to wait.)

    about     its own name, the job's secret, who wrote it last, the lease, the rules it is to be replayed by, and how
              late it is
    events    seq, at_ms (the orchestrator's own time, see `clock`), the event in msgpack, and whether the next one was
              heard together with it (see `rules.cluster.advance`)
    anchors   which wall-clock time belongs to which at_ms; one more whenever the two drift apart
    audit     every changing call: when, who, what, and the event it led to
    snapshots, archive   the state now and then, and old events packed away (see `archive`)

The *lease* is a number: each orchestrator that opens the journal raises it, and every write of an older one fails in
its own transaction (`Superseded`). So two never both act, also where the file lock means nothing (network file
systems), or when one was stopped, replaced, and wakes up.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from torchrelay.orchestrator.store import archive
from torchrelay.orchestrator.store.lock import Locked, take_lock
from torchrelay.orchestrator.store.mark import Mark, MarkFile, read_mark, shortfall
from torchrelay.orchestrator.store.parts import (
    STATEMENTS,
    SUCCESSION,
    Row,
    Value,
    read_succession,
)
from torchrelay.orchestrator.store.saved_cluster import SavedCluster
from torchrelay.orchestrator.store.tables import AUDITED, check_format, connect, damaged, header
from torchrelay.orchestrator.store.tables import JournalRefused as JournalRefused
from torchrelay.protocol.messages.events import AnyEvent, Event
from torchrelay.protocol.messages.ids import Generation, JobId, Point
from torchrelay.protocol.rules.cluster import RULES_VERSION
from torchrelay.protocol.succession.succession import Succession

_RAISE = """
INSERT INTO about VALUES ('lease', '1') ON CONFLICT DO UPDATE SET value = CAST(value AS INTEGER) + 1 RETURNING value
"""
_NAME_IT = "INSERT OR IGNORE INTO about VALUES ('name', ?)"
UNNUMBERED = 1  # the rules of journals that say nothing of rules

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyEvent)


class JournalUnavailable(Exception):
    """An append did not reach the disk (full, read-only, failing). Nothing was written; it may be tried again."""


class Unwritable(Exception):
    """This event, or this call, fits into no journal (a number beyond 64 bits, half a letter). Nothing was written."""


class Superseded(Exception):
    """Another orchestrator has taken over this journal. Nothing was written, and nothing may be decided any more."""


class Call(Struct, frozen=True, kw_only=True):
    """A changing call: who asked for what, in words."""

    wall_ms: int
    who: str
    call: str
    what: str
    seq: int = 0  # the event that it led to; 0: none


class Entry(Struct, frozen=True):
    """One event as it was heard. `seq` counts from 1 without gaps; `at_ms` never goes back.

    more    the next one was heard together with it
    """

    seq: int
    at_ms: int
    event: AnyEvent
    more: bool = False


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
    calls: tuple[Call, ...] = ()
    lease: int = 0


def wall_ms(anchors: tuple[Anchor, ...] | list[Anchor], at_ms: int) -> int:
    """The wall-clock time of a moment, in ms since 1970; 0 if nothing anchors it."""
    if not anchors:
        return 0
    place = bisect_right(anchors, at_ms, key=lambda anchor: anchor.at_ms)
    anchor = anchors[max(0, place - 1)]
    return anchor.wall_ms + at_ms - anchor.at_ms


class Journal:
    """The journal of one orchestrator, which is the only one to write to it until another one takes it over.

    Raises `JournalRefused` if the file cannot be opened as a journal of ours. `take_over`: open it although another
    orchestrator holds it; that one finds itself superseded with its next write. `name`: of the journal that the run
    had, if it had one. That one is demanded, and so is what its mark tells of. `lease`: which the voters have given.

    `on_part` is called with whatever was written in one go, and its number under this lease: see `parts`.
    """

    def __init__(self, path: Path, *, take_over: bool = False, name: str = "", lease: int | None = None) -> None:
        from importlib.metadata import version  # slow to import, and who only reads needs none

        self.path = path
        self.part = 0
        self.on_part: Callable[[int, tuple[Row, ...]], None] | None = None
        self._rows: list[Row] = []
        try:
            self._lock = take_lock(path, take_over=take_over)
        except Locked as error:
            raise JournalRefused(str(error)) from error
        try:
            self._db, self._mark = _open_known(path, name)
        except BaseException:
            os.close(self._lock)
            raise
        try:
            self._db.execute(_NAME_IT, (secrets.token_hex(16),))
            self.name = _read_name(self._db)
            self.lease = self._take_lease(lease)
            self._db.execute(STATEMENTS["about"], ("version", version("torchrelay")))
            self.rules = _read_rules(self._db)
            self.anchors = list(_read_anchors(self._db))
            self.last_seq, last_ms = archive.last(self._db)
            kept_ms, kept_wall_ms = _read_time(self._db)
        except sqlite3.Error as error:
            self.close()
            raise JournalRefused(damaged(path, str(error))) from error
        self.last_ms: int = max(last_ms, kept_ms, self.anchors[-1].at_ms if self.anchors else 0)
        self._mark.write(Mark(self.name, self.lease, self.last_seq))
        # The newest note of what the clock on the wall said: it may have gone another way than ours since the start.
        newer = kept_wall_ms and (not self.anchors or kept_ms > self.anchors[-1].at_ms)
        self.last_wall_ms = kept_wall_ms + self.last_ms - kept_ms if newer else wall_ms(self.anchors, self.last_ms)

    # ------------------------------------------------------------ writing

    def append(self, event: Event, at_ms: int, call: Call | None = None) -> int:
        """Write one event, and the call that led to it; returns its number.

        Raises `Unwritable`, `JournalUnavailable` or `Superseded`, and then nothing has changed.
        """
        data = _encoded(event)
        if call is not None:
            _encoded(call)
        self._write("event", (self.last_seq + 1, at_ms, data, 0), call)
        return self._written(1, at_ms)

    def append_all(self, events: Sequence[Event], at_ms: int) -> int:
        """Write events that are heard together: all or none. Returns the number of the first; raises as `append`."""
        first, last = self.last_seq + 1, self.last_seq + len(events)
        rows = [(seq, at_ms, _encoded(event), int(seq < last)) for seq, event in enumerate(events, first)]
        with self._transaction():
            self._db.executemany(STATEMENTS["event"], rows)
            self._rows += [Row("event", row) for row in rows]
        self._written(len(events), at_ms)
        return first

    def _written(self, count: int, at_ms: int) -> int:
        """So many more events are on disk; returns the number of the last."""
        self.last_seq, self.last_ms = self.last_seq + count, max(at_ms, self.last_ms)
        self._mark.write(Mark(self.name, self.lease, self.last_seq))
        return self.last_seq

    def note(self, call: Call) -> None:
        """Write down a call that leads to no event. Raises as `append` does."""
        _encoded(call)
        self._write("call", (call.wall_ms, call.who, call.call, call.what, 0))

    def check_lease(self) -> None:
        """Raises `Superseded` if another orchestrator has taken over."""
        try:
            self._hold_lease()
        except sqlite3.Error as error:
            raise JournalUnavailable(f"{self.path}: {error}") from error

    def anchor(self, at_ms: int, wall_ms: int) -> None:
        """Note which wall-clock time belongs to `at_ms`. Raises `JournalUnavailable`."""
        found = Anchor(at_ms, wall_ms, os.getpid())
        self._write("anchor", (found.at_ms, found.wall_ms, found.pid))
        self.anchors.append(found)

    def secret(self) -> str:
        """The job's secret (hexadecimal), made when first asked for; the same after a restart."""
        made = secrets.token_hex(32)
        self._write("secret", (made,))
        value: str = self._db.execute("SELECT value FROM about WHERE name = 'secret'").fetchone()[0]
        return value

    def remember(self, reached: Reached) -> None:
        """Keep how far the jobs were, for who reads the journal later: beats are not journalled."""
        text = msgspec.json.encode(reached).decode()
        self._write("about", ("reached", text))

    def keep_time(self, at_ms: int, wall_ms: int) -> None:
        """Keep how late it is: hours may pass without an event. Raises `JournalUnavailable` or `Superseded`."""
        self._write("about", ("time", f"{at_ms} {wall_ms}"))
        self.last_ms = max(at_ms, self.last_ms)

    def adopt_rules(self) -> None:
        """From now on it goes by the rules of this version. Raises `JournalUnavailable` or `Superseded`."""
        self._write("about", ("rules", str(RULES_VERSION)))
        self.rules = RULES_VERSION

    def reached(self) -> Reached:
        """What was remembered last."""
        return _read_reached(self._db)

    def keep_snapshot(self, state: bytes) -> None:
        """Keep the state after the last event. Raises as `append` does."""
        with self._transaction():
            archive.keep(self._db, self.last_seq, state)

    def pack_away(self) -> bool:
        """Pack some old events away. Returns whether there may be more. Raises as `append` does."""
        with self._transaction():
            return archive.pack(self._db)

    def keep_succession(self, proposed: Succession) -> None:
        """Keep who may take our place. Raises as `append` does."""
        self._write("about", (SUCCESSION, msgspec.json.encode(proposed).decode()))

    def succession(self) -> Succession | None:
        """What was kept last."""
        return read_succession(self._db)

    def whole(self) -> bytes:
        """The file as it is after the newest part."""
        return self._db.serialize()

    def _take_lease(self, given: int | None) -> int:
        if given is not None:
            if given <= _read_lease(self._db):
                raise Superseded(f"lease {given} of {self.path} is over: it was given to another orchestrator")
            self._db.execute(STATEMENTS["about"], ("lease", str(given)))
            return given
        return int(self._db.execute(_RAISE).fetchone()[0])

    def _write(self, kind: str, values: tuple[Value, ...], call: Call | None = None) -> None:
        """One row, and with it the call."""
        with self._transaction():
            self._put(kind, values)
            if call is not None:
                self._put("call", (call.wall_ms, call.who, call.call, call.what, self.last_seq + 1))

    def _put(self, kind: str, values: tuple[Value, ...]) -> None:
        self._db.execute(STATEMENTS[kind], values)
        self._rows.append(Row(kind, values))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing, and only if the lease is still ours."""
        self._rows = []
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._hold_lease()
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:  # a COMMIT for which there was no room
                self._db.execute("ROLLBACK")
            raise JournalUnavailable(f"{self.path}: {error}") from error
        if self._rows:
            self.part += 1
            if self.on_part is not None:
                self.on_part(self.part, tuple(self._rows))

    def _hold_lease(self) -> None:
        found = _read_lease(self._db)
        if found != self.lease:
            message = f"lease {self.lease} of {self.path} is over: another orchestrator holds it now (lease {found})"
            raise Superseded(message)

    # ------------------------------------------------------------ reading

    def entries(self, after: int = 0) -> Iterator[Entry]:
        """Everything heard after this event, oldest first. Raises `JournalRefused` at the first one that is damaged."""
        return _read_entries(self._db, self.path, after)

    def snapshot(self) -> SavedCluster | None:
        """The newest that a start can begin with; None: it begins with the first event."""
        return archive.newest(self._db, self.last_seq, self.last_ms)

    def calls(self) -> tuple[Call, ...]:
        """Every changing call so far, oldest first. Raises `JournalUnavailable`."""
        try:
            return _read_calls(self._db)
        except sqlite3.Error as error:
            raise JournalUnavailable(f"{self.path}: {error}") from error

    def wall_ms(self, at_ms: int) -> int:
        """The wall-clock time of a moment, in ms since 1970."""
        return wall_ms(self.anchors, at_ms)

    def close(self) -> None:
        """Close the file and let go of the lock."""
        self._db.close()
        self._mark.close()
        os.close(self._lock)


def read_history(path: Path) -> History:
    """Read a journal that may be in use by its orchestrator. Raises `JournalRefused`, or FileNotFoundError."""
    with _reading(path) as db:
        return _history(db, tuple(_read_entries(db, path)))


def read_newest(path: Path) -> tuple[SavedCluster | None, History]:
    """The same from the newest snapshot on, if there is one: without the events before it."""
    with _reading(path) as db:
        last, last_ms = archive.last(db)
        found = archive.newest(db, last, max(last_ms, _read_time(db)[0]))
        return found, _history(db, tuple(_read_entries(db, path, found.seq if found is not None else 0)))


def read_rules(path: Path) -> tuple[int, str]:
    """By which rules a journal goes, and who wrote it last. Raises as `read_history` does."""
    with _reading(path) as db:
        row = db.execute("SELECT value FROM about WHERE name = 'version'").fetchone()
        return _read_rules(db), row[0] if row else "unknown"


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    if not path.exists():
        raise FileNotFoundError(f"no journal at {path}")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)) as db:
            check_format(db, path)
            db.execute("BEGIN")  # all of it as it is now: its orchestrator may be packing events away
            yield db
    except sqlite3.Error as error:
        raise JournalRefused(damaged(path, str(error))) from error


def _history(db: sqlite3.Connection, entries: tuple[Entry, ...]) -> History:
    return History(entries, tuple(_read_anchors(db)), _read_reached(db), _read_calls(db), _read_lease(db))


# ---------------------------------------------------------------- opening


def _open_known(path: Path, name: str) -> tuple[sqlite3.Connection, MarkFile]:
    """Open the file and its mark. Raises `JournalRefused` if it is not the journal that the run had."""
    told = read_mark(path)
    known = [one for one in (told, Mark(name) if name else None) if one is not None]
    empty = not path.exists() or not path.stat().st_size
    if known and empty:  # and none is made: it would hide what has happened
        raise JournalRefused(shortfall(path, known[0], None))
    db = connect(path)
    try:
        found = Mark(_read_name(db), _read_lease(db), archive.last(db)[0])
        wrong = next(filter(None, (shortfall(path, one, found) for one in known)), "")
        if wrong:
            raise JournalRefused(wrong)
        return db, MarkFile(path)
    except sqlite3.Error as error:
        db.close()
        raise JournalRefused(damaged(path, str(error))) from error
    except OSError as error:
        db.close()
        raise JournalRefused(f"cannot write {error.filename}: {error.strerror}; use another --run-dir") from error
    except JournalRefused:
        db.close()
        raise


def _read_anchors(db: sqlite3.Connection) -> Iterator[Anchor]:
    return (Anchor(*row) for row in db.execute("SELECT at_ms, wall_ms, pid FROM anchors ORDER BY at_ms, rowid"))


def _read_lease(db: sqlite3.Connection) -> int:
    row = db.execute("SELECT value FROM about WHERE name = 'lease'").fetchone()
    return int(row[0]) if row else 0


def _read_time(db: sqlite3.Connection) -> tuple[int, int]:
    """How late it was when that was noted last, and what the clock on the wall said then."""
    row = db.execute("SELECT value FROM about WHERE name = 'time'").fetchone()
    return tuple(map(int, row[0].split())) if row else (0, 0)  # type: ignore[return-value]


def _read_name(db: sqlite3.Connection) -> str:
    row = db.execute("SELECT value FROM about WHERE name = 'name'").fetchone()
    return str(row[0]) if row else ""


def _read_rules(db: sqlite3.Connection) -> int:
    row = db.execute("SELECT value FROM about WHERE name = 'rules'").fetchone()
    return int(row[0]) if row else UNNUMBERED


def _read_calls(db: sqlite3.Connection) -> tuple[Call, ...]:
    if header(db)[1] < AUDITED:
        return ()
    rows = db.execute("SELECT wall_ms, who, call, what, seq FROM audit ORDER BY rowid")
    return tuple(Call(wall_ms=at, who=who, call=call, what=what, seq=seq) for at, who, call, what, seq in rows)


def _read_reached(db: sqlite3.Connection) -> Reached:
    row = db.execute("SELECT value FROM about WHERE name = 'reached'").fetchone()
    try:
        return msgspec.json.decode(row[0], type=Reached) if row else {}
    except msgspec.DecodeError:
        return {}  # nothing depends on it


def _read_entries(db: sqlite3.Connection, path: Path, after: int = 0) -> Iterator[Entry]:
    expected = after + 1
    try:
        for row in archive.rows(db, after):
            if row.seq != expected:
                raise JournalRefused(damaged(path, f"event {expected} is missing"))
            yield Entry(row.seq, row.at_ms, _decoder.decode(row.event), row.more)
            expected += 1
    except ValueError as error:
        raise JournalRefused(damaged(path, f"event {expected} cannot be read: {error}")) from error
    except sqlite3.Error as error:
        raise JournalRefused(damaged(path, str(error))) from error


def _encoded(value: Event | Call) -> bytes:
    """Raises `Unwritable`."""
    try:
        return _encoder.encode(value)
    except (OverflowError, UnicodeEncodeError) as error:
        text = ascii(value)  # half a letter cannot be shown either
        raise Unwritable(f"{type(value).__name__} cannot be journalled ({error}): {text[:200]}") from error
