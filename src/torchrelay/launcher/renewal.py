"""Renewal: orchestrator and agents of a running job are started again, with the code that is installed now.

`torchrelay restart-services` asks the orchestrator, which writes RUN_DIR/restart.json; their keeper looks for it.
The orchestrator is ended in order. An agent is killed: its forkserver keeps the workers, the next agent adopts them.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from torchrelay.api.endpoint import RESTART, read_endpoint
from torchrelay.client.client import Away, Client, Denied
from torchrelay.launcher.keeper import Keeper
from torchrelay.protocol.messages.ids import NodeId

WANTED_S = 0.5  # between two looks for the file: people ask, and seldom
LOOK_S = 0.2
BACK_S = 45.0  # how long each may take to be back, before the rest is left alone


class Wanted(Struct, frozen=True, kw_only=True):
    """What the file says."""

    orchestrator: bool = False
    agents: bool = False
    who: str = ""


@dataclass(frozen=True, slots=True)
class Renewal:
    """What it needs: who keeps the orchestrator, the agents' process ids, a client, and a voice."""

    run_dir: Path
    keeper: Keeper
    agents: Callable[[], Mapping[NodeId, int]]
    client: Callable[[], Client]
    say: Callable[[str], None]

    async def watch(self) -> None:
        """Look for the file, for ever."""
        while True:
            wanted = take(self.run_dir)
            if wanted is not None:
                await self.renew(wanted)
            await asyncio.sleep(WANTED_S)

    async def renew(self, wanted: Wanted) -> None:
        """One after the other; what does not come back ends it, so that the others stay as they are."""
        self.say(f"restarting, as {wanted.who} asks: training goes on")
        if wanted.orchestrator and not await self._orchestrator():
            self.say("the orchestrator is not back: the agents are left alone")
            return
        for node, pid in sorted(self.agents().items()) if wanted.agents else ():
            if not await self._agent(node, pid):
                self.say(f"the agent of {node} is not back: the others are left alone")
                return

    async def _orchestrator(self) -> bool:
        before = read_endpoint(self.run_dir)
        await self.keeper.restart()
        return await back(lambda: read_endpoint(self.run_dir) != before and bool(self.client().view_status().pid))

    async def _agent(self, node: NodeId, pid: int) -> bool:
        try:
            before = await asyncio.to_thread(self._incarnation, node)
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, Away, Denied):
            return False
        return await back(lambda: self._incarnation(node) not in ("", before))

    def _incarnation(self, node: NodeId) -> str:
        """Of the agent that is attached and heard; empty if none is."""
        nodes = self.client().view_nodes().nodes
        return next((one.incarnation for one in nodes if one.node == node and one.alive), "")


def take(run_dir: Path) -> Wanted | None:
    """What is wanted, once; None if nothing is."""
    path = run_dir / RESTART
    try:
        data = path.read_bytes()
        path.unlink()
        return msgspec.json.decode(data, type=Wanted)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


async def back(fact: Callable[[], bool]) -> bool:
    """Wait until something is there; False if it does not come."""
    loop = asyncio.get_running_loop()
    until = loop.time() + BACK_S
    while loop.time() < until:
        try:
            if await asyncio.to_thread(fact):
                return True
        except (Away, Denied, ValueError):
            pass  # it is being started
        await asyncio.sleep(LOOK_S)
    return False
