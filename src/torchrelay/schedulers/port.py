"""Port: what a scheduler plugin does for us, whoever owns the nodes: Slurm, Kubernetes, or one laptop.

A job runs on a pool of nodes, and the pool is made of *grants*: what a scheduler gives, and can take away, as one
unit (a Slurm job, a pod, a virtual node of the local plugin). The orchestrator maps ranks to nodes, the plugin nodes to
grants; so a rank that moves inside the pool needs no call to the scheduler. Afterwards the plugin gives the bad node
back, fills the pool up, and writes the new roster into the scheduler's own record.

A plugin passes the shared tests in `tests/support/scheduler_port.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Rank, WorkerId


class SchedulerError(Exception):
    """The scheduler cannot do what was asked, and why. The message says what would help."""


class Caps(Struct, frozen=True, kw_only=True):
    """What this scheduler, at this site, is able to do."""

    shrink: bool  # a node can be given back while the job runs
    native_replace: bool  # the scheduler itself restarts one grant elsewhere
    preempt: bool  # acquire() may take nodes from work of lower priority
    hold_drain: bool  # a drain waits until we have moved
    report_bad: bool  # we may taint or drain a node
    watch: bool  # events are pushed (otherwise the plugin polls)
    gpu_granular: bool  # signals name one device, not only its node


class Health(StrEnum):
    """A node's health, as its scheduler sees it."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    LEAVING = "leaving"
    LOST = "lost"


class NodeView(Struct, frozen=True, kw_only=True):
    """A node that the scheduler knows."""

    node: NodeId
    slots: int
    health: Health = Health.HEALTHY
    reason: str = ""  # why it is not healthy
    grant: str | None = None  # whose it is now; None if idle
    whole: bool = False  # it is left as all of its grant ends
    agent_pid: int | None = None  # its agent's process, if that runs on the scheduler's own machine


class Grant(Struct, frozen=True, kw_only=True):
    """What was given to us as one unit. `key` is the request's: asking again with it gives the same grant."""

    grant: str
    key: str
    nodes: tuple[NodeId, ...]


class ClusterView(Struct, frozen=True, kw_only=True):
    """What the scheduler says there is: all nodes it would tell us of, and our grants."""

    nodes: tuple[NodeView, ...]
    grants: tuple[Grant, ...]


class SpareSource(StrEnum):
    """Where more nodes may come from."""

    DEDICATED = "dedicated"  # kept for us
    IDLE = "idle"
    PREEMPT = "preempt"  # taken from work of lower priority


class SpareRequest(Struct, frozen=True, kw_only=True):
    """A wish for nodes. `key` names the need (job/generation/rank): two grants for one need must never race."""

    key: str
    count: int = 1
    source: SpareSource = SpareSource.IDLE
    exclude: tuple[NodeId, ...] = ()  # never these, even if the scheduler calls them idle
    prefer: tuple[NodeId, ...] = ()
    deadline_s: float = 600.0


class Place(Struct, frozen=True, kw_only=True):
    """Who holds a rank, and where."""

    rank: Rank
    worker: WorkerId | None
    node: NodeId | None


class Roster(Struct, frozen=True, kw_only=True):
    """Which worker on which node holds each rank of a job, in one generation."""

    job: JobId
    generation: Generation
    places: tuple[Place, ...]


class SchedulerEvent(Struct, frozen=True, tag=True, kw_only=True):
    """What a scheduler tells us."""

    node: NodeId


class NodeLeaving(SchedulerEvent, frozen=True, tag=True, kw_only=True):
    """A node will be taken, drained or rebooted; `deadline_s` from now, None if it waits for us.

    `whole`: not for the node's sake, but as all of its grant ends.
    """

    reason: str
    deadline_s: float | None = None
    whole: bool = False


class NodeGone(SchedulerEvent, frozen=True, tag=True, kw_only=True):
    """The scheduler has given a node up."""

    reason: str


class NodeReturned(SchedulerEvent, frozen=True, tag=True, kw_only=True):
    """A node can be used again."""


class GrantReady(SchedulerEvent, frozen=True, tag=True, kw_only=True):
    """A node of a grant is ours now."""

    grant: str


class GrantLost(SchedulerEvent, frozen=True, tag=True, kw_only=True):
    """A node is ours no more, without our having given it back."""

    grant: str
    reason: str


class Scheduler(Protocol):
    """Whoever owns the nodes. `LocalScheduler`, its fake and the laptop's real one, is in this package."""

    @property
    def caps(self) -> Caps: ...

    async def snapshot(self) -> ClusterView:
        """Nodes, grants, health, and what is idle."""
        ...

    def watch(self) -> AsyncIterator[SchedulerEvent]:
        """What happens from now on. Ends when the plugin is closed."""
        ...

    async def acquire(self, request: SpareRequest) -> Grant:
        """More nodes. Repeating a request with its key gives the same grant. Raises `SchedulerError`."""
        ...

    async def release(self, nodes: Sequence[NodeId], *, bad: bool, reason: str = "") -> None:
        """Give nodes back; unknown ones are ignored. A bad one is not given to us again."""
        ...

    async def publish(self, roster: Roster) -> None:
        """Write the roster into the scheduler's own record of the job, so that its tools show the truth."""
        ...

    async def report_bad(self, node: NodeId, reason: str) -> bool:
        """Taint or drain a node, where we may. Returns whether it was done."""
        ...
