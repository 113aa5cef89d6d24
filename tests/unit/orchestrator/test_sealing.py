"""The manifest of a parking: written whole, or not there; and what an operator is told of a parking."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from msgspec.structs import replace

from tests.support.brain import until
from tests.support.service import Deaf
from tests.support.telling import JOB, Story, running, submitted
from torchrelay.orchestrator.core import parking
from torchrelay.orchestrator.core.parking import seal
from torchrelay.orchestrator.core.service import Orchestrator
from torchrelay.orchestrator.views.parking import parking_text, plan_park
from torchrelay.orchestrator.views.plans import PlanRefused
from torchrelay.orchestrator.views.scene import Scene
from torchrelay.protocol.health.pulses import FailureDetector
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.enclosed import Resumed
from torchrelay.protocol.messages.ids import Point, Rank
from torchrelay.protocol.model.job import JobPhase
from torchrelay.wire.files.launch import Launch, write_launch
from torchrelay.wire.parked.folder import InUse, lock, make_folder, user_of
from torchrelay.wire.parked.manifest import MANIFEST, NoParking, read_manifest, write_manifest

KEY = "0123456789abcdef"


@pytest.fixture
def story(tmp_path: Path) -> Story:
    """A job whose ranks are all written down."""
    write_launch(tmp_path, Launch(script="train.py", args=("--lr", "1"), cwd="/home/me"))
    story = running(park_dir=str(tmp_path / "parked"), park_key=KEY)
    story.hear(ev.ParkAsked(job=JOB, reason="the nodes go", source="test"))
    for kind in (od.Halt, od.Decide, od.Park):
        story.answer((kind,))
    assert story.job.phase is JobPhase.SEALING
    return story


def test_the_manifest_says_what_a_resumed_run_must_be(story: Story, tmp_path: Path) -> None:
    assert seal(story.job, tmp_path, 0) == ""
    found = read_manifest(tmp_path / "parked")
    assert (found.name, found.point) == (story.job.parking.name, Point(4))
    assert (found.world_size, found.torch, found.script, found.args) == (2, "2", "/home/me/train.py", ("--lr", "1"))
    assert found.code == "c", "as its ranks have told: whoever writes the manifest need not have the script"
    assert [(file.rank, file.node, file.size) for file in found.files] == [(0, "node-0", 1000), (1, "node-0", 1000)]


def test_the_former_parking_stays_until_the_next_is_whole(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "parked"
    make_folder(place)
    former = place / f"parked-{KEY}-1"
    former.mkdir()
    full = OSError(28, "No space left on device")

    def fails(*_: object) -> None:
        raise full

    with monkeypatch.context() as patched:
        patched.setattr(parking, "write_manifest", fails)
        assert "No space left" in seal(story.job, tmp_path, 0)
    assert former.is_dir()
    with pytest.raises(NoParking):
        read_manifest(place)
    assert seal(story.job, tmp_path, 0) == ""
    assert not former.exists()


def test_what_was_written_and_said_to_have_failed_is_taken_back(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk says only after the rename that something is wrong."""
    write = write_manifest

    def writes_and_fails(folder: Path, manifest: object) -> None:
        write(folder, manifest)  # type: ignore[arg-type]
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(parking, "write_manifest", writes_and_fails)
    assert "Input/output error" in seal(story.job, tmp_path, 0)
    assert not (tmp_path / "parked" / MANIFEST).exists()
    monkeypatch.setattr(parking, "taken_back", lambda _: False)
    assert seal(story.job, tmp_path, 0) == ""  # it is there: nobody may go on beside it


def test_what_cannot_be_told_is_asked_again_and_not_for_ever(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unclear(*_: object) -> str:
        raise parking.Unclear("stale file handle")

    monkeypatch.setattr(parking, "AGAIN_S", 0.0)
    told = asyncio.run(parking.sealed(story.job, unclear))
    assert isinstance(told, ev.SealFailed)
    assert told.reason.startswith("stale file handle. Look into")
    answers = iter((parking.Unclear("stale"), ""))

    def at_last() -> str:
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    assert isinstance(asyncio.run(parking.sealed(story.job, at_last)), ev.ParkingSealed)
    monkeypatch.setattr(parking, "write_manifest", lambda *_: (_ for _ in ()).throw(OSError(5, "I/O error")))
    monkeypatch.setattr(Path, "read_bytes", lambda *_: (_ for _ in ()).throw(OSError(116, "Stale file handle")))
    with pytest.raises(parking.Unclear, match="nor can be told"):
        parking.is_there(tmp_path, "x", "why")


def test_no_manifest_is_written_before_the_heirs_know_of_it(story: Story, tmp_path: Path) -> None:
    """The next head would let the job train on, and a manifest would say that it has ended."""
    heard: list[ev.Event] = []
    deaf = Deaf()

    async def watched() -> None:
        service = SimpleNamespace(
            cluster=story.cluster, news=asyncio.Event(), heirs=deaf, degraded="", superseded="", over=False,
            take=lambda event, _: heard.append(event),
        )  # fmt: skip
        watching = asyncio.create_task(parking.watch_parking(cast(Orchestrator, service), tmp_path))
        await until("it waits for the heirs", lambda: deaf.waiting)
        assert not (tmp_path / "parked" / MANIFEST).exists()
        deaf.waiting.pop()()
        await until("it is sealed", lambda: heard)
        watching.cancel()

    asyncio.run(watched())
    assert heard == [ev.ParkingSealed(job=JOB, name=story.job.parking.name)]
    assert (tmp_path / "parked" / MANIFEST).exists()


def test_ranks_that_run_several_scripts_are_not_parked(story: Story, tmp_path: Path) -> None:
    seat = story.job.seats[Rank(1)]
    assert seat.parked is not None
    other = story.job.with_seat(Rank(1), replace(seat, parked=replace(seat.parked, code="another")))
    assert "several scripts" in seal(other, tmp_path, 0)
    assert not (tmp_path / "parked" / MANIFEST).exists()


@pytest.mark.parametrize("other", [f"parked-{KEY}-99", f"parked-{'f' * 16}-1"])
def test_a_manifest_takes_no_other_ones_place(story: Story, tmp_path: Path, other: str) -> None:
    """It is late: the run has parked again meanwhile, or another run has."""
    place = tmp_path / "parked"
    make_folder(place)
    (place / other).mkdir()
    newer = replace(parking.manifest_of(story.job, tmp_path, 0), name=other)
    write_manifest(place, newer)
    assert f"another parking is in {place} ({other})" in seal(story.job, tmp_path, 0)
    assert read_manifest(place).name == other
    assert (place / other).is_dir()


def test_it_takes_the_place_of_its_own_earlier_ones_and_of_that_it_came_from(story: Story, tmp_path: Path) -> None:
    place = tmp_path / "parked"
    make_folder(place)
    former = f"parked-{'f' * 16}-1"
    came = replace(story.job, spec=replace(story.job.spec, resumes=Resumed(folder=f"{place}/{former}", point=Point(2))))
    for name in (former, f"parked-{KEY}-1", story.job.parking.name):
        write_manifest(place, replace(parking.manifest_of(story.job, tmp_path, 0), name=name))
        assert seal(came, tmp_path, 0) == ""
        assert read_manifest(place).name == story.job.parking.name


def test_a_manifest_that_cannot_be_read_is_not_said_to_be_missing(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "parked"
    assert seal(story.job, tmp_path, 0) == ""
    broken = OSError(5, "Input/output error")
    monkeypatch.setattr(Path, "read_bytes", lambda *_: (_ for _ in ()).throw(broken))
    with pytest.raises(parking.Unclear, match="Input/output error"):
        parking.is_there(place, story.job.parking.name, "why")


def test_whoever_acts_for_a_lost_launcher_keeps_other_runs_away(tmp_path: Path) -> None:
    """The launcher's lock ended with it."""
    place = tmp_path / "parked"
    claims = parking.Claims()
    make_folder(place)
    launchers = lock(place, user_of(KEY))
    assert claims.claim(place, KEY) == "", "our own launcher may be there still"
    os.close(launchers)
    assert claims.claim(place, KEY) == claims.claim(place, KEY) == ""
    with pytest.raises(InUse, match=KEY):
        lock(place, user_of("f" * 16))
    others = parking.Claims()
    assert "another run uses" in others.claim(place, "f" * 16)
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    assert "is open to others" in others.claim(tmp_path / "open", KEY)


def test_a_job_whose_folder_another_run_uses_is_not_parked(story: Story, tmp_path: Path) -> None:
    heard: list[ev.Event] = []
    claims = parking.Claims()
    claims.refused[JOB] = "another run uses it"

    async def watched() -> None:
        service = SimpleNamespace(
            cluster=story.cluster, news=asyncio.Event(), heirs=None, degraded="", superseded="", over=False,
            take=lambda event, _: heard.append(event),
        )  # fmt: skip
        watching = asyncio.create_task(parking.watch_parking(cast(Orchestrator, service), tmp_path, claims))
        await until("it has failed", lambda: heard)
        watching.cancel()

    asyncio.run(watched())
    assert heard == [ev.SealFailed(job=JOB, name=story.job.parking.name, reason="another run uses it")]
    assert not (tmp_path / "parked" / MANIFEST).exists()


# ---------------------------------------------------------------- what operators are told


def scene(story: Story) -> Scene:
    return Scene(story.cluster, FailureDetector(), {}, (), story.now_ms, {})


def test_a_plan_says_where_to_and_how_long() -> None:
    story = running(park_dir="/parked", park_key=KEY)
    story.hear(ev.WorkerJoined(worker=story.holder(0), job=JOB, rank=Rank(0), park_ms=2_500))
    planned = plan_park(scene(story), story.job, "", None, 0, "me")
    assert "write themselves to /parked (about 2.5 s)" in planned.change.plan[0]
    assert planned.event == ev.ParkAsked(job=JOB, reason="asked for by me", source="me")
    assert parking_text(story.job) == "to /parked, takes about 2.5 s"
    hurried = plan_park(scene(story), story.job, "", 1_000, 15, "me")
    assert "it does not fit into 1 s" in hurried.change.plan[-1]


def test_what_cannot_be_parked_is_refused_with_the_reason() -> None:
    with pytest.raises(PlanRefused, match="without --park-dir"):
        plan_park(scene(running()), running().job, "", None, 0, "me")
    story = running(park_dir="/parked", park_key=KEY)
    story.hear(ev.FreezeSet(source="ops", reason="look"))
    with pytest.raises(PlanRefused, match="frozen by ops: look"):
        plan_park(scene(story), story.job, "", None, 0, "me")


def test_a_job_that_only_starts_is_not_parked_so_that_a_signal_ends_it_at_once() -> None:
    story = submitted(park_dir="/parked", park_key=KEY)
    with pytest.raises(PlanRefused, match="it is only starting"):
        plan_park(scene(story), story.job, "", 30_000, 15, "me")


def test_what_is_asked_for_already_is_told() -> None:
    story = running(park_dir="/parked", park_key=KEY)
    story.hear(ev.ParkAsked(job=JOB, reason="the nodes go", source="test"))
    planned = plan_park(scene(story), story.job, "", None, 0, "me")
    assert planned.event is None
    assert "is to park already (test): the nodes go" in planned.change.plan[0]
    assert parking_text(story.job) == "asked for by test: the nodes go"
