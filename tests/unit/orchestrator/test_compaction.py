"""Snapshots and the archive: a start from a snapshot is a start from the first event, only sooner."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.support.aged import JOB, aged
from tests.support.brain import serving, spec
from torchrelay.client.chronicle import Chronicle
from torchrelay.orchestrator.core.compaction import Compaction, wanted
from torchrelay.orchestrator.store import archive, saved_cluster
from torchrelay.orchestrator.store.journal import Entry, Journal, JournalRefused, read_history, read_newest
from torchrelay.orchestrator.views.scene import Ways, note_ways
from torchrelay.orchestrator.views.story import replay
from torchrelay.protocol.messages.events import AnyEvent, Tick
from torchrelay.protocol.messages.ids import Rank
from torchrelay.protocol.model.job import Job
from torchrelay.protocol.model.roster import Seat
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.model.table import Table
from torchrelay.protocol.rules.cluster import EMPTY, RULES_VERSION, advance, orders
from torchrelay.simulation.machine.shell import Shell
from torchrelay.simulation.world import run_seed

Told = list[tuple[AnyEvent, int]]
Heard = list[tuple[AnyEvent, int, bool]]  # and whether the next one was heard together with it


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("EVERY", 100), ("BACK", 50), ("PACK", 40)):
        monkeypatch.setattr(archive, name, value)


@pytest.fixture(scope="module")
def events() -> Told:
    return list(aged(4, 40))


def written(path: Path, events: Told, *, upto: int | None = None) -> None:
    """A journal as an orchestrator writes it, with its snapshots; it may have been written to before."""
    with closing(Journal(path)) as journal:
        compaction, cluster, ways = Compaction(journal), EMPTY, Ways()
        start = compaction.start()
        if start is not None:
            cluster, ways = start.cluster, start.known_ways()
        for entry in journal.entries(compaction.seq):
            before, cluster = cluster, advance(cluster, entry.event, entry.at_ms)
            note_ways(ways, before, cluster)
        for event, at_ms in events[journal.last_seq : upto]:
            journal.append(event, at_ms)
            before, cluster = cluster, advance(cluster, event, at_ms)
            note_ways(ways, before, cluster)
            compaction.take(cluster, ways, busy=False)


def from_start(events: Told) -> Cluster:
    return from_there(EMPTY, [(event, at_ms, False) for event, at_ms in events])


def from_there(cluster: Cluster, events: Heard) -> Cluster:
    for event, at_ms, more in events:
        cluster = advance(cluster, event, at_ms, more=more)
    return cluster


def same(one: Cluster, other: Cluster) -> bool:
    """Equal in all, the order of tables and the time included."""
    return one == other and repr(one) == repr(other) and orders(one) == orders(other)


def found_at_start(path: Path) -> tuple[int, Cluster]:
    """Where a start begins, and where it leads."""
    start, history = read_newest(path)
    cluster = replay(history.entries, None, EMPTY if start is None else start.cluster)
    return (0 if start is None else start.seq), cluster


class TestSnapshot:
    def test_a_state_from_a_snapshot_and_the_rest_is_the_state_from_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Worlds with every kind of fault and move, cut anywhere."""
        shells: list[Shell] = []
        make = Shell.__init__

        def made(shell: Shell, *given: Any, **named: Any) -> None:
            shells.append(shell)
            make(shell, *given, **named)

        monkeypatch.setattr(Shell, "__init__", made)
        chance, together = random.Random(23), 0
        for seed in range(40):
            assert not run_seed(seed).violation
            told: Heard = shells.pop().journal  # type: ignore[assignment]  # only events of the union are told
            together += sum(more for _, _, more in told)
            cut = chance.randrange(len(told) + 1)
            cluster = from_there(EMPTY, told[:cut])
            data = saved_cluster.encode(cut, cluster, {})
            found = saved_cluster.decode(data, saved_cluster.digest(data), saved_cluster.SHAPE)
            assert found is not None
            assert same(found.cluster, cluster), seed
            assert same(from_there(found.cluster, told[cut:]), from_there(cluster, told[cut:])), seed
        assert together > 100, "events were heard together"

    def test_what_is_damaged_or_of_another_shape_is_not_read(self) -> None:
        data = saved_cluster.encode(0, EMPTY, {})
        digest = saved_cluster.digest(data)
        assert saved_cluster.decode(data, digest, saved_cluster.SHAPE) is not None
        assert saved_cluster.decode(data, digest, "9:another") is None
        for place in range(len(data)):
            flipped = data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]
            assert saved_cluster.decode(flipped, digest, saved_cluster.SHAPE) is None

    def test_the_shape_tells_of_every_field_and_of_the_rules(self) -> None:
        told = saved_cluster.shape_of(saved_cluster.SavedCluster, set())
        for name in ("foreign", "left_out_ms", "asked_buddies", "furthest", "JobPhase", "to_slot"):
            assert name in told, name
        assert saved_cluster.SHAPE.startswith(f"{RULES_VERSION}:")

    def test_one_with_another_order_or_time_does_not_read_back(
        self, monkeypatch: pytest.MonkeyPatch, events: Told
    ) -> None:
        cluster = from_start(events[:200])
        monkeypatch.setattr(saved_cluster, "from_table", lambda table: list(reversed(table.items())))
        encoder = msgspec.msgpack.Encoder(enc_hook=lambda table: saved_cluster.from_table(table), order="deterministic")
        monkeypatch.setattr(saved_cluster, "_encoder", encoder)
        with pytest.raises(saved_cluster.Inexact):
            saved_cluster.encode(200, cluster, {})

    @pytest.mark.parametrize("broken", [{"born": 1 << 70}, {"nodes": {"n": object()}}, {"nodes": {"\udce9": 1}}])
    def test_one_that_cannot_be_written_is_said_to_be_so(self, broken: dict[str, Any]) -> None:
        with pytest.raises(saved_cluster.Inexact):
            saved_cluster.encode(1, replace(EMPTY, **broken), {})

    def test_one_that_would_not_read_back_is_not_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def inexact(*_: object) -> bytes:
            raise saved_cluster.Inexact("it reads back as another state")

        monkeypatch.setattr(archive, "EVERY", 1)
        monkeypatch.setattr(saved_cluster, "encode", inexact)
        with closing(Journal(tmp_path / "journal.db")) as journal:
            journal.append(Tick(), 1)
            compaction = Compaction(journal)
            compaction.take(EMPTY, {}, busy=False)
            assert (compaction.seq, journal.snapshot()) == (1, None)
            assert journal._db.execute("SELECT count(*) FROM snapshots").fetchone() == (0,)

    def test_a_large_job_is_not_kept_waiting_for_a_snapshot(self) -> None:
        large, small = (
            replace(EMPTY, jobs=Table({JOB: Job(spec(), Table((Rank(n), Seat()) for n in range(ranks)), 0)}))
            for ranks in (4_096, 16)
        )
        assert wanted(large, busy=False) == 4_096
        assert wanted(large, busy=True) == 5 * 8 * 4_096, "longer than any recovery"
        assert (wanted(small, busy=False), wanted(small, busy=True)) == (archive.EVERY, 5 * archive.EVERY)


@pytest.mark.usefixtures("often")
class TestJournal:
    def test_a_start_reads_little_and_ends_where_all_leads(self, tmp_path: Path, events: Told) -> None:
        path = tmp_path / "journal.db"
        for upto in (250, 251, 600, None):  # begun again and again
            written(path, events, upto=upto)
            start, cluster = found_at_start(path)
            assert same(cluster, from_start(events[:upto]))
        assert start > 0
        assert len(events) - 150 - archive.BACK <= start <= len(events) - archive.BACK

    def test_a_start_does_not_replay_a_recovery_of_thousands_of_ranks(
        self, tmp_path: Path, events: Told, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The newest snapshot does when those that follow the story have read on, although little lies behind it."""
        path = tmp_path / "journal.db"
        monkeypatch.setattr(archive, "EVERY", 400)
        monkeypatch.setattr(archive, "BACK", 400)
        written(path, events, upto=1_010)
        for many, settled_ms, start in ((1_000, 60_000, 400), (100, 1 << 40, 400), (100, 60_000, 800)):
            monkeypatch.setattr(archive, "MANY", many)
            monkeypatch.setattr(archive, "SETTLED_MS", settled_ms)
            begun, cluster = found_at_start(path)
            assert begun == start
            assert same(cluster, from_start(events[:1_010]))

    def test_what_is_old_is_packed_away_bit_by_bit_while_nobody_waits(
        self, tmp_path: Path, events: Told, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(archive, "PACKS", 1)
        path = tmp_path / "journal.db"
        written(path, events)
        with closing(Journal(path)) as journal:
            compaction = Compaction(journal)
            compaction.start()
            compaction._behind = True
            cluster = from_start(events)
            loose = journal._db.execute("SELECT count(*) FROM events").fetchone()[0]
            compaction.take(cluster, Ways(), busy=True)
            assert journal._db.execute("SELECT count(*) FROM events").fetchone()[0] == loose, "somebody waits"
            while compaction._behind:
                compaction.take(cluster, Ways(), busy=False)
                now = journal._db.execute("SELECT count(*) FROM events").fetchone()[0]
                assert loose - now in (0, archive.PACK)
                loose = now
            assert loose < 100 * (archive.KEPT + 1) + archive.PACK
        assert [(entry.event, entry.at_ms) for entry in read_history(path).entries] == events

    def test_who_reads_while_events_are_packed_away_finds_them_all(
        self, tmp_path: Path, events: Told, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "journal.db"
        written(path, events, upto=600)
        with monkeypatch.context() as idle:
            idle.setattr(archive, "PACKS", 0)  # and much is left to be packed away
            written(path, events)
        rows = archive.rows

        def packing(db: sqlite3.Connection, after: int) -> Any:
            for number, row in enumerate(rows(db, after)):
                if number == 10:  # in the middle of the archive
                    loose = journal._db.execute("SELECT min(seq) FROM events").fetchone()
                    journal.pack_away()
                    assert journal._db.execute("SELECT min(seq) FROM events").fetchone() > loose
                yield row

        with closing(Journal(path)) as journal:
            monkeypatch.setattr(archive, "rows", packing)
            assert len(read_history(path).entries) == len(events)
            monkeypatch.setattr(archive, "rows", rows)
            assert len(read_history(path).entries) == len(events)

    def test_all_events_stay_and_most_are_packed(self, tmp_path: Path, events: Told) -> None:
        path = tmp_path / "journal.db"
        written(path, events)
        history = read_history(path)
        assert [(entry.event, entry.at_ms) for entry in history.entries] == events
        assert [entry.seq for entry in history.entries] == list(range(1, len(events) + 1))
        with closing(sqlite3.connect(path)) as db:
            loose = db.execute("SELECT count(*) FROM events").fetchone()[0]
            assert loose < 100 * (archive.KEPT + 1) + archive.PACK
            assert db.execute("SELECT count(*) FROM snapshots").fetchone()[0] == archive.KEPT
        assert Chronicle.of(tmp_path).view_incidents().incidents[-1].name == "I-40"

    def test_a_damaged_snapshot_is_passed_over_and_without_any_all_is_replayed(
        self, tmp_path: Path, events: Told
    ) -> None:
        path = tmp_path / "journal.db"
        written(path, events)
        starts, whole, start = [], from_start(events), 1
        while start:
            start, cluster = found_at_start(path)
            assert same(cluster, whole)
            starts.append(start)
            with closing(sqlite3.connect(path)) as db, db:
                db.execute("UPDATE snapshots SET state = zeroblob(length(state)) WHERE seq = ?", (start,))
        assert starts == sorted(set(starts), reverse=True)
        assert len(starts) > 2

    def test_a_damaged_archive_keeps_nobody_from_starting_and_is_said_by_who_reads_it(
        self, tmp_path: Path, events: Told
    ) -> None:
        path = tmp_path / "journal.db"
        written(path, events)
        with closing(sqlite3.connect(path)) as db, db:
            db.execute("UPDATE archive SET events = zeroblob(100) WHERE first = (SELECT min(first) FROM archive)")
        assert same(found_at_start(path)[1], from_start(events))
        with pytest.raises(JournalRefused, match="archived events cannot be read"):
            read_history(path)

    def test_a_journal_of_the_format_before_is_brought_up_to_date(self, tmp_path: Path, events: Told) -> None:
        path = tmp_path / "journal.db"
        written(path, events, upto=60)
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.executescript("DROP TABLE snapshots; DROP TABLE archive; PRAGMA user_version = 2;")
        assert read_newest(path)[0] is None
        assert len(read_history(path).entries) == 60
        written(path, events)
        assert same(found_at_start(path)[1], from_start(events))

    def test_an_orchestrator_goes_on_from_one(self, tmp_path: Path, events: Told) -> None:
        """With the story of the events that are replayed, for whoever follows it."""
        written(tmp_path / "journal.db", events)

        async def story() -> None:
            async with serving(tmp_path) as service:
                assert service._compaction.seq > 0
                incidents = service.cluster.jobs[JOB].accounting.incidents
                assert [incident.number for incident in incidents] == list(range(1, 41))
                assert len(service.moments.after(-1)) >= archive.BACK
                assert service.moments.after(service.journal.last_seq - archive.BACK)[0].seq == (
                    service.journal.last_seq - archive.BACK + 1
                )

        asyncio.run(story())
        entries = read_history(tmp_path / "journal.db").entries
        assert isinstance(entries[-1], Entry)
