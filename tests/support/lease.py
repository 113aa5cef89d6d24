"""What tests of lease share."""

from __future__ import annotations

from collections.abc import Callable

from torchrelay.agent.uplink import Uplink
from torchrelay.protocol.health.pulses import Beat
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.wire.messages.channel import Attach


def an_uplink(where: Callable[[], str], token: Callable[[], str], on_message: Callable[[object], None]) -> Uplink:
    """The agent's end of a node without workers."""
    node = NodeId("node-0")
    return Uplink(
        where=where,
        token=token,
        attach=lambda: Attach(node=node, incarnation="a", slots=1),
        beat=lambda: Beat(node=node, incarnation="a"),
        on_message=on_message,
        on_acked=lambda _: None,
    )
