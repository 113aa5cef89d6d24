"""Which further nodes a run in a Slurm job asks for, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from torchrelay.api.shown import Nodes, NodeView, TaintView
from torchrelay.client.client import Client
from torchrelay.launcher import satellites
from torchrelay.launcher.machines import Floating
from torchrelay.launcher.satellites import Satellites
from torchrelay.protocol.messages.events import Effect
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.schedulers.port import ClusterView, Grant, SchedulerError, SpareRequest, SpareSource
from torchrelay.schedulers.slurm.plugin import SlurmScheduler

FIRST = tuple(NodeId(name) for name in ("n1", "n2", "n3"))


class Slurm:
    """Gives the nodes that it has, in their order; those of `yielding` only to whoever preempts."""

    def __init__(self, on_grant: Callable[[Grant, Sequence[NodeId]], Any], idle: str, yielding: str = "") -> None:
        self._on_grant = on_grant
        self.idle, self.yielding = idle.split(), yielding.split()
        self.asked: list[SpareRequest] = []
        self.grants: dict[str, Grant] = {}
        self.released: list[NodeId] = []

    async def acquire(self, request: SpareRequest) -> Grant:
        self.asked.append(request)
        if request.key not in self.grants:
            source = self.idle if request.source is SpareSource.IDLE else self.yielding
            free = [node for node in source if node not in request.exclude]
            if not free:
                raise SchedulerError(f"nothing is {request.source}")
            source.remove(free[0])
            number = str(len(self.asked))
            self.grants[request.key] = Grant(grant=number, key=request.key, nodes=(NodeId(free[0]),))
            await self._on_grant(self.grants[request.key], self.grants[request.key].nodes)
        return self.grants[request.key]

    async def snapshot(self) -> ClusterView:
        return ClusterView(nodes=(), grants=tuple(self.grants.values()))

    async def release(self, nodes: Sequence[NodeId], *, bad: bool, reason: str = "") -> None:
        assert not bad, "the site is not told that a node is at fault"
        assert not reason
        self.released += nodes
        self.grants = {key: grant for key, grant in self.grants.items() if not set(grant.nodes) & set(nodes)}


class World:
    """The nodes as the orchestrator shows them, and what came of it."""

    def __init__(self, tmp_path: Path, wanted: Floating, idle: str, yielding: str = "") -> None:
        self.nodes: dict[str, NodeView] = {name: shown(name) for name in FIRST}
        self.started: list[tuple[str, int]] = []
        self.said: list[str] = []
        self.looks = 0
        self.satellites = Satellites(
            4711,
            wanted,
            tmp_path,
            first=FIRST,
            slots=1,
            now=lambda: cast(Client, self),
            start=self.start,
            say=self.said.append,
        )
        self.slurm = Slurm(self.satellites._on_grant, idle, yielding)

    def view_nodes(self) -> Nodes:
        return Nodes(nodes=tuple(self.nodes.values()), freezes=())

    async def start(self, node: NodeId, job: int) -> None:
        self.started.append((node, job))
        self.nodes[node] = shown(node)

    def lose(self, name: str) -> None:
        self.nodes[name] = shown(name, alive=False)

    def play(self, *scenes: tuple[Callable[[], object], Callable[[], bool]]) -> None:
        """Do something, and wait for what comes of it; again and again."""
        asyncio.run(self._play(scenes))

    async def _play(self, scenes: Sequence[tuple[Callable[[], object], Callable[[], bool]]]) -> None:
        minding = asyncio.create_task(self.satellites._mind(cast(SlurmScheduler, self.slurm)))
        for do, is_so in scenes:
            do()
            async with asyncio.timeout(10):
                while not is_so():
                    await asyncio.sleep(0.005)
        minding.cancel()
        with suppress(asyncio.CancelledError):
            await minding


def shown(name: str, *, alive: bool = True, taints: tuple[TaintView, ...] = ()) -> NodeView:
    return NodeView(
        node=NodeId(name),
        alive=alive,
        lost_since="",
        silent_ms=0,
        incarnation="a",
        slots=(),
        taints=taints,
        failures=(),
    )


def taint(effect: Effect, slot: int | None = None) -> TaintView:
    return TaintView(
        place="",
        node=FIRST[0],
        slot=slot,
        key="slurm",
        value="",
        effect=effect,
        reason="",
        source="slurm",
        since="",
        age_s=0,
        left_s=None,
        planned=False,
    )


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(satellites, "LOOK_S", 0.005)
    monkeypatch.setattr(satellites, "AGAIN_S", 0.01)


def test_a_lost_node_is_asked_for_once(tmp_path: Path) -> None:
    world = World(tmp_path, Floating(2), "n7 n8")
    world.play((lambda: world.lose("n2"), lambda: world.started == [("n7", 1)]), (int, lambda: passed(world, 20)))
    assert [(one.key, one.source, one.exclude) for one in world.slurm.asked] == [("n2", SpareSource.IDLE, ("n2",))]


def passed(world: World, looks: int) -> bool:
    """Time has gone by for so many looks."""
    world.looks += 1
    return world.looks > looks


def test_no_more_are_asked_for_than_the_user_wants(tmp_path: Path) -> None:
    world = World(tmp_path, Floating(1), "n7 n8")
    world.play(
        (lambda: world.lose("n2"), lambda: len(world.started) == 1),
        (lambda: world.lose("n3"), lambda: passed(world, 20)),
    )
    assert {one.key for one in world.slurm.asked} == {"n2"}


@pytest.mark.parametrize(
    ("lies", "asked"),
    [(taint(Effect.NO_EXECUTE), True), (taint(Effect.NO_SCHEDULE), False), (taint(Effect.NO_EXECUTE, 0), False)],
)
def test_a_node_that_all_ranks_are_to_leave_counts_as_lost(tmp_path: Path, lies: TaintView, asked: bool) -> None:
    world = World(tmp_path, Floating(1), "n7")
    world.nodes["n1"] = shown("n1", taints=(lies,))
    world.play((int, lambda: bool(world.started) or passed(world, 20)))
    assert bool(world.started) == asked


def test_if_none_is_idle_those_are_taken_that_yield(tmp_path: Path) -> None:
    world = World(tmp_path, Floating(1, "low"), "", "n9")
    world.play((lambda: world.lose("n2"), lambda: world.started == [("n9", 2)]))
    assert [one.source for one in world.slurm.asked] == [SpareSource.IDLE, SpareSource.PREEMPT]


def test_without_a_partition_nobody_is_stopped_and_it_is_tried_again(tmp_path: Path) -> None:
    world = World(tmp_path, Floating(1), "", "n9")
    world.play(
        (lambda: world.lose("n2"), lambda: len(world.slurm.asked) > 2),
        (lambda: world.slurm.idle.append("n7"), lambda: [node for node, _ in world.started] == ["n7"]),
    )
    assert {one.source for one in world.slurm.asked} == {SpareSource.IDLE}
    assert len([text for text in world.said if "nothing is idle" in text]) == 1, "said once"


def test_one_that_is_lost_itself_is_given_back_and_another_one_comes(tmp_path: Path) -> None:
    world = World(tmp_path, Floating(1), "n7 n8")
    world.play(
        (lambda: world.lose("n2"), lambda: [node for node, _ in world.started] == ["n7"]),
        (lambda: world.lose("n7"), lambda: [node for node, _ in world.started] == ["n7", "n8"]),
    )
    assert world.slurm.released == ["n7"]
    assert "n7" in world.slurm.asked[-1].exclude


def test_one_that_slurm_takes_away_is_asked_for_again(tmp_path: Path) -> None:
    world = World(tmp_path, Floating(1), "n7 n8")
    world.play(
        (lambda: world.lose("n2"), lambda: [node for node, _ in world.started] == ["n7"]),
        (world.slurm.grants.clear, lambda: [node for node, _ in world.started] == ["n7", "n8"]),
    )
    assert any("is ours no more" in text for text in world.said)


def test_a_node_that_never_joined_is_not_asked_for_again(tmp_path: Path) -> None:
    """Its agent cannot run there, and would have it given back and asked for, again and again."""
    world = World(tmp_path, Floating(1), "n7")

    def taken_away() -> None:
        del world.nodes["n7"]
        world.satellites._seen.discard(NodeId("n7"))
        world.slurm.grants.clear()
        world.slurm.idle.append("n7")

    world.play(
        (lambda: world.lose("n2"), lambda: [node for node, _ in world.started] == ["n7"]),
        (taken_away, lambda: "n7" in world.slurm.asked[-1].exclude),
    )
    assert [node for node, _ in world.started] == ["n7"]


def test_one_on_which_no_agent_can_run_is_exchanged(tmp_path: Path) -> None:
    world = World(tmp_path, Floating(1), "n7 n8")
    world.play(
        (lambda: world.lose("n2"), lambda: [node for node, _ in world.started] == ["n7"]),
        (lambda: world.satellites.give_up(NodeId("n7")), lambda: [node for node, _ in world.started] == ["n7", "n8"]),
    )
    assert world.slurm.released == ["n7"]


def test_a_defect_in_asking_for_one_is_said_and_it_is_tried_again(tmp_path: Path) -> None:
    world = World(tmp_path, Floating(1), "n7")
    broken = [True]

    async def start(node: NodeId, job: int) -> None:
        if broken.pop() if broken else False:
            raise OSError("no more processes")
        await world.start(node, job)

    world.satellites._start = start
    world.play((lambda: world.lose("n2"), lambda: any("defect" in text for text in world.said)))
