"""`torchrelay doctor --net`: the network of this machine: which paths there are, and what protects control traffic.

The path core covers collectives that go through it. TCPStore, NCCL's bootstrap, unmodified Gloo and our orchestrator
use one TCP connection each: for them there are the network's own means, see docs/network.md.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from torchrelay.cli.diagnose.doctor import Check, State

SETTINGS = Path("/proc/sys/net")
INTERFACES = Path("/sys/class/net")
RECIPE = "see docs/network.md, control traffic"
# Interfaces that seldom lead to another machine.
SELDOM = ("lo", "docker", "virbr", "br-", "cni", "flannel", "cali")
LONGEST_RTO_MS = 1000
LEAST_RETRIES = 255
NETLINK_ROUTE, RTM_NEWADDR, RTM_GETADDR = 0, 20, 22
NLM_F_REQUEST, NLM_F_DUMP = 0x1, 0x300
IFF_UP = 0x1


def network_checks(settings: Path = SETTINGS) -> Iterator[Check]:
    """Paths, then what control traffic can count on."""
    paths = usable_interfaces()
    yield check_paths(paths)
    ecmp, mptcp = check_ecmp(settings), check_mptcp(settings)
    if len(paths) > 1 and State.WELL not in (ecmp.state, mptcp.state):
        yield ecmp
        yield mptcp
    else:
        yield from (check for check in (ecmp, mptcp) if check.state is State.WELL)


def usable_interfaces(folder: Path = INTERFACES) -> list[str]:
    """Interfaces that are up, have an address, and may lead to other machines."""
    addressed = with_addresses()
    names = [name for _, name in socket.if_nameindex() if not name.startswith(SELDOM) and name in addressed]
    return [name for name in names if is_up(folder / name)]


def is_up(interface: Path) -> bool:
    """Whether it is switched on and has a carrier, as far as the kernel can tell."""
    try:
        flags, state = int((interface / "flags").read_text(), 16), (interface / "operstate").read_text().strip()
    except OSError:
        return False  # it was removed
    return bool(flags & IFF_UP) and state in ("up", "unknown")


def with_addresses() -> set[str]:
    """The interfaces that have an IP address, by rtnetlink(7). Raises OSError."""
    found = set[str]()
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_ROUTE) as kernel:
        kernel.sendall(struct.pack("=IHHIIB3x", 20, RTM_GETADDR, NLM_F_REQUEST | NLM_F_DUMP, 1, 0, socket.AF_UNSPEC))
        while True:
            data = kernel.recv(1 << 16)
            while data:
                length, kind = struct.unpack_from("=IH", data)
                if kind != RTM_NEWADDR:
                    return found  # the end, or an error
                family, index = struct.unpack_from("=B3xI", data, 16)
                if family in (socket.AF_INET, socket.AF_INET6):
                    with suppress(OSError):  # it was removed
                        found.add(socket.if_indextoname(index))
                data = data[(length + 3) & ~3 :]


def check_paths(names: Sequence[str]) -> Check:
    if len(names) > 1:
        return Check("network paths", State.WELL, ", ".join(names))
    found = f"one only: {names[0]}" if names else "none besides loopback"
    return Check("network paths", State.WELL, f"{found}; there is nothing to fail over to")


def check_ecmp(settings: Path) -> Check:
    """A service address on a dummy interface, routed over all links: the kernel takes another link, TCP goes on."""
    wrong = [
        f"{name} is {found}, not 1"
        for name in ("ipv4/fib_multipath_hash_policy", "ipv4/conf/all/ignore_routes_with_linkdown")
        if (found := read(settings / name)) != 1
    ]
    if not wrong:
        return Check("control traffic: ECMP", State.WELL, "both settings are in place")
    return Check("control traffic: ECMP", State.REMARK, "; ".join(wrong), f"optional: {RECIPE}")


def check_mptcp(settings: Path) -> Check:
    """Multipath TCP, with the two settings without which an outage of half a minute takes as long again to heal."""
    name = "control traffic: MPTCP"
    if read(settings / "mptcp/enabled") != 1:
        return Check(name, State.REMARK, "not enabled in this kernel", f"optional: {RECIPE}")
    rto, retries = read(settings / "ipv4/tcp_rto_max_ms"), read(settings / "ipv4/tcp_retries2")
    if rto is None:
        return Check(name, State.REMARK, "no tcp_rto_max_ms: the kernel is older than 6.15", f"optional: {RECIPE}")
    if rto > LONGEST_RTO_MS or retries is None or retries < LEAST_RETRIES:
        remedy = f"sysctl net.ipv4.tcp_rto_max_ms={LONGEST_RTO_MS} net.ipv4.tcp_retries2={LEAST_RETRIES}; {RECIPE}"
        return Check(name, State.REMARK, f"tcp_rto_max_ms is {rto}, tcp_retries2 is {retries}", remedy)
    return Check(name, State.WELL, f"tcp_rto_max_ms {rto}, tcp_retries2 {retries}")


def read(setting: Path) -> int | None:
    """A number that the kernel shows; None if it does not."""
    try:
        return int(setting.read_text())
    except (OSError, ValueError):
        return None
