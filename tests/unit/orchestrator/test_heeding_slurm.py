"""What a scheduler says of nodes becomes taints, but for the end of the whole job: then there is nowhere to go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

from torchrelay.orchestrator.core.service import Orchestrator
from torchrelay.orchestrator.scheduling import SLURM, answer_notices, heed
from torchrelay.protocol.messages.enclosed import JobSpec
from torchrelay.protocol.messages.events import Effect, ParkAsked, TaintCleared, TaintSet
from torchrelay.protocol.messages.ids import JobId, NodeId
from torchrelay.protocol.model.job import Job
from torchrelay.protocol.model.moves import Taint
from torchrelay.protocol.model.roster import Node
from torchrelay.protocol.model.table import Table
from torchrelay.protocol.placement.taints import TOLD
from torchrelay.schedulers.local import FIRST_KEY
from torchrelay.schedulers.port import (
    ClusterView,
    Grant,
    Health,
    NodeLeaving,
    NodeReturned,
    NodeView,
    Scheduler,
    SchedulerError,
    SchedulerEvent,
)
from torchrelay.schedulers.slurm.judging import Leave

N1, N2, SATELLITE, STRANGER = (NodeId(name) for name in ("n1", "n2", "s1", "x1"))
LIMIT = "the time limit of its job"


def node(name: NodeId, reason: str = "", *, whole: bool = False) -> NodeView:
    return NodeView(node=name, slots=1, health=Health.LEAVING if reason else Health.HEALTHY, reason=reason, whole=whole)


class Slurm:
    """Two nodes of the main job, a satellite, and somebody else's; then these events."""

    def __init__(self, nodes: tuple[NodeView, ...], *events: SchedulerEvent) -> None:
        grants = (
            Grant(grant="1", key=FIRST_KEY, nodes=(N1, N2)),
            Grant(grant="2", key="n2", nodes=(SATELLITE,)),
        )
        self._view, self._events = ClusterView(nodes=nodes, grants=grants), events

    async def snapshot(self) -> ClusterView:
        return self._view

    async def watch(self) -> AsyncIterator[SchedulerEvent]:
        for event in self._events:
            yield event


def heard(slurm: Slurm, *tainted: NodeId) -> list[tuple[str, str]]:
    """What is taken in: nodes and reasons, "" for a taint that is lifted. `tainted`: those that have one already."""
    taken: list[Any] = []
    lying = {(name, None, SLURM): "taint" for name in tainted}
    take_in(slurm, SimpleNamespace(taints=lying, jobs={}), taken)
    assert all(isinstance(event, TaintSet | TaintCleared) for event in taken)
    return [(event.node, getattr(event, "reason", "")) for event in taken]


def take_in(slurm: Slurm, cluster: SimpleNamespace, taken: list[Any]) -> None:
    service = SimpleNamespace(cluster=cluster, take=lambda event, _: taken.append(event))
    asyncio.run(heed(cast(Orchestrator, service), cast(Scheduler, slurm)))


def test_a_job_that_has_a_place_for_it_parks_when_all_its_nodes_go() -> None:
    taken: list[Any] = []
    jobs = {
        JobId(name): Job(JobSpec(job=JobId(name), world_size=1, nproc_per_node=1, park_dir=place), Table(), 0)
        for name, place in (("parks", "/parked"), ("ends", ""))
    }
    leaving = NodeLeaving(node=N1, reason=LIMIT, whole=True, deadline_s=90.0)
    take_in(Slurm((node(N1), node(N2)), leaving), SimpleNamespace(taints={}, jobs=jobs), taken)
    assert taken == [ParkAsked(job=JobId("parks"), reason=LIMIT, source=SLURM, grace_ms=90_000)]


def test_what_was_drained_while_nobody_looked_is_tainted_and_the_rest_is_not() -> None:
    slurm = Slurm((node(N1), node(N2, "xid 79"), node(SATELLITE), node(STRANGER, "drained")))
    assert heard(slurm) == [("n2", "xid 79")]


def test_what_was_resumed_meanwhile_is_not_tainted_any_more() -> None:
    assert heard(Slurm((node(N1), node(N2), node(SATELLITE))), N2) == [("n2", "")]


def test_a_job_that_begins_with_little_time_is_not_tainted() -> None:
    slurm = Slurm((node(N1, LIMIT, whole=True), node(N2, LIMIT, whole=True), node(SATELLITE)))
    assert heard(slurm) == []


def test_the_end_of_the_whole_job_is_no_reason_to_leave_a_node_but_a_drain_in_it_is() -> None:
    ends = NodeLeaving(node=N1, reason=LIMIT, whole=True)
    drained = NodeLeaving(node=N2, reason=f"xid 79; {LIMIT}")
    assert heard(Slurm((node(N1), node(N2)), ends, drained)) == [("n2", f"xid 79; {LIMIT}")]


def test_a_satellite_whose_own_job_ends_is_left() -> None:
    ends = NodeLeaving(node=SATELLITE, reason=LIMIT, whole=True)
    assert heard(Slurm((node(N1), node(N2), node(SATELLITE)), ends)) == [("s1", LIMIT)]


def test_a_node_that_returns_is_not_tainted_any_more() -> None:
    returned = NodeReturned(node=N2)
    assert heard(Slurm((node(N1), node(N2, "xid 79")), returned), N2) == [("n2", "xid 79"), ("n2", "")]


# ---------------------------------------------------------------- when our processes were told to end


def told(name: NodeId, source: str = "agent") -> Taint:
    return Taint(name, None, TOLD, "15", Effect.NO_EXECUTE, "told", source, 0)


def answered(leave: Leave | SchedulerError | None, *rounds: tuple[Taint, ...]) -> tuple[list[Any], int]:
    """What is taken in when these taints lie, one round after the other; and how often Slurm was asked."""
    taken: list[Any] = []
    asked = 0
    alive = {N1: True, N2: True, STRANGER: False}
    nodes = {name: Node(name, "a", 1, alive=lives) for name, lives in alive.items()}

    async def notice() -> Leave | None:
        nonlocal asked
        asked += 1
        if isinstance(leave, SchedulerError):
            raise leave
        return leave

    async def play() -> None:
        def take(event: Any, _: Any) -> None:
            taken.append(event)

        service = SimpleNamespace(cluster=None, take=take, news=asyncio.Event())
        answering: asyncio.Task[None] | None = None
        for lying in rounds:
            service.cluster = SimpleNamespace(taints={one.node: one for one in lying}, nodes=nodes)
            service.news, before = asyncio.Event(), service.news
            before.set()
            if answering is None:
                scheduler = SimpleNamespace(notice=notice)
                answering = asyncio.create_task(answer_notices(cast(Any, service), cast(Any, scheduler)))
            for _ in range(20):
                await asyncio.sleep(0)
        assert answering is not None
        answering.cancel()

    asyncio.run(play())
    return taken, asked


def test_when_the_whole_job_goes_all_nodes_are_told_how_long_there_is() -> None:
    taken, asked = answered(Leave("preempted", time.time() + 60, whole=True), (told(N1),))
    assert asked == 1
    assert [(event.node, event.key, event.value, event.reason) for event in taken] == [
        (name, TOLD, "15", "preempted") for name in (N1, N2)
    ]
    assert all(50_000 < event.gone_in_ms <= 60_000 for event in taken)


def test_slurm_is_asked_again_when_another_node_was_told_and_not_otherwise() -> None:
    assert answered(None, (told(N1),), (told(N1),), (told(N1), told(N2)))[1] == 2


def test_what_slurm_has_said_itself_is_not_asked_about() -> None:
    assert answered(None, (), (told(N1, SLURM),)) == ([], 0)


def test_a_slurm_that_does_not_answer_leaves_it_to_the_rules() -> None:
    assert answered(SchedulerError("no answer"), (told(N1),)) == ([], 1)


def test_an_end_whose_time_is_not_known_is_told_without_one() -> None:
    taken, _ = answered(Leave("preempted", None, whole=True), (told(N1),))
    assert {event.gone_in_ms for event in taken} == {None}
