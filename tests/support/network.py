"""What tests of network share."""

from __future__ import annotations

import pytest

from torchrelay.protocol.messages.ids import NodeId
from torchrelay.schedulers import network as net

A, B = NodeId("node-0"), NodeId("node-1")
REASON = net.obstacle()
isolated = pytest.mark.skipif(bool(REASON), reason=REASON)


def traces(tag: str) -> list[str]:
    return [*net.namespaces(tag), *(name for name in net.interfaces() if name.startswith(f"tr{tag}"))]
