"""Sending: orders go to the agents of their nodes, one frame each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, cast, get_args

from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.messages.orders import AnyOrder, Fence, Order
from torchrelay.wire.messages.channel import OrderFrame, ToAgent

# Within one frame: first who must stop, then who starts, then the rest in the order of a recovery.
SEQUENCE: dict[type[Order], int] = {kind: place for place, kind in reversed([*enumerate((Fence, *get_args(AnyOrder)))])}


class AgentPort(Protocol):
    """The way to one agent. `send` never waits and never fails; who does not read is disconnected."""

    node: NodeId
    incarnation: str

    def send(self, message: ToAgent) -> None: ...

    def close(self, reason: str) -> None: ...


def send_orders(some: Iterable[Order], connections: Mapping[NodeId, AgentPort], lease: int) -> None:
    """Send them to those agents that are there; the others are told when they come back."""
    by_node: dict[NodeId, list[AnyOrder]] = {}
    for order in sorted(some, key=lambda order: (SEQUENCE[type(order)], getattr(order, "worker", ""))):
        by_node.setdefault(order.node, []).append(cast(AnyOrder, order))
    for node, batch in by_node.items():
        connection = connections.get(node)
        if connection is not None:
            connection.send(OrderFrame(tuple(batch), lease))
