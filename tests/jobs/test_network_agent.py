"""An agent and the network cores of its workers: real processes, sockets and pages; the cores are pretended."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from tests.support.agent_stage import NODE, Stage, until
from tests.support.fake_core import wish
from torchrelay.protocol.messages.events import TaintCleared, TaintSet
from torchrelay.wire.files.launch import PathLimits, read_launch, write_launch
from torchrelay.wire.messages.channel import Ack, Attached
from torchrelay.wire.messages.pathnews import SOURCE, LinkNews, NetworkNews

LIMITS = PathLimits(down_s=1.0, heal_s=1.0)
NEAR, FAR, OTHER = "127.0.91.1", "127.0.91.2", "127.0.91.3"
NEAR_2, FAR_2 = "127.0.92.1", "127.0.92.2"
TWO_PATHS = [[0, "", NEAR, FAR], [0, "", NEAR, OTHER], [1, "", NEAR_2, FAR_2]]
LOST = [[NEAR, FAR], [NEAR, OTHER]]


class NetStage(Stage):
    """A stage whose agent watches network paths."""

    def pretend(self, worker: str, **fields: Any) -> None:
        wish(self.run_dir / f"{worker}.json", **fields)

    @property
    def folder(self) -> Path:
        return self.sockets / NODE

    @property
    def news(self) -> NetworkNews:
        return self.conductor.news[-1] if self.conductor.news else NetworkNews()

    def links(self) -> dict[tuple[str, str], LinkNews]:
        return {(path.local, link.remote): link for path in self.news.paths for link in path.links}

    def states(self) -> dict[tuple[str, str], str]:
        return {key: link.state for key, link in self.links().items()}

    async def ready(self, worker: str = "w1", slot: int = 0, links: Any = TWO_PATHS, **fields: Any) -> None:
        """Start a worker whose core has these links, and wait until they are known."""
        self.pretend(worker, links=links, **fields)
        await self.start(worker, slot)
        await self.says(worker, "ready")
        wanted = {(local, remote) for _, _, local, remote in links}
        await until(lambda: wanted <= self.states().keys(), f"its links are known\n{self.agent_log()}")

    async def tainted(self, count: int = 1) -> TaintSet:
        return await self.heard(TaintSet, count=count)


@asynccontextmanager
async def net_stage(folder: Path, limits: PathLimits | None, linger_s: float) -> AsyncIterator[NetStage]:
    stage = NetStage(folder, "work", (), linger_s)
    launch = msgspec.structs.replace(
        read_launch(stage.run_dir),
        function="tests.support.fake_core:work",
        preload=("tests.support.fake_core",),
        paths=limits,
    )
    write_launch(stage.run_dir, launch)
    await stage.conductor.open()
    try:
        await stage.start_agent()
        await stage.attached()
        yield stage
    finally:
        await stage.strike()


def on_net_stage(
    limits: PathLimits | None = LIMITS, linger_s: float = 0.0
) -> Callable[[Callable[[NetStage], Awaitable[None]]], Callable[[Path], None]]:
    """A test told as a story on such a stage."""

    def direct(story: Callable[[NetStage], Awaitable[None]]) -> Callable[[Path], None]:
        async def play(folder: Path) -> None:
            async with net_stage(folder, limits, linger_s) as stage:
                await story(stage)

        def test(tmp_path: Path) -> None:
            asyncio.run(play(tmp_path))

        test.__name__ = test.__qualname__ = story.__name__
        test.__module__ = story.__module__
        return test

    return direct


# ---------------------------------------------------------------- what is heard


@on_net_stage()
async def test_workers_find_the_socket_and_the_folder_and_both_are_ours_alone(stage: NetStage) -> None:
    await stage.ready()
    ready = f"ready {stage.folder / 'net-report'} {stage.folder / 'net'}"
    await until(lambda: ready in stage.log("w1"), "what it prints is in the log")
    assert stat.S_IMODE((stage.folder / "net").stat().st_mode) == 0o700
    assert stat.S_IMODE((stage.folder / "net-report").stat().st_mode) == 0o600
    assert set(stage.states().values()) == {"up"}
    assert stage.news.processes == 1
    assert stage.links()[NEAR, FAR].live == 2


@on_net_stage(limits=None)
async def test_without_net_failover_there_is_neither(stage: NetStage) -> None:
    await stage.start("w1")
    ended = await stage.ended("w1")
    assert ended.code == 1
    assert "KeyError: 'TORCHRELAY_NET_REPORT'" in stage.log("w1")
    assert not (stage.folder / "net").exists()
    assert stage.conductor.news == []


@on_net_stage()
async def test_what_is_no_report_is_dropped_and_counted_and_nothing_breaks(stage: NetStage) -> None:
    good = {"v": 1, "what": "corrupt", "ts": 1.0, "pid": "PID", "path": 0, "local": NEAR, "remote": FAR}
    raw = [
        "", "{", "[]", "null", '{"v":1}', "x" * 1500, '{"v":1,"what":"path_down","ts":1,"pid":PID}',
        json.dumps(good | {"pid": 1}), json.dumps(good).replace('"PID"', "PID") + "x", '{"v":2}',
        json.dumps(good | {"remote": "a\x1b[2J"}).replace('"PID"', "PID"),
        json.dumps(good | {"ts": 1e300}).replace('"PID"', "PID"),
    ]  # fmt: skip
    await stage.ready(raw=[*raw, json.dumps(good).replace('"PID"', "PID")])
    await until(lambda: stage.news.reports == 1, f"the last one is heard\n{stage.agent_log()}")
    assert (stage.news.malformed, stage.news.strangers) == (len(raw), 0)
    assert stage.agent_log().count("dropped: ") == 4, "the first, second, fourth and eighth are told"
    stage.pretend("w1", links=TWO_PATHS, lost=LOST)
    await until(lambda: stage.states()[NEAR, FAR] == "down", "it goes on listening")


@on_net_stage()
async def test_strangers_are_not_heard_and_their_pages_not_read(stage: NetStage) -> None:
    await stage.ready()
    report = {"v": 1, "what": "path_down", "ts": 1.0, "pid": os.getpid(), "local": NEAR, "remote": FAR}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for _ in range(3):
            stranger.sendto(json.dumps(report).encode(), str(stage.folder / "net-report"))
    (stage.folder / "net" / f"net-{os.getpid()}").write_bytes(b"a page of mine")
    await until(lambda: stage.news.strangers == 4, f"counted\n{stage.agent_log()}")
    assert stage.states()[NEAR, FAR] == "up"
    assert f"process {os.getpid()} of user {os.getuid()}, which is no worker of ours" in stage.agent_log()


@on_net_stage()
async def test_files_that_are_no_pages_are_left_alone(stage: NetStage) -> None:
    await stage.ready()
    pid = int(next((stage.folder / "net").glob("net-*")).name.removeprefix("net-"))
    (stage.folder / "net" / "net-report").write_text("no number")
    (stage.folder / "net" / f"net-{stage.pid}").symlink_to("/dev/zero")
    for name in ("net-0", "net-999999999999"):
        (stage.folder / "net" / name).write_text("")
    (stage.folder / "net" / "net-999999998").mkdir()
    os.kill(pid, signal.SIGSTOP)  # it does not write its page meanwhile
    (stage.folder / "net" / f"net-{pid}").write_bytes(b"TRNETST1" + bytes([2] * 500))
    await until(lambda: stage.news.malformed >= 1, f"counted\n{stage.agent_log()}")
    os.kill(pid, signal.SIGCONT)
    await until(lambda: not (stage.folder / "net" / "net-0").exists(), "there is no such process")


@on_net_stage()
async def test_the_page_of_a_worker_that_was_killed_goes_with_it(stage: NetStage) -> None:
    await stage.ready()
    assert len(list((stage.folder / "net").iterdir())) == 1
    await stage.fence("w1")
    await stage.ended("w1")
    await until(lambda: not list((stage.folder / "net").iterdir()), "its page is removed")
    await until(lambda: set(stage.states().values()) == {"unused"}, "nobody uses its links")
    assert stage.news.processes == 0


@on_net_stage()
async def test_figures_add_up_over_processes(stage: NetStage) -> None:
    await stage.ready("w1", rate=1e6)
    await stage.ready("w2", slot=1, rate=1e6)
    await until(lambda: stage.links()[NEAR, FAR].live == 4, "both are seen")
    await until(lambda: stage.links()[NEAR, FAR].sent_bytes > 1_000_000, "bytes are counted")


# ---------------------------------------------------------------- what follows


@on_net_stage()
async def test_a_path_that_stays_lost_taints_the_node_and_healed_it_is_cleared(stage: NetStage) -> None:
    await stage.ready()
    stage.pretend("w1", links=TWO_PATHS, lost=LOST, reason="silent")
    taint = await stage.tainted()
    assert (taint.node, taint.slot, taint.key, taint.value) == (NODE, None, "network/path0", "down")
    assert (taint.source, taint.yields, taint.planned) == (SOURCE, True, False)
    # A machine that is busy says it later than after the second.
    told = re.sub(r"lost for [1-9]\d* s", "lost for SOME s", taint.reason)
    assert f"path {NEAR} lost for SOME s (silent), to all 2 peers ({FAR}, {OTHER})" in told
    await until(lambda: any(path.finding is not None for path in stage.news.paths), "it is in the news")
    (finding,) = [path.finding for path in stage.news.paths if path.finding is not None]
    assert (finding.kind, finding.where, finding.taint) == ("down", "here", "network/path0")
    stage.pretend("w1", links=TWO_PATHS)
    cleared = await stage.heard(TaintCleared)
    assert (cleared.node, cleared.slot, cleared.key, cleared.source) == (NODE, None, "network/path0", SOURCE)
    assert (cleared.yields, cleared.healed) == (True, False)
    assert len(stage.conductor.of(TaintSet)) == 1


@on_net_stage(limits=PathLimits(down_s=8.0, heal_s=1.0))
async def test_a_short_loss_and_one_to_a_single_peer_taint_nothing(stage: NetStage) -> None:
    await stage.ready()
    stage.pretend("w1", links=TWO_PATHS, lost=LOST)
    await until(lambda: stage.states()[NEAR, OTHER] == "down", "lost")
    stage.pretend("w1", links=TWO_PATHS, lost=LOST[:1])
    await until(lambda: any(path.finding is not None for path in stage.news.paths), "found")
    (finding,) = [path.finding for path in stage.news.paths if path.finding is not None]
    assert (finding.where, finding.taint) == ("there", "")
    assert stage.conductor.of(TaintSet) == []


@on_net_stage()
async def test_only_the_slots_whose_workers_use_the_path_are_tainted(stage: NetStage) -> None:
    await stage.ready("w1", slot=1)
    await stage.ready("w2", slot=3, links=TWO_PATHS[2:])
    await until(lambda: stage.news.processes == 2, "the page of the second is read, too")
    stage.pretend("w1", links=TWO_PATHS, lost=LOST)
    taint = await stage.tainted()
    assert (taint.slot, taint.key) == (1, "network/path0")
    stage.pretend("w1", links=TWO_PATHS)
    assert (await stage.heard(TaintCleared)).slot == 1


@on_net_stage()
async def test_where_nobody_is_left_the_path_is_probed(stage: NetStage) -> None:
    """Nobody listens on that port of these addresses, which is an answer; of one that is not ours there is none."""
    links = [[0, "", NEAR, FAR], [0, "", NEAR, OTHER], [1, "", "192.0.2.7", FAR_2], [1, "", "192.0.2.7", OTHER]]
    await stage.ready(links=links)
    stage.pretend("w1", links=links, lost=[[local, remote] for _, _, local, remote in links])
    await stage.tainted(count=2)
    await stage.fence("w1")
    await stage.ended("w1")
    cleared = await stage.heard(TaintCleared)
    assert cleared.key == "network/path0"
    await until(lambda: len(stage.conductor.news) > 2 and stage.news.processes == 0, "some more looks")
    assert [event.key for event in stage.conductor.of(TaintCleared)] == ["network/path0"]


# ---------------------------------------------------------------- an agent that is restarted


@on_net_stage(linger_s=30.0)
async def test_a_restarted_agent_takes_the_socket_over_and_goes_on_with_its_taints(stage: NetStage) -> None:
    await stage.ready()
    stage.pretend("w1", links=TWO_PATHS, lost=LOST)
    await stage.tainted()
    await until(lambda: b'"told":true' in (stage.folder / "net-memory").read_bytes(), "the acknowledgement is noted")
    await stage.kill_agent()
    await stage.start_agent()
    await stage.attached(times=2)
    stage.conductor.news.clear()
    await until(lambda: stage.states().get((NEAR, FAR)) == "down", f"its page is read again\n{stage.agent_log()}")
    (finding,) = [path.finding for path in stage.news.paths if path.finding is not None]
    assert finding.taint == "network/path0"
    stage.pretend("w1", links=TWO_PATHS)
    await stage.heard(TaintCleared)
    await until(lambda: stage.news.reports >= 1, "what is reported now is heard")
    assert len(stage.conductor.of(TaintSet)) == 1, "it was told and is not told again"
    await until(lambda: b'"held":[]' in (stage.folder / "net-memory").read_bytes(), "nothing is left of it")


@on_net_stage(linger_s=30.0)
async def test_what_was_not_acknowledged_is_told_again_by_the_next_agent(stage: NetStage) -> None:
    await stage.ready()
    stage.conductor.acknowledge = False
    stage.pretend("w1", links=TWO_PATHS, lost=LOST)
    first = await stage.tainted()
    await until(lambda: b'"told":false' in (stage.folder / "net-memory").read_bytes(), "it is noted")
    await stage.kill_agent()
    stage.conductor.acknowledge = True
    await stage.start_agent()
    await stage.attached(times=2)
    assert await stage.tainted(count=2) == first


@on_net_stage(linger_s=30.0)
async def test_a_memory_that_is_damaged_is_left_aside(stage: NetStage) -> None:
    await stage.ready()
    await stage.kill_agent()
    (stage.folder / "net-memory").write_text("{")
    await stage.start_agent()
    await stage.attached(times=2)
    stage.conductor.news.clear()
    await until(lambda: stage.states().get((NEAR, FAR)) == "up", f"it goes on\n{stage.agent_log()}")
    assert "what was known of the network paths cannot be read" in stage.agent_log()


@on_net_stage(linger_s=30.0)
async def test_a_taint_that_an_agent_without_memory_finds_on_its_node_is_lifted(stage: NetStage) -> None:
    await stage.ready()
    stage.pretend("w1", links=TWO_PATHS, lost=LOST)
    first = await stage.tainted()
    await stage.kill_agent()
    (stage.folder / "net-memory").unlink()
    stage.pretend("w1", links=TWO_PATHS)
    assert isinstance(stage.conductor.answer, Attached)
    stage.conductor.answer = structs.replace(stage.conductor.answer, tainted=((first.slot, first.key),))
    await stage.start_agent()
    await stage.attached(times=2)
    await stage.heard(TaintCleared)
    assert [event.key for event in stage.conductor.of(TaintCleared)] == [first.key]


@on_net_stage()
async def test_news_wait_for_nobody_and_only_the_newest_counts(stage: NetStage) -> None:
    await stage.ready()
    await stage.conductor.close()
    stage.pretend("w1", links=TWO_PATHS, lost=LOST)
    await until(lambda: "network/path0 is down" in stage.agent_log(), "it is found while nobody listens")
    stage.conductor.news.clear()
    await stage.conductor.open()
    await stage.attached(times=2)
    await stage.tainted()
    newest = {(NEAR, FAR): "down", (NEAR_2, FAR_2): "up"}  # taints go a way of their own: either may come first
    await until(lambda: newest.items() <= stage.states().items(), f"the newest\n{stage.agent_log()}")
    await stage.conductor.say(Ack(len(stage.conductor.frames)))
