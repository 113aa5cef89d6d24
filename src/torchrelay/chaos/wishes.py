"""Wishes: which fault a user wants, whom it hits, and what should follow from it as things stand."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

import msgspec
from msgspec import Struct

from torchrelay.api.shown import JobStatus, Ranks, RankStatus
from torchrelay.chaos.whereabouts import Refusal
from torchrelay.protocol.messages.ids import NodeId, Rank


class Deed(StrEnum):
    """A fault, as `torchrelay chaos` names it."""

    KILL = "kill"
    STOP = "stop"
    EXIT = "exit"
    OOM = "oom"
    SLOW = "slow"
    NODE = "node"
    PATH = "path"
    PARTITION = "partition"
    AGENT = "agent"
    ORCHESTRATOR = "orchestrator"
    MEND = "mend"


OF_RANKS = frozenset({Deed.KILL, Deed.STOP, Deed.EXIT, Deed.OOM, Deed.SLOW})
OF_NODES = frozenset({Deed.NODE, Deed.PATH, Deed.PARTITION, Deed.AGENT, Deed.MEND})
# What a random mix draws from: each strikes at once, and all but the last two interrupt training.
MIX = (Deed.KILL, Deed.STOP, Deed.EXIT, Deed.OOM, Deed.AGENT, Deed.ORCHESTRATOR)


# A link that is down for less than this is up again, and heard, before its node is lost.
SHORT_CUT_S = 4.5


class Phase(StrEnum):
    """What a victim is doing when it is hit."""

    ANY = "any"
    BACKWARD = "backward"  # in a step, when half of its usual time has passed
    GATE = "gate"
    UPDATE = "update"
    SECTION = "section"


class How(StrEnum):
    """How a node is lost."""

    KILL = "kill"
    POWER = "power"


class Cut(StrEnum):
    """How a path is lost."""

    DOWN = "down"  # its cable is pulled
    DROP = "drop"  # packets are lost without a word


class Wish(Struct, frozen=True, kw_only=True):
    """One fault. `for_s`: how long it lasts; None: for good, or its own default."""

    deed: Deed
    rank: Rank | None = None
    node: NodeId | None = None
    phase: Phase = Phase.ANY
    how: How = How.KILL
    code: int | None = None
    for_s: float | None = None
    factor: float = 2.0
    path: int = 1
    cut: Cut = Cut.DOWN


@dataclass(frozen=True, slots=True)
class Facts:
    """How the job stands. `down_s`: how long a path may be lost before ranks leave it; None: no --net-failover."""

    job: JobStatus
    ranks: Ranks
    down_s: float | None = None

    def holder(self, rank: Rank) -> RankStatus:
        """Who holds it. Raises `Refusal` if nobody does."""
        for row in self.ranks.ranks:
            if row.rank == rank:
                if row.pid is None or row.worker is None or row.node is None:
                    raise Refusal(f"rank {rank} has no process at the moment ({row.state})")
                return row
        raise Refusal(f"no rank {rank}: the job has ranks 0 to {self.job.world_size - 1}")

    def on(self, node: NodeId) -> list[RankStatus]:
        """All workers on a node."""
        return [row for row in self.ranks.ranks if row.node == node and row.pid is not None]

    def warm(self, *, but: NodeId | None = None) -> list[RankStatus]:
        """Warm spares, but for those on a node."""
        return [row for row in self.ranks.ranks if row.rank is None and row.state == "warm" and row.node != but]


def draw(wish: Wish, facts: Facts, chance: random.Random) -> Wish:
    """The wish with its victim, drawn by chance where none is named."""
    if wish.deed in OF_RANKS and wish.rank is None:
        held = [row.rank for row in facts.ranks.ranks if row.rank is not None and row.pid is not None]
        if not held:
            raise Refusal("no rank has a process at the moment")
        return msgspec.structs.replace(wish, rank=chance.choice(held))
    if wish.deed in OF_NODES and wish.node is None:
        nodes = sorted({row.node for row in facts.ranks.ranks if row.node is not None})
        if not nodes:
            raise Refusal("no node has a worker at the moment")
        return msgspec.structs.replace(wish, node=chance.choice(nodes))
    return wish


# ---------------------------------------------------------------- what should follow


class Outlook(Struct, frozen=True, kw_only=True):
    """What should follow, in words; and whether training is interrupted."""

    text: str
    incident: bool


def outlook(wish: Wish, facts: Facts) -> Outlook:
    """What should follow from this, as things stand."""
    match wish.deed:
        case Deed.KILL | Deed.EXIT | Deed.OOM:
            return Outlook(text=move_of(wish, facts), incident=True)
        case Deed.STOP:
            return outlook_of_stop(wish, facts)
        case Deed.NODE:
            brief = wish.how is How.POWER and wish.for_s is not None and wish.for_s < SHORT_CUT_S
            if brief:
                return Outlook(text="no incident: the link is up again before its silence loses it", incident=False)
            return Outlook(text=outlook_of_node(wish, facts), incident=any_rank_on(wish.node, facts))
        case Deed.PATH:
            return outlook_of_path(wish, facts)
        case Deed.PARTITION if not any_rank_on(wish.node, facts):
            return Outlook(text=f"{wish.node} holds no rank: it is lost after 6 to 30 s of silence", incident=False)
        case Deed.PARTITION:
            text = f"no incident: {wish.node} is silent, but its ranks train on (if steps take less than about 6 s)"
            return Outlook(text=text, incident=False)
        case Deed.AGENT:
            text = f"no incident: the agent of {wish.node} is started again and adopts its workers"
            return Outlook(text=text, incident=False)
        case Deed.ORCHESTRATOR:
            return Outlook(text="no incident: it is started again and goes on from its journal", incident=False)
        case Deed.SLOW:
            return Outlook(text=f"no incident: all wait for rank {wish.rank}, step by step", incident=False)
        case Deed.MEND:
            return Outlook(text="what was cut, parted or stopped on it goes on", incident=False)


def move_of(wish: Wish, facts: Facts) -> str:
    """Where the rank goes."""
    if facts.warm():
        names = ", ".join(f"{row.worker} on {row.node}" for row in facts.warm())
        return f"rank {wish.rank} goes to a warm spare ({names})"
    if facts.job.spares.starting:
        return f"no spare is warm: rank {wish.rank} waits for one of {facts.job.spares.starting} that are starting"
    return f"no spare: a new worker is started for rank {wish.rank} where there is room, and the others wait for it"


def outlook_of_stop(wish: Wish, facts: Facts) -> Outlook:
    step_s = (facts.job.step_ms or 0.0) / 1000
    patience_s = min(30.0, max(1.5, 5 * step_s))
    if wish.for_s is not None and wish.for_s < patience_s:
        text = f"no incident: it goes on before the patience with a stopped worker ({patience_s:.1f} s) ends"
        return Outlook(text=text, incident=False)
    return Outlook(text=f"found after {patience_s:.1f} s or a little more; then {move_of(wish, facts)}", incident=True)


def outlook_of_path(wish: Wish, facts: Facts) -> Outlook:
    if facts.down_s is None:
        return Outlook(text="no incident: nobody uses it (torchrelay run --net-failover)", incident=False)
    over = f"no incident: collectives go on over the other paths of {wish.node}"
    if wish.for_s is not None and wish.for_s < facts.down_s:
        return Outlook(text=over, incident=False)
    if not any_rank_on(wish.node, facts):
        return Outlook(text=f"no incident: {wish.node} holds no rank", incident=False)
    text = f"collectives go on over the other paths; after {facts.down_s:g} s the path is at fault, and ranks leave"
    return Outlook(text=f"{text} a node that has it", incident=True)


def any_rank_on(node: NodeId | None, facts: Facts) -> bool:
    return node is not None and any(row.rank is not None for row in facts.on(node))


def outlook_of_node(wish: Wish, facts: Facts) -> str:
    assert wish.node is not None, "drawn before"
    lost = sorted(row.rank for row in facts.on(wish.node) if row.rank is not None)
    found = (
        "found when its agent, started anew, finds nothing there"
        if wish.how is How.KILL
        else ("found by silence, after 6 to 30 s")
    )
    if not lost:
        return f"{wish.node} holds no rank: its spares are gone, training goes on; {found}"
    spares = facts.warm(but=wish.node)
    ranks = ", ".join(map(str, lost))
    if len(spares) >= len(lost):
        return f"{found}; ranks {ranks} go to warm spares elsewhere ({len(spares)} there)"
    return f"{found}; ranks {ranks} need as many places elsewhere, {len(spares)} are warm: the others wait, or it ends"
