"""What workers tell at the same time is heard together: one transaction, one look at the job, one round of orders."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support.brain import JOB, NODE, RecordingLink, serving, spec, train
from tests.support.service import run
from torchrelay.orchestrator.core.service import Orchestrator
from torchrelay.orchestrator.store.journal import Entry, Journal, JournalUnavailable, Unwritable, read_history
from torchrelay.orchestrator.views.story import replay
from torchrelay.protocol.messages.events import (
    Event,
    JobCancelled,
    JobSubmitted,
    NodeJoined,
    OnceRecorded,
    WorkerExited,
    WorkerResumed,
    WorkerWarm,
)
from torchrelay.protocol.messages.ids import Generation, Rank, WorkerId
from torchrelay.protocol.rules.cluster import EMPTY, advance, orders


def exited(worker: str) -> WorkerExited:
    return WorkerExited(worker=WorkerId(worker), node=NODE, signal=9, cause="SIGKILL")


def warm(name: str) -> WorkerWarm:
    return WorkerWarm(worker=WorkerId(name))


def entries(folder: Path) -> tuple[Entry, ...]:
    return read_history(folder / "journal.db").entries


def test_a_node_that_trains_is_heard_together_and_replays_to_the_same_state(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as service:
            await train(service, RecordingLink(), world_size=3, nproc_per_node=3)
            found = entries(tmp_path)
            assert [entry.seq for entry in found] == list(range(1, len(found) + 1))
            assert sum(entry.more for entry in found) >= 6, "three workers started, were ready, ..."
            assert all(one.at_ms == other.at_ms for one, other in itertools.pairwise(found) if one.more)
            again = replay(found)
            assert again == service.cluster
            assert orders(again) == orders(service.cluster)

    run(story)


def test_what_is_due_is_done_after_the_last_of_them() -> None:
    joined = NodeJoined(node=NODE, incarnation="a", slots=3)
    alone = advance(advance(EMPTY, joined, 1), JobSubmitted(spec=spec()), 1)
    assert alone.workers
    first = advance(advance(EMPTY, joined, 1, more=True), JobSubmitted(spec=spec()), 1, more=True)
    assert not first.workers, "nothing is placed yet"
    last = advance(first, warm("a stranger"), 1)
    assert (last, orders(last)) == (alone, orders(alone))


def test_orders_follow_once_after_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[int] = []

    async def story() -> None:
        async with serving(tmp_path) as service:
            await train(service, RecordingLink())
            say = service._say

            def saying() -> None:
                said.append(service.journal.last_seq)
                say()

            monkeypatch.setattr(service, "_say", saying)
            first, second = [service.put(exited(name)) for name in sorted(service.cluster.workers)[:2]]
            assert await second == await first + 1
            assert said == [await second]

    run(story)


def test_a_call_and_what_is_no_workers_are_heard_alone_and_in_their_turn(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as service:
            told: list[Event] = [
                warm("a"), warm("b"), JobSubmitted(spec=spec()), warm("c"),
                JobCancelled(job=JOB, reason="enough"), warm("d"), warm("e"), warm("f"),
            ]  # fmt: skip
            numbers = [await done for done in [service.put(event) for event in told]]
            assert numbers == list(range(1, 9))
            assert [entry.event for entry in entries(tmp_path)] == told
            assert [entry.more for entry in entries(tmp_path)] == [True, False, False, False, False, True, True, False]

    run(story)


def test_one_that_fits_into_no_journal_is_refused_alone(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as service:
            first, wrong, last = (service.put(warm(name)) for name in ("a", "\ud800", "b"))
            with pytest.raises(Unwritable):
                await wrong
            assert (await first, await last) == (1, 2)
            assert [entry.more for entry in entries(tmp_path)] == [False, False]

    run(story)


def test_a_journal_that_cannot_be_written_takes_none_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise JournalUnavailable("the disk is full")

    async def story() -> None:
        async with serving(tmp_path) as service:
            before = service.cluster
            monkeypatch.setattr(Journal, "append_all", full)
            monkeypatch.setattr(Journal, "append", full)
            some = [service.put(warm(name)) for name in ("a", "b", "c")]
            for one in some:
                with pytest.raises(JournalUnavailable):
                    await one
            assert service.degraded
            assert service.cluster == before
            assert entries(tmp_path) == ()

    run(story)


def test_none_or_all_of_them_are_on_disk(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "journal.db")) as journal:
        journal.append_all([warm("a"), warm("b")], 5)
        with pytest.raises(Unwritable):
            journal.append_all([warm("c"), warm("\ud800")], 6)
        assert (journal.last_seq, journal.last_ms) == (2, 5)
        with closing(sqlite3.connect(tmp_path / "journal.db", isolation_level=None)) as db:
            db.execute(
                "CREATE TRIGGER full BEFORE INSERT ON events WHEN NEW.seq = 4 BEGIN SELECT RAISE(ABORT, 'full'); END"
            )
        with pytest.raises(JournalUnavailable):
            journal.append_all([warm("c"), warm("d")], 6)
        assert journal.last_seq == 2
    assert [(entry.seq, entry.at_ms, entry.more) for entry in entries(tmp_path)] == [(1, 5, True), (2, 5, False)]


def test_what_is_heard_says_since_when_it_has_waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Sequence[Event]] = []

    async def story() -> None:
        async with serving(tmp_path) as service:
            hear_all = Orchestrator.hear_all

            def hearing(service: Orchestrator, some: Sequence[Event]) -> int:
                heard.append(some)
                return hear_all(service, some)

            monkeypatch.setattr(Orchestrator, "hear_all", hearing)
            some = [service.put(exited(name)) for name in ("a", "b")]
            waiting = service._inbox._events
            for place, one in enumerate(waiting):
                waiting[place] = replace(one, came_s=one.came_s - 2.0)
            for written in some:
                await written
            ages = [event.age_ms for event in heard[0] if isinstance(event, WorkerExited)]
            assert len(ages) == 2
            assert all(2_000 <= age < 4_000 for age in ages)

    run(story)


def test_what_was_answered_before_is_acknowledged_and_not_journalled_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as service:
            await train(service, RecordingLink())
            worker = next(iter(service.cluster.workers.values()))
            assert worker.rank is not None
            known = {"job": JOB, "generation": Generation(1), "worker": worker.worker, "rank": worker.rank}
            before = service.journal.last_seq
            again = WorkerResumed(**known)  # type: ignore[arg-type]
            assert await service.put(again) == before
            one, two, three = [service.put(event) for event in (again, warm("x"), again)]
            assert (await one, await two, await three) == (before, before + 1, before + 1)
            assert [entry.event for entry in entries(tmp_path)[before:]] == [warm("x")]

    run(story)


def test_values_given_by_workers_are_not_heard_with_answers(tmp_path: Path) -> None:
    """What is done once is answered to the worker that asked: it is heard alone."""

    async def story() -> None:
        async with serving(tmp_path) as service:
            await train(service, RecordingLink())
            once = OnceRecorded(job=JOB, rank=Rank(0), name="n", value=b"1", restarts=0)
            for done in [service.put(warm("x")), service.put(once), service.put(warm("y"))]:
                await done
            assert not any(entry.more for entry in entries(tmp_path)[-3:])

    run(story)
