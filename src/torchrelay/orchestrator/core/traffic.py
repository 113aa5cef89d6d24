"""Traffic: events on their way into the journal, and which of them are heard together; orders to agents."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, cast, get_args

from torchrelay.orchestrator.store.journal import Call
from torchrelay.protocol.messages.events import WORKERS_TELL, Event, age_event
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.messages.orders import AnyOrder, Fence, Order
from torchrelay.wire.messages.channel import OrderFrame, ToAgent

# Events that are heard in one go, at most.
TOGETHER = 65_536
# Within one frame: first who must stop, then who starts, then the rest in the order of a recovery.
SEQUENCE: dict[type[Order], int] = {kind: place for place, kind in reversed([*enumerate((Fence, *get_args(AnyOrder)))])}


@dataclass(frozen=True, slots=True)
class Heard:
    """An event that has come. `written` gets its number in the journal, or the reason why it has none."""

    event: Event
    call: Call | None = None
    came_s: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    written: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def aged(self) -> Event:
        """The event, so much later as it has waited here."""
        return age_event(self.event, round(1000 * (asyncio.get_running_loop().time() - self.came_s)))

    def done(self, seq: int) -> None:
        """It has this number in the journal."""
        if not self.written.done():
            self.written.set_result(seq)

    def refuse(self, error: Exception) -> None:
        """It is not in the journal. An agent's events are not waited for: it sends them again."""
        if not self.written.done():
            self.written.set_exception(error)
            self.written.exception()


class Inbox:
    """Of one orchestrator, in its event loop."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Heard | None] = asyncio.Queue()

    def put(self, heard: Heard) -> None:
        self._queue.put_nowait(heard)

    def stir(self) -> None:
        """Let who waits for an event look again, and not wait for the tick."""
        self._queue.put_nowait(None)

    async def get(self) -> Heard | None:
        """The next event; None if there is another reason to look."""
        return await self._queue.get()

    def get_nowait(self) -> Heard | None:
        """The next event; None if there is none."""
        while not self._queue.empty():
            heard = self._queue.get_nowait()
            if heard is not None:
                return heard
        return None

    def batches(self, first: Heard) -> Iterator[list[Heard]]:
        """This event and what else has come by now, in order. What workers tell is heard together; the rest alone."""
        together: list[Heard] = []
        for heard in self._those_there(first):
            if heard.call is None and isinstance(heard.event, WORKERS_TELL):
                together.append(heard)
                continue
            if together:
                yield together
                together = []
            yield [heard]
        if together:
            yield together

    def _those_there(self, first: Heard) -> Iterator[Heard]:
        yield first
        for _ in range(TOGETHER - 1):
            if self._queue.empty():
                return
            heard = self._queue.get_nowait()
            if heard is not None:
                yield heard


# ---------------------------------------------------------------- orders


class AgentPort(Protocol):
    """The way to one agent. `send` never waits and never fails; who does not read is disconnected."""

    node: NodeId
    incarnation: str

    def send(self, message: ToAgent) -> None: ...

    def close(self, reason: str) -> None: ...


def send_orders(some: Iterable[Order], connections: Mapping[NodeId, AgentPort], lease: int) -> None:
    """Send them to those agents that are there; the others are told when they come back."""
    by_node: dict[NodeId, list[AnyOrder]] = {}
    for order in some:
        by_node.setdefault(order.node, []).append(cast(AnyOrder, order))
    for node, batch in by_node.items():
        connection = connections.get(node)
        if connection is not None:
            batch.sort(key=lambda order: SEQUENCE[type(order)])
            connection.send(OrderFrame(tuple(batch), lease))
