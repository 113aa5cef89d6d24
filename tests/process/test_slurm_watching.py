"""The Slurm plugin tells what happens to nodes and jobs, and gets over commands that fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.brain import until
from tests.support.fake_slurm import FakeSlurm
from tests.support.slurm_plugin import play, plugin
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.schedulers.port import (
    GrantLost,
    NodeGone,
    NodeLeaving,
    NodeReturned,
    SchedulerError,
    SchedulerEvent,
    SpareRequest,
)
from torchrelay.schedulers.slurm.plugin import SlurmScheduler

# ---------------------------------------------------------------- watching


def watched(fake: FakeSlurm, deeds: Sequence[tuple[Callable[[dict[str, object]], None], SchedulerEvent]]) -> None:
    """Each change of the cluster is followed by its event. Deadlines are compared without their fractions."""
    heard = list[SchedulerEvent]()

    async def story(scheduler: SlurmScheduler) -> None:
        async def listen() -> None:
            async for event in scheduler.watch():
                heard.append(event)

        listening = asyncio.create_task(listen())
        await asyncio.sleep(0)
        for change, event in deeds:
            with fake.changed() as state:
                change(state)
            await until(f"word of {event}", lambda event=event: event in [rounded(each) for each in heard])  # type: ignore[misc]
        await scheduler.close()
        await listening  # closing ends it

    play(fake, story)


def rounded(event: SchedulerEvent) -> SchedulerEvent:
    """Deadlines in whole minutes."""
    if isinstance(event, NodeLeaving) and event.deadline_s is not None:
        minutes = 60.0 * round(event.deadline_s / 60)
        return NodeLeaving(node=event.node, reason=event.reason, deadline_s=minutes)
    return event


def flagged(node: str, flag: str, reason: str) -> Callable[[dict[str, object]], None]:
    def change(state: dict[str, object]) -> None:
        state["nodes"][node] = {"flags": [flag] if flag else [], "reason": reason}  # type: ignore[index]

    return change


def of_job(**changes: object) -> Callable[[dict[str, object]], None]:
    return lambda state: state["jobs"]["1"].update(changes)  # type: ignore[index]


@pytest.mark.parametrize("version", ["22.05.8", "24.11.5"])
def test_what_happens_to_our_nodes_is_told(tmp_path: Path, version: str) -> None:
    n2, now = NodeId("n2"), time.time()
    ahead = {"name": "maint", "start": now + 600, "nodes": "n2", "flags": "MAINT"}
    fake = FakeSlurm(tmp_path, version=version)
    with fake.changed() as state:
        state["reservations"] = [ahead]
    watched(
        fake,
        [
            (
                flagged("n2", "REBOOT_REQUESTED", ""),
                NodeLeaving(node=n2, reason="to be rebooted; maintenance ahead (reservation maint)", deadline_s=600.0),
            ),
            (flagged("n2", "DOWN", "power cut"), NodeGone(node=n2, reason="power cut")),
            (of_job(nodes=["n1"]), GrantLost(node=n2, grant="1", reason="power cut")),
            (flagged("n2", "", ""), NodeReturned(node=n2)),
        ],
    )


def test_the_end_of_the_job_is_told_with_its_deadline(tmp_path: Path) -> None:
    n1, now = NodeId("n1"), time.time()
    watched(
        FakeSlurm(tmp_path),
        [
            (of_job(end=now + 300), NodeLeaving(node=n1, reason="the time limit of its job", deadline_s=300.0)),
            (of_job(end=now + 9000), NodeReturned(node=n1)),
            (
                of_job(end=now + 120, preempt=now),
                NodeLeaving(node=n1, reason="preempted by a job of higher priority", deadline_s=120.0),
            ),
            (of_job(state="CANCELLED"), GrantLost(node=n1, grant="1", reason="job 1 has ended")),
        ],
    )


def test_a_bad_node_that_was_repaired_may_be_asked_for_again(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path, nodes=3)

    async def story(scheduler: SlurmScheduler) -> None:
        grant = await scheduler.acquire(SpareRequest(key="a"))
        await scheduler.release(grant.nodes, bad=True, reason="fan")
        with pytest.raises(SchedulerError, match="0 are idle"):
            await scheduler.acquire(SpareRequest(key="b"))
        with fake.changed() as state:
            flagged("n3", "", "")(state)
        assert (await scheduler.acquire(SpareRequest(key="b"))).nodes == ("n3",)

    play(fake, story)


# ---------------------------------------------------------------- commands that fail


@pytest.mark.parametrize("how", ["refuse", "empty", "garbage", "half", "huge"])
@pytest.mark.parametrize("command", ["scontrol", "squeue"])
def test_a_look_that_fails_says_which_command_and_changes_nothing(tmp_path: Path, command: str, how: str) -> None:
    fake = FakeSlurm(tmp_path)

    async def story(scheduler: SlurmScheduler) -> None:
        before = await scheduler.snapshot()
        fake.fail(command, how)
        with pytest.raises(SchedulerError, match=rf"`{command}\b"):
            await scheduler.snapshot()
        fake.fail(command, "")
        assert await scheduler.snapshot() == before

    play(fake, story)


def test_a_command_that_hangs_is_ended(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path)

    async def story() -> None:
        async with plugin(fake, deadline_s=1.0) as scheduler:
            fake.fail("scontrol", "hang")
            with pytest.raises(SchedulerError, match=r"`scontrol .*did not end within 1 s: .*waiting; "):
                await scheduler.snapshot()

    asyncio.run(story())


def test_json_that_is_not_to_be_had_is_done_without(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path)
    with fake.changed() as state:
        state["config"] = {"SLURM_VERSION": "24.11.5"}  # it says so, and knows no --json: built without

    async def story(scheduler: SlurmScheduler) -> None:
        assert len((await scheduler.snapshot()).nodes) == 5

    play(fake, story)
    assert sum("--json" in call for call in fake.state()["calls"]) == 1


def test_without_slurm_it_is_said_what_is_missing(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path)
    fake.remove("scontrol")
    with pytest.raises(SchedulerError, match="scontrol is not on PATH: install"):
        play(fake, lambda _: asyncio.sleep(0))


def test_a_slurm_that_is_too_old_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SchedulerError, match=r"needs 22\.05\.0 or later"):
        play(FakeSlurm(tmp_path, version="21.08.8"), lambda _: asyncio.sleep(0))


def test_who_watches_hears_nothing_of_a_look_that_fails_and_goes_on(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path)

    def broken(state: dict[str, object]) -> None:
        state["faults"] = {"squeue": "refuse"}
        flagged("n2", "DRAIN", "fan")(state)

    async def story(scheduler: SlurmScheduler) -> None:
        async def hear() -> SchedulerEvent:
            return await anext(scheduler.watch())

        first = asyncio.create_task(hear())
        await asyncio.sleep(0)
        with fake.changed() as state:
            broken(state)
        calls = len(fake.state()["calls"])
        await until("some looks in vain", lambda: len(fake.state()["calls"]) > calls + 3)
        assert not first.done()
        fake.fail("squeue", "")
        assert await first == NodeLeaving(node=NodeId("n2"), reason="fan")
        await scheduler.close()

    play(fake, story)
