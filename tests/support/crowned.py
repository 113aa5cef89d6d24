"""What tests of the succession share: worlds whose orchestrator is on one of the nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from random import Random

from torchrelay.simulation.model.plans import FaultKind, On, Plan, Strike, draw, draw_head_strike, draw_late_strikes


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


def woken(seeds: range) -> Iterator[Plan]:
    """The head is stopped, and so is who stands meanwhile; the head wakes up, and is lost soon after."""
    for plan in crowned(seeds):
        if len(plan.slots) > 2:
            script = replace(plan.script, calls=(plan.script.calls * 8)[:160])
            yield replace(plan, strikes=draw_late_strikes(Random(plan.seed)), script=script)


def outvoted(seeds: range) -> Iterator[Plan]:
    """Both heirs of five nodes are lost, and a third node is cut off for a while: meanwhile nothing leaves the head."""
    for plan in crowned(seeds):
        if len(plan.slots) != 5 or plan.head is None:
            continue
        last = max(number for number in range(5) if number != plan.head)
        strikes = (
            Strike(FaultKind.KILL, On.TIME, delay_ms=2_000 - plan.seed % 400, rank=plan.seed % 2),
            Strike(FaultKind.SPLIT, On.TIME, delay_ms=2_000, rank=last, length_ms=14_000),
            Strike(FaultKind.HEIR, On.TIME, delay_ms=2_001, length_ms=40_000),
            Strike(FaultKind.HEIR, On.TIME, delay_ms=2_002, length_ms=40_000),
        )
        yield replace(plan, strikes=strikes, script=replace(plan.script, calls=(plan.script.calls * 4)[:40]))
