"""Large worlds: the plan of a seed with many more ranks, and faults that take many of them at once.

A strike of the plan hits the rank that lies as far along in the large job. Besides, a rack is lost: nodes that follow
one another, at the same moment or one shortly after the other. Nothing of what a small world must hold is given up.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import msgspec

from torchrelay.protocol.messages.ids import Rank
from torchrelay.protocol.model.job import JobPhase
from torchrelay.simulation.model.plans import CROWN, FaultKind, Lack, On, Plan, Strike

SLOTS = 8
RACK = 16  # nodes, at most
# Of two shards each rank knows its groups by looking at all ranks; without replicas no rack may be lost.
ALIKE = Lack.REPLICAS, Lack.HYBRID


def enlarge(plan: Plan, nodes: int) -> Plan:
    """The same with so many nodes of eight ranks, and with room for those that a rack loses."""
    aside = Random(plan.seed ^ 0x1A6)
    ranks = nodes * SLOTS
    lost = min(RACK, nodes // 4)
    spare_nodes = 0 if Lack.SPARES in plan.lacks else lost + 1
    spec = msgspec.structs.replace(
        plan.spec, world_size=ranks, nproc_per_node=SLOTS, nodes=nodes, spares=spare_nodes * SLOTS, ranks_per_slot=1
    )
    alike = not set(ALIKE) & plan.lacks
    shards = ("all",) * ranks if alike else tuple(f"shard-{rank}" for rank in range(ranks))
    script = replace(plan.script, shards=shards)
    if script.error is not None and script.error.rank is not None:
        script = replace(script, error=replace(script.error, rank=Rank(script.error.rank * (ranks // 4))))
    small = (one for one in plan.strikes if one.on is not On.SUCCESSION and one.kind not in CROWN)
    strikes = tuple(replace(one, rank=one.rank * (ranks // 4)) for one in small)
    if alike and spare_nodes:
        strikes = (lose_rack(aside, nodes, lost), *strikes)
    slots = (SLOTS,) * (nodes + spare_nodes)
    return replace(plan, spec=spec, slots=slots, script=script, strikes=strikes, rack=lost, head=None)


def lose_rack(chance: Random, nodes: int, lost: int) -> Strike:
    """Nodes that follow one another lose their power, while the job trains or recovers: at once, or one by one."""
    phase = chance.choice((JobPhase.RUNNING, JobPhase.RUNNING, JobPhase.AGREEING, JobPhase.RECONFIGURING))
    apart_ms = chance.choice((0, 0, 1, 700))
    skip = 1 if phase is JobPhase.RECONFIGURING else 0
    return Strike(FaultKind.RACK, On.JOB, phase, skip, chance.randint(0, 200), chance.randrange(nodes - lost), apart_ms)
