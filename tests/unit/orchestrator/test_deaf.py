"""While the orchestrator hears no node its clock stands: for how long, and how it goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.brain import JOB, NODE, RecordingLink, serving, train
from tests.support.service import FakeTime, run, told
from torchrelay.orchestrator.core.service import Orchestrator
from torchrelay.orchestrator.store.journal import read_history
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.ids import NodeId, WorkerId

OTHER = NodeId("node-1")
EXITED = ev.WorkerExited(worker=WorkerId("node-0.1.1"), node=NODE, signal=9, cause="SIGKILL")


def silence(service: Orchestrator, now: FakeTime, seconds: float) -> None:
    """Time passes, and nobody is heard."""
    for _ in range(round(5 * seconds)):
        now.sleep(0.2)
        service.clock.now_ms()
        service._pass_time()


def test_no_deadline_passes_while_no_node_is_heard(tmp_path: Path) -> None:
    """The network of the orchestrator is away in the middle of a recovery. Nobody could report, so nobody is late."""
    now = FakeTime()

    async def story() -> None:
        async with serving(tmp_path, now) as service:
            link = RecordingLink()
            await train(service, link, report_ms=1_000)
            before = sum(told(tmp_path))
            service.beat(link, link.beat())
            await service.put(EXITED)
            generation = service.cluster.jobs[JOB].generation
            for _ in range(200):
                now.sleep(0.2)
                service._pass_time()
                service.clock.now_ms()
                if now.ns > 2.2e9:
                    assert service.clock.held
            assert service.cluster.jobs[JOB].generation == generation, "the others were given up"
            service.beat(link, link.beat())
            assert not service.clock.held
            service._pass_time()
            assert sum(told(tmp_path)) - before == pytest.approx(38_000, abs=300)

    run(story)


def test_the_time_goes_on_though_nobody_is_heard_for_a_minute(tmp_path: Path) -> None:
    """And the ledger knows when the node fell silent."""
    now = FakeTime()

    async def story() -> None:
        async with serving(tmp_path, now) as service:
            link = RecordingLink()
            await train(service, link)
            service.beat(link, link.beat())
            began_ns = now.ns
            while service.cluster.nodes[NODE].alive:
                assert now.ns - began_ns < 61e9, "a node that is gone is waited for for ever"
                now.sleep(0.2)
                service.clock.now_ms()
                service._pass_time()
            assert now.ns - began_ns >= 60e9
            lost = next(entry.event for entry in read_history(tmp_path / "journal.db").entries
                        if isinstance(entry.event, ev.NodeLost))  # fmt: skip
            assert lost.age_ms == pytest.approx(60_000, abs=300)
            assert "no beat for 60." in lost.reason

    run(story)


def test_an_orchestrator_that_was_away_itself_while_its_clock_stood_calls_nobody_silent(tmp_path: Path) -> None:
    """One machine, frozen for two minutes with all that is on it: none of them has had a chance to be heard."""
    now = FakeTime()

    async def story() -> None:
        async with serving(tmp_path, now) as service:
            link = RecordingLink()
            await train(service, link)
            service.beat(link, link.beat())
            silence(service, now, 3.0)
            now.sleep(120.0)
            service._pass_time()
            assert service.cluster.nodes[NODE].alive
            assert service.clock.held
            service.beat(link, link.beat())
            silent_ms = service.failure_detector.rhythms[NODE].longest_ms
            assert silent_ms == pytest.approx(3_000, abs=300)
            service._pass_time()
            assert sum(told(tmp_path)) >= 120_000, "the ledger owns up to all of it"

    run(story)


def test_of_two_that_fell_silent_the_other_has_time_to_come_back(tmp_path: Path) -> None:
    now = FakeTime()

    async def story() -> None:
        async with serving(tmp_path, now) as service:
            link, other = RecordingLink(), RecordingLink(node=OTHER)
            await service.attach(other, other.joined())
            await train(service, link)
            for one in (link, other):
                service.beat(one, one.beat())
            silence(service, now, 20.0)
            service.beat(link, link.beat())
            assert service.failure_detector.rhythms[OTHER].longest_ms == pytest.approx(20_000, abs=300)
            assert service.failure_detector.heard[OTHER, other.incarnation] == service.clock.now_ms()
            service.beat(other, other.beat())
            silence(service, now, 4.0)
            service.beat(link, link.beat())
            silent_ms = service.clock.now_ms() - service.failure_detector.heard[OTHER, other.incarnation]
            assert silent_ms == pytest.approx(4_000, abs=300)

    run(story)


def test_an_orchestrator_that_could_not_write_waits_for_its_agents_though_it_was_deaf(tmp_path: Path) -> None:
    now = FakeTime()

    async def story() -> None:
        async with serving(tmp_path, now) as service:
            link = RecordingLink()
            await train(service, link)
            service.beat(link, link.beat())
            silence(service, now, 3.0)
            assert service.clock.held
            service._degrade("the disk is full")
            service.beat(link, link.beat())
            assert service.clock.held, "what is still read now says nothing"
            service._try_journal()
            assert not service.degraded
            service._pass_time()
            assert service.clock.held, "none of them is back"

    run(story)


def test_while_it_waits_for_agents_silence_holds_nothing(tmp_path: Path) -> None:
    now = FakeTime()

    async def first() -> None:
        async with serving(tmp_path, now) as service:
            await train(service, RecordingLink())

    async def second() -> None:
        async with serving(tmp_path, now) as service:
            silence(service, now, 3.0)
            assert service.clock.held
            assert not service._watch.still

    asyncio.run(first())
    run(second)
