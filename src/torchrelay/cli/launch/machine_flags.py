"""Flags of `torchrelay run` for nodes that are machines of their own, and what is made of them."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from torchrelay.client.runs import NotPossible
from torchrelay.launcher.allocation import allocation_in
from torchrelay.launcher.machines import SSH, Floating, Host, Machines, own_address, parse_hosts, read_hostfile
from torchrelay.protocol.messages.ids import NodeId

BAD_ARGUMENTS = 2
_SPARES = re.compile(
    r"dedicated:(?P<dedicated>\d{1,5})|floating:(?P<floating>\d{1,5})|partition=(?P<partition>[\w.-]+)"
)


def add_machines(group: argparse._ArgumentGroup) -> None:
    """Where the nodes are."""
    group.add_argument("--hosts", default="", metavar="A,B:4,C", help="start an agent on each of these hosts by ssh")
    group.add_argument("--hostfile", type=Path, metavar="F", help="the same from a file, a host a line (slots=N)")
    group.add_argument("--by-hand", action="store_true", help="agents are started by somebody: torchrelay agent --join")
    group.add_argument("--host", default="", metavar="ADDRESS", help="of this machine, for the others (found out)")
    group.add_argument(
        *("--no-slurm", "--no_slurm"),
        action="store_true",
        dest="no_slurm",
        help="in a Slurm job of several nodes, too, all is on this machine",
    )
    group.add_argument("--ssh", default=SSH, metavar="COMMAND", help="what starts an agent on a host (ssh)")
    group.add_argument(
        "--export",
        default="",
        metavar="NAMES",
        help="further variables of this environment for the ranks, or ALL (NCCL_*, TORCH_*, OMP_* and so on go anyway)",
    )
    group.add_argument(
        *("--join-timeout", "--join_timeout"),
        type=float,
        default=600.0,
        metavar="S",
        dest="join_timeout",
        help="how long the agents of hosts, or of a Slurm job's nodes, may take to join; 0: for ever (600)",
    )
    group.add_argument(
        *("--plain-transfer", "--plain_transfer"),
        action="store_true",
        dest="plain_transfer",
        help="do not encrypt states and records between machines: only where their network is trusted",
    )


def read_spares(given: argparse.Namespace) -> None:
    """--spares: a number of workers, or `dedicated:K,floating:N,partition=P` in nodes. Raises `NotPossible`."""
    given.floating, text = Floating(), str(given.spares)
    if re.fullmatch(r"-?\d{1,9}", text):
        given.spares = int(text)
        return
    found: dict[str, str] = {}
    for part in text.split(","):
        match = _SPARES.fullmatch(part.strip())
        if match is None or match.lastgroup in found or match.lastgroup is None:
            usage = "give a number of workers, or dedicated:K,floating:N,partition=NAME, each once"
            raise NotPossible(f"--spares {text}: {usage}", BAD_ARGUMENTS)
        found[match.lastgroup] = match[match.lastgroup]
    if "dedicated" in found and given.spare_nodes:
        raise NotPossible("--spares dedicated:K and --spare-nodes say the same: give one of them", BAD_ARGUMENTS)
    if "partition" in found and "floating" not in found:
        raise NotPossible("--spares partition=NAME: say how many nodes, too: floating:N", BAD_ARGUMENTS)
    given.spares, given.spare_nodes = 0, int(found.get("dedicated", given.spare_nodes))
    given.floating = Floating(int(found.get("floating", 0)), found.get("partition", ""))


def hosts_of(given: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Host, ...] | None:
    """The hosts; empty if agents are started by hand; None: all is on this machine. Raises `NotPossible`.

    In a Slurm job of several nodes they are its nodes, unless another way, or this machine alone, is asked for.
    """
    given.slurm_job = 0
    ways = [
        flag
        for flag, wanted in (
            ("--hosts", given.hosts),
            ("--hostfile", given.hostfile is not None),
            ("--by-hand", given.by_hand),
        )
        if wanted
    ]
    if len(ways) > 1:
        raise NotPossible(f"{' and '.join(ways)}: give one of them", BAD_ARGUMENTS)
    if not ways and not given.isolate and not given.no_slurm and (found := allocation_in(environ)) is not None:
        given.slurm_job = found.job
        return tuple(Host(node, NodeId(node)) for node in found.nodes)
    if not ways:
        for words, wanted in (
            (f"--host {given.host}", given.host),
            (f"--export {given.export}", given.export),
            ("--plain-transfer", given.plain_transfer),
        ):
            if wanted:
                raise NotPossible(
                    f"{words}: only with --hosts, --hostfile or --by-hand, or in a Slurm job", BAD_ARGUMENTS
                )
        return None
    if given.isolate:
        raise NotPossible(f"--isolate pretends nodes on this machine: leave {ways[0]} out", BAD_ARGUMENTS)
    if given.by_hand:
        return ()
    return parse_hosts(given.hosts) if given.hosts else read_hostfile(given.hostfile)


def nodes_of(given: argparse.Namespace, hosts: tuple[Host, ...] | None) -> str:
    """--nodes; by default all hosts but the spare nodes. Raises `NotPossible`."""
    if given.nodes is not None or not hosts:
        return given.nodes or "1"
    return str(len(hosts) - given.spare_nodes)


def machines_of(given: argparse.Namespace, hosts: tuple[Host, ...] | None, nodes: int, nproc: int) -> Machines | None:
    """Where the nodes are. Raises `NotPossible`."""
    if given.floating.nodes and not given.slurm_job:
        raise NotPossible("--spares floating:N: only in a Slurm job of several nodes", BAD_ARGUMENTS)
    if hosts is None:
        return None
    if hosts and len(hosts) < nodes + given.spare_nodes:
        needed = f"--nodes {nodes} and --spare-nodes {given.spare_nodes} need {nodes + given.spare_nodes}"
        raise NotPossible(f"{len(hosts)} hosts are named: {needed}", BAD_ARGUMENTS)
    if small := [host.node for host in hosts if host.slots and host.slots < nproc]:
        raise NotPossible(f"{', '.join(small)}: fewer slots than --nproc-per-node {nproc}", BAD_ARGUMENTS)
    ssh = shlex.split(given.ssh)
    if not ssh:
        raise NotPossible("--ssh: give a command", BAD_ARGUMENTS)
    if not hosts and not given.host:
        raise NotPossible("--by-hand: give --host ADDRESS, under which the others reach this machine", BAD_ARGUMENTS)
    return Machines(hosts, given.host or own_address(hosts), tuple(ssh), given.slurm_job, given.floating)
