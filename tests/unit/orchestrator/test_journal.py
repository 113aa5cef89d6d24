"""The journal: what is appended is there after any end of the process; what is not ours is refused in words."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from torchrelay.orchestrator.core.clock import Clock
from torchrelay.orchestrator.store.journal import (
    Anchor,
    Journal,
    JournalRefused,
    JournalUnavailable,
    read_history,
    wall_ms,
)
from torchrelay.protocol.messages.events import (
    AnyEvent,
    JobCancelled,
    NodeJoined,
    NodeLost,
    PrivateRecord,
    Tick,
    WorkerExited,
)
from torchrelay.protocol.messages.ids import JobId, NodeId, Point, WorkerId

LEFT = PrivateRecord(Point(7, 1), b"\x00rng")
EVENTS: tuple[AnyEvent, ...] = (
    NodeJoined(node=NodeId("node-0"), incarnation="a", slots=3),
    WorkerExited(worker=WorkerId("node-0.1.4"), node=NodeId("node-0"), signal=9, private=(LEFT,)),
    Tick(),
    JobCancelled(job=JobId("job"), reason="by hand"),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    with closing(Journal(path)) as journal:
        yield journal


def damage(path: Path, sql: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(sql)


def test_what_is_appended_comes_back_in_order_with_its_time(path: Path) -> None:
    with closing(Journal(path)) as journal:
        assert [journal.append(event, 10 * place) for place, event in enumerate(EVENTS)] == [1, 2, 3, 4]
    with closing(Journal(path)) as journal:
        entries = list(journal.entries())
        assert [(entry.seq, entry.at_ms, entry.event) for entry in entries] == [
            (place + 1, 10 * place, event) for place, event in enumerate(EVENTS)
        ]
        assert (journal.last_seq, journal.last_ms) == (4, 30)


def test_an_event_is_on_disk_when_append_returns_even_if_the_process_is_killed_then(path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from torchrelay.orchestrator.store.journal import Journal
from torchrelay.protocol.messages.events import Tick
journal = Journal(Path(sys.argv[1]))
for at_ms in range(200):
    journal.append(Tick(), at_ms)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", code, str(path)], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    with closing(Journal(path)) as journal:
        assert [entry.at_ms for entry in journal.entries()] == list(range(200))


def test_a_second_orchestrator_is_refused_and_told_who_holds_the_journal(journal: Journal) -> None:
    with pytest.raises(JournalRefused, match=rf"in use by another orchestrator \(pid {os.getpid()}\).*--run-dir"):
        Journal(journal.path)
    assert journal.append(Tick(), 1) == 1


def test_the_lock_is_let_go_when_the_journal_is_closed(path: Path) -> None:
    Journal(path).close()
    Journal(path).close()


def test_a_file_that_is_no_database_is_refused(path: Path) -> None:
    path.write_text("Dear diary,\n" * 100)
    with pytest.raises(JournalRefused, match="damaged or not a journal"):
        Journal(path)
    assert path.read_text().startswith("Dear diary"), "it is not touched"
    with pytest.raises(JournalRefused, match="damaged or not a journal"):
        read_history(path)


def test_somebody_elses_database_is_refused(path: Path) -> None:
    damage(path, "CREATE TABLE recipes (name TEXT)")
    with pytest.raises(JournalRefused, match="not a journal of torchrelay"):
        Journal(path)


def test_a_newer_format_is_refused_with_its_number(path: Path) -> None:
    Journal(path).close()
    damage(path, "PRAGMA user_version = 7")
    with pytest.raises(JournalRefused, match=r"has format 7, this torchrelay knows 4.*0\.1\.0"):
        Journal(path)


@pytest.mark.parametrize(
    ("sql", "what"),
    [
        ("DELETE FROM events WHERE seq = 2", "event 2 is missing"),
        ("UPDATE events SET event = x'c1c1' WHERE seq = 3", "event 3 cannot be read"),
        ("UPDATE events SET event = x'81a474797065a3466f6f' WHERE seq = 1", "event 1 cannot be read"),
    ],
)
def test_a_damaged_entry_is_named(path: Path, sql: str, what: str) -> None:
    with closing(Journal(path)) as journal:
        for event in EVENTS:
            journal.append(event, 1)
    damage(path, sql)
    with closing(Journal(path)) as journal, pytest.raises(JournalRefused, match=what):
        list(journal.entries())


def test_a_journal_without_its_tables_is_refused(path: Path) -> None:
    Journal(path).close()
    damage(path, "DROP TABLE events")
    with pytest.raises(JournalRefused, match="no such table"):
        Journal(path)


def test_a_full_disk_is_told_apart_and_the_append_can_be_made_later(journal: Journal) -> None:
    journal.append(Tick(), 1)
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count = {pages}")
    exited = WorkerExited(worker=WorkerId("w"), node=NodeId("n"), private=(PrivateRecord(Point(1), b"x" * 100_000),))
    with pytest.raises(JournalUnavailable, match="full"):
        journal.append(exited, 2)
    assert [entry.seq for entry in journal.entries()] == [1], "nothing half written"
    journal._db.execute("PRAGMA max_page_count = 1000000")
    assert journal.append(exited, 3) == 2


def test_a_folder_that_cannot_be_written_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(JournalRefused, match="cannot open"):
        Journal(tmp_path / "absent" / "journal.db")


def test_a_journal_in_use_can_be_read_by_others(journal: Journal) -> None:
    journal.anchor(0, 1_000_000)
    journal.append(NodeLost(node=NodeId("n"), incarnation="a", reason="no beat"), 5)
    history = read_history(journal.path)
    assert [entry.at_ms for entry in history.entries] == [5]
    assert wall_ms(history.anchors, 5) == 1_000_005


def test_readers_and_the_writer_do_not_wait_for_one_another(journal: Journal) -> None:
    journal.append(Tick(), 1)
    with closing(sqlite3.connect(journal.path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM events").fetchone() == (1,)
        assert journal.append(Tick(), 2) == 2, "a reader in the middle of its work keeps nobody from writing"
        assert reader.execute("SELECT count(*) FROM events").fetchone() == (1,)


def test_reading_does_not_make_a_journal(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_history(path)
    assert not path.exists()


def test_the_secret_is_made_once_and_kept(path: Path) -> None:
    with closing(Journal(path)) as journal:
        secret = journal.secret()
        assert len(bytes.fromhex(secret)) == 32
    with closing(Journal(path)) as journal:
        assert journal.secret() == secret


def test_only_the_owner_may_read_the_journal(journal: Journal) -> None:
    journal.append(Tick(), 1)
    for file in journal.path.parent.iterdir():
        assert file.stat().st_mode & 0o077 == 0, file


def test_each_moment_belongs_to_the_newest_anchor_before_it() -> None:
    anchors = (Anchor(0, 1_000, 1), Anchor(500, 9_000, 2))
    assert [wall_ms(anchors, at) for at in (-5, 0, 499, 500, 700)] == [995, 1_000, 1_499, 9_000, 9_200]
    assert wall_ms((), 700) == 0


def test_the_clock_goes_on_from_where_it_was_and_leaves_out_the_time_it_did_not_run() -> None:
    now = 0
    clock = Clock(5_000, source=lambda: now)
    now += 300_000_000
    assert clock.now_ms() == 5_300
    now += 3_600_000_000_000  # the lid was closed for an hour
    assert clock.now_ms() == 5_350
    assert clock.skips == 1
    now += 250_000_000
    assert clock.now_ms() == 5_600


def test_no_handle_stays_open_after_a_refusal(path: Path) -> None:
    damage(path, "CREATE TABLE recipes (name TEXT)")
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with suppress(JournalRefused):
            Journal(path)
    assert set(os.listdir("/proc/self/fd")) == before


class TestMark:
    """Which journal it is, and how far it went, is known beside it: a lost one is not begun anew."""

    def written(self, path: Path) -> str:
        with closing(Journal(path)) as journal:
            for at_ms in range(3):
                journal.append(Tick(), at_ms)
            return journal.name

    def test_one_that_was_removed_is_not_begun_anew(self, tmp_path: Path) -> None:
        path = tmp_path / "journal.db"
        self.written(path)
        for part in tmp_path.glob("journal.db*"):
            part.unlink()
        with pytest.raises(JournalRefused, match="is gone, and with it all that the orchestrator has decided"):
            Journal(path)
        assert not path.exists()

    def test_whoever_knows_its_name_demands_it(self, tmp_path: Path) -> None:
        path = tmp_path / "journal.db"
        name = self.written(path)
        for part in tmp_path.glob("journal.*"):
            part.unlink()
        with pytest.raises(JournalRefused, match="is gone"):
            Journal(path, name=name)
        assert self.written(path) != name
        (tmp_path / "journal.mark").unlink()
        with pytest.raises(JournalRefused, match="not the journal that this run had"):
            Journal(path, name=name)

    def test_an_older_state_of_it_is_refused_until_somebody_says_that_it_will_do(self, tmp_path: Path) -> None:
        path, older = tmp_path / "journal.db", tmp_path / "older.db"
        self.written(path)
        shutil.copy(path, older)
        self.written(path)
        older.replace(path)
        with pytest.raises(JournalRefused, match=r"an older state of itself .*3, but 6 were heard"):
            Journal(path)
        (tmp_path / "journal.mark").unlink()
        with closing(Journal(path)) as journal:
            assert journal.last_seq == 3

    def test_one_whose_lease_is_behind_is_refused_as_well(self, tmp_path: Path) -> None:
        path, older = tmp_path / "journal.db", tmp_path / "older.db"
        self.written(path)
        shutil.copy(path, older)
        with closing(Journal(path)):
            pass
        older.replace(path)
        with pytest.raises(JournalRefused, match="its lease is 1, but 2 was held"):
            Journal(path)

    def test_a_mark_that_cannot_be_read_forbids_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "journal.db"
        self.written(path)
        (tmp_path / "journal.mark").write_text("half a li")
        with closing(Journal(path)) as journal:
            assert journal.last_seq == 3
