"""Network: the channel between an agent and the orchestrator, with all that can go wrong on the way.

A connection keeps the order of what is sent, unless the weather reorders; what is on its way when it breaks is lost.
Where nothing gets through for a while, and nobody sees that, it comes when the way is free again.
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
        self.cut = False  # nothing gets through
        self.deaf = False  # nobody reads at the orchestrator's end
        self.lease = 0  # of the orchestrator that acts at the other end
        self._stalled: list[tuple[bool, Callable[..., None], tuple[Any, ...]]] = []
        self._unread: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._up_ms = 0  # when the last message up arrives
        self._down_ms = 0

    def close(self) -> None:
        self.closed = True

    def up(self, receive: Callable[..., None], *given: Any) -> None:
        """Send towards the orchestrator."""
        for at_ms in self._arrivals():
            if not self.world.plan.weather.reordered:
                self._up_ms = at_ms = max(at_ms, self._up_ms)
            self.world.after(at_ms - self.world.now, self._arrive, True, receive, given)

    def down(self, receive: Callable[..., None], *given: Any) -> None:
        """Send towards the agent."""
        for at_ms in self._arrivals():
            if not self.world.plan.weather.reordered:
                self._down_ms = at_ms = max(at_ms, self._down_ms)
            self.world.after(at_ms - self.world.now, self._arrive, False, receive, given)

    def welcome(self, receive: Callable[..., None], *given: Any) -> None:
        """The first message towards the agent, which is not lost: without it there would be no connection."""
        self._down_ms = at_ms = max(self.world.now + self._latency(), self._down_ms)
        self.world.after(at_ms - self.world.now, self._arrive, False, receive, given)

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

    def _arrive(self, up: bool, receive: Callable[..., None], given: tuple[Any, ...]) -> None:
        if self.closed:
            return
        if self.cut:
            self._stalled.append((up, receive, given))
        elif up and self.deaf:
            self._unread.append((receive, given))
        else:
            receive(*given)

    def at_once(self, receive: Callable[..., None], *given: Any) -> None:
        """Towards the orchestrator, without any delay of its own."""
        self._arrive(True, receive, given)

    def hang_up(self, receive: Callable[..., None], *given: Any) -> None:
        """The agent closes its end; who is stopped hears of it after all that came before. Who is cut off does not."""
        if self.deaf or self.cut:
            self._unread.append((receive, given))
        else:
            receive(*given)

    def flow(self) -> None:
        """What was not read is read, whoever has hung up since; what was held up arrives, in its order."""
        unread: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        if not self.deaf:
            unread, self._unread = self._unread, []
        for receive, given in unread:
            receive(*given)
        stalled, self._stalled = self._stalled, []
        for up, receive, given in stalled:
            self._arrive(up, receive, given)
