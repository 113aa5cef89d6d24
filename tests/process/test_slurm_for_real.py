"""The Slurm plugin on a real Slurm, started for these tests: one satellite a need, shrinking, preempting, drains."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.brain import until, wait_for
from tests.support.minislurm import MiniSlurm, available
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Rank, WorkerId
from torchrelay.schedulers.port import (
    Grant,
    GrantLost,
    GrantReady,
    NodeGone,
    NodeLeaving,
    NodeReturned,
    Place,
    Roster,
    SchedulerError,
    SchedulerEvent,
    SpareRequest,
    SpareSource,
)
from torchrelay.schedulers.slurm.asking import Wishes, agent_argv, roster_of_comment, satellite_name
from torchrelay.schedulers.slurm.commands import Commands
from torchrelay.schedulers.slurm.plugin import SlurmScheduler, StartAgent, open_slurm

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(not available(), reason="NO SLURM: apt-get install slurmctld slurmd slurm-client munge"),
]
KEY = "gpt/2/1"
WISHES = Wishes(poll_s=0.05, rest=0.0, shrink_risk=True, yields="low")


@pytest.fixture(scope="module")
def slurm() -> Iterator[MiniSlurm]:
    with MiniSlurm(nodes=5, gpus=2) as cluster:
        yield cluster


@pytest.fixture
def main(slurm: MiniSlurm) -> Iterator[int]:
    """A job on three of five nodes; afterwards all is as it was."""
    words = ("--no-kill", "-N3", "--gpus-per-node=2", "-J", "gpt", "-o", "/dev/null", "--chdir=/")
    job = slurm.run("sbatch", "--parsable", *words, "--wrap", "srun --no-kill sleep 300").stdout.strip()
    wait_for("the main job", lambda: squeue(slurm, job, "%T") == "RUNNING")
    yield int(job)
    slurm.run("scancel", "-f", "-u", str(os.getuid()))
    wait_for("an empty queue", lambda: not slurm.run("squeue", "-h").stdout.strip())
    for node in slurm.node_names():
        slurm.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
    wait_for("idle nodes", lambda: set(slurm.run("sinfo", "-h", "-N", "-o", "%T").stdout.split()) == {"idle"})


def squeue(slurm: MiniSlurm, job: object, column: str) -> str:
    return slurm.run("squeue", "-h", "-j", str(job), "-o", column, check=False).stdout.strip()


def satellites(slurm: MiniSlurm) -> list[str]:
    """Id and state of each."""
    lines = slurm.run("squeue", "-h", "-t", "PD,R", "-o", "%i %T %j").stdout.splitlines()
    return [line.rpartition(" ")[0] for line in lines if "+spare." in line]


@asynccontextmanager
async def plugin(
    slurm: MiniSlurm, main: int, folder: Path, start_agent: StartAgent | None = None
) -> AsyncIterator[SlurmScheduler]:
    async with open_slurm(main, folder, WISHES, start_agent, Commands(slurm.env)) as scheduler:
        yield scheduler


def play(slurm: MiniSlurm, main: int, folder: Path, story: Callable[[SlurmScheduler], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        async with asyncio.timeout(100), plugin(slurm, main, folder) as scheduler:
            await story(scheduler)

    asyncio.run(all_of_it())


def test_a_satellite_comes_once_runs_an_agent_and_is_given_back(slurm: MiniSlurm, main: int, tmp_path: Path) -> None:
    agents, mark = list[subprocess.Popen[bytes]](), tmp_path / "agent"

    async def start(grant: Grant, nodes: Sequence[NodeId]) -> None:
        command = [
            "sh",
            "-c",
            f"echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES > {mark}.draft; mv {mark}.draft {mark}; sleep 60",
        ]
        for node in nodes:
            agents.append(subprocess.Popen(agent_argv(grant.grant, node, command), env=slurm.env))
        await until("the agent", mark.exists)

    async def story() -> None:
        async with plugin(slurm, main, tmp_path, start) as one, plugin(slurm, main, tmp_path) as other:
            grants = await asyncio.gather(*(each.acquire(SpareRequest(key=KEY)) for each in (one, other, one)))
            assert len(set(grants)) == 1
            assert len(satellites(slurm)) == 1
            assert mark.read_text().split() == [grants[0].nodes[0], "0,1"]
        async with plugin(slurm, main, tmp_path, start) as again:  # an agent runs there: none is started
            assert await again.acquire(SpareRequest(key=KEY)) == grants[0]
            assert len(agents) == 1
            await again.give_everything_back()
            assert satellites(slurm) == []
            assert squeue(slurm, main, "%T") == "RUNNING"

    asyncio.run(story())
    for agent in agents:
        agent.wait(20)


ASK = """
import asyncio, sys
from pathlib import Path
from torchrelay.schedulers.port import SpareRequest
from torchrelay.schedulers.slurm.plugin import open_slurm
async def ask():
    async with open_slurm(int(sys.argv[1]), Path(sys.argv[2])) as scheduler:
        await scheduler.acquire(SpareRequest(key="gpt/2/1"))
asyncio.run(ask())
"""


def test_an_orchestrator_that_is_killed_while_it_asks_leaves_one_request_at_most(
    slurm: MiniSlurm, main: int, tmp_path: Path
) -> None:
    """The request that the killed one left waits in the queue, behind a job of the same name; then it is the grant."""
    name = satellite_name("gpt", main, KEY)
    words = ("--no-shell", "-N1", "-J", name, "--comment=before", "-w", "n5", "-Q", "--gres=gpu:2")
    slurm.run("salloc", *words)
    before = satellites(slurm)[0].split()[0]
    orphan = subprocess.Popen(
        ["salloc", "--no-shell", "-N1", "-J", name, "--dependency=singleton", "-Q", f'--comment={{"key":"{KEY}"}}'],
        env=slurm.env,
    )
    wait_for("both", lambda: len(satellites(slurm)) == 2)
    orphan.kill()
    orphan.wait()
    slurm.run("scancel", before)
    wait_for("the orphan's start", lambda: [each.split()[1] for each in satellites(slurm)] == ["RUNNING"])
    left = satellites(slurm)[0].split()[0]

    async def story(scheduler: SlurmScheduler) -> None:
        assert (await scheduler.acquire(SpareRequest(key=KEY))).grant == left

    play(slurm, main, tmp_path, story)
    assert len(satellites(slurm)) == 1


def test_killed_at_any_moment_and_asked_again_there_is_one(slurm: MiniSlurm, main: int, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ASK, str(main), str(tmp_path)], env=slurm.env)
    wait_for("the request", lambda: satellites(slurm))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()

    async def story(scheduler: SlurmScheduler) -> None:
        grant = await scheduler.acquire(SpareRequest(key=KEY))
        assert [each.split()[0] for each in satellites(slurm)] == [grant.grant]

    play(slurm, main, tmp_path, story)


def test_a_bad_node_is_given_back_by_shrinking_and_the_batch_node_stays(
    slurm: MiniSlurm, main: int, tmp_path: Path
) -> None:
    async def story(scheduler: SlurmScheduler) -> None:
        first = (await scheduler.snapshot()).grants[0]
        batch, bad, other = first.nodes
        place = Place(rank=Rank(0), worker=WorkerId("w0"), node=other)
        roster = Roster(job=JobId("gpt"), generation=Generation(2), places=(place,))
        await scheduler.publish(roster)
        with pytest.raises(SchedulerError, match=f"{batch} stays in job {main}, unused: the batch script"):
            await scheduler.release([batch], bad=False)
        await scheduler.release([bad], bad=True, reason="xid 79")
        assert (await scheduler.snapshot()).grants[0].nodes == (batch, other)
        assert roster_of_comment(squeue(slurm, main, "%k")) == roster
        grants = [await scheduler.acquire(SpareRequest(key=f"k{place}", prefer=(bad,))) for place in range(2)]
        assert all(grant.nodes != (bad,) for grant in grants)
        with pytest.raises(SchedulerError, match="0 are idle in train"):
            await scheduler.acquire(SpareRequest(key="k3"))

    play(slurm, main, tmp_path, story)


def test_a_job_of_the_partition_that_yields_is_preempted(slurm: MiniSlurm, main: int, tmp_path: Path) -> None:
    words = ("-p", "low", "-N2", "--exclusive", "-o", "/dev/null", "--chdir=/", "--wrap", "sleep 300")
    stranger = slurm.run("sbatch", "--parsable", *words).stdout.strip()
    wait_for("the stranger", lambda: squeue(slurm, stranger, "%T") == "RUNNING")

    async def story(scheduler: SlurmScheduler) -> None:
        with pytest.raises(SchedulerError, match="0 are idle"):
            await scheduler.acquire(SpareRequest(key=KEY, source=SpareSource.IDLE))
        grant = await scheduler.acquire(SpareRequest(key=KEY, source=SpareSource.PREEMPT, deadline_s=20.0))
        assert len(grant.nodes) == 1

    play(slurm, main, tmp_path, story)
    assert squeue(slurm, stranger, "%T") == "PENDING"


def test_drains_returns_and_losses_are_told(slurm: MiniSlurm, main: int, tmp_path: Path) -> None:
    heard = list[SchedulerEvent]()

    def update(node: NodeId, *words: str) -> None:
        slurm.run("scontrol", "update", f"NodeName={node}", *words)

    async def story(scheduler: SlurmScheduler) -> None:
        async def listen() -> None:
            async for event in scheduler.watch():
                heard.append(event)

        listening = asyncio.create_task(listen())
        await asyncio.sleep(0)
        first = (await scheduler.snapshot()).grants[0]
        node = first.nodes[1]
        update(node, "State=DRAIN", "Reason=fan = slow")
        await until("the drain", lambda: NodeLeaving(node=node, reason="fan = slow") in heard)
        update(node, "State=RESUME")
        await until("the resume", lambda: NodeReturned(node=node) in heard)
        update(node, "State=DOWN", "Reason=power cut")
        await until("the loss", lambda: NodeGone(node=node, reason="power cut") in heard)
        lost = GrantLost(node=node, grant=str(main), reason="power cut")
        await until("the shrinking", lambda: lost in heard)
        grant = await scheduler.acquire(SpareRequest(key=KEY))
        await until("the grant", lambda: GrantReady(node=grant.nodes[0], grant=grant.grant) in heard)
        await scheduler.close()
        await listening

    play(slurm, main, tmp_path, story)
