"""Network: virtual nodes with a link of their own each, so that it can be cut for real (root, Linux, iproute2).

    bridge tr<tag> (198.18.x.1: the orchestrator)
      ├── tr<tag>n0 ── eth0 (198.18.x.10) in the network namespace torchrelay-<tag>-node-0: its agent and workers
      └── tr<tag>n1 ── eth0 (198.18.x.11) in torchrelay-<tag>-node-1

With `links`, nodes have further links (path1, path2, ...), each on a bridge and in a subnet of its own, for collectives
over several paths; any of them can be cut alone.

A node whose links are down is, for all others, a node without power: nothing is closed, no FIN and no RST comes, while
its processes live on. The namespaces hold nothing else: nodes reach one another and the bridge, not the world outside.
Files, and what goes through them (unix sockets, shared memory), stay shared.

The tag comes from the run's folder. A lock tells whether the run lives: what a killed run left is removed by the next.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from torchrelay.protocol.messages.ids import NodeId
from torchrelay.schedulers.port import SchedulerError

RECORD = "network.json"
LOCKS = Path("/run/torchrelay-networks")
NAMESPACES = Path("/run/netns")
PREFIX = "torchrelay-"
# For tests between networks (RFC 2544): no real network should have it. A run takes one of its 512 /24.
FIRST_NET = (198, 18)
NETS = 512
FIRST_NODE = 10
MOST_NODES = 240
TOOLS = ("ip", "nsenter")
# An address of the link layer that nobody has: what is sent to it is lost without a word.
NOBODY = "02:00:00:00:00:01"
LOST = ("lladdr", NOBODY, "nud", "permanent")


class PathLink(Struct, frozen=True, kw_only=True):
    """One of a virtual node's further links."""

    name: str  # inside: path1
    interface: str  # the end outside
    address: str


class NodeLink(Struct, frozen=True, kw_only=True):
    """A virtual node's way to the others."""

    node: NodeId
    namespace: str
    interface: str  # the end outside: down, and the node is cut off
    address: str
    paths: tuple[PathLink, ...] = ()  # the first is path 1

    def path(self, number: int) -> PathLink:
        """Raises `SchedulerError` for a path that it has not got."""
        if not 1 <= number <= len(self.paths):
            have = f"paths 1 to {len(self.paths)}" if self.paths else "no paths: start the run with --isolate --links 2"
            raise SchedulerError(f"{self.node} has no path {number}; it has {have}")
        return self.paths[number - 1]


class Network(Struct, frozen=True, kw_only=True):
    """The network of one run, as `RUN_DIR/network.json` tells it."""

    tag: str
    bridge: str
    address: str  # of the bridge, where the orchestrator listens
    nodes: tuple[NodeLink, ...]
    path_bridges: tuple[str, ...] = ()

    @property
    def path_names(self) -> tuple[str, ...]:
        """The further links of each node, as they are called inside."""
        return tuple(path.name for path in self.nodes[0].paths) if self.nodes else ()

    def link(self, node: NodeId) -> NodeLink:
        """Raises `SchedulerError` for a node that has none."""
        for link in self.nodes:
            if link.node == node:
                return link
        raise SchedulerError(f"{node} has no link of its own; there are {', '.join(one.node for one in self.nodes)}")


def obstacle() -> str:
    """Why this machine cannot give nodes a network of their own; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root: run it as root, or leave --isolate out"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        packages = {"ip": "iproute2", "nsenter": "util-linux"}
        return f"`{missing[0]}` is not here: install {packages[missing[0]]}, or leave --isolate out"
    return ""


def plan_network(run_dir: Path, nodes: Iterable[NodeId], subnet: int, links: int = 0) -> Network:
    """Names and addresses, without doing anything. `subnet`: which of the `NETS`; each further link takes the next."""
    tag = hashlib.blake2b(os.fsencode(run_dir.absolute()), digest_size=3).hexdigest()

    def path(number: int, place: int) -> PathLink:
        return PathLink(
            name=f"path{number}",
            interface=f"tr{tag}p{number}n{place}",
            address=f"{net_of(subnet + number)}.{FIRST_NODE + place}",
        )

    found = tuple(
        NodeLink(
            node=node,
            namespace=f"{PREFIX}{tag}-{node}",
            interface=f"tr{tag}n{place}",
            address=f"{net_of(subnet)}.{FIRST_NODE + place}",
            paths=tuple(path(number, place) for number in range(1, links + 1)),
        )
        for place, node in enumerate(nodes)
    )
    if len(found) > MOST_NODES:
        raise SchedulerError(f"{len(found)} isolated nodes: there is room for {MOST_NODES}")
    return Network(
        tag=tag,
        bridge=f"tr{tag}",
        address=f"{net_of(subnet)}.1",
        nodes=found,
        path_bridges=tuple(f"tr{tag}p{number}" for number in range(1, links + 1)),
    )


def net_of(subnet: int) -> str:
    """The first three numbers of its addresses."""
    place = subnet % NETS
    return f"{FIRST_NET[0]}.{FIRST_NET[1] + place // 256}.{place % 256}"


@dataclass
class Isolation:
    """A network that stands, and the lock that keeps it."""

    network: Network
    lock: int

    @classmethod
    def open(cls, run_dir: Path, nodes: Iterable[NodeId], links: int = 0) -> Isolation:
        """Build it. Raises `SchedulerError` with what `ip` said."""
        clear_leftovers()
        with taking_turns():
            network = plan_network(run_dir, nodes, free_subnet(run_dir, 1 + links), links)
            lock = take_lock(network.tag)
            if lock is None:
                raise SchedulerError(f"another run in {run_dir} has its network already")
            try:
                dismantle(network.tag)
                build(network)
            except SchedulerError:
                dismantle(network.tag)
                release(network.tag, lock)
                raise
        return cls(network, lock)

    def command(self, node: NodeId, command: list[str]) -> list[str]:
        """The command as it runs on this node: in its network namespace, and else as it is."""
        return ["nsenter", f"--net={NAMESPACES / self.network.link(node).namespace}", "--", *command]

    def close(self) -> None:
        """Take it down."""
        dismantle(self.network.tag)
        release(self.network.tag, self.lock)


# ---------------------------------------------------------------- building


def build(network: Network) -> None:
    lines = [
        f"link add {network.bridge} type bridge forward_delay 0 stp_state 0",
        f"addr add {network.address}/24 dev {network.bridge}",
        f"link set {network.bridge} up",
    ]
    for bridge in network.path_bridges:
        lines += [f"link add {bridge} type bridge forward_delay 0 stp_state 0", f"link set {bridge} up"]
    for link in network.nodes:
        ip("netns", "add", link.namespace)
        lines += joined(link, link.interface, "eth0", network.bridge)
        for path, bridge in zip(link.paths, network.path_bridges, strict=True):
            lines += joined(link, path.interface, path.name, bridge)
    ip("-batch", "-", words="\n".join(lines))
    for link in network.nodes:
        inside = [f"addr add {link.address}/24 dev eth0", "link set eth0 up", "link set lo up"]
        for path in link.paths:
            inside += [f"addr add {path.address}/24 dev {path.name}", f"link set {path.name} up"]
        ip("-n", link.namespace, "-batch", "-", words="\n".join(inside))


def joined(link: NodeLink, outside: str, inside: str, bridge: str) -> list[str]:
    """Commands for one cable: from the node to a bridge."""
    return [
        f"link add {outside} type veth peer name {inside} netns {link.namespace}",
        f"link set {outside} master {bridge} up",
    ]


def dismantle(tag: str) -> None:
    """Remove all that bears the tag, processes included: they are of a run that is over."""
    held = namespaces(tag)
    for name in held:
        for pid in ip("netns", "pids", name).split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
    # Links first: without its namespace a veth goes by itself, at a time of the kernel's choice.
    for name in interfaces():
        if name == f"tr{tag}" or name.startswith((f"tr{tag}n", f"tr{tag}p")):
            ip("link", "del", name)
    for name in held:
        ip("netns", "del", name)


def namespaces(tag: str) -> list[str]:
    found = NAMESPACES.iterdir() if NAMESPACES.is_dir() else ()
    return [path.name for path in found if path.name.startswith(f"{PREFIX}{tag}-")]


def interfaces() -> list[str]:
    return [path.name for path in Path("/sys/class/net").iterdir()]


def free_subnet(run_dir: Path, count: int = 1) -> int:
    """The first of so many in a row that no interface here has, from one on that the folder names."""
    taken = ip("-o", "-4", "addr", "show")
    start = int.from_bytes(hashlib.blake2b(os.fsencode(run_dir.absolute()), digest_size=2).digest()) % NETS
    for step in range(NETS):
        if all(f" {net_of(start + step + place)}." not in taken for place in range(count)):
            return (start + step) % NETS
    raise SchedulerError("all subnets of 198.18.0.0/15 are taken")


def ip(*words: str, **given: str) -> str:
    """Run `ip`; `words=` goes to its standard input. Raises `SchedulerError` with what it said."""
    done = subprocess.run(["ip", *words], input=given.get("words"), capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise SchedulerError(f"`ip {' '.join(words)}` failed: {said}")
    return done.stdout


# ---------------------------------------------------------------- locks


@contextmanager
def taking_turns() -> Iterator[None]:
    """One run at a time looks for a subnet and takes it."""
    LOCKS.mkdir(mode=0o700, exist_ok=True)
    turn = os.open(LOCKS / "turn", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield
    finally:
        os.close(turn)


def take_lock(tag: str) -> int | None:
    """The run's lock, or None if a living run has it."""
    lock = os.open(LOCKS / f"{tag}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def release(tag: str, lock: int) -> None:
    (LOCKS / f"{tag}.lock").unlink(missing_ok=True)
    os.close(lock)


def clear_leftovers() -> None:
    """Remove the networks of runs that were killed."""
    with taking_turns():
        for path in sorted(LOCKS.glob("*.lock")):
            lock = take_lock(path.stem)
            if lock is not None:
                dismantle(path.stem)
                release(path.stem, lock)


# ---------------------------------------------------------------- faults of links


def cut(network: Network, node: NodeId) -> None:
    """All links of the node are down: to all others it is as if it had no power."""
    for interface in ends(network, node):
        ip("link", "set", interface, "down")


def mend(network: Network, node: NodeId) -> None:
    """All its links are up again, and let everything pass."""
    ip("link", "set", network.link(node).interface, "up")
    for number in range(1, len(network.path_bridges) + 1):
        mend_path(network, node, number)


def ends(network: Network, node: NodeId) -> list[str]:
    """The outer ends of all links of a node."""
    link = network.link(node)
    return [link.interface, *(path.interface for path in link.paths)]


def cut_path(network: Network, node: NodeId, number: int) -> None:
    """One path's cable is pulled: the node sees its carrier go, and the others only that nothing comes."""
    ip("link", "set", network.link(node).path(number).interface, "down")


def swallow_path(network: Network, node: NodeId, number: int) -> None:
    """All packets between the node and the others over one path are lost, both ways; no link goes down."""
    for here, there in pairs_of(network, node):
        path = here.path(number)
        ip("-n", here.namespace, "neigh", "replace", there.path(number).address, *LOST, "dev", path.name)


def mend_path(network: Network, node: NodeId, number: int) -> None:
    """The path's link is up, and packets find their way."""
    ip("link", "set", network.link(node).path(number).interface, "up")
    for here, there in pairs_of(network, node):
        name, address = here.path(number).name, there.path(number).address
        if NOBODY in ip("-n", here.namespace, "neigh", "show", address, "dev", name):
            ip("-n", here.namespace, "neigh", "del", address, "dev", name)


def pairs_of(network: Network, node: NodeId) -> list[tuple[NodeLink, NodeLink]]:
    """The node with each other one, both ways round."""
    here = network.link(node)
    others = [link for link in network.nodes if link is not here]
    return [pair for other in others for pair in ((here, other), (other, here))]


def is_cut(network: Network, node: NodeId) -> bool:
    return "state DOWN" in ip("link", "show", network.link(node).interface)


def part(network: Network, node: NodeId) -> None:
    """The node and the orchestrator lose each other's packets, in both directions; workers reach one another still."""
    link = network.link(node)
    ip("-n", link.namespace, "neigh", "replace", network.address, *LOST, "dev", "eth0")
    ip("neigh", "replace", link.address, *LOST, "dev", network.bridge)


def rejoin(network: Network, node: NodeId) -> None:
    """They find each other again. Nothing happens if they had not lost each other."""
    link = network.link(node)
    if NOBODY in ip("-n", link.namespace, "neigh", "show", network.address):
        ip("-n", link.namespace, "neigh", "del", network.address, "dev", "eth0")
    if NOBODY in ip("neigh", "show", link.address, "dev", network.bridge):
        ip("neigh", "del", link.address, "dev", network.bridge)
