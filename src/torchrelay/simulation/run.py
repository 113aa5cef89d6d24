"""Run: one seed, or many; what they covered, and what they broke."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torchrelay.simulation.model.plans import Plan, draw
from torchrelay.simulation.world import World


@dataclass
class Result:
    """What one seed showed. `violation` is empty if nothing is wrong."""

    seed: int
    violation: str = ""
    coverage: Counter[str] = field(default_factory=Counter)
    story: list[str] = field(default_factory=list)
    actions: int = 0


def run_plan(plan: Plan, *, story: bool = False) -> Result:
    """Let one world live. Never raises for what the protocol does wrong: that is the result."""
    result = Result(plan.seed)
    world = None
    try:
        world = World(plan, story=story)
        world.run()
    except AssertionError as error:
        result.violation = str(error) or type(error).__name__
    if world is not None:
        result.coverage = world.coverage
        result.coverage.update(f"lack: {lack}" for lack in plan.lacks)
        for what, times in list(result.coverage.items()):
            if what.startswith("event: "):
                result.coverage[what.partition(" in ")[0]] += times
        result.story = world.story or []
    return result


def run_seed(seed: int, *, story: bool = False) -> Result:
    """One seed, one schedule, one outcome."""
    return run_plan(draw(seed), story=story)
