"""The Slurm plugin passes the port's tests on a fake of Slurm, and no need ever has two satellites."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.brain import until, wait_for
from tests.support.fake_slurm import FakeSlurm
from tests.support.scheduler_port import PortTests
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId
from torchrelay.schedulers.port import (
    Grant,
    GrantLost,
    Health,
    NodeGone,
    NodeLeaving,
    NodeReturned,
    Roster,
    Scheduler,
    SchedulerError,
    SchedulerEvent,
    SpareRequest,
    SpareSource,
)
from torchrelay.schedulers.slurm.asking import roster_of_comment
from torchrelay.schedulers.slurm.commands import Commands
from torchrelay.schedulers.slurm.holdings import Patience
from torchrelay.schedulers.slurm.plugin import SlurmScheduler, StartAgent, Wishes, open_slurm

DEADLINE_S = 60.0
QUICK = Patience(deadline_s=10.0, between_s=0.0)
RISKY = Wishes(poll_s=0.02, rest=0.0, shrink_risk=True, yields="low")


@asynccontextmanager
async def plugin(
    fake: FakeSlurm, wishes: Wishes = RISKY, start_agent: StartAgent | None = None, deadline_s: float = 20.0
) -> AsyncIterator[SlurmScheduler]:
    commands = Commands(fake.environ, deadline_s=deadline_s, most_bytes=1 << 20)
    async with open_slurm(1, fake.folder, wishes, start_agent, commands) as scheduler:
        yield scheduler


def play(fake: FakeSlurm, story: Callable[[SlurmScheduler], Awaitable[None]], wishes: Wishes = RISKY) -> None:
    async def all_of_it() -> None:
        async with asyncio.timeout(DEADLINE_S), plugin(fake, wishes) as scheduler:
            await story(scheduler)

    asyncio.run(all_of_it())


class OnFake(PortTests):
    """The shared tests, on one kind of Slurm."""

    version = "22.05.8"
    operator = True

    @asynccontextmanager
    async def scheduler(self, folder: Path) -> AsyncIterator[Scheduler]:
        fake = FakeSlurm(folder, version=self.version, operator=self.operator)
        async with plugin(fake) as scheduler:
            yield scheduler

    def published(self, folder: Path) -> Roster | None:
        with FakeSlurm.changed_in(folder) as state:
            return roster_of_comment(state["jobs"]["1"]["comment"])


class TestOldSlurm(OnFake):
    """22.05: text only."""


class TestNewSlurm(OnFake):
    """26.05: JSON, numbers in three parts."""

    version = "26.05.5"


class TestOrdinaryUser(OnFake):
    """Who may not drain."""

    version = "24.11.5"
    operator = False

    @pytest.fixture(autouse=True)
    def not_root(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "getuid", lambda: 4711)

    def test_it_may_not_drain_and_says_so(self, tmp_path: Path) -> None:
        async def story(scheduler: Scheduler) -> None:
            assert not scheduler.caps.report_bad
            assert not await scheduler.report_bad(NodeId("n4"), "too hot")
            grant = await scheduler.acquire(SpareRequest(key="k"))
            await scheduler.release(grant.nodes, bad=True, reason="ecc errors")
            again = await scheduler.acquire(SpareRequest(key="again", prefer=grant.nodes))
            assert not set(again.nodes) & set(grant.nodes)
            told = {node.node: node for node in (await scheduler.snapshot()).nodes}[grant.nodes[0]]
            assert (told.health, told.reason) == (Health.LEAVING, "ecc errors")

        self.play(tmp_path, story)


# ---------------------------------------------------------------- one satellite for one need


def test_many_who_ask_at_once_get_the_same(tmp_path: Path) -> None:
    fake, started = FakeSlurm(tmp_path), list[str]()

    async def start(grant: Grant, nodes: Sequence[NodeId]) -> None:
        assert tuple(nodes) == grant.nodes
        started.append(grant.grant)

    async def story() -> None:
        async with plugin(fake, start_agent=start) as one, plugin(fake) as other:
            asked = [each.acquire(SpareRequest(key="gpt/2/1")) for each in (one, other) for _ in range(3)]
            grants = await asyncio.gather(*asked)
            assert len(set(grants)) == 1

    asyncio.run(story())
    assert len(fake.alive()) == 1
    assert fake.state()["doubles"] == 0
    assert started == ["2"]


ASK = """
import asyncio, sys
from pathlib import Path
from torchrelay.schedulers.port import SpareRequest
from torchrelay.schedulers.slurm.commands import Commands
from torchrelay.schedulers.slurm.plugin import open_slurm
async def ask():
    async with open_slurm(1, Path(sys.argv[1]), commands=Commands()) as scheduler:
        await scheduler.acquire(SpareRequest(key="gpt/2/1"))
asyncio.run(ask())
"""


def killed_while_asking(fake: FakeSlurm, fact: Callable[[], bool]) -> None:
    """An orchestrator asks, and is killed as soon as something is true."""
    process = subprocess.Popen([sys.executable, "-c", ASK, str(fake.folder)], env=fake.environ)
    try:
        wait_for("the request", fact)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


def test_one_who_is_killed_between_asking_and_answer_finds_it_again(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path)
    fake.fail("salloc", "lost")
    killed_while_asking(fake, lambda: bool(fake.running()))
    fake.fail("salloc", "")
    agents = list[str]()

    async def start(grant: Grant, _nodes: Sequence[NodeId]) -> None:
        agents.append(grant.grant)

    async def story() -> None:
        async with plugin(fake, start_agent=start) as scheduler:
            grant = await scheduler.acquire(SpareRequest(key="gpt/2/1"))
            assert grant.grant == "2"

    asyncio.run(story())
    assert len(fake.alive()) == 1
    assert agents == ["2"], "nobody had started it"


def test_a_request_that_arrives_after_its_process_was_killed_is_one_too_many(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path)
    fake.fail("salloc", "late")
    killed_while_asking(fake, lambda: "at_gate" in fake.state())
    fake.fail("salloc", "")

    async def story(scheduler: SlurmScheduler) -> None:
        grant = await scheduler.acquire(SpareRequest(key="gpt/2/1"))
        (tmp_path / "gate").touch()
        await until("the late request", lambda: fake.state()["next"] == 4)
        await scheduler.snapshot()
        assert await scheduler.acquire(SpareRequest(key="gpt/2/1")) == grant

    play(fake, story)
    assert len(fake.alive()) == 1
    assert fake.state()["doubles"] == 0


def test_an_agent_that_runs_is_not_started_again(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path)

    async def asked(scheduler: SlurmScheduler) -> None:
        await scheduler.acquire(SpareRequest(key="k"))

    play(fake, asked)
    with fake.changed() as state:
        state["jobs"]["2"]["steps"] = ["0"]

    async def start(_grant: Grant, _nodes: Sequence[NodeId]) -> None:
        raise AssertionError("it runs")

    async def story() -> None:
        async with plugin(fake, start_agent=start) as scheduler:
            assert (await scheduler.acquire(SpareRequest(key="k"))).grant == "2"

    asyncio.run(story())


def test_a_request_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path)
    fake.fail("salloc", "lost")

    async def story(scheduler: SlurmScheduler) -> None:
        asking = asyncio.create_task(scheduler.acquire(SpareRequest(key="k")))
        await until("the request", fake.alive)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert fake.alive() == []

    play(fake, story)


# ---------------------------------------------------------------- where from


def test_idle_means_idle_and_preempting_takes_the_partition_that_was_named(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path, nodes=3)
    with fake.changed() as state:
        state["jobs"]["50"] = {**state["jobs"]["1"], "name": "stranger", "nodes": ["n3"], "partition": "low"}

    async def story(scheduler: SlurmScheduler) -> None:
        with pytest.raises(SchedulerError, match="0 are idle in train"):
            await scheduler.acquire(SpareRequest(key="k"))
        assert (await scheduler.acquire(SpareRequest(key="k", source=SpareSource.PREEMPT))).nodes == ("n3",)

    play(fake, story)
    assert fake.state()["jobs"]["50"]["state"] == "PREEMPTED"


def test_what_does_not_yield_is_not_preempted(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path)

    async def story(scheduler: SlurmScheduler) -> None:
        assert not scheduler.caps.preempt
        with pytest.raises(SchedulerError, match=r"no partition nights; there are: low, train"):
            await scheduler.acquire(SpareRequest(key="k", source=SpareSource.PREEMPT))
        with pytest.raises(SchedulerError, match="more --nodes"):
            await scheduler.acquire(SpareRequest(key="k", source=SpareSource.DEDICATED))

    play(fake, story, Wishes(yields="nights"))


# ---------------------------------------------------------------- giving back


def test_a_bad_node_of_the_main_job_is_given_back_and_not_asked_for(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path, operator=False, main_nodes=3)

    async def story(scheduler: SlurmScheduler) -> None:
        await scheduler.publish(Roster(job=JobId("gpt"), generation=Generation(2), places=()))
        await scheduler.release([NodeId("n2")], bad=True, reason="xid 79")
        assert fake.state()["jobs"]["1"]["nodes"] == ["n1", "n3"]
        assert (await scheduler.acquire(SpareRequest(key="a", prefer=(NodeId("n2"),)))).nodes != ("n2",)

    async def after_a_restart(scheduler: SlurmScheduler) -> None:
        assert (await scheduler.acquire(SpareRequest(key="b"))).nodes == ("n5",)
        with pytest.raises(SchedulerError, match="0 are idle"):
            await scheduler.acquire(SpareRequest(key="c"))

    play(fake, story)
    play(fake, after_a_restart)


@pytest.mark.parametrize(
    ("setting", "wishes", "told"),
    [
        ({"SchedulerParameters": "bf_interval=1,disable_job_shrink"}, RISKY, "disable_job_shrink is set"),
        ({"SLURM_VERSION": "23.02.3"}, Wishes(), "slurmctld may crash"),
    ],
)
def test_where_a_job_may_not_shrink_the_node_stays(
    tmp_path: Path, setting: dict[str, str], wishes: Wishes, told: str
) -> None:
    fake = FakeSlurm(tmp_path)
    with fake.changed() as state:
        state["config"] = setting

    async def story(scheduler: SlurmScheduler) -> None:
        assert not scheduler.caps.shrink
        with pytest.raises(SchedulerError, match=f"n2 stays in job 1, unused: .*{told}"):
            await scheduler.release([NodeId("n2")], bad=True)

    play(fake, story, wishes)


def test_the_node_of_the_batch_script_stays_and_others_go(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path, main_nodes=3)

    async def story(scheduler: SlurmScheduler) -> None:
        with pytest.raises(SchedulerError, match="n1 stays in job 1, unused: the batch script runs there"):
            await scheduler.release([NodeId("n1"), NodeId("n2")], bad=False)

    play(fake, story)
    assert fake.state()["jobs"]["1"]["nodes"] == ["n1", "n3"]


def test_a_site_that_refuses_to_shrink_is_believed(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path)
    with fake.changed() as state:
        state["refuses"] = "disable_job_shrink"

    async def story(scheduler: SlurmScheduler) -> None:
        assert scheduler.caps.shrink
        with pytest.raises(SchedulerError, match="does not let jobs shrink"):
            await scheduler.release([NodeId("n2")], bad=False)
        assert not scheduler.caps.shrink

    play(fake, story)


def test_22_05_without_accounting_is_changed_once(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path, main_nodes=3)
    with fake.changed() as state:
        state["config"] = {"AccountingStorageType": "accounting_storage/none"}

    def roster(generation: int) -> Roster:
        return Roster(job=JobId("gpt"), generation=Generation(generation), places=())

    async def story(scheduler: SlurmScheduler) -> None:
        await scheduler.publish(roster(2))
        await scheduler.release([NodeId("n2")], bad=False)
        await scheduler.publish(roster(3))
        with pytest.raises(SchedulerError, match="can be shrunk once"):
            await scheduler.release([NodeId("n3")], bad=False)

    play(fake, story)
    assert roster_of_comment(fake.state()["jobs"]["1"]["comment"]) == roster(2)


def test_everything_is_given_back_also_by_one_who_has_just_come(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path)

    async def story(scheduler: SlurmScheduler) -> None:
        for key in "ab":
            await scheduler.acquire(SpareRequest(key=key))

    async def end(scheduler: SlurmScheduler) -> None:
        asking = asyncio.create_task(scheduler.acquire(SpareRequest(key="c")))
        await until("the request", lambda: fake.state()["next"] == 5)
        await scheduler.give_everything_back(QUICK)
        await asyncio.gather(asking, return_exceptions=True)
        with pytest.raises(SchedulerError, match="being given back"):
            await scheduler.acquire(SpareRequest(key="d"))

    play(fake, story)
    fake.fail("salloc", "lost")
    play(fake, end)
    assert fake.alive() == []


def test_what_cannot_be_given_back_is_named_with_the_line_to_type(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path)

    async def story(scheduler: SlurmScheduler) -> None:
        await scheduler.acquire(SpareRequest(key="a"))
        fake.fail("scancel", "refuse")
        with pytest.raises(SchedulerError, match=r"Unable to contact slurm controller.*scancel 2"):
            await scheduler.give_everything_back(Patience(deadline_s=0.5, between_s=0.0))

    play(fake, story)


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
            (flagged("n2", "REBOOT_REQUESTED", ""),
             NodeLeaving(node=n2, reason="to be rebooted; maintenance ahead (reservation maint)", deadline_s=600.0)),
            (flagged("n2", "DOWN", "power cut"), NodeGone(node=n2, reason="power cut")),
            (of_job(nodes=["n1"]), GrantLost(node=n2, grant="1", reason="power cut")),
            (flagged("n2", "", ""), NodeReturned(node=n2)),
        ],
    )  # fmt: skip


def test_the_end_of_the_job_is_told_with_its_deadline(tmp_path: Path) -> None:
    n1, now = NodeId("n1"), time.time()
    watched(
        FakeSlurm(tmp_path),
        [
            (of_job(end=now + 300), NodeLeaving(node=n1, reason="the time limit of its job", deadline_s=300.0)),
            (of_job(end=now + 9000), NodeReturned(node=n1)),
            (of_job(end=now + 120, preempt=now),
             NodeLeaving(node=n1, reason="preempted by a job of higher priority", deadline_s=120.0)),
            (of_job(state="CANCELLED"), GrantLost(node=n1, grant="1", reason="job 1 has ended")),
        ],
    )  # fmt: skip


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
