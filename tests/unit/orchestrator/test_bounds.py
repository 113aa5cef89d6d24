"""No call ends the orchestrator: what is out of all bounds, or could not be journalled, is refused in words."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from tests.support.api import Port, play
from tests.support.brain import JOB, NODE, RecordingLink, serving, spec
from tests.support.plans import taint, two_nodes
from torchrelay.api.shown import LONGEST_MS, Change
from torchrelay.client.runs import NotPossible, time_in
from torchrelay.orchestrator.http import changes
from torchrelay.orchestrator.http.changes import check_spec
from torchrelay.orchestrator.store.journal import Call, Journal, Unwritable
from torchrelay.orchestrator.views.plans import Planned, PlanRefused
from torchrelay.protocol.messages.events import Event, FreezeSet, JobCancelled, JobSpec, JobSubmitted, TaintSet, Tick

HUGE = 10**20
WHO = Call(wall_ms=1, who="ann\udcff@desk", call="taint", what="node-0 k")


def taints_for(ttl_ms: int) -> TaintSet:
    return TaintSet(node=NODE, key="k", source="ann", ttl_ms=ttl_ms)


NOBODY_CAN_WRITE: list[tuple[Event, Call | None]] = [
    (taints_for(HUGE), None),
    (FreezeSet(source="file /runs/\udcff/FREEZE"), None),
    (Tick(), WHO),
]


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 30))


class TestTimes:
    @pytest.mark.parametrize("ttl_ms", [LONGEST_MS + 1, HUGE])
    def test_a_taint_lies_for_ten_years_at_most(self, ttl_ms: int) -> None:
        with pytest.raises(PlanRefused, match="10 years"):
            taint(two_nodes(), node="node-1", key="k", ttl_ms=ttl_ms)

    def test_ten_years_may_be_asked_for(self) -> None:
        planned = taint(two_nodes(), node="node-1", key="k", ttl_ms=LONGEST_MS)
        assert planned.event == TaintSet(node="node-1", key="k", source="ann@desk", ttl_ms=LONGEST_MS)  # type: ignore[arg-type]

    @pytest.mark.parametrize("text", ["999999999999999d", "3651d", "9" * 5_000])
    def test_the_command_line_says_so_too(self, text: str) -> None:
        with pytest.raises(NotPossible, match="10 years") as caught:
            time_in(text)
        assert caught.value.code == 2

    def test_the_command_line_takes_ten_years(self) -> None:
        assert time_in("3650d") == LONGEST_MS


class TestSpecs:
    @pytest.mark.parametrize(
        "name", [field.name for field in msgspec.structs.fields(JobSpec) if field.type in (int, int | None)]
    )
    @pytest.mark.parametrize("value", [HUGE, -HUGE])
    def test_every_number_has_its_bounds(self, name: str, value: int) -> None:
        found = check_spec(msgspec.structs.replace(spec(), **{name: value}))
        assert found.startswith(f"{name} is {value}: ")

    def test_what_jobs_have_is_within_them(self) -> None:
        assert check_spec(spec(moves_per_hour=-1, probation_ms=0, spares=0, max_restarts=1_000)) == ""


class TestJournal:
    @pytest.mark.parametrize(("event", "call"), NOBODY_CAN_WRITE)
    def test_what_cannot_be_written_changes_nothing(self, tmp_path: Path, event: Event, call: Call | None) -> None:
        with closing(Journal(tmp_path / "journal.db")) as journal:
            with pytest.raises(Unwritable, match=r"ann|TaintSet|FreezeSet|Tick"):
                journal.append(event, 5, call)
            assert (journal.last_seq, journal.last_ms) == (0, 0)
            assert journal.append(Tick(), 6) == 1

    def test_a_call_that_cannot_be_written_is_refused(self, tmp_path: Path) -> None:
        with closing(Journal(tmp_path / "journal.db")) as journal:
            with pytest.raises(Unwritable):
                journal.note(WHO)
            assert journal.calls() == ()


class TestService:
    @pytest.mark.parametrize(("event", "call"), NOBODY_CAN_WRITE)
    def test_such_an_event_is_dropped_and_the_next_one_is_heard(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, event: Event, call: Call | None
    ) -> None:
        async def story() -> None:
            async with serving(tmp_path) as service:
                link = RecordingLink()
                await service.attach(link, link.joined())
                await service.put(JobSubmitted(spec=spec()))
                before, cluster = service.journal.last_seq, service.cluster
                with caplog.at_level(logging.WARNING), pytest.raises(Unwritable):
                    await service.put(event, call)
                assert service.cluster == cluster
                assert "is dropped" in caplog.text
                assert await service.put(JobCancelled(job=JOB, reason="enough")) == before + 1
                assert not service.degraded

        run(story)

    def test_nobody_needs_to_wait_for_it(self, tmp_path: Path) -> None:
        """An agent's event is not awaited; its exception must not be reported as forgotten either."""

        async def story() -> None:
            async with serving(tmp_path) as service:
                service.put(taints_for(HUGE))
                assert await service.put(Tick()) == 1

        run(story)


class TestApi:
    def test_a_time_beyond_all_bounds_is_refused_and_the_service_lives(self, tmp_path: Path) -> None:
        async def story(port: Port) -> None:
            async with port.agent():
                await port.post("/v1/jobs", spec(), 201)
                for ttl_ms in (LONGEST_MS + 1, 2**64, HUGE):
                    body = {"node": NODE, "key": "k", "ttl_ms": ttl_ms}
                    assert "10 years" in (await port.post("/v1/taint", body, 400))["error"]
                body = {"job": "b", "world_size": 1, "nproc_per_node": 1, "report_ms": HUGE}
                assert "report_ms is" in (await port.post("/v1/jobs", body, 400))["error"]
                assert len(port.service.cluster.jobs) == 1

        play(tmp_path, story)

    def test_an_event_that_cannot_be_written_is_a_bad_request(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        change = Change(verb="taint", applied=False, changes=True, plan=())
        monkeypatch.setattr(changes, "plan_taint", lambda *_: Planned(taints_for(HUGE), change))

        async def story(port: Port) -> None:
            assert "TaintSet" in (await port.post("/v1/taint", {"node": NODE, "key": "k"}, 400))["error"]
            assert port.service.journal.last_seq == 0
            await port.post("/v1/jobs", spec(), 201)

        play(tmp_path, story)
