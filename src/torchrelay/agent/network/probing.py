"""Probing: whether a peer's address can be reached over one of our paths, where no process uses it any more.

A TCP connection is tried, from the path's own address and through its interface. Whatever comes back shows that the way
is there in both directions: also that nobody listens. Nothing back, or no such address here, shows that it is not.
"""

from __future__ import annotations

import asyncio
import socket
from ipaddress import ip_address

PROBE_S = 1.0  # how long an answer may take


async def reaches(local: str, remote: str, port: int, interface: str = "", within_s: float = PROBE_S) -> bool:
    """Whether anything at `remote` answers what comes from `local`. Never raises for what an address may be."""
    try:
        family = socket.AF_INET6 if ip_address(local).version == 6 else socket.AF_INET
        ip_address(remote)  # a name would be looked up
    except ValueError:
        return False
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            through(probe, interface)
            probe.bind((local, 0))
            async with asyncio.timeout(within_s):
                await asyncio.get_running_loop().sock_connect(probe, (remote, port))
        except (ConnectionRefusedError, ConnectionResetError):
            return True
        except (OSError, TimeoutError):
            return False
        return True


def through(probe: socket.socket, interface: str) -> None:
    """Leave by this interface only, not by whichever has a route, where the kernel lets us (Linux 5.7 lets anybody)."""
    if interface:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode() + b"\0")
        except PermissionError:
            pass  # the own address has to do
