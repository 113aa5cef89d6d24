"""The local scheduler passes the port's tests, and keeps its agents: started, started again, ended with their owner."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.brain import until, wait_for
from tests.support.processes import Seen, exists
from tests.support.scheduler_port import PortTests
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.schedulers import local
from torchrelay.schedulers.local import CANNOT_START, LocalScheduler, read_file, spread
from torchrelay.schedulers.port import (
    GrantLost,
    NodeGone,
    NodeReturned,
    Roster,
    Scheduler,
    SchedulerError,
    SchedulerEvent,
    SpareRequest,
)
from torchrelay.wire.files.procfs import ProcessGone

THREE = {NodeId(f"node-{place}"): 2 for place in range(3)}
NODE = NodeId("node-0")


def sleeper(node: NodeId, slots: int) -> Sequence[str]:
    """An agent that only waits to be told to end."""
    return [sys.executable, "-c", f"import time; time.sleep(60)  # {node} {slots}"]


def ends_with(code: int) -> Callable[[NodeId, int], Sequence[str]]:
    return lambda _, __: [sys.executable, "-c", f"raise SystemExit({code})"]


@asynccontextmanager
async def local_scheduler(
    folder: Path, command: Callable[[NodeId, int], Sequence[str]] = sleeper
) -> AsyncIterator[LocalScheduler]:
    scheduler = LocalScheduler(folder, command, dict(THREE))
    try:
        yield scheduler
    finally:
        await scheduler.close()


class TestThePort(PortTests):
    """The shared tests of all plugins."""

    @asynccontextmanager
    async def scheduler(self, folder: Path) -> AsyncIterator[Scheduler]:
        async with local_scheduler(folder) as scheduler:
            yield scheduler

    def published(self, folder: Path) -> Roster | None:
        return read_file(folder / "roster.json", Roster)


class Hearing:
    """What a scheduler announces, in order."""

    def __init__(self, scheduler: LocalScheduler) -> None:
        self.heard: list[SchedulerEvent] = []
        self._task = asyncio.create_task(self._listen(scheduler))

    async def _listen(self, scheduler: LocalScheduler) -> None:
        async for event in scheduler.watch():
            self.heard.append(event)

    async def until(self, kind: type[SchedulerEvent]) -> SchedulerEvent:
        def found() -> SchedulerEvent | None:
            return next((event for event in self.heard if isinstance(event, kind)), None)

        event = await until(kind.__name__, found)
        assert event is not None
        return event

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def play(
    folder: Path,
    story: Callable[[LocalScheduler, Hearing], Awaitable[None]],
    command: Callable[[NodeId, int], Sequence[str]] = sleeper,
) -> None:
    async def all_of_it() -> None:
        async with asyncio.timeout(30), local_scheduler(folder, command) as scheduler:
            hearing = Hearing(scheduler)
            await asyncio.sleep(0)
            await story(scheduler, hearing)
            await hearing.end()

    asyncio.run(all_of_it())


def test_spares_are_dealt_round_as_additional_slots() -> None:
    assert spread(2, 4, 0) == {"node-0": 4, "node-1": 4}
    assert spread(2, 4, 3) == {"node-0": 6, "node-1": 5}


def test_an_agent_that_dies_is_started_again(tmp_path: Path) -> None:
    async def story(scheduler: LocalScheduler, hearing: Hearing) -> None:
        await scheduler.acquire(SpareRequest(key="k", prefer=(NODE,)))
        before = scheduler.processes()[NODE]
        os.kill(before, signal.SIGKILL)
        gone = await hearing.until(NodeGone)
        assert gone == NodeGone(node=NODE, reason="its agent ended with -9")
        await hearing.until(NodeReturned)
        assert scheduler.processes()[NODE] != before

    play(tmp_path, story)


def test_an_agent_that_has_run_for_long_is_started_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "QUICK_S", 0.0)  # any time is long
    monkeypatch.setattr(local, "AGAIN_S", 3600.0)

    async def story(scheduler: LocalScheduler, hearing: Hearing) -> None:
        await scheduler.acquire(SpareRequest(key="k", prefer=(NODE,)))
        os.kill(scheduler.processes()[NODE], signal.SIGKILL)
        await hearing.until(NodeReturned)

    play(tmp_path, story)


def test_an_agent_that_cannot_start_is_not_tried_again(tmp_path: Path) -> None:
    async def story(scheduler: LocalScheduler, hearing: Hearing) -> None:
        await scheduler.acquire(SpareRequest(key="k", prefer=(NODE,)))
        lost = await hearing.until(GrantLost)
        assert f"exit code {CANNOT_START}" in getattr(lost, "reason", "")
        assert NodeReturned not in {type(event) for event in hearing.heard}
        assert scheduler.processes() == {}
        assert (await scheduler.snapshot()).grants == ()

    play(tmp_path, story, ends_with(CANNOT_START))


def test_an_agent_that_ends_at_once_every_time_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "AGAIN_S", 0.0)

    async def story(scheduler: LocalScheduler, hearing: Hearing) -> None:
        await scheduler.acquire(SpareRequest(key="k"))
        await hearing.until(GrantLost)
        assert len([event for event in hearing.heard if isinstance(event, NodeReturned)]) == local.TRIES - 1

    play(tmp_path, story, ends_with(3))


def test_a_taint_can_be_taken_back_by_removing_its_file(tmp_path: Path) -> None:
    async def story(scheduler: LocalScheduler, hearing: Hearing) -> None:
        await scheduler.report_bad(NODE, "too hot")
        await until("the taint", lambda: hearing.heard)
        (tmp_path / "taints" / NODE).unlink()
        await hearing.until(NodeReturned)
        await scheduler.acquire(SpareRequest(key="k", count=3))

    play(tmp_path, story)


def test_others_see_the_pool_through_its_file(tmp_path: Path) -> None:
    async def story(scheduler: LocalScheduler, _: Hearing) -> None:
        assert await LocalScheduler(tmp_path).snapshot() == await LocalScheduler(tmp_path / "x").snapshot()
        await scheduler.acquire(SpareRequest(key="k"))
        assert await LocalScheduler(tmp_path).snapshot() == await scheduler.snapshot()

    play(tmp_path, story)


def test_who_owns_no_processes_cannot_acquire(tmp_path: Path) -> None:
    async def story() -> None:
        with pytest.raises(SchedulerError, match="0 idle"):
            await LocalScheduler(tmp_path).acquire(SpareRequest(key="k"))

    asyncio.run(story())


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "nodes.json").write_text("{")
    with pytest.raises(SchedulerError, match=r"nodes\.json cannot be read"):
        asyncio.run(LocalScheduler(tmp_path).snapshot())


def test_an_agent_that_does_not_listen_is_killed_at_the_end(tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"

    async def story() -> int:
        scheduler = LocalScheduler(tmp_path, lambda _, __: [sys.executable, "-c", deaf], dict(THREE))
        await scheduler.acquire(SpareRequest(key="k", prefer=(NODE,)))
        log = tmp_path / "logs" / f"agent-{NODE}.log"
        await until("a deaf agent", lambda: "deaf" in log.read_text())
        process = scheduler.processes()[NODE]
        await scheduler.close(grace_s=0.05)
        return process

    assert not exists(asyncio.run(story()))


OWNER = """
import asyncio, sys
from pathlib import Path
from torchrelay.schedulers.local import LocalScheduler
from torchrelay.schedulers.port import SpareRequest

async def own():
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    scheduler = LocalScheduler(Path(sys.argv[1]), lambda node, slots: command, {"node-0": 1})
    await scheduler.acquire(SpareRequest(key="k"))
    print(scheduler.processes()["node-0"], flush=True)
    await asyncio.sleep(60)

asyncio.run(own())
"""


@contextmanager
def owner(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Seen]]:
    """A process that owns an agent, and the agent."""
    command = [sys.executable, "-c", OWNER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        agent = Seen(int(process.stdout.readline()))
        try:
            yield process, agent
        finally:
            process.kill()
            with suppress(ProcessGone):
                agent.kill()


def test_agents_end_with_their_owner_even_if_it_is_killed(tmp_path: Path) -> None:
    with owner(tmp_path) as (process, agent):
        assert agent.is_alive()
        process.kill()
        wait_for("the agent's end", lambda: not agent.is_alive())
