"""The agent through deaths, its own and others', and its end: nothing is lost, and nothing is left running."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.agent_stage import JOB, NODE, Stage, interrupt, lives, offspring, on_stage, staged, until
from torchrelay.agent.__main__ import private_folder, take_node
from torchrelay.agent.workers.forks import Child, Ended, Fork
from torchrelay.agent.workers.processes import MOST_ENDED, Processes, see_gone
from torchrelay.protocol.messages.events import WorkerExited, WorkerJoined, WorkerReported, WorkerStarted
from torchrelay.protocol.messages.ids import Point, WorkerId
from torchrelay.wire.files.procfs import read_stat
from torchrelay.wire.messages.channel import Ack, Refused, Shutdown

# An agent that has a defect from the moment at which a file is there.
DEFECTIVE = """
import sys
from torchrelay.agent import __main__, agent

beat = agent.Agent._beat

def broken(self):
    if (self.site.folder / "strike").exists():
        raise RuntimeError("a defect")
    return beat(self)

agent.Agent._beat = broken
sys.exit(__main__.main())
"""

# ---------------------------------------------------------------- nothing is lost


@on_stage("work")
async def test_private_state_travels_with_the_end_and_stays_until_it_is_acknowledged(stage: Stage) -> None:
    page = stage.sockets / NODE / "w1.page"
    stage.conductor.acknowledge = False
    os.kill(await stage.working(), signal.SIGKILL)
    private = (await stage.ended("w1")).private
    assert [(record.point, record.data) for record in private] == [
        (Point(3), b"private three"),
        (Point(4), b"private four"),
    ]
    assert page.exists()
    stage.conductor.acknowledge = True
    await stage.start("w2", slot=1)
    await stage.heard(WorkerStarted, "w2")
    await until(lambda: not page.exists(), "the page is removed")


@on_stage("work")
async def test_facts_outlive_an_orchestrator(stage: Stage) -> None:
    pid = await stage.working()
    other = await stage.working("w2", slot=1)
    await stage.conductor.close()
    os.kill(pid, signal.SIGKILL)
    await until(lambda: f"worker w1 (process {pid})" in stage.agent_log(), "the agent knows that w1 is dead")
    heard = len(stage.conductor.frames)
    await asyncio.sleep(0.1)  # an age that can be seen
    await stage.conductor.open()
    await stage.attached(times=2)
    # It is listed although it is dead: what it left must be heard before anybody concludes anything.
    assert {seen.worker for seen in stage.conductor.attaches[1].workers} == {"w1", "w2"}
    assert stage.conductor.attaches[1].incarnation == stage.conductor.attaches[0].incarnation
    ended = await stage.ended("w1")
    assert ended.age_ms >= 100
    assert len(ended.private) == 2
    assert stage.conductor.frames[heard].seq == heard + 1
    assert lives(other)


@on_stage("work")
async def test_what_was_not_acknowledged_is_sent_again_in_order_with_its_number(stage: Stage) -> None:
    stage.conductor.acknowledge = False
    await stage.working()
    first = list(stage.conductor.frames)
    stage.conductor.frames.clear()
    stage.conductor.acknowledge = True
    await stage.conductor.close()
    await stage.conductor.open()
    await until(lambda: len(stage.conductor.frames) >= len(first), "everything again")
    assert [(one.seq, one.event) for one in stage.conductor.frames] == [(one.seq, one.event) for one in first]
    seen = stage.conductor.attaches[1].workers[0]
    assert (seen.warm, seen.rank, seen.generation, seen.address, seen.job) == (True, 2, 1, "a:1", JOB)


@on_stage("work", linger_s=30.0)
async def test_an_agent_that_comes_back_adopts_its_workers(stage: Stage) -> None:
    pid = await stage.working()
    dying = await stage.working("w2", slot=1)
    await stage.kill_agent()
    os.kill(dying, signal.SIGKILL)
    await until(lambda: not lives(dying), "w2 is dead")
    assert lives(pid)
    await stage.start_agent()
    await stage.attached(times=2)
    again = stage.conductor.attaches[1]
    assert {(seen.worker, seen.pid) for seen in again.workers} == {("w1", pid), ("w2", dying)}
    assert again.incarnation != stage.conductor.attaches[0].incarnation
    ended = await stage.ended("w2")
    assert (ended.signal, len(ended.private)) == (signal.SIGKILL, 2)
    await stage.heard(WorkerJoined, "w1", count=2)  # it has called again and said what holds
    await stage.order(interrupt("w1", "still there?"))
    await stage.heard(WorkerReported, "w1")
    await until(lambda: stage.log("w1").count("welcome") == 2, "what it prints is in the log, by the new agent")


@on_stage("work")
async def test_a_defect_of_an_agent_leaves_its_workers_to_the_next_one(stage: Stage) -> None:
    await stage.end()
    stage.program = ("-c", DEFECTIVE)
    agent = await stage.start_agent()
    await stage.attached(times=2)
    pid = await stage.working()
    (stage.sockets / NODE / "strike").touch()
    assert await agent.wait() == 95, stage.agent_log()
    assert "RuntimeError: a defect" in stage.agent_log()
    assert lives(pid), "although it lingers for no second"
    stage.program = ("-m", "torchrelay.agent")
    await stage.start_agent()
    await stage.attached(times=3)
    assert [(seen.worker, seen.pid) for seen in stage.conductor.attaches[2].workers] == [("w1", pid)]
    await stage.heard(WorkerJoined, "w1", count=2)
    family = [pid, *await stage.kill_agent()]
    await until(lambda: not any(lives(one) for one in family), "a kill is as ever: what it lingers for counts")


@on_stage("stay")
async def test_workers_do_not_outlive_an_agent_unless_told_to(stage: Stage) -> None:
    await stage.start("w1")
    await stage.says("w1", "staying")
    family = await stage.kill_agent()
    assert len(family) == 3
    await until(lambda: not any(lives(pid) for pid in family), "worker, forkserver and scribe are gone")


@on_stage("stay", linger_s=3.0)
async def test_a_lingering_forkserver_gives_up_at_its_deadline(stage: Stage) -> None:
    await stage.start("w1")
    await stage.says("w1", "staying")
    family = await stage.kill_agent()
    assert all(lives(pid) for pid in family)
    await until(lambda: not any(lives(pid) for pid in family), "worker and forkserver are gone")


@on_stage("work")
async def test_when_the_forkserver_dies_its_workers_go_with_it_and_another_takes_over(stage: Stage) -> None:
    pid = await stage.working()
    server = next(offspring(stage.pid))
    os.kill(server, signal.SIGKILL)
    ended = await stage.ended("w1")
    assert "its forkserver died" in ended.cause
    assert len(ended.private) == 2
    assert not lives(pid)
    await stage.working("w2")


def test_a_worker_without_a_parent_is_seen_to_its_end() -> None:
    orphan = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    with orphan:
        child = Child(worker=WorkerId("w1"), job=JOB, slot=0, pid=orphan.pid)
        started = read_stat(orphan.pid).started
        for another in (started - 1, None):  # the process id has come again: this one is a stranger
            asyncio.run(see_gone(child, another))
            assert lives(orphan.pid)
        asyncio.run(see_gone(child, started))
        assert not lives(orphan.pid)
    asyncio.run(see_gone(child, started))  # nothing to wait for


def test_ends_are_remembered_up_to_a_bound_and_no_id_is_used_again(tmp_path: Path) -> None:
    told: list[Ended] = []
    processes = Processes(tmp_path, preload=(), env={}, cwd="/", linger_s=0.0, on_ended=told.append)
    (tmp_path / "lives").mkdir()
    for number in range(MOST_ENDED + 1):
        processes.kill(WorkerId(f"w{number}"), signal.SIGKILL, "unknown")
    assert len(processes.ended) == MOST_ENDED
    assert "w0" not in processes.ended
    processes.start(Fork(worker=WorkerId("w0"), job=JOB, slot=0, function="", log=""))
    assert told[-1].worker == "w0"
    assert len(told) == MOST_ENDED + 2


@on_stage("work", linger_s=30.0)
async def test_an_id_of_a_dead_agent_and_forkserver_is_not_started_again(stage: Stage) -> None:
    await stage.working()
    family = await stage.kill_agent()
    for pid in family:
        os.kill(pid, signal.SIGKILL)
    await until(lambda: not any(lives(pid) for pid in family), "all are gone")
    await stage.start_agent()
    await stage.attached(times=2)
    assert stage.conductor.attaches[1].workers == ()
    await stage.start("w1")
    assert "earlier agent" in (await stage.ended("w1")).cause


# ---------------------------------------------------------------- the end, and what does not begin


@on_stage("work")
async def test_an_agent_that_is_ended_ends_its_workers_reports_them_and_cleans_up(stage: Stage) -> None:
    family = [await stage.working(), await stage.working("w2", slot=1)]
    assert await stage.end() == 0
    assert [lives(pid) for pid in family] == [False, False]
    assert {e.cause for e in stage.conductor.of(WorkerExited)} == {"SIGTERM (ended by its agent: received SIGTERM)"}
    assert list(stage.sockets.iterdir()) == []


@on_stage("work")
async def test_an_agent_stays_until_its_last_reports_are_acknowledged(stage: Stage) -> None:
    await stage.working()
    stage.conductor.acknowledge = False
    assert stage.agent is not None
    stage.agent.send_signal(signal.SIGTERM)
    await stage.ended("w1")
    await asyncio.sleep(0.2)  # it would be gone by now
    assert stage.agent.returncode is None
    await stage.conductor.say(Ack(stage.conductor.frames[-1].seq))
    assert await stage.agent.wait() == 0


@on_stage("stay")
async def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(stage: Stage) -> None:
    await stage.start("w1")
    await stage.says("w1", "staying")
    await stage.conductor.say(Shutdown(reason="the job is over", grace_s=0.2))
    assert stage.agent is not None
    assert await stage.agent.wait() == 0
    assert (await stage.ended("w1")).cause == "SIGKILL (ended by its agent: the job is over)"


@on_stage("work")
async def test_a_silent_orchestrator_changes_nothing_for_the_workers(stage: Stage) -> None:
    pid = await stage.working()
    stage.conductor.token = "another"  # it comes back with another token: not ours to give up
    await stage.conductor.close()
    await stage.conductor.open()
    await until(lambda: "does not accept our token" in stage.agent_log(), "it is turned away")
    assert lives(pid)
    assert stage.agent is not None
    assert stage.agent.returncode is None


def test_an_agent_with_a_wrong_token_ends_with_94_and_the_reason(tmp_path: Path) -> None:
    async def story() -> None:
        stage = Stage(tmp_path, "work", (), 0.0)
        stage.conductor.token = "another"
        await stage.conductor.open()
        try:
            agent = await stage.start_agent()
            assert await agent.wait() == 94
            assert "does not accept our token" in stage.agent_log()
        finally:
            await stage.strike()

    asyncio.run(story())


def test_an_agent_that_is_refused_ends_with_94_and_the_reason(tmp_path: Path) -> None:
    async def story() -> None:
        stage = Stage(tmp_path, "work", (), 0.0)
        stage.conductor.answer = Refused(reason="node-0 is there already")
        await stage.conductor.open()
        try:
            agent = await stage.start_agent()
            assert await agent.wait() == 94
            assert "node-0 is there already" in stage.agent_log()
        finally:
            await stage.strike()

    asyncio.run(story())


def test_an_agent_whose_modules_do_not_load_ends_with_94_and_the_traceback(tmp_path: Path) -> None:
    async def story() -> None:
        stage = Stage(tmp_path, "work", (), 0.0)
        stage.write_launch("work", preload=("no_such_module",))
        await stage.conductor.open()
        try:
            agent = await stage.start_agent()
            assert await agent.wait() == 94
            assert "No module named 'no_such_module'" in stage.agent_log()
            assert "while it loaded no_such_module" in stage.agent_log()
        finally:
            await stage.strike()

    asyncio.run(story())


def test_an_agent_tied_to_its_parent_ends_with_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with staged(tmp_path, "work") as stage:
            await stage.end()
            # Between us and the agent stands a process that we can end.
            code = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); input()"
            parent = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                code,
                sys.executable,
                "-m",
                "torchrelay.agent",
                "--node",
                NODE,
                "--slots",
                "1",
                "--url",
                f"http://127.0.0.1:{stage.conductor.port}",
                "--token-file",
                str(stage.run_dir / "token"),
                "--run-dir",
                str(stage.run_dir),
                "--folder",
                str(stage.sockets),
                "--tied",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
            assert parent.stdout is not None
            agent = int(await parent.stdout.readline())
            await stage.attached(times=2)
            await stage.working()
            family = [agent, *offspring(agent)]
            parent.kill()
            await parent.wait()
            await until(lambda: not any(lives(pid) for pid in family), "agent and workers are gone")

    asyncio.run(story())


def test_a_node_has_one_agent(tmp_path: Path) -> None:
    take_node(tmp_path, "node-0")
    with pytest.raises(ValueError, match="another agent of node-0"):
        take_node(tmp_path, "node-0")


def test_a_folder_that_others_can_open_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match="chmod 700"):
        private_folder(tmp_path)


def test_a_folder_whose_sockets_would_have_too_long_a_path_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 90)
    with pytest.raises(ValueError, match="shorter --folder"):
        take_node(deep, "node-0")
