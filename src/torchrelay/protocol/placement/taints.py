"""Taints: what is held against a place, what follows from it for placing, and the memory of places that fail.

A fault taint that is lifted (cleared, or its time is over), and a lost node that comes back, leave a *probation*: the
place is taken last until it is over. Each further fault of the same place within a month doubles it, and after
`QUARANTINE_AFTER` the place is not used at all until somebody clears it by hand: one in five repaired nodes fails
again within a day.
"""

from __future__ import annotations

from msgspec.structs import replace

from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.events import Effect
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.model.moves import Taint, TaintId
from torchrelay.protocol.model.state import Cluster

PROBATION = "torchrelay/probation"
DRAIN = "torchrelay/drain"
# Its agent was sent a signal that ends it; the value is the signal's number.
TOLD = "torchrelay/told-to-end"
MEMORY_MS = 30 * 24 * 3_600_000
QUARANTINE_AFTER = 4  # faults of one place within MEMORY_MS
_SEVERITY = (Effect.PREFER_NO_SCHEDULE, Effect.NO_SCHEDULE, Effect.NO_EXECUTE)


# ---------------------------------------------------------------- looking


def on_slot(cluster: Cluster, node: NodeId, slot: int) -> list[Taint]:
    """The taints that lie on a slot, its node's included."""
    return [taint for taint in cluster.taints.values() if taint.covers(node, slot)]


def effect_on(cluster: Cluster, node: NodeId, slot: int) -> Effect | None:
    """The strongest effect of all taints that lie on a slot."""
    found = [taint.effect for taint in on_slot(cluster, node, slot)]
    return max(found, key=_SEVERITY.index, default=None)


def is_closed(cluster: Cluster, node: NodeId, slot: int) -> bool:
    """Whether nothing new may be put there."""
    return effect_on(cluster, node, slot) in (Effect.NO_SCHEDULE, Effect.NO_EXECUTE)


def taken_last(cluster: Cluster, node: NodeId, slot: int) -> bool:
    """Whether the place should be used only if there is no other."""
    return effect_on(cluster, node, slot) is Effect.PREFER_NO_SCHEDULE


# ---------------------------------------------------------------- facts


def taint_set(cluster: Cluster, event: ev.TaintSet) -> Cluster:
    """The same taint again changes nothing, except that one with a time to live lives from now on anew."""
    key: TaintId = (event.node, event.slot, event.key)
    now = cluster.now_ms
    until = None if event.ttl_ms is None else now + event.ttl_ms
    taint = Taint(
        event.node,
        event.slot,
        event.key,
        event.value,
        event.effect,
        event.reason,
        event.source,
        now,
        until,
        event.planned,
        None if event.gone_in_ms is None else now + event.gone_in_ms,
    )
    before = cluster.taints.get(key)
    if before is not None and event.yields and before.source != event.source:
        return cluster  # what a person holds against a place is not a detector's to change
    if before is not None:
        taint = replace(taint, since_ms=before.since_ms)
        if taint == before:
            return cluster
    cluster = replace(cluster, taints=cluster.taints.put(key, taint))
    if before is not None and is_fault(before) and not is_fault(taint):  # no warning any more: as if it was lifted
        return put_on_probation(cluster, event.node, event.slot, f"{event.key} was lowered")
    fresh = is_fault(taint) and (before is None or not is_fault(before))
    return remember_failure(cluster, event.node, event.slot) if fresh else cluster


def taint_cleared(cluster: Cluster, event: ev.TaintCleared) -> Cluster:
    taint = cluster.taints.get((event.node, event.slot, event.key))
    if taint is None or (event.yields and taint.source != event.source):
        return cluster
    return lift(cluster, taint, healed=event.healed)


def freeze_set(cluster: Cluster, event: ev.FreezeSet) -> Cluster:
    return replace(cluster, freezes=cluster.freezes.put(event.source, event.reason))


def freeze_cleared(cluster: Cluster, event: ev.FreezeCleared) -> Cluster:
    return replace(cluster, freezes=cluster.freezes.drop(event.source))


# ---------------------------------------------------------------- what follows


def is_fault(taint: Taint) -> bool:
    """Whether it tells of something that is about to fail, or has failed."""
    return taint.effect is Effect.NO_EXECUTE and not taint.planned


def remember_failure(cluster: Cluster, node: NodeId, slot: int | None) -> Cluster:
    """A place has failed, or was said to be about to."""
    recent = [at for at in cluster.failures.get((node, slot), ()) if cluster.now_ms - at < MEMORY_MS]
    return replace(cluster, failures=cluster.failures.put((node, slot), (*recent, cluster.now_ms)[-16:]))


def lift(cluster: Cluster, taint: Taint, *, healed: bool) -> Cluster:
    """A taint is gone. After a fault the place is on probation; clearing a probation by hand forgives what was."""
    place = (taint.node, taint.slot)
    cluster = replace(cluster, taints=cluster.taints.drop((taint.node, taint.slot, taint.key)))
    if taint.key == PROBATION:
        over = taint.until_ms is not None and taint.until_ms <= cluster.now_ms
        return cluster if over else replace(cluster, failures=cluster.failures.drop(place))
    if not is_fault(taint):
        return cluster
    if healed:  # a mistake: it does not count against the place
        rest = cluster.failures.get(place, ())[:-1]
        table = cluster.failures.put(place, rest) if rest else cluster.failures.drop(place)
        return replace(cluster, failures=table)
    return put_on_probation(cluster, taint.node, taint.slot, f"{taint.key} was lifted")


def put_on_probation(cluster: Cluster, node: NodeId, slot: int | None, why: str) -> Cluster:
    """The place is back: it is taken last for a while, or not at all if it fails again and again."""
    faults = len(cluster.failures.get((node, slot), ()))
    base = max((job.spec.probation_ms for job in cluster.jobs.values()), default=0)
    if base <= 0:
        return cluster
    now = cluster.now_ms
    lying = cluster.taints.get((node, slot, PROBATION))
    # A quarantine is ended by hand only, however long ago the faults were that led to it.
    quarantined = faults >= QUARANTINE_AFTER or (lying is not None and lying.until_ms is None)
    reason = f"{why}; {faults} fault{'s' if faults != 1 else ''} within 30 days"
    taint = Taint(
        node,
        slot,
        PROBATION,
        "",
        Effect.NO_SCHEDULE if quarantined else Effect.PREFER_NO_SCHEDULE,
        reason,
        "torchrelay",
        now,
        None if quarantined else now + base * 2 ** max(0, faults - 1),
    )
    return replace(cluster, taints=cluster.taints.put((node, slot, PROBATION), taint))


def expire_taints(cluster: Cluster) -> Cluster:
    """Lift the taints whose time is over."""
    for taint in list(cluster.taints.values()):
        if taint.until_ms is not None and taint.until_ms <= cluster.now_ms:
            cluster = lift(cluster, taint, healed=False)
    return cluster
