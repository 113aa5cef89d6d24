"""Network: the channel between an agent and the orchestrator, with all that can go wrong on the way.

A connection keeps the order of what is sent, unless the weather reorders; what is on its way when it breaks is lost.
In bad weather single messages are lost or come twice, too: the agent repeats its events until they are acknowledged,
the orchestrator its orders while they hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchrelay.simulation.ports import Carrier, Timeline


class Connection:
    """One connection of one agent."""

    def __init__(self, world: Timeline, agent: Carrier) -> None:
        self.world = world
        self.agent = agent
        self.closed = False
        self._up_ms = 0  # when the last message up arrives
        self._down_ms = 0

    def close(self) -> None:
        self.closed = True

    def up(self, receive: Callable[..., None], *given: Any) -> None:
        """Send towards the orchestrator."""
        for at_ms in self._arrivals():
            if not self.world.plan.weather.reordered:
                self._up_ms = at_ms = max(at_ms, self._up_ms)
            self.world.after(at_ms - self.world.now, self._arrive, receive, given)

    def down(self, receive: Callable[..., None], *given: Any) -> None:
        """Send towards the agent."""
        for at_ms in self._arrivals():
            if not self.world.plan.weather.reordered:
                self._down_ms = at_ms = max(at_ms, self._down_ms)
            self.world.after(at_ms - self.world.now, self._arrive, receive, given)

    def _arrivals(self) -> list[int]:
        """When a message arrives: never, once, or twice."""
        weather, chance = self.world.plan.weather, self.world.chance
        if self.closed or (self.world.stormy and chance.random() < weather.lost):
            return []
        times = 2 if self.world.stormy and chance.random() < weather.doubled else 1
        return [self.world.now + self._latency() for _ in range(times)]

    def _latency(self) -> int:
        weather, chance = self.world.plan.weather, self.world.chance
        if self.world.stormy and chance.random() < weather.late:
            return chance.randint(1, weather.late_ms)
        return chance.randint(*weather.latency_ms)

    def _arrive(self, receive: Callable[..., None], given: tuple[Any, ...]) -> None:
        if not self.closed:
            receive(*given)
