"""Flags of `torchrelay run` for several network paths: what switches them on, and what is made of one that fails."""

from __future__ import annotations

import argparse
import os
import re

import msgspec

from torchrelay.client.runs import NotPossible, time_in
from torchrelay.terminal.show import remark
from torchrelay.wire.files.launch import PathLimits

BAD_ARGUMENTS = 2
CPU_BACKEND = "TORCHRELAY_CPU_BACKEND"  # what Gloo's groups on the CPU get in its place (`path_groups`)
GIVE_UP = "TORCHRELAY_NET_GIVEUP_S"
GIVE_UP_S = 300
OF_THE_CORE = {"net_giveup", "net_probe_port"}
TIMES = {"net_down": "down_s", "net_window": "window_s", "net_slow": "slow_s", "net_heal": "heal_s"}


def add_network(group: argparse._ArgumentGroup) -> None:
    """The flags themselves; none has a default, so that it is seen which were given."""
    group.add_argument(
        "--net-failover",
        "--net_failover",
        action="store_true",
        help="collectives use all network paths between nodes and get over the loss of some; ranks leave a node one of "
        "whose paths stays lost",
    )
    group.add_argument(
        "--ib-failover",
        "--ib_failover",
        action="store_true",
        help="instead: NCCL's own failover between InfiniBand or RoCE ports (NCCL 2.29.7), which the agents watch; "
        "the limits below hold for ports, too",
    )
    group.add_argument(
        "--ib-merge", "--ib_merge", metavar="DEVICES", help="which ports back each other: mlx5_0,mlx5_1;mlx5_2,mlx5_3"
    )
    known = PathLimits()
    for name, sign, text in (
        ("net-down", "TIME", f"a path is at fault if it was lost for so long ({known.down_s:.0f}s)"),
        ("net-flaps", "N", f"or was lost so often ({known.flaps})"),
        ("net-window", "TIME", f"within this time ({known.window_s / 3600:.0f}h)"),
        ("net-share", "PERCENT", f"or carries less than this part of its usual ({known.slow_share:.0%})"),
        ("net-slow", "TIME", f"for so long ({known.slow_s:.0f}s)"),
        ("net-heal", "TIME", f"its taint is lifted when it has been whole for so long ({known.heal_s:.0f}s)"),
        ("net-probe-port", "P", f"where agents knock at a peer if nobody uses a path any more ({known.probe_port})"),
        ("net-giveup", "TIME", f"without any path to a peer a collective fails after this time ({GIVE_UP_S}s)"),
    ):
        group.add_argument(f"--{name}", f"--{name.replace('-', '_')}", metavar=sign, help=text.replace("%", "%%"))


def path_limits(given: argparse.Namespace) -> PathLimits | None:
    """When a path or a port is at fault; None without --net-failover and --ib-failover. Raises `NotPossible`."""
    said = {name: text for name, text in vars(given).items() if name.startswith("net_") and isinstance(text, str)}
    if given.net_failover and given.ib_failover:
        told = "--net-failover and --ib-failover: NCCL takes either our plugin or its own InfiniBand part"
        raise NotPossible(told, BAD_ARGUMENTS)
    if given.ib_merge is not None and not given.ib_failover:
        raise NotPossible("--ib-merge means nothing without --ib-failover", BAD_ARGUMENTS)
    if not (given.net_failover or given.ib_failover):
        if said:
            raise NotPossible(f"{flag(min(said))} means nothing without --net-failover", BAD_ARGUMENTS)
        return None
    for name in said.keys() & OF_THE_CORE if given.ib_failover else ():
        raise NotPossible(f"{flag(name)} means nothing with --ib-failover: it is for our own core", BAD_ARGUMENTS)
    known = PathLimits()
    times = {field: seconds(said[name], name) for name, field in TIMES.items() if name in said}
    return msgspec.structs.replace(
        known,
        **times,
        flaps=number(said, "net_flaps", known.flaps, 2, 1000),
        slow_share=number(said, "net_share", round(100 * known.slow_share), 1, 99) / 100,
        probe_port=number(said, "net_probe_port", known.probe_port, 1, 65535),
        ports=given.ib_failover,
    )


def number(said: dict[str, str], name: str, otherwise: int, least: int, most: int) -> int:
    """What a flag says, or the default. Raises `NotPossible`."""
    text = said.get(name, str(otherwise)).removesuffix("%")
    if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise NotPossible(f"{flag(name)} {said[name]}: give a number from {least} to {most}", BAD_ARGUMENTS)
    return int(text)


def seconds(text: str, name: str) -> float:
    """A time that is not 0. Raises `NotPossible`."""
    found = time_in(text) / 1000
    if not found:
        raise NotPossible(f"{flag(name)} {text}: give at least a second", BAD_ARGUMENTS)
    return found


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def network_environment(given: argparse.Namespace) -> dict[str, str]:
    """What switches path failover on in the workers: the network core, or NCCL's own. Raises `NotPossible`."""
    if given.ib_failover:
        return for_ports(given.ib_merge)
    if not given.net_failover:
        return {}
    give_up = os.environ.get(GIVE_UP, str(GIVE_UP_S))
    if given.net_giveup is not None:
        give_up = str(time_in(given.net_giveup) // 1000)
    return {**core_variables(), GIVE_UP: give_up}


def core_variables() -> dict[str, str]:
    """What makes NCCL, RCCL and groups on the CPU use the network core. Raises `NotPossible` if it was not built."""
    from torchrelay.netpath.native.environment import plugin
    from torchrelay.netpath.native.library import NotBuilt

    try:
        return {**plugin(), CPU_BACKEND: os.environ.get(CPU_BACKEND, "torchrelay")}
    except NotBuilt as error:
        raise NotPossible(f"--net-failover: {error}", BAD_ARGUMENTS) from error


def for_ports(merge: str | None) -> dict[str, str]:
    """Variables for NCCL's own failover; what it lacks is said on stderr. Raises `NotPossible` if it has none."""
    from torchrelay.netpath.native.environment import FAILOVER, RECOVERY, BadMerge, infiniband, nccl_version

    version = nccl_version()
    told = ".".join(map(str, version or ()))
    if version is None:
        remark("no NCCL is installed here: port failover needs NCCL 2.29.7, recovery of ports 2.30.3")
    elif version < FAILOVER:
        why = "it came with 2.29.7, and torch 2.14 brings 2.30.7"
        raise NotPossible(f"NCCL {told} has no port failover: {why}", BAD_ARGUMENTS)
    elif version < RECOVERY:
        remark(f"NCCL {told} fails over to another port and stays there: recovery of ports came with 2.30.3")
    if merge is None:
        remark("only ports of devices that NCCL merges back each other: see NCCL_DEBUG=INFO, or name them with --merge")
    try:
        return infiniband(merge, version)
    except BadMerge as error:
        raise NotPossible(str(error), BAD_ARGUMENTS) from error
