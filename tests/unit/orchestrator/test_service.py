"""The orchestrator's shell: journal first, orders at once and again, and no deadline passes while it cannot listen."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.brain import JOB, NODE, RecordingLink, sample, serving, spec, train, until
from tests.support.service import FakeTime, run
from torchrelay.orchestrator.core import service as shell
from torchrelay.orchestrator.core.service import Orchestrator
from torchrelay.orchestrator.store.journal import Journal, JournalRefused, JournalUnavailable, read_history
from torchrelay.orchestrator.views.story import replay
from torchrelay.protocol.messages.events import (
    Event,
    FreezeSet,
    JobSubmitted,
    NodeJoined,
    NodeLost,
    TaintSet,
    Tick,
    WorkerExited,
    WorkerFinished,
    WorkerHung,
)
from torchrelay.protocol.messages.ids import NodeId, Point, Rank, WorkerId
from torchrelay.protocol.messages.orders import Fence, Interrupt, Leave, StartWorker
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.rules import cluster as core
from torchrelay.wire.messages.channel import JobTerms, OrderFrame, Shutdown


def journalled(folder: Path) -> list[Event]:
    return [entry.event for entry in read_history(folder / "journal.db").entries]


def exited(worker: str) -> WorkerExited:
    return WorkerExited(worker=WorkerId(worker), node=NODE, signal=9, cause="SIGKILL")


class TestSaying:
    def test_new_orders_are_sent_at_once(self, tmp_path: Path) -> None:
        async def story() -> None:
            async with serving(tmp_path) as service:
                link = RecordingLink()
                await service.attach(link, link.joined())
                await service.put(JobSubmitted(spec=spec()))
                assert [order for order in link.orders() if isinstance(order, StartWorker)]

        run(story)

    def test_an_agent_hears_of_a_job_before_its_first_order(self, tmp_path: Path) -> None:
        async def story() -> None:
            async with serving(tmp_path) as service:
                link = RecordingLink()
                await service.attach(link, link.joined())
                await service.put(JobSubmitted(spec=spec()))
                kinds = [type(message) for message in link.sent]
                assert kinds.index(JobTerms) < kinds.index(OrderFrame)

        run(story)

    def test_standing_orders_are_said_again_until_they_are_carried_out(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shell, "REPEAT_S", 0.05)

        async def story() -> None:
            async with serving(tmp_path) as service:
                link = RecordingLink()
                await service.attach(link, link.joined())
                await service.put(JobSubmitted(spec=spec()))
                starts = [order for order in link.orders() if isinstance(order, StartWorker)]
                await until("the same orders again", lambda: link.orders().count(starts[0]) >= 3)

        run(story)

    def test_an_order_that_holds_no_more_is_not_said_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shell, "REPEAT_S", 0.05)

        async def story() -> None:
            async with serving(tmp_path) as service:
                link = RecordingLink()
                await train(service, link)
                said = len(link.sent)
                await until("time to pass", lambda: service.clock.now_ms() > service.journal.last_ms + 300)
                assert link.sent[said:] == []

        run(story)

    def test_within_a_frame_fences_come_first(self, tmp_path: Path) -> None:
        async def story() -> None:
            async with serving(tmp_path) as service:
                link = RecordingLink()
                await train(service, link)
                await service.put(WorkerHung(worker=WorkerId("node-0.1.1"), evidence="stopped"))
                frames = [tuple(message.each()) for message in link.sent if isinstance(message, OrderFrame)]
                kinds = [type(order) for order in frames[-1]]
                assert kinds[0] is Fence
                assert Interrupt in kinds

        run(story)

    def test_within_a_frame_who_must_stop_comes_before_who_starts(self, tmp_path: Path) -> None:
        async def story() -> None:
            async with serving(tmp_path) as service:
                link = RecordingLink()
                await service.attach(link, link.joined())
                start = StartWorker(node=NODE, worker=WorkerId("new"), slot=1, job=JOB)
                service._send([start, Fence(node=NODE, worker=WorkerId("old"))])
                assert [type(order) for order in link.orders()] == [Fence, StartWorker]

        run(story)

    def test_each_job_has_a_secret_of_its_own_that_outlives_the_orchestrator(self, tmp_path: Path) -> None:
        async def secrets() -> tuple[bytes, bytes]:
            async with serving(tmp_path) as service:
                return service.terms(spec()).secret, service.terms(spec(job="other")).secret

        first, again = asyncio.run(secrets()), asyncio.run(secrets())
        assert first == again
        assert first[0] != first[1]
        assert len(first[0]) == 32


class TestReplay:
    def test_the_state_is_the_journal_replayed(self, tmp_path: Path) -> None:
        async def story() -> Cluster:
            async with serving(tmp_path) as service:
                await train(service, RecordingLink())
                await service.put(exited("node-0.1.1"))
                return service.cluster

        before = asyncio.run(story())
        assert before.jobs[JOB].phase is JobPhase.AGREEING
        assert replay(read_history(tmp_path / "journal.db").entries) == before

    def test_a_returning_orchestrator_goes_on_and_says_what_holds(self, tmp_path: Path) -> None:
        async def first() -> Cluster:
            async with serving(tmp_path) as service:
                await train(service, RecordingLink())
                await service.put(exited("node-0.1.1"))
                return service.cluster

        async def second(before: Cluster) -> None:
            async with serving(tmp_path) as service:
                job = service.cluster.jobs[JOB]
                # On a busy machine it was away for so long that it is worth a word.
                left_out_ms = before.jobs[JOB].accounting.left_out_ms
                assert service.cluster.with_job(job.with_accounting(left_out_ms=left_out_ms)) == before
                link = RecordingLink()
                await service.attach(link, link.joined(alive=before.workers.values()))
                service.remind(link)
                assert Interrupt in {type(order) for order in link.orders()}

        before = asyncio.run(first())
        asyncio.run(second(before))

    def test_time_goes_on_from_where_it_was(self, tmp_path: Path) -> None:
        with closing(Journal(tmp_path / "journal.db")) as journal:
            journal.append(Tick(), 3_600_000)

        async def story() -> None:
            async with serving(tmp_path) as service:
                assert service.clock.now_ms() >= 3_600_000

        run(story)

    def test_the_story_is_told_again_from_the_journal(self, tmp_path: Path) -> None:
        async def tell() -> list[tuple[int, str]]:
            async with serving(tmp_path) as service:
                if not service.cluster.jobs:
                    await train(service, RecordingLink())
                return [(moment.seq, note.text) for moment in service.moments.after(-1) for note in moment.notes]

        first = asyncio.run(tell())
        assert asyncio.run(tell())[: len(first)] == first

    def test_taints_and_freezes_are_told(self, tmp_path: Path) -> None:
        async def story() -> None:
            async with serving(tmp_path) as service:
                await service.put(TaintSet(node=NODE, key="ecc", source="ann", reason="errors"))
                await service.put(FreezeSet(source="ann", reason="a talk"))
                texts = [note.text for moment in service.moments.after(-1) for note in moment.notes]
                assert any("is tainted ecc" in text for text in texts)
                assert any("frozen by ann: a talk" in text for text in texts)

        run(story)

    def test_a_damaged_journal_is_refused(self, tmp_path: Path) -> None:
        async def story() -> None:
            with closing(Journal(tmp_path / "journal.db")) as journal:
                journal.append(Tick(), 1)
                journal._db.execute("UPDATE events SET event = x'00'")
                with pytest.raises(JournalRefused, match="event 1 cannot be read"):
                    Orchestrator(journal)

        run(story)


class TestTime:
    def test_a_tick_is_journalled_only_if_it_changes_something(self, tmp_path: Path) -> None:
        async def story() -> None:
            async with serving(tmp_path) as service:
                await train(service, RecordingLink())
                quiet = service.clock.now_ms() + 600
                await until("some ticks to pass", lambda: service.clock.now_ms() > quiet)
                assert Tick() not in journalled(tmp_path)
                assert service.cluster.jobs[JOB].phase is JobPhase.RUNNING

        run(story)

    def test_a_deadline_that_passes_is_journalled(self, tmp_path: Path) -> None:
        async def story() -> None:
            async with serving(tmp_path) as service:
                await train(service, RecordingLink(), report_ms=150)
                await service.put(exited("node-0.1.1"))
                await until("the silent survivor to be lost", lambda: service.cluster.jobs[JOB].generation > 2)
                assert Tick() in journalled(tmp_path)

        run(story)

    def test_a_node_that_falls_silent_is_lost(self, tmp_path: Path) -> None:
        now = FakeTime()

        async def story() -> None:
            async with serving(tmp_path, now) as service:
                link = RecordingLink()
                await train(service, link)
                service.beat(link, link.beat())
                while NodeLost not in map(type, journalled(tmp_path)):
                    assert now.ns < 60e9, "silence was never noticed"
                    now.sleep(1.0)
                    service.clock.now_ms()
                    await asyncio.sleep(0)
                    service._pass_time()
                assert now.ns >= 15e9, "too early"
                assert not service.cluster.nodes[NODE].alive

        run(story)

    def test_time_in_which_the_orchestrator_did_not_run_makes_nobody_late(self, tmp_path: Path) -> None:
        now = FakeTime()

        async def story() -> None:
            async with serving(tmp_path, now) as service:
                link = RecordingLink()
                await train(service, link)
                service.beat(link, link.beat())
                now.sleep(3600)  # the lid was closed
                service._pass_time()
                assert service.cluster.nodes[NODE].alive
                wall = [anchor.at_ms for anchor in service.journal.anchors]
                assert len(wall) >= 2, "the wall clock is anchored anew"

        run(story)

    def test_after_a_start_deadlines_wait_until_the_agents_are_back(self, tmp_path: Path) -> None:
        async def first() -> None:
            async with serving(tmp_path) as service:
                await train(service, RecordingLink(), report_ms=100)
                await service.put(exited("node-0.1.1"))

        async def second() -> None:
            async with serving(tmp_path) as service:
                begun = service.clock.now_ms()
                for _ in range(5):
                    service._pass_time()
                assert service.clock.held
                assert service.clock.now_ms() == begun
                link = RecordingLink()
                await service.attach(link, link.joined())
                await until("time to go on", lambda: not service.clock.held)

        asyncio.run(first())
        run(second)

    def test_an_agent_that_does_not_come_back_is_not_waited_for_for_ever(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def first() -> None:
            async with serving(tmp_path) as service:
                await train(service, RecordingLink())

        async def second() -> None:
            monkeypatch.setattr(shell, "RETURN_S", 0.1)
            async with serving(tmp_path) as service:
                assert service.clock.held
                await until("time to go on", lambda: not service.clock.held)

        asyncio.run(first())
        run(second)


class TestAgents:
    def test_a_node_that_was_given_up_must_join_anew(self, tmp_path: Path) -> None:
        async def story() -> None:
            async with serving(tmp_path) as service:
                link = RecordingLink()
                await train(service, link)
                await service.put(NodeLost(node=NODE, incarnation=link.incarnation, reason="silent"))
                service.beat(link, link.beat())
                assert "join anew" in link.closed

        run(story)

    def test_a_second_agent_of_the_same_name_is_not_let_in_while_the_first_lives(self, tmp_path: Path) -> None:
        now = FakeTime()

        async def story() -> None:
            async with serving(tmp_path, now) as service:
                link = RecordingLink()
                await train(service, link)
                service.beat(link, link.beat())
                assert service.occupied(NODE, "second")
                assert not service.occupied(NODE, "first"), "the same one may come back at once"
                for _ in range(25):
                    now.sleep(0.1)
                    service.clock.look(0.5)
                assert not service.occupied(NODE, "second"), "the first is silent"

        run(story)

    def test_a_new_connection_takes_the_place_of_the_old_one(self, tmp_path: Path) -> None:
        async def story() -> None:
            async with serving(tmp_path) as service:
                old, new = RecordingLink(), RecordingLink()
                await service.attach(old, old.joined())
                await service.attach(new, new.joined())
                assert old.closed
                service.detach(old)
                assert service.connections[NODE] is new

        run(story)

    def test_beats_tell_how_far_a_job_is_and_it_is_remembered(self, tmp_path: Path) -> None:
        async def first() -> None:
            async with serving(tmp_path) as service:
                link = RecordingLink()
                await train(service, link)
                service.beat(link, link.beat(sample("node-0.0.0", 0, 41), sample("node-0.1.1", 1, 40)))
                await until("it to be remembered", lambda: service.journal.reached().get(JOB))
                service.beat(link, link.beat(sample("node-0.0.0", 0, 43)))

        async def second() -> None:
            async with serving(tmp_path) as service:
                assert service.reached[JOB][1] == Point(43), "the last is remembered at the end"

        asyncio.run(first())
        asyncio.run(second())


class TestFullDisk:
    """A journal that cannot be written: to the agents the orchestrator is as if it were away."""

    def test_an_event_that_is_not_journalled_has_no_effect_and_is_not_acknowledged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def story() -> None:
            async with serving(tmp_path) as service:
                link = RecordingLink()
                await train(service, link)
                before = service.cluster
                fill_disk(service, monkeypatch)
                with pytest.raises(JournalUnavailable, match="full"):
                    await service.put(exited("node-0.1.1"))
                assert service.cluster == before
                assert "full" in service.degraded
                assert link.closed
                assert service.connections == {}
                with pytest.raises(JournalUnavailable, match="training goes on"):
                    await service.put(JobSubmitted(spec=spec(job="other")))
                monkeypatch.undo()

        run(story)

    def test_when_there_is_room_again_it_goes_on_and_no_deadline_has_passed_meanwhile(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shell, "REPEAT_S", 0.05)

        async def story() -> None:
            async with serving(tmp_path) as service:
                await train(service, RecordingLink())
                with monkeypatch.context() as full:
                    tried = fill_disk(service, full)
                    with pytest.raises(JournalUnavailable):
                        await service.put(exited("node-0.1.1"))
                    held = service.clock.now_ms()
                    await until("some attempts", lambda: len(tried) > 3)
                    assert service.clock.now_ms() == held
                    assert service.degraded
                await until("the journal to be written again", lambda: not service.degraded)
                link = RecordingLink()
                await service.attach(link, link.joined(alive=service.cluster.workers.values()))
                await service.put(exited("node-0.1.1"))
                assert service.cluster.jobs[JOB].phase is JobPhase.AGREEING
                assert replay(read_history(tmp_path / "journal.db").entries) == service.cluster

        run(story)


def fill_disk(service: Orchestrator, patch: pytest.MonkeyPatch) -> list[str]:
    """No write succeeds any more. Returns the statements that were tried."""
    tried: list[str] = []

    def refuse(sql: str, *_: object) -> None:
        tried.append(sql)
        raise JournalUnavailable("journal.db: database or disk is full")

    patch.setattr(service.journal, "_write", refuse)
    return tried


class TestEnds:
    def test_a_failed_assertion_of_ours_ends_the_loop(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(_: Cluster, __: Any) -> Cluster:
            raise AssertionError("a rank has two owners")

        async def story() -> None:
            with closing(Journal(tmp_path / "journal.db")) as journal:
                service = Orchestrator(journal)
                rules: dict[type[Event], Any] = {NodeJoined: broken}
                monkeypatch.setattr(core, "RULES", rules)
                loop = asyncio.create_task(service.serve())
                service.put(NodeJoined(node=NODE, incarnation="a", slots=1))
                with pytest.raises(AssertionError, match="two owners"):
                    await loop

        run(story)

    def test_after_the_end_of_a_job_holders_that_have_left_are_told_nothing(self, tmp_path: Path) -> None:
        async def story() -> None:
            async with serving(tmp_path) as service:
                link = RecordingLink()
                node = await train(service, link, spares=0)
                for rank in (0, 1):
                    worker = WorkerId(f"node-0.{rank}.{rank}")
                    generation = service.cluster.jobs[JOB].generation
                    finished = WorkerFinished(job=JOB, generation=generation, worker=worker, rank=Rank(rank))
                    await service.put(finished)
                await node.until_phase("finishing")
                assert {type(order) for order in service.standing} == {Leave}
                for rank in (0, 1):
                    await service.put(WorkerExited(worker=WorkerId(f"node-0.{rank}.{rank}"), node=NODE, code=0))
                assert service.cluster.jobs[JOB].phase is JobPhase.ENDED
                assert not list(service.standing)

        run(story)

    def test_a_shutdown_waits_for_the_agents_to_leave(self, tmp_path: Path) -> None:
        async def story() -> None:
            async with serving(tmp_path) as service:
                link = RecordingLink()
                await service.attach(link, link.joined())
                service.begin_shutdown("the run is over")
                assert Shutdown in {type(message) for message in link.sent}
                assert not service.over
                service.detach(link)
                await until("the end", lambda: service.over)

        run(story)

    def test_an_end_leaves_training_alone(self, tmp_path: Path) -> None:
        async def story() -> None:
            async with serving(tmp_path) as service:
                link = RecordingLink()
                await service.attach(link, link.joined())
                service.end()
                assert Shutdown not in {type(message) for message in link.sent}

        run(story)


def test_unknown_nodes_are_not_spoken_to(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as service:
            link = RecordingLink(NodeId("node-1"))
            await service.attach(link, link.joined())
            await service.put(NodeJoined(node=NODE, incarnation="elsewhere", slots=3))
            await service.put(JobSubmitted(spec=spec(nodes=2)))
            assert all(order.node == "node-1" for order in link.orders())

    run(story)
