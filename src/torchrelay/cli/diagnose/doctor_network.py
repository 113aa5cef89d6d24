"""`torchrelay doctor --net`: the network of this machine: which paths there are, and what protects control traffic.

The path core covers collectives that go through it. TCPStore, NCCL's bootstrap, unmodified Gloo and our orchestrator
use one TCP connection each: for them there are the network's own means, see docs/network.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from torchrelay.cli.diagnose.doctor import Check, State

SETTINGS = Path("/proc/sys/net")
RECIPE = "see docs/network.md, control traffic"
# Interfaces that seldom lead to another machine.
SELDOM = ("lo", "docker", "virbr", "br-", "cni", "flannel", "cali")
LONGEST_RTO_MS = 1000
LEAST_RETRIES = 255


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


def usable_interfaces() -> list[str]:
    """Interfaces that are up, have an address, and may lead to other machines."""
    states = psutil.net_if_stats()
    return [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if not name.startswith(SELDOM)
        and name in states
        and states[name].isup
        and any(address.family.name in ("AF_INET", "AF_INET6") for address in addresses)
    ]


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
