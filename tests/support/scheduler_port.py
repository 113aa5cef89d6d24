"""What every scheduler plugin must do, whoever owns the nodes. A plugin's tests inherit `PortTests`:

    class TestMine(PortTests):
        @asynccontextmanager
        async def scheduler(self, folder):
            yield MyScheduler(...)

with at least three nodes, of which at least two are idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.support.brain import until
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Rank, WorkerId
from torchrelay.schedulers.port import (
    Caps,
    GrantReady,
    Health,
    NodeLeaving,
    Place,
    Roster,
    Scheduler,
    SchedulerError,
    SchedulerEvent,
    SpareRequest,
)

DEADLINE_S = 30.0


class PortTests:
    """The shared tests."""

    def scheduler(self, folder: Path) -> AbstractAsyncContextManager[Scheduler]:
        """A plugin over a pool of at least three nodes, of which at least two are idle."""
        raise NotImplementedError

    def published(self, folder: Path) -> Roster | None:
        """The roster as the scheduler's own tools would show it; None if nothing was published."""
        raise NotImplementedError

    def play(self, folder: Path, story: Callable[[Scheduler], Awaitable[None]]) -> None:
        async def all_of_it() -> None:
            async with asyncio.timeout(DEADLINE_S), self.scheduler(folder) as scheduler:
                await story(scheduler)

        asyncio.run(all_of_it())

    def test_it_says_what_it_is_able_to_do(self, tmp_path: Path) -> None:
        async def story(scheduler: Scheduler) -> None:
            assert isinstance(scheduler.caps, Caps)

        self.play(tmp_path, story)

    def test_a_grant_is_ours_and_its_nodes_are_not_idle(self, tmp_path: Path) -> None:
        async def story(scheduler: Scheduler) -> None:
            grant = await scheduler.acquire(SpareRequest(key="job/2/1"))
            assert len(grant.nodes) == 1
            view = await scheduler.snapshot()
            assert grant in view.grants
            assert {node.grant for node in view.nodes if node.node in grant.nodes} == {grant.grant}

        self.play(tmp_path, story)

    def test_asking_again_with_the_same_key_gives_the_same_grant(self, tmp_path: Path) -> None:
        async def story(scheduler: Scheduler) -> None:
            first = await scheduler.acquire(SpareRequest(key="job/2/1"))
            assert await scheduler.acquire(SpareRequest(key="job/2/1")) == first
            second = await scheduler.acquire(SpareRequest(key="job/3/1"))
            assert not set(second.nodes) & set(first.nodes)

        self.play(tmp_path, story)

    def test_excluded_nodes_are_not_given(self, tmp_path: Path) -> None:
        async def story(scheduler: Scheduler) -> None:
            idle = [node.node for node in (await scheduler.snapshot()).nodes if node.grant is None]
            grant = await scheduler.acquire(SpareRequest(key="k", exclude=(idle[0],)))
            assert idle[0] not in grant.nodes

        self.play(tmp_path, story)

    def test_preferred_nodes_are_given_if_they_can_be(self, tmp_path: Path) -> None:
        async def story(scheduler: Scheduler) -> None:
            idle = [node.node for node in (await scheduler.snapshot()).nodes if node.grant is None]
            assert (await scheduler.acquire(SpareRequest(key="k", prefer=(idle[-1],)))).nodes == (idle[-1],)

        self.play(tmp_path, story)

    def test_more_than_there_is_cannot_be_had_and_the_error_says_what_helps(self, tmp_path: Path) -> None:
        async def story(scheduler: Scheduler) -> None:
            with pytest.raises(SchedulerError, match="--spares"):
                await scheduler.acquire(SpareRequest(key="k", count=100, deadline_s=0.5))
            assert not any(grant.key == "k" for grant in (await scheduler.snapshot()).grants)

        self.play(tmp_path, story)

    def test_a_released_node_is_idle_again(self, tmp_path: Path) -> None:
        async def story(scheduler: Scheduler) -> None:
            grant = await scheduler.acquire(SpareRequest(key="k"))
            await scheduler.release(grant.nodes, bad=False)
            view = await scheduler.snapshot()
            assert {node.grant for node in view.nodes if node.node in grant.nodes} == {None}
            assert grant.grant not in {held.grant for held in view.grants}

        self.play(tmp_path, story)

    def test_releasing_what_is_not_ours_changes_nothing(self, tmp_path: Path) -> None:
        async def story(scheduler: Scheduler) -> None:
            before = await scheduler.snapshot()
            await scheduler.release([NodeId("nowhere-7")], bad=False)
            assert await scheduler.snapshot() == before

        self.play(tmp_path, story)

    def test_a_bad_node_is_not_given_to_us_again(self, tmp_path: Path) -> None:
        async def story(scheduler: Scheduler) -> None:
            if not scheduler.caps.report_bad:
                pytest.skip("this scheduler does not let us taint nodes")
            grant = await scheduler.acquire(SpareRequest(key="k"))
            await scheduler.release(grant.nodes, bad=True, reason="ecc errors")
            again = await scheduler.acquire(SpareRequest(key="again", prefer=grant.nodes))
            assert not set(again.nodes) & set(grant.nodes)
            told = {node.node: node for node in (await scheduler.snapshot()).nodes}[grant.nodes[0]]
            assert told.health is Health.LEAVING
            assert "ecc errors" in told.reason

        self.play(tmp_path, story)

    def test_the_roster_stands_in_the_schedulers_own_record(self, tmp_path: Path) -> None:
        async def story(scheduler: Scheduler) -> None:
            for generation in (1, 2):
                place = Place(rank=Rank(0), worker=WorkerId(f"w{generation}"), node=NodeId("node-0"))
                roster = Roster(job=JobId("job"), generation=Generation(generation), places=(place,))
                await scheduler.publish(roster)
                assert self.published(tmp_path) == roster

        self.play(tmp_path, story)

    def test_who_watches_hears_of_grants_and_of_bad_nodes(self, tmp_path: Path) -> None:
        heard: list[SchedulerEvent] = []

        async def listen(scheduler: Scheduler) -> None:
            async for event in scheduler.watch():
                heard.append(event)

        async def story(scheduler: Scheduler) -> None:
            listening = asyncio.create_task(listen(scheduler))
            await asyncio.sleep(0)
            grant = await scheduler.acquire(SpareRequest(key="k"))
            ready = GrantReady(node=grant.nodes[0], grant=grant.grant)
            await until("word of the grant", lambda: ready in heard)
            if scheduler.caps.report_bad:
                assert await scheduler.report_bad(grant.nodes[0], "too hot")
                leaving = NodeLeaving(node=grant.nodes[0], reason="too hot")
                await until("word of the bad node", lambda: leaving in heard)
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

        self.play(tmp_path, story)
