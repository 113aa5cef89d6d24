"""What outlives an orchestrator besides its events: the time that passed in quiet hours, and which rules it went by."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.brain import JOB, NODE, RecordingLink, serving, spec
from tests.support.operating import Desk
from tests.support.operating import play as at_the_desk
from tests.support.service import FakeTime
from torchrelay.orchestrator.core import rules
from torchrelay.orchestrator.core import service as shell
from torchrelay.orchestrator.core.rules import other_rules
from torchrelay.orchestrator.core.service import Orchestrator
from torchrelay.orchestrator.store.journal import Journal, JournalRefused, Superseded, read_history, read_rules
from torchrelay.protocol.messages.events import FreezeSet, JobCancelled, JobSubmitted, TaintSet, Tick
from torchrelay.protocol.rules.cluster import RULES_VERSION

HOUR = 3_600


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 30))


def age(service: Orchestrator, now: FakeTime, seconds: float) -> None:
    """Time passes, and the orchestrator is awake."""
    service.clock.release()
    for _ in range(int(seconds)):
        now.sleep(1)
        service.clock.look(1.0)
        if now.ns // 10**9 % 5 == 0:
            service._pass_time()


def journal_of(path: Path, version: int | None) -> Path:
    """A journal of a job, by other rules."""
    with closing(Journal(path)) as journal:
        journal.append(JobSubmitted(spec=spec()), 1)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        if version is None:
            db.execute("DELETE FROM about WHERE name = 'rules'")
        else:
            db.execute("UPDATE about SET value = ? WHERE name = 'rules'", (version,))
        db.execute("UPDATE about SET value = '0.0.7' WHERE name = 'version'")
    return path


class TestTime:
    def test_a_taint_is_lifted_although_the_orchestrator_dies_again_and_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shell, "RETURN_S", 0.0)
        now = FakeTime()

        async def life(begun: bool) -> int:
            """Half an hour; it is killed at the end."""
            with closing(Journal(tmp_path / "journal.db")) as journal:
                service = Orchestrator(journal, source=now)
                if begun:
                    link = RecordingLink()
                    service.hear(link.joined())
                    service.hear(TaintSet(node=NODE, key="k", source="ann", ttl_ms=(2 * HOUR + 600) * 1_000))
                age(service, now, HOUR / 2)
                return len([taint for taint in service.cluster.taints.values() if taint.key == "k"])

        assert [asyncio.run(life(number == 0)) for number in range(5)] == [1, 1, 1, 1, 0]

    def test_the_time_is_kept_at_least_once_a_minute_while_there_is_a_job(self, tmp_path: Path) -> None:
        now = FakeTime()

        async def story() -> None:
            with closing(Journal(tmp_path / "journal.db")) as journal:
                service = Orchestrator(journal, source=now)
                service.hear(JobSubmitted(spec=spec()))
                before = journal.last_seq
                age(service, now, 600)
                assert journal.last_seq == before, "time alone is no event"
                reached = service.clock.now_ms()
            with closing(Journal(tmp_path / "journal.db")) as journal:
                assert reached - 60_000 < journal.last_ms <= reached

        run(story)

    def test_nothing_is_written_for_nobody(self, tmp_path: Path) -> None:
        now = FakeTime()

        async def story() -> None:
            with closing(Journal(tmp_path / "journal.db")) as journal:
                age(Orchestrator(journal, source=now), now, 600)
                assert journal.last_ms == 0

        run(story)

    def test_an_end_in_order_loses_nothing(self, tmp_path: Path) -> None:
        now = FakeTime()

        async def story() -> None:
            async with serving(tmp_path, now) as service:
                service.hear(JobSubmitted(spec=spec()))
                service.clock.release()
                now.sleep(1.2)
                reached = service.clock.now_ms()
                service.end()
            with closing(Journal(tmp_path / "journal.db")) as journal:
                assert (journal.last_ms, reached) == (1_200, 1_200)

        run(story)

    def test_the_journal_keeps_it_and_wall_time_goes_on_from_there(self, tmp_path: Path) -> None:
        path = tmp_path / "journal.db"
        with closing(Journal(path)) as journal:
            journal.append(Tick(), 7)
            journal.keep_time(5_000, 1_000_000)
            assert journal.last_ms == 5_000
            journal.keep_time(6_000, 1_001_000)
        with closing(Journal(path)) as journal:
            assert (journal.last_seq, journal.last_ms) == (1, 6_000)

    def test_one_that_is_superseded_keeps_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "journal.db"
        with closing(Journal(path)) as old, closing(Journal(path, take_over=True)) as new:
            with pytest.raises(Superseded):
                old.keep_time(5_000, 1)
            assert new.last_ms == 0
        with closing(Journal(path)) as journal:
            assert journal.last_ms == 0


class TestRules:
    def test_a_new_journal_says_which_rules_it_goes_by(self, tmp_path: Path) -> None:
        with closing(Journal(tmp_path / "journal.db")) as journal:
            assert journal.rules == RULES_VERSION
        assert read_rules(tmp_path / "journal.db")[0] == RULES_VERSION
        assert other_rules(tmp_path / "journal.db") == ""

    @pytest.mark.parametrize("version", [None, 1, RULES_VERSION + 1])
    def test_a_job_that_goes_on_is_not_gone_on_with_by_other_rules(self, tmp_path: Path, version: int | None) -> None:
        path = journal_of(tmp_path / "journal.db", version)
        said = other_rules(path)
        assert f"rules {version or 1} (torchrelay 0.0.7)" in said
        assert f"has rules {RULES_VERSION}" in said
        assert "or start it anew" in said

        async def story() -> None:
            with closing(Journal(path)) as journal, pytest.raises(JournalRefused, match="or start it anew"):
                Orchestrator(journal)

        run(story)

    def test_what_the_rules_installed_now_cannot_replay_has_not_ended(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = journal_of(tmp_path / "journal.db", 1)
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute("INSERT INTO events VALUES (2, 3, x'c1', 0)")
        assert "or start it anew" in other_rules(path)

        def fails(_: object) -> None:
            raise AssertionError("the protocol does not come to rest")

        monkeypatch.setattr(rules, "replay", fails)
        assert "or start it anew" in other_rules(journal_of(tmp_path / "second.db", 1))

    def test_a_job_that_has_ended_or_never_was_is_no_hindrance(self, tmp_path: Path) -> None:
        path = journal_of(tmp_path / "journal.db", 1)
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute("DELETE FROM events")
        path.with_suffix(".mark").unlink()
        assert other_rules(path) == ""
        with closing(Journal(path)) as journal:
            journal.append(JobSubmitted(spec=spec()), 1)
            journal.append(JobCancelled(job=JOB, reason="enough"), 2)
        assert other_rules(path) == ""

        async def story() -> None:
            async with serving(tmp_path) as service:
                assert service.journal.rules == RULES_VERSION
                await service.put(FreezeSet(source="ann"))

        run(story)
        assert read_rules(path)[0] == RULES_VERSION, "what is written from now on goes by these"

    def test_the_process_ends_with_94_and_has_not_touched_the_journal(self, tmp_path: Path) -> None:
        path = journal_of(tmp_path / "journal.db", 1)
        lease = read_history(path).lease
        words = [sys.executable, "-m", "torchrelay.orchestrator", "--run-dir", str(tmp_path), "--take-over"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert done.returncode == 94
        assert "or start it anew" in done.stderr
        assert "\n" not in done.stderr.strip()
        assert (read_history(path).lease, read_rules(path)) == (lease, (1, "0.0.7")), "who has it keeps it"


def test_restart_says_before_it_acts_that_other_rules_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(desk: Desk) -> None:
        desk.service.kept = True
        assert (await desk.say("restart-services", "--dry-run")).code == 0
        monkeypatch.setattr(rules, "RULES_VERSION", RULES_VERSION + 1)
        for words in ((), ("--orchestrator",), ("--force",), ("--dry-run",)):
            said = await desk.say("restart-services", "--yes", *words)
            assert said.code == 2, said
            assert "nothing was restarted" in said.err
            assert f"has rules {RULES_VERSION + 1}" in said.err
        assert not (desk.run_dir / "restart.json").exists()
        assert desk.service.cluster.jobs[JOB].phase == "running"
        assert (await desk.say("restart-services", "--agents", "--dry-run")).code == 0

    at_the_desk(tmp_path, story)
