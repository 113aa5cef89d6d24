"""What tests of the succession share: worlds whose orchestrator is on one of the nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from random import Random

from torchrelay.simulation.model.plans import Plan, draw, draw_head_strike


def crowned(seeds: range) -> Iterator[Plan]:
    """Those of these seeds whose orchestrator may have heirs."""
    return (plan for plan in map(draw, seeds) if plan.head is not None)


@cache
def contested(seeds: range) -> tuple[Plan, ...]:
    """The same with nothing but faults of heads and heirs, and with many of them."""
    return tuple(harder(plan) for plan in crowned(seeds) if len(plan.slots) > 2)


def harder(plan: Plan) -> Plan:
    aside = Random(plan.seed)
    strikes = tuple(draw_head_strike(aside) for _ in range(aside.randint(3, 8)))
    script = replace(plan.script, calls=plan.script.calls * aside.choice((1, 2)))
    return replace(plan, strikes=strikes, script=script)
