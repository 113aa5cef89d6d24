"""The agent, as its orchestrator and its workers see it: real processes, workers without torch."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.support.agent_stage import G1, JOB, NODE, SECRET, Stage, assign, interrupt, lives, on_stage, staged, until
from torchrelay.protocol.messages.events import WorkerExited, WorkerRaised, WorkerReported, WorkerStarted, WorkerWarm
from torchrelay.protocol.messages.ids import NodeId, Point, WorkerId, WorkerPhase
from torchrelay.protocol.messages.orders import Leave, StartWorker
from torchrelay.wire.messages.channel import Ack
from torchrelay.wire.messages.framing import Closed, FrameSocket
from torchrelay.wire.messages.worker_frames import ATTENDED_S


def numbers_after(text: str, word: str) -> list[int]:
    return [int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{word} ")]


# ---------------------------------------------------------------- ends


@on_stage("leave", "7")
async def test_a_worker_ends_with_its_code_and_all_its_words_in_its_log(stage: Stage) -> None:
    await stage.start("w1")
    ended = await stage.ended("w1")
    assert (ended.code, ended.signal, ended.cause) == (7, None, "exit code 7")
    assert sorted(stage.log("w1").splitlines()) == ["a warning", "argv train.py 7", "atexit ran"]


@on_stage("crash")
async def test_a_worker_that_raises_ends_with_1_and_a_traceback(stage: Stage) -> None:
    await stage.start("w1")
    assert (await stage.ended("w1")).code == 1
    assert "RuntimeError: the script is broken" in stage.log("w1")


@on_stage("signal_myself", str(int(signal.SIGSEGV)))
async def test_a_worker_that_a_signal_ends_is_reported_with_it(stage: Stage) -> None:
    await stage.start("w1")
    ended = await stage.ended("w1")
    assert (ended.code, ended.signal) == (None, signal.SIGSEGV)
    assert ended.cause.startswith("SIGSEGV")


@pytest.mark.usefixtures("no_kernel_kills")
@on_stage("signal_myself", str(int(signal.SIGKILL)))
async def test_a_kill_that_nobody_ordered_is_only_a_kill(stage: Stage) -> None:
    await stage.start("w1")
    assert (await stage.ended("w1")).cause == "SIGKILL"


@on_stage("work", beat_ms=60_000)
async def test_an_end_is_reported_at_once_and_not_with_the_next_beat(stage: Stage) -> None:
    pid = await stage.working()
    killed = time.monotonic_ns()
    os.kill(pid, signal.SIGKILL)
    await stage.ended("w1")
    assert stage.conductor.heard_ns[-1] - killed < 5_000_000_000  # it takes 2 ms; a busy machine has its moods


@on_stage("have_family")
async def test_a_fence_kills_the_whole_family(stage: Stage) -> None:
    await stage.start("w1")
    children = numbers_after(await stage.says("w1", "complete"), "child")
    assert all(lives(pid) for pid in children)
    await stage.fence("w1")
    ended = await stage.ended("w1")
    assert (ended.signal, ended.cause) == (signal.SIGKILL, "SIGKILL (fenced)")
    await until(lambda: not any(lives(pid) for pid in children), "the children are gone")


@pytest.mark.usefixtures("no_kernel_kills")
@on_stage("have_family")
async def test_a_worker_that_dies_by_itself_leaves_no_family(stage: Stage) -> None:
    await stage.start("w1")
    children = numbers_after(await stage.says("w1", "complete"), "child")
    os.kill(os.getsid(children[0]), signal.SIGKILL)  # the worker leads the session
    assert (await stage.ended("w1")).cause == "SIGKILL"
    await until(lambda: not any(lives(pid) for pid in children), "the children are gone")


@on_stage("work")
async def test_a_stopped_worker_is_seen_and_can_be_fenced(stage: Stage) -> None:
    os.kill(await stage.working(), signal.SIGSTOP)
    await until(lambda: any(s.process == "T" for s in stage.samples), "a beat says that it is stopped")
    await stage.fence("w1")
    assert (await stage.ended("w1")).cause == "SIGKILL (fenced)"


CGROUP = Path("/sys/fs/cgroup/memory")


@pytest.mark.skipif(
    not (CGROUP / "memory.limit_in_bytes").exists() or os.getuid() != 0,
    reason="needs a memory cgroup (version 1) and root",
)
@pytest.mark.usefixtures("kernel_kills")
def test_a_worker_that_runs_out_of_memory_is_told_from_a_killed_one(tmp_path: Path) -> None:
    group = CGROUP / f"torchrelay-test-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(64 << 20))

    async def story() -> None:
        async with staged(tmp_path, "eat_memory", group.name) as stage:
            await stage.start("w1")
            ended = await stage.ended("w1")
            assert ended.signal == signal.SIGKILL
            assert ended.cause.startswith("SIGKILL (out of memory: ")

    try:
        asyncio.run(story())
    finally:
        group.rmdir()


# ---------------------------------------------------------------- orders, twice and stale


@on_stage("work")
async def test_an_order_to_start_may_come_twice(stage: Stage) -> None:
    for _ in range(3):
        await stage.start("w1")
    await stage.heard(WorkerStarted, "w1")
    await stage.start("w1")
    await stage.start("w2", slot=1)
    await stage.heard(WorkerStarted, "w2")
    assert len(stage.conductor.of(WorkerStarted, "w1")) == 1


@on_stage("leave", "3")
async def test_an_id_that_has_ended_is_reported_again_and_not_started(stage: Stage) -> None:
    await stage.start("w1")
    await stage.ended("w1")
    await stage.start("w1")
    assert (await stage.ended("w1", count=2)).code == 3
    assert stage.log("w1").count("argv") == 1


@on_stage("work")
async def test_fencing_an_unknown_worker_reports_it_as_ended_for_good(stage: Stage) -> None:
    await stage.fence("w9")
    ended = await stage.ended("w9")
    assert (ended.code, ended.signal, ended.cause) == (None, None, "unknown here")
    await stage.start("w9")
    await stage.ended("w9", count=2)
    assert stage.conductor.of(WorkerStarted) == []


@on_stage("work")
async def test_an_end_that_is_not_acknowledged_yet_is_not_told_twice(stage: Stage) -> None:
    stage.conductor.acknowledge = False
    for _ in range(3):
        await stage.fence("w9")
    await stage.start("w1")
    await stage.heard(WorkerStarted, "w1")
    assert len(stage.conductor.of(WorkerExited, "w9")) == 1
    await stage.conductor.say(Ack(len(stage.conductor.frames)))


@on_stage("work")
async def test_orders_that_are_not_for_this_node_or_name_a_path_are_refused(stage: Stage) -> None:
    await stage.order(
        StartWorker(node=NodeId("node-1"), worker=WorkerId("w1"), slot=0, job=JOB),
        StartWorker(node=NODE, worker=WorkerId("../w2"), slot=0, job=JOB),
        StartWorker(node=NODE, worker=WorkerId("w3"), slot=5, job=JOB),
    )
    await stage.start("w4")
    await stage.heard(WorkerStarted, "w4")
    assert len(stage.conductor.of(WorkerStarted)) == 1


@on_stage("work")
async def test_a_worker_gets_its_orders_and_its_words_arrive_in_order(stage: Stage) -> None:
    await stage.working()
    await stage.order(interrupt("w1", "somebody died"))
    reported = await stage.heard(WorkerReported, "w1")
    assert (reported.committed, reported.phase, reported.pending) == (Point(3), WorkerPhase.GATE, Point(4))
    await stage.order(Leave(node=NODE, worker=WorkerId("w1"), job=JOB, generation=G1, code=5))
    assert (await stage.ended("w1")).code == 5
    kinds = [type(event).__name__ for event in stage.conductor.events]
    assert kinds == ["WorkerStarted", "WorkerWarm", "WorkerJoined", "WorkerReported", "WorkerExited"]
    assert [frame.seq for frame in stage.conductor.frames] == [1, 2, 3, 4, 5]


@on_stage("work")
async def test_what_a_worker_said_last_comes_before_its_end(stage: Stage) -> None:
    for number in range(5):
        name = f"w{number}"
        await stage.working(name)
        await stage.order(interrupt(name, "raise"))
        assert (await stage.ended(name)).code == 17
        kinds = [type(event) for event in stage.conductor.events if getattr(event, "worker", "") == name]
        assert kinds[-2:] == [WorkerRaised, WorkerExited]


@on_stage("work")
async def test_all_that_a_worker_said_is_heard_before_its_end_also_by_a_slow_agent(stage: Stage) -> None:
    pid = await stage.working()
    await stage.order(interrupt("w1", "shout"))
    await stage.says("w1", "ordered Interrupt")
    os.kill(stage.pid, signal.SIGSTOP)
    (stage.run_dir / "shout").touch()
    await until(lambda: not Path(f"/proc/{pid}").exists(), "the forkserver has reported and reaped it")
    os.kill(stage.pid, signal.SIGCONT)
    await stage.ended("w1")
    kinds = [type(event) for event in stage.conductor.events]
    assert kinds[-4:] == [WorkerRaised, WorkerRaised, WorkerRaised, WorkerExited]


@on_stage("work")
async def test_a_worker_that_calls_again_is_served_on_its_newest_call(stage: Stage) -> None:
    await stage.working()
    await stage.order(interrupt("w1", "call again"))
    await stage.says("w1", "the older call is over")


@on_stage("work", "silent")
async def test_a_rank_is_known_from_the_order_that_gave_it(stage: Stage) -> None:
    await stage.start("w1")
    await stage.heard(WorkerWarm, "w1")
    await stage.order(assign("w1", rank=3))
    await until(lambda: [sample.rank for sample in stage.samples] == [3], "a beat tells the rank")


@on_stage("wait")
async def test_orders_to_a_worker_that_has_not_called_are_dropped(stage: Stage) -> None:
    await stage.start("w1")
    await stage.says("w1", "waiting")
    await stage.order(assign("w1"), assign("nobody"))
    await stage.fence("w1")
    assert (await stage.ended("w1")).cause == "SIGKILL (fenced)"


@on_stage("work")
async def test_a_worker_may_not_speak_for_another(stage: Stage) -> None:
    await stage.working()
    await stage.order(interrupt("w1", "lie"))
    await stage.says("w1", "the agent is gone")
    await stage.heard(WorkerStarted, "w1", count=2)
    assert stage.conductor.of(WorkerWarm, "somebody-else") == []


@on_stage("work")
async def test_a_stranger_on_the_link_is_hung_up_on(stage: Stage) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(stage.sockets / NODE / "agent"))
        with pytest.raises(Closed):
            await asyncio.to_thread(FrameSocket(stranger).receive, 10)
    assert "not a worker of ours" in stage.agent_log()


# ---------------------------------------------------------------- what a worker finds, and what is seen of it


@on_stage("tell_environment")
async def test_a_worker_finds_torchruns_environment_and_ours_and_no_secret(stage: Stage) -> None:
    await stage.start("w1", slot=3)
    await stage.ended("w1")
    log = stage.log("w1")
    expected = {
        "OPERATORS": "own", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": JOB, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCHRELAY_WORKER": "w1",
        "TORCHRELAY_JOB": JOB, "TORCHRELAY_NODE": NODE, "TORCHRELAY_SLOT": "3", "TORCHRELAY_LOGS": str(stage.logs),
    }  # fmt: skip
    for name, value in expected.items():
        assert f"{name}={value}\n" in log
    assert "\nRANK=" not in log
    assert f"cwd {stage.run_dir}\n" in log
    assert "session True\nstdin ''\n" in log
    assert "terminated by default True" in log
    # Nothing of the server may stay open in a worker: stdin, and the pipe of its output, thrice.
    opened = next(line for line in log.splitlines() if line.startswith("open "))
    assert opened == f"open {['/dev/null', 'pipe', 'pipe', 'pipe']}"
    for text in (log, stage.agent_log()):
        assert SECRET.decode() not in text
        assert stage.conductor.token not in text


@on_stage("work")
async def test_the_welcome_brings_the_secret_and_the_patience(stage: Stage) -> None:
    await stage.start("w1")
    await stage.says("w1", f"welcome w1 {len(SECRET)} 11.0 127.0.0.1")
    assert (stage.sockets / NODE / "agent").stat().st_mode & 0o077 == 0


@on_stage("work")
async def test_workers_are_told_that_the_orchestrator_is_there_while_it_is(stage: Stage) -> None:
    def told() -> int:
        return (stage.logs / "w1.log").read_text().count("attended")

    await stage.start("w1")
    await stage.says("w1", "attended")
    await until(lambda: told() >= 2, "told twice")
    await stage.conductor.close()
    await until(lambda: "lost the orchestrator" in stage.agent_log(), "the agent knows")
    before, begin = told(), time.monotonic()
    await until(lambda: time.monotonic() - begin > 2 * ATTENDED_S, "two more would have come")
    assert told() == before
    await stage.conductor.open()
    await until(lambda: told() > before, "told again")


@on_stage("work")
async def test_beats_tell_where_each_worker_is(stage: Stage) -> None:
    await stage.working()
    await until(lambda: any(s.phase is WorkerPhase.COMPUTING for s in stage.samples), "the page is read")
    sample = stage.samples[0]
    assert (sample.worker, sample.rank, sample.generation, sample.point) == ("w1", 2, 1, Point(3))
    assert (sample.step_ms, sample.collectives) == (12.0, 7)
    before = len(stage.conductor.beats)
    await until(lambda: len(stage.conductor.beats) >= before + 10, "ten more beats")
    later = stage.samples[0]
    assert later.phase_ms > sample.phase_ms
    assert later.beat_ms >= later.phase_ms
    assert stage.conductor.beats[-1].incarnation == stage.conductor.attaches[-1].incarnation
