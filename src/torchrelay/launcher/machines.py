"""Machines: nodes of a run that are machines of their own, and how their agents come to be there.

    --hosts a,b,c    each agent is started by ssh; the pass goes over its standard input, never in a command line
    in a Slurm job   each agent is started by srun, in the same way: see `allocation`
    --by-hand        somebody starts them: `torchrelay agent --join HOST:PORT --token-file F` on each

Either way nothing is shared but the connections. These are encrypted, and checked both ways by the job's own authority.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torchrelay.client.runs import NotPossible
from torchrelay.launcher.allocation import step_command
from torchrelay.protocol.messages.ids import SAFE_ID, NodeId
from torchrelay.wire.trust.passes import Role, pass_of

BAD_ARGUMENTS = 2
CANNOT_START = 94
MOST_SLOTS = 4_096
SSH = "ssh"
# Nobody is there to type a password, and a host that is gone is to be noticed.
SSH_FLAGS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")
# What of the operator's environment goes to other machines, beside what --export names: settings of libraries that must
# be the same for all ranks. The rest (PATH, HOME, ...) is each machine's own.
EXPORTED = (
    "NCCL_",
    "TORCH_",
    "GLOO_",
    "OMP_",
    "MKL_",
    "CUDA_",
    "PYTORCH_",
    "UCX_",
    "FI_",
    "HF_",
    "WANDB_",
    "TORCHRELAY_",
)
NOT_EXPORTED = ("CUDA_VISIBLE_DEVICES",)
ALL = "ALL"
# A node beside the job is held for nothing when the job is gone: its agent gives it back sooner than others end.
SATELLITE_FORSAKEN_S = "120"

_LABEL = r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}"  # RFC 1035; underscores are not in it, but some sites have them
_HOST = re.compile(rf"(?P<user>[A-Za-z0-9._-]+@)?(?P<name>{_LABEL}(\.{_LABEL})*)(:(?P<slots>\d{{1,4}}))?")


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, as ssh knows it, and how many workers it has room for (0: as many as each node has)."""

    address: str
    node: NodeId
    slots: int = 0


@dataclass(frozen=True, slots=True)
class Floating:
    """Nodes that are had when one is lost, and not before. `partition`: whose jobs yield, if none is idle."""

    nodes: int = 0
    partition: str = ""


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines of a run. `hosts` is empty if agents are started by hand."""

    hosts: tuple[Host, ...]
    address: str  # of this machine, for the others
    ssh: tuple[str, ...] = (SSH,)
    slurm_job: int = 0  # whose nodes they are; 0: nobody's
    floating: Floating = Floating()

    def host(self, node: NodeId) -> Host:
        return next(host for host in self.hosts if host.node == node)

    @property
    def own_node(self) -> str:
        """The node that this machine is; empty if it is none of them."""
        return next((host.node for host in self.hosts if is_this_machine(host.address)), "")

    def command(self, node: NodeId, slots: int, join: str, satellite: int = 0) -> list[str]:
        """What starts the agent of a node: it reads its pass from standard input. `satellite`: a further Slurm job."""
        words = [sys.executable, "-P", "-m", "torchrelay.cli.main", "agent", "--join", join, "--token-file", "-"]
        words += ["--node", node, "--slots", str(slots)]
        if satellite:
            return step_command(
                satellite, node, [*words, "--own-log", "--give-back", "--forsaken", SATELLITE_FORSAKEN_S]
            )
        if self.slurm_job:
            return step_command(self.slurm_job, node, [*words, "--own-log"])
        host = self.host(node)
        if is_this_machine(host.address):
            return words
        flags = SSH_FLAGS if self.ssh[0].rpartition("/")[2] == SSH else ()
        return [*self.ssh, *flags, host.address, f"exec {shlex.join(words)}"]


def parse_hosts(text: str) -> tuple[Host, ...]:
    """`a,b:4,user@c`. Raises `NotPossible`."""
    return checked(host_of(part.strip(), f"--hosts {text}") for part in text.split(",") if part.strip())


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """A host a line, with `slots=N` (DeepSpeed, Open MPI) or `:N` (MPICH), and comments. Raises `NotPossible`."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise NotPossible(f"--hostfile {path}: {why}", BAD_ARGUMENTS) from error
    return checked(host_in(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if words_of(line))


def words_of(line: str) -> list[str]:
    return line.partition("#")[0].split()


def host_in(line: str, where: str) -> Host:
    """One line of a hostfile."""
    name, *rest = words_of(line)
    found = host_of(name, where)
    for word in rest:
        key, _, value = word.partition("=")
        if key in ("max_slots", "max-slots"):
            continue
        if key != "slots" or not value.isdecimal() or not 0 < int(value) <= MOST_SLOTS:
            raise NotPossible(f"{where}: {word!r} is not slots=N", BAD_ARGUMENTS)
        found = Host(found.address, found.node, int(value))
    return found


def host_of(text: str, where: str) -> Host:
    found = _HOST.fullmatch(text)
    if found is None or not SAFE_ID.fullmatch(found["name"]):
        raise NotPossible(f"{where}: {text!r} is no host: give NAME or NAME:SLOTS", BAD_ARGUMENTS)
    slots = int(found["slots"] or 0)
    if found["slots"] and not 0 < slots <= MOST_SLOTS:
        raise NotPossible(f"{where}: {text!r}: give 1 to {MOST_SLOTS} slots", BAD_ARGUMENTS)
    return Host(f"{found['user'] or ''}{found['name']}", NodeId(found["name"]), slots)


def checked(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """All of them, each once. Raises `NotPossible`."""
    found: dict[NodeId, Host] = {}
    for host in hosts:
        if host.node in found:
            raise NotPossible(f"{host.node} is named twice: a machine is one node; give it more slots", BAD_ARGUMENTS)
        found[host.node] = host
    if not found:
        raise NotPossible("no host is named", BAD_ARGUMENTS)
    return tuple(found.values())


def exported(environment: Mapping[str, str], names: str) -> dict[str, str]:
    """What of the operator's environment goes to all machines. `names`: ALL, or further names with commas."""
    further = {name.strip() for name in names.split(",") if name.strip()}
    return {
        name: value
        for name, value in environment.items()
        if ALL in further or name in further or (name.startswith(EXPORTED) and name not in NOT_EXPORTED)
    }


def is_this_machine(address: str) -> bool:
    """Whether a host is the one we are on."""
    name = address.rpartition("@")[2]
    own = {socket.gethostname(), os.environ.get("SLURMD_NODENAME", "")} - {""}
    return name in ("localhost", "127.0.0.1", *own, *(each.partition(".")[0] for each in own))


def own_address(hosts: Iterable[Host]) -> str:
    """The address of this machine by which the first of the others is reached. Raises `NotPossible`."""
    for host in hosts:
        if is_this_machine(host.address):
            continue
        name = host.address.rpartition("@")[2]
        try:
            family, kind, _, _, where = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(where)  # nothing is sent
                found = str(probe.getsockname()[0])
        except OSError:
            continue  # an alias of ssh's own, say
        if name == where[0] or not ipaddress.ip_address(found.partition("%")[0]).is_loopback:
            return found  # else it is this machine, by another name
    raise NotPossible(
        "which address of this machine the others reach cannot be found out: give --host ADDRESS", BAD_ARGUMENTS
    )


def by_hand(run_dir: Path, join: str) -> str:
    """What somebody is to type on each machine."""
    held = pass_of(run_dir, Role.AGENT)
    return (
        f"waiting for nodes: copy {held} to each machine (readable by its owner only), and start there\n"
        f"    torchrelay agent --join {join} --token-file {os.path.basename(held)}"
    )
