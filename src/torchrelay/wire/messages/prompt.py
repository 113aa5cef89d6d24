"""Prompt: connections that go on soon after the network was away.

TCP waits twice as long after each attempt that was lost: when a link was down for four seconds, a connection over it
may be silent for six, and its node be taken for lost. Linux 6.15 lets a socket say how long it waits at most.
"""

from __future__ import annotations

import socket
from typing import Protocol

TCP_RTO_MAX_MS = 44
LONGEST_MS = 1_000  # the shortest that the kernel takes


class Options(Protocol):
    """A socket, as far as its options are concerned (asyncio hands out no more)."""

    def setsockopt(self, level: int, optname: int, value: int, /) -> None: ...


def resume_soon(connection: Options | None) -> bool:
    """Lost packets are sent again every second at least. False where the kernel cannot: all works, only later."""
    if connection is None:
        return False  # closed already
    try:
        connection.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, LONGEST_MS)
    except OSError:
        return False
    return True
