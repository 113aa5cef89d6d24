"""The Slurm plugin passes the port's tests on a fake of Slurm, and no need ever has two satellites."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.brain import until, wait_for
from tests.support.fake_slurm import FakeSlurm
from tests.support.scheduler_port import PortTests
from tests.support.slurm_plugin import RISKY, play, plugin
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId
from torchrelay.schedulers.port import (
    Grant,
    Health,
    Roster,
    Scheduler,
    SchedulerError,
    SpareRequest,
    SpareSource,
)
from torchrelay.schedulers.slurm.asking import Wishes, roster_of_comment
from torchrelay.schedulers.slurm.holdings import Patience
from torchrelay.schedulers.slurm.plugin import SlurmScheduler

QUICK = Patience(deadline_s=10.0, between_s=0.0)


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


def test_one_that_was_given_before_its_node_was_known_to_be_bad_is_exchanged(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path)

    async def story(scheduler: SlurmScheduler) -> None:
        first = await scheduler.acquire(SpareRequest(key="k"))
        second = await scheduler.acquire(SpareRequest(key="k", exclude=first.nodes))
        assert not set(first.nodes) & set(second.nodes)

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
