"""Local scheduler: virtual nodes on one machine, an agent process each. The port's fake, and the laptop's real one.

Everything that is not about processes goes through files in the run's folder, so that the owner of the agents (which
is `torchrelay run`), the orchestrator and the operator see the same:

    nodes.json     the pool: nodes, slots, grants
    roster.json    what was published last
    taints/NODE    a reason to keep ranks off this node; remove the file to take it back
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from torchrelay.protocol.messages.ids import NodeId
from torchrelay.schedulers.port import (
    Caps,
    ClusterView,
    Grant,
    GrantLost,
    GrantReady,
    Health,
    NodeGone,
    NodeLeaving,
    NodeReturned,
    NodeView,
    Roster,
    SchedulerError,
    SchedulerEvent,
    SpareRequest,
)
from torchrelay.schedulers.tether import signal_child, tethered

NODES = "nodes.json"
ROSTER = "roster.json"
TAINTS = "taints"
FIRST_KEY = "first"  # the key of the grant that a run starts with

LOOK_S = 0.25  # how often files are looked at
AGAIN_S = 0.2  # before an agent that ended soon after its start is started again
# Deaths in a row within this time after which a node is given up.
QUICK_S = 5.0
END_WORD = b"end"  # over an agent's standard input, with the seconds that workers have after SIGTERM
WORKERS_S = 5.0
CANNOT_START = 94  # an agent's exit code that will not change by trying again
TRIES = 5

T = TypeVar("T")


@dataclass
class Agent:
    """A virtual node's agent, as its owner keeps it."""

    node: NodeId
    slots: int
    process: asyncio.subprocess.Process
    keeper: asyncio.Task[None] | None = None
    wanted: bool = True


@dataclass(frozen=True, slots=True)
class Way:
    """How an agent on another machine is reached.

    tied      whether the way ends with us. The agent need not
    word_s    how long the word to end may be on its way, and be obeyed, before the way itself is ended
    least_s   how long the end of the way may take, before it is killed
    environment   what of ours it has
    """

    tied: bool
    word_s: float
    least_s: float
    environment: Callable[[Mapping[str, str]], dict[str, str]] = dict


BY_SSH = Way(tied=True, word_s=3.0, least_s=0.0)


@dataclass
class Pool:
    """What the owner has: nodes with their slots, grants, and who listens."""

    idle: dict[NodeId, int] = field(default_factory=dict)
    agents: dict[NodeId, Agent] = field(default_factory=dict)
    grants: list[Grant] = field(default_factory=list)
    listeners: list[asyncio.Queue[SchedulerEvent | None]] = field(default_factory=list)


def spread(nodes: int, nproc_per_node: int, spares: int, *, first: int = 0) -> dict[NodeId, int]:
    """Slots of each virtual node: its ranks, and its share of the spares, dealt round. `first`: the first's number."""
    slots = {NodeId(f"node-{first + place}"): nproc_per_node for place in range(nodes)}
    for spare in range(spares):
        slots[NodeId(f"node-{first + spare % nodes}")] += 1
    return slots


class LocalScheduler:
    """The port over one machine. Without `command` it owns no processes, and sees and writes the files only.

    run_dir   the run's folder
    command   the agent's command line for a node and its number of slots
    idle      nodes with their slots that `acquire` may give
    words     what an agent is told over its standard input: it is on another machine then
    way       how it is reached there
    end_by    the signal that ends an agent of this machine
    """

    caps = Caps(
        shrink=True,
        native_replace=True,
        preempt=False,
        hold_drain=True,
        report_bad=True,
        watch=True,
        gpu_granular=False,
    )

    def __init__(
        self,
        run_dir: Path,
        command: Callable[[NodeId, int], Sequence[str]] | None = None,
        idle: dict[NodeId, int] | None = None,
        words: Callable[[], bytes] | None = None,
        way: Way = BY_SSH,
        end_by: signal.Signals = signal.SIGTERM,
    ) -> None:
        self.run_dir = run_dir
        self._command = command
        self._words = words
        self._way = way
        self._end_by = end_by
        self._pool = Pool(idle=dict(idle or {}))
        self._closed = False

    # ------------------------------------------------------------ the port

    async def snapshot(self) -> ClusterView:
        view = self._view() if self._command else read_file(self.run_dir / NODES, ClusterView)
        if view is None:
            return ClusterView(nodes=(), grants=())
        taints = read_taints(self.run_dir)
        nodes = tuple(
            msgspec.structs.replace(node, health=Health.LEAVING, reason=taints[node.node])
            if node.node in taints
            else node
            for node in view.nodes
        )
        return ClusterView(nodes=nodes, grants=view.grants)

    async def watch(self) -> AsyncIterator[SchedulerEvent]:
        """Taints from files, ends of agents from their owner."""
        inbox: asyncio.Queue[SchedulerEvent | None] = asyncio.Queue()
        self._pool.listeners.append(inbox)
        taints = read_taints(self.run_dir)
        try:
            while not self._closed:
                try:
                    async with asyncio.timeout(LOOK_S):
                        event = await inbox.get()
                except TimeoutError:
                    before, taints = taints, read_taints(self.run_dir)
                    for change in changes(before, taints):
                        yield change
                    continue
                if event is None:
                    return
                yield event
        finally:
            self._pool.listeners.remove(inbox)

    async def acquire(self, request: SpareRequest) -> Grant:
        for grant in self._pool.grants:
            if grant.key == request.key:
                return grant
        barred = {*request.exclude, *read_taints(self.run_dir)}
        able = [node for node in self._pool.idle if node not in barred]
        able.sort(key=lambda node: node not in request.prefer)
        if self._command is None or len(able) < request.count:
            raise SchedulerError(f"{request.count} nodes wanted, {len(able)} idle: start the run with more --spares")
        nodes = tuple(able[: request.count])
        grant = Grant(grant=f"local-{len(self._pool.grants)}", key=request.key, nodes=nodes)
        self._pool.grants.append(grant)
        for node in nodes:
            await self._start(node, self._pool.idle.pop(node))
            self._announce(GrantReady(node=node, grant=grant.grant))
        self._note()
        return grant

    async def add(self, node: NodeId, slots: int) -> None:
        """A further node, and its agent at once."""
        self._pool.idle[node] = slots
        await self.acquire(SpareRequest(key=f"{node} {len(self._pool.grants)}", prefer=(node,)))

    async def release(self, nodes: Sequence[NodeId], *, bad: bool, reason: str = "") -> None:
        for node in nodes:
            agent = self._pool.agents.pop(node, None)
            if agent is None:
                continue
            if bad:
                await self.report_bad(node, reason or "released as bad")
            await self._stop(agent, grace_s=10.0)
            self._pool.idle[node] = agent.slots
            self._drop(node)
        self._note()

    async def publish(self, roster: Roster) -> None:
        write_file(self.run_dir / ROSTER, roster)

    async def report_bad(self, node: NodeId, reason: str) -> bool:
        folder = self.run_dir / TAINTS
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / node).write_text(reason + "\n")
        return True

    # ------------------------------------------------------------ owning agents

    async def close(self, grace_s: float = 10.0) -> None:
        """End all agents: SIGTERM, or what ends them, and SIGKILL for who is still there after `grace_s`.

        Those on other machines are told over their standard input first: a signal would end only the way to them.
        """
        await asyncio.gather(*(self._stop(agent, grace_s=grace_s) for agent in self._pool.agents.values()))
        self._pool.agents.clear()
        self._closed = True
        for listener in self._pool.listeners:
            listener.put_nowait(None)

    def processes(self) -> dict[NodeId, int]:
        """The process ids of the agents."""
        return {node: agent.process.pid for node, agent in self._pool.agents.items()}

    async def _start(self, node: NodeId, slots: int) -> None:
        agent = Agent(node, slots, await self._launch(node, slots))
        agent.keeper = asyncio.create_task(self._keep(agent))
        self._pool.agents[node] = agent

    async def _launch(self, node: NodeId, slots: int) -> asyncio.subprocess.Process:
        assert self._command is not None, "only an owner starts agents"
        (self.run_dir / "logs").mkdir(mode=0o700, exist_ok=True)
        # A session of its own: Ctrl-C in the terminal is for `torchrelay run`, which then ends the agents in order.
        with (self.run_dir / "logs" / f"agent-{node}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self._command(node, slots),
                stdin=asyncio.subprocess.DEVNULL if self._words is None else asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self._way.environment(os.environ),
                preexec_fn=tethered(self._end_by) if self._words is None or self._way.tied else None,
            )
        if process.stdin is not None and self._words is not None:
            process.stdin.write(self._words())  # it stays open: its end says that we are gone
        return process

    async def _keep(self, agent: Agent) -> None:
        """Start an agent that ended again, unless it ends at once every time."""
        loop, quick = asyncio.get_running_loop(), 0
        while True:
            since = loop.time()
            code = await agent.process.wait()
            if not agent.wanted:
                return
            quick = quick + 1 if loop.time() - since < QUICK_S else 0
            quick = TRIES if code == CANNOT_START else quick
            self._announce(NodeGone(node=agent.node, reason=f"its agent ended with {code}"))
            if quick >= TRIES:
                self._pool.agents.pop(agent.node, None)
                grant = self._drop(agent.node)
                reason = f"its agent cannot run (exit code {code})"
                self._announce(GrantLost(node=agent.node, grant=grant, reason=reason))
                return
            # Who has run for long is missed: its return tells others which ranks are lost.
            await asyncio.sleep(AGAIN_S if quick else 0)
            if not agent.wanted:
                return
            agent.process = await self._launch(agent.node, agent.slots)
            self._note()
            self._announce(NodeReturned(node=agent.node))

    async def _stop(self, agent: Agent, *, grace_s: float) -> None:
        agent.wanted = False
        if agent.process.stdin is not None:
            with suppress(ConnectionError, RuntimeError):  # it has ended, or nobody reads there
                agent.process.stdin.write(b"%b %g\n" % (END_WORD, min(grace_s, WORKERS_S)))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._way.word_s):
                    await agent.process.wait()
        signal_child(agent.process, self._end_by)
        try:
            async with asyncio.timeout(max(grace_s, self._way.least_s)):
                await agent.process.wait()
        except TimeoutError:
            signal_child(agent.process, signal.SIGKILL)
            await agent.process.wait()
        if agent.process.stdin is not None:
            agent.process.stdin.close()
        if agent.keeper is not None:
            agent.keeper.cancel()

    def _drop(self, node: NodeId) -> str:
        """Take a node out of its grant; returns the grant's name."""
        for place, grant in enumerate(self._pool.grants):
            if node in grant.nodes:
                left = tuple(other for other in grant.nodes if other != node)
                self._pool.grants[place] = msgspec.structs.replace(grant, nodes=left)
                self._note()
                return grant.grant
        return ""

    def _view(self) -> ClusterView:
        held = {node: grant.grant for grant in self._pool.grants for node in grant.nodes}
        nodes = [
            NodeView(
                node=node,
                slots=agent.slots,
                grant=held.get(node),
                agent_pid=agent.process.pid if self._words is None else None,
            )
            for node, agent in self._pool.agents.items()
        ]
        nodes += [NodeView(node=node, slots=slots) for node, slots in self._pool.idle.items()]
        grants = tuple(grant for grant in self._pool.grants if grant.nodes)
        return ClusterView(nodes=tuple(sorted(nodes, key=lambda node: node.node)), grants=grants)

    def _note(self) -> None:
        write_file(self.run_dir / NODES, self._view())

    def _announce(self, event: SchedulerEvent) -> None:
        for listener in self._pool.listeners:
            listener.put_nowait(event)


# ---------------------------------------------------------------- files


def write_file(path: Path, value: msgspec.Struct) -> None:
    """Write JSON, whole or not at all."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_bytes(msgspec.json.encode(value) + b"\n")
    draft.replace(path)


def read_file(path: Path, kind: type[T]) -> T | None:
    """Read it back; None if it was never written. Raises `SchedulerError` if it is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise SchedulerError(f"{path} cannot be read ({error}): remove it") from error


def read_taints(run_dir: Path) -> dict[NodeId, str]:
    """Tainted nodes and why."""
    folder = run_dir / TAINTS
    found = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            found[NodeId(path.name)] = path.read_text().strip() or "tainted"
        except FileNotFoundError:
            continue  # taken back this moment
    return found


def changes(before: dict[NodeId, str], after: dict[NodeId, str]) -> list[SchedulerEvent]:
    """What changed in the taints."""
    new: list[SchedulerEvent] = [
        NodeLeaving(node=node, reason=reason) for node, reason in after.items() if node not in before
    ]
    return [*new, *(NodeReturned(node=node) for node in before if node not in after)]
