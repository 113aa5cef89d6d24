"""Judging: from what Slurm shows to health, deadlines and events. Pure: it is told what time it is."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from torchrelay.protocol.messages.ids import NodeId
from torchrelay.schedulers.port import (
    Grant,
    GrantLost,
    GrantReady,
    Health,
    NodeGone,
    NodeLeaving,
    NodeReturned,
    SchedulerEvent,
)
from torchrelay.schedulers.slurm.reading import JobRecord, JobRow, NodeRecord, Reservation

# So far ahead the end of a job or the beginning of a maintenance is worth a word, in seconds.
AHEAD_S = 900.0
LAST_S = 2.0  # so long before SIGKILL all should be written: the launcher has yet to say so
PREEMPTED = "preempted by a job of higher priority"
# States, each with what it means. The first that a node has counts: what is lost is no longer leaving.
LOST = {
    "DOWN": "down", "ERROR": "in error", "REBOOT_ISSUED": "rebooting", "POWERED_DOWN": "powered down",
    "POWERING_DOWN": "powering down", "FUTURE": "not in service",
}  # fmt: skip
LEAVING = {
    "FAIL": "about to fail", "FAILING": "about to fail", "DRAIN": "drained", "DRAINED": "drained",
    "DRAINING": "drained", "REBOOT_REQUESTED": "to be rebooted", "REBOOT": "to be rebooted",
    "MAINT": "under maintenance", "MAINTENANCE": "under maintenance", "POWER_DOWN": "to be powered down",
}  # fmt: skip
SUSPECT = {
    "NOT_RESPONDING": "does not respond", "NO_RESPOND": "does not respond", "UNKNOWN": "in an unknown state",
    "INVALID_REG": "registered with fewer resources than it should have", "INVAL": "registered wrongly",
}  # fmt: skip
# Why an idle node is not to be had all the same.
RESERVED = ("RESERVED", "PLANNED", "POWERING_UP", "COMPLETING", "BLOCKED")
HELD = ("RUNNING", "SUSPENDED", "STAGE_OUT", "SIGNALING", "RESIZING")
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")


class Leave(Struct, frozen=True):
    """A node will go. `at`: when, in seconds since 1970; None: it waits for us. `whole`: as its whole job ends."""

    reason: str
    at: float | None = None
    whole: bool = False


class Sight(Struct, frozen=True, kw_only=True):
    """What one look at Slurm showed.

    nodes     all nodes by name
    grants    ours that run
    leaves    nodes of ours that will go
    waiting   names of satellites that are asked for and not given yet
    surplus   jobs of ours that must not be: a second one of a name
    """

    nodes: dict[str, NodeRecord]
    grants: tuple[Grant, ...]
    leaves: dict[NodeId, Leave]
    waiting: frozenset[str] = frozenset()
    surplus: tuple[int, ...] = ()

    @property
    def held(self) -> dict[NodeId, str]:
        """The grant of each node of ours."""
        return {node: grant.grant for grant in self.grants for node in grant.nodes}


def health_of(node: NodeRecord) -> tuple[Health, str]:
    """A node's health, and why it is not healthy: the operator's words if there are any."""
    for health, table in ((Health.LOST, LOST), (Health.LEAVING, LEAVING), (Health.SUSPECT, SUSPECT)):
        for state, meaning in table.items():
            if state in node.states and not ("UNDRAIN" in node.states and state == "DRAIN"):
                return health, node.reason or meaning
    return Health.HEALTHY, ""


def is_idle(node: NodeRecord) -> bool:
    """Whether Slurm would give it now, all of it."""
    return "IDLE" in node.states and health_of(node)[0] is Health.HEALTHY and not node.states & set(RESERVED)


def leaves_of(
    grant: Grant, nodes: dict[str, NodeRecord], end: Leave | None, reservations: Iterable[Reservation], now: float
) -> dict[NodeId, Leave]:
    """Which nodes of a grant will go, and when. `end`: the job's own end, if it is near."""
    ahead = [each for each in reservations if is_ahead(each, now)]
    found = {}
    for node in grant.nodes:
        record = nodes.get(node)
        reasons = list[Leave]()
        if record is not None and (told := health_of(record))[0] is Health.LEAVING:
            reasons.append(Leave(told[1]))
        reasons += [
            Leave(f"maintenance ahead (reservation {each.name})", each.start_at) for each in ahead if node in each.nodes
        ]
        reasons += [] if end is None else [end]
        if reasons:
            found[node] = together(reasons)
    return found


def together(leaves: list[Leave]) -> Leave:
    """Several reasons as one: the words of all, and the first deadline."""
    times = [leave.at for leave in leaves if leave.at is not None]
    return Leave(
        "; ".join(leave.reason for leave in leaves), min(times, default=None), all(leave.whole for leave in leaves)
    )


def is_ahead(reservation: Reservation, now: float) -> bool:
    """Whether it is a maintenance that begins soon: any other reservation leaves running jobs alone."""
    start = reservation.start_at
    return "MAINT" in reservation.flags and start is not None and now < start <= now + AHEAD_S


def end_of(row: JobRow, told_at: float | None, grace_s: float, now: float) -> Leave | None:
    """The end of a job that is near. `told_at`: when Slurm told it to go for another job's sake.

    `grace_s`: GraceTime of its partition.
    """
    if told_at is not None:
        return preempted(told_at, grace_s, row.end_at)
    if row.end_at is not None and row.end_at <= now + AHEAD_S:
        return Leave("the time limit of its job", row.end_at, whole=True)
    return None


def preempted(told_at: float, grace_s: float, end_at: float | None) -> Leave:
    """A job that has notice ends when the grace time of its partition is over.

    A partition without one is not the whole story (QOS have their own): then what Slurm shows as its end counts. That
    is not to be relied upon otherwise: 22.05 shows none, until the time is over, for a job without a time limit.
    """
    ends = [*([told_at + grace_s] if grace_s else []), *([end_at] if end_at is not None else [])]
    return Leave(PREEMPTED, min(ends, default=None), whole=True)


def notice_of(job: JobRecord, grace_s: float, kill_wait_s: float, now: float) -> Leave | None:
    """How long a job has whose processes were told to end just now; None: Slurm says nothing of its end.

    With GraceTime it runs on. Without it Slurm counts it as ended from that moment on, and kills what has outlived
    SIGTERM after `kill_wait_s` (KillWait).
    """
    if job.state not in HELD:
        return Leave("Slurm ends its job", now + max(0.0, kill_wait_s - LAST_S), whole=True)
    if job.preempt_at is None:
        return None
    return preempted(job.preempt_at, grace_s, job.end_at)


# ---------------------------------------------------------------- what changed


def differences(before: Sight, after: Sight, now: float, released: frozenset[NodeId]) -> list[SchedulerEvent]:
    """What a watcher is told. `released`: nodes that we gave back ourselves, or that are on their way."""
    had, has = before.held, after.held
    events = list[SchedulerEvent]()
    for node, grant in has.items():
        if had.get(node) != grant:
            events.append(GrantReady(node=node, grant=grant))
    for node in {**had, **has}:
        events += _of_health(node, before, after, now)
    for node, grant in had.items():
        if node not in has and node not in released:
            reason = _why_lost(node, grant, after)
            events.append(GrantLost(node=node, grant=grant, reason=reason))
    # A node that was ours once and is idle and well again: it may be asked for.
    for name, record in before.nodes.items():
        node, now_known = NodeId(name), after.nodes.get(name)
        was_ill = health_of(record)[0] is not Health.HEALTHY
        if node not in had and node not in has and was_ill and now_known is not None and is_idle(now_known):
            events.append(NodeReturned(node=node))
    return events


def _of_health(node: NodeId, before: Sight, after: Sight, now: float) -> list[SchedulerEvent]:
    """What changed about the health of a node that is or was ours."""
    old, new = _lost(node, before), _lost(node, after)
    if new and not old:
        return [NodeGone(node=node, reason=new)]
    leave = after.leaves.get(node)
    if new or node not in after.held:
        return []
    if leave is not None:
        if leave == before.leaves.get(node):
            return []
        deadline = None if leave.at is None else max(0.0, leave.at - now)
        return [NodeLeaving(node=node, reason=leave.reason, deadline_s=deadline, whole=leave.whole)]
    return [NodeReturned(node=node)] if old or node in before.leaves else []


def _lost(node: NodeId, sight: Sight) -> str:
    """Why Slurm has given a node up; empty if it has not."""
    record = sight.nodes.get(node)
    if record is None:
        return "Slurm does not know it any more"
    health, reason = health_of(record)
    return reason if health is Health.LOST else ""


def _why_lost(node: NodeId, grant: str, after: Sight) -> str:
    if any(held.grant == grant for held in after.grants):
        return _lost(node, after) or f"job {grant} has been shrunk"
    return f"job {grant} has ended"


def resumed(before: Sight, after: Sight, bad: Iterable[NodeId]) -> list[NodeId]:
    """Nodes that we hold for bad and that somebody has repaired: Slurm held them for bad, too, and no longer does."""
    return [
        node
        for node in bad
        if node in before.nodes
        and node in after.nodes
        and health_of(before.nodes[node])[0] in (Health.LEAVING, Health.LOST)
        and health_of(after.nodes[node])[0] is Health.HEALTHY
    ]
