"""Satellites: for each node of a Slurm job that is lost or to be left, another one is asked for, and given back.

A node's own name is the need (`acquire`'s key), so that asking again never makes a second one. Idle nodes come first,
then those of the partition that yields, if one was named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from torchrelay.api.shown import TaintView
from torchrelay.client.client import Away, Client, Denied
from torchrelay.launcher.machines import Floating
from torchrelay.protocol.messages.events import Effect
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.schedulers.port import Grant, SchedulerError, SpareRequest, SpareSource
from torchrelay.schedulers.slurm.asking import Wishes
from torchrelay.schedulers.slurm.commands import Commands
from torchrelay.schedulers.slurm.holdings import Patience, give_back_satellites
from torchrelay.schedulers.slurm.plugin import SlurmScheduler, open_slurm
from torchrelay.schedulers.slurm.queries import Queries

FOLDER = "satellites"  # in the run's folder
LOOK_S = 1.0
AGAIN_S = 10.0  # before a need that could not be met is tried again
WAIT_S = 120.0  # how long Slurm may take over one


class Satellites:
    """Those of one run.

    wanted   how many nodes at a time, and from where
    first    the nodes that the run began with: in their place
    slots    workers that each further node has room for
    now      a client of the orchestrator
    start    starts an agent on a node of another Slurm job
    say      for people
    """

    def __init__(
        self,
        job: int,
        wanted: Floating,
        run_dir: Path,
        *,
        first: Collection[NodeId],
        slots: int,
        now: Callable[[], Client],
        start: Callable[[NodeId, int], Awaitable[None]],
        say: Callable[[str], None],
    ) -> None:
        self._job, self._wanted, self._folder, self._slots = job, wanted, run_dir / FOLDER, slots
        self._now, self._start, self._say, self._first = now, start, say, frozenset(first)
        self._needs: dict[NodeId, asyncio.Task[None]] = {}
        self._gone: set[NodeId] = set()  # not to be asked for again
        self._seen: set[NodeId] = set()  # they have joined
        self._told = ""

    async def mind(self) -> None:
        """Ask for as many as there are nodes that ranks cannot use. Never returns."""
        while True:
            try:
                self._folder.mkdir(mode=0o700, exist_ok=True)
                wishes = Wishes(slots=self._slots, yields=self._wanted.partition)
                async with open_slurm(self._job, self._folder, wishes, self._on_grant) as slurm:
                    await self._mind(slurm)
            except (SchedulerError, OSError) as error:
                self._say_once(f"no further nodes can be asked for: {error}")
            await asyncio.sleep(AGAIN_S)

    async def _mind(self, slurm: SlurmScheduler) -> None:
        try:
            while True:
                self._gone.update(missed := await self._missed())
                self._forget_ended()
                for node in missed:
                    if node in self._first and node not in self._needs and len(self._needs) < self._wanted.nodes:
                        self._needs[node] = asyncio.create_task(self._meet(slurm, node))
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._needs.values():
                task.cancel()
            await asyncio.gather(*self._needs.values(), return_exceptions=True)
            self._needs.clear()

    def give_up(self, node: NodeId) -> None:
        """No agent can run there: it is given back, and another one is asked for."""
        self._gone.add(node)

    def _forget_ended(self) -> None:
        """A need is met for ever; whatever else ends one is a defect of ours, and no reason to end the run."""
        for node, task in [*self._needs.items()]:
            if task.done():
                del self._needs[node]
                self._say_once(f"no node in place of {node}: {task.exception()!r}; this is a defect of torchrelay")

    async def _missed(self) -> list[NodeId]:
        """Nodes that are lost, or that are to be left."""
        try:
            nodes = await asyncio.to_thread(self._now().view_nodes)
        except (Away, Denied, ValueError):
            return []
        self._seen.update(view.node for view in nodes.nodes if view.alive)
        return [view.node for view in nodes.nodes if not view.alive or any(to_be_left(one) for one in view.taints)]

    async def _meet(self, slurm: SlurmScheduler, missed: NodeId) -> None:
        """Have a node in place of one, and keep it. Tries for ever."""
        sources = [SpareSource.IDLE, *[SpareSource.PREEMPT] * bool(self._wanted.partition)]
        while True:
            for source in sources:
                exclude = tuple(sorted({missed, *self._gone}))
                request = SpareRequest(key=missed, source=source, exclude=exclude, deadline_s=WAIT_S)
                try:
                    grant = await slurm.acquire(request)
                    await self._keep(slurm, grant)
                    break
                except SchedulerError as error:
                    self._say_once(f"no node in place of {missed} yet: {error}")
            await asyncio.sleep(AGAIN_S)

    async def _keep(self, slurm: SlurmScheduler, grant: Grant) -> None:
        """Until its node is lost, too, or Slurm has taken it away. Raises `SchedulerError`."""
        while not self._gone.intersection(grant.nodes):
            view = await slurm.snapshot()
            if not any(held.key == grant.key for held in view.grants):
                names = ", ".join(grant.nodes)
                self._say(f"{names}, in place of {grant.key}, is ours no more: another one is asked for")
                # One that never joined would not do so the next time.
                self._gone.update(set(grant.nodes) - self._seen)
                return
            await asyncio.sleep(AGAIN_S)
        await slurm.release(grant.nodes, bad=False)  # whether the node is at fault is not ours to tell the site

    async def _on_grant(self, grant: Grant, nodes: Sequence[NodeId]) -> None:
        for node in nodes:
            self._say(f"{node} joins in place of {grant.key} (Slurm job {grant.grant})")
            await self._start(node, int(grant.grant))

    def _say_once(self, text: str) -> None:
        if text != self._told:
            self._say(text)
        self._told = text


def to_be_left(taint: TaintView) -> bool:
    """Whether a whole node is not to hold any rank."""
    return taint.slot is None and taint.effect == Effect.NO_EXECUTE


async def give_back(job: int, say: Callable[[str], None]) -> None:
    """Cancel all satellites of a job, also those that an orphan of ours has asked for."""
    try:
        with suppress(TimeoutError):
            await give_back_satellites(Queries(Commands()), job, Patience())
    except SchedulerError as error:
        say(str(error))
