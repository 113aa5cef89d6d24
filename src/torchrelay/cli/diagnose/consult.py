"""Consult: `torchrelay doctor`, of this machine, of its network, of Slurm, or of a job's layout."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from msgspec import Struct

from torchrelay.api.shown import size_text
from torchrelay.client.runs import NotPossible
from torchrelay.netpath.native.library import NotBuilt, find, load
from torchrelay.terminal import words
from torchrelay.terminal.show import Output, show_json, table


def consult(given: argparse.Namespace) -> int:
    """Examine what was asked for. Returns the exit code; raises `NotPossible` for flags that mean nothing together."""
    if given.module and not given.script:
        raise NotPossible("-m: no module is named", 2)
    if given.layout:
        from torchrelay.cli.diagnose.layout import show_layout

        return show_layout(given)
    if given.script and given.script[0] == SLURM:
        output = output_behind(given)
        return examine(slurm_checks(), output)
    if given.script:
        raise NotPossible(f"{given.script[0]}: the doctor looks at a script with --layout only", 2)

    if given.net:
        return examine(network_checks(), given.output)
    return examine(all_checks(), given.output)


# ---------------------------------------------------------------- slurm

SLURM = "slurm"


def output_behind(given: argparse.Namespace) -> Output:
    """How it is printed: -o may stand behind the word, as a script's arguments would. Raises `NotPossible`."""
    behind = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    words.printed(behind)
    behind.set_defaults(output=given.output)
    try:
        found, other = behind.parse_known_args(given.script[1:])
    except argparse.ArgumentError as error:
        raise NotPossible(f"doctor slurm: {error}", 2) from error
    if other:
        raise NotPossible(f"doctor slurm: {other[0]!r} means nothing here; there is -o table, and -o json", 2)
    output: Output = found.output
    return output


def slurm_checks() -> list[Check]:
    """What Slurm lets us do. Raises `NotPossible` where there is none."""
    from torchrelay.cli.diagnose.slurm import slurm_rows
    from torchrelay.schedulers.port import SchedulerError

    try:
        rows = asyncio.run(slurm_rows())
    except SchedulerError as error:
        raise NotPossible(f"there is no Slurm to examine here: {error}", 2) from error
    return [
        Check(name, State.WELL, row.why)
        if row.able
        else Check(name, State.REMARK, row.why if row.able is False else f"unknown: {row.why}", row.remedy)
        for name, row in rows
    ]


# ---------------------------------------------------------------- network

# `torchrelay doctor --net`: the network of this machine: which paths there are, and what protects control traffic.
#
# The path core covers collectives that go through it. TCPStore, NCCL's bootstrap, unmodified Gloo and our orchestrator
# use one TCP connection each: for them there are the network's own means, see docs/network.md.

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


# ---------------------------------------------------------------- machine

# `torchrelay doctor`: checks what a run needs from this machine; whatever is not well comes with what to do.

TORCH_S = 120.0  # importing torch for the first time on a busy machine takes long
LEAST_PYTHON = (3, 11)
LEAST_TORCH = (2, 11)
LEAST_MEMORY = 64 << 20  # bytes of /dev/shm: a page for each worker is 2 MiB at most
LEAST_DISK = 100 << 20
LEAST_FILES = 1024
LEAST_PORTS = 1000
# Where SQLite's write-ahead log, which needs shared memory, does not work or cannot be trusted.
NETWORK_FILES = ("nfs", "nfs4", "lustre", "cifs", "smb3", "9p", "fuse.sshfs", "gpfs", "beegfs")

# Runs in a process of its own: nothing but workers imports torch here, and a broken torch breaks only this.
PROBE = """
import json, time
begin = time.monotonic()
import torch, torch.distributed as dist
found = {"torch": torch.__version__, "import_s": round(time.monotonic() - begin, 1)}
found["gpus"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
found["nccl"] = dist.is_nccl_available()
try:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    one = torch.ones(1)
    dist.all_reduce(one)
    found["gloo"] = ""
except Exception as error:
    found["gloo"] = f"{type(error).__name__}: {error}"
try:
    from torchrelay.worker.process_groups import swap
    way, reason = swap.load()
    found["swap"], found["swap_reason"] = type(way).__name__, reason
except Exception as error:
    found["swap"], found["swap_reason"] = "", f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


class State(StrEnum):
    """How a check came out."""

    WELL = "ok"
    REMARK = "remark"
    ILL = "problem"


class Check(Struct, frozen=True):
    """One thing that was looked at. `remedy` is empty if all is well."""

    name: str
    state: State
    found: str
    remedy: str = ""


def examine(found: Iterable[Check], output: Output) -> int:
    """Print these checks. Returns 0: all well, 1: a run is possible, with remarks, 2: it is not."""
    checks = list(found)
    if output is Output.JSON:
        print(show_json(checks))
    else:
        print(table(("check", "", "found", "what to do"), [(c.name, c.state, c.found, c.remedy) for c in checks]))
    states = {check.state for check in checks}
    return 2 if State.ILL in states else 1 if State.REMARK in states else 0


def all_checks() -> Iterator[Check]:
    yield check_python()
    yield from check_torch(probe_torch())
    yield check_compiler()
    yield check_network_part()
    yield check_loopback()
    yield check_ports(Path("/proc/sys/net/ipv4/ip_local_port_range"))
    yield check_memory(Path("/dev/shm"))
    yield check_limits()
    yield check_disk(Path.cwd())


def judged(name: str, well: bool, found: str, remedy: str, *, otherwise: State = State.ILL) -> Check:
    return Check(name, State.WELL, found) if well else Check(name, otherwise, found, remedy)


# ---------------------------------------------------------------- python and torch


def check_python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    least = ".".join(map(str, LEAST_PYTHON))
    return judged("python", sys.version_info[:2] >= LEAST_PYTHON, found, f"install Python {least} or later")


def probe_torch() -> dict[str, Any]:
    """What a process with torch finds; `error` if there is no such process."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROBE], capture_output=True, text=True, timeout=TORCH_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"importing torch took longer than {TORCH_S:g} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"error": said}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def check_torch(found: dict[str, Any]) -> Iterator[Check]:
    """Version, Gloo, devices, and the way in which communicators are swapped."""
    if "error" in found:
        yield Check("torch", State.ILL, found["error"], f"install torch {LEAST_TORCH[0]}.{LEAST_TORCH[1]} or later")
        return
    version = tuple(int(part) for part in found["torch"].split("+")[0].split(".")[:2] if part.isdigit())
    least = ".".join(map(str, LEAST_TORCH))
    told = f"{found['torch']}, imported in {found['import_s']} s"
    yield judged("torch", version >= LEAST_TORCH, told, f"install torch {least} or later")
    remedy = "install a torch that is built with Gloo; see the message"
    yield judged("gloo", not found["gloo"], found["gloo"] or "a group of one works", remedy)
    devices = f"{found['gpus']} GPUs, NCCL {'there' if found['nccl'] else 'not there'}"
    yield Check("devices", State.WELL, devices if found["gpus"] else "no GPU: Gloo on the CPU")
    if found["swap"] == "ExtensionSwap":
        yield Check("communicator swap", State.WELL, "compiled extension")
        return
    remedy = "optional: `make ext` compiles the extension, which frees old communicators at once"
    told = "fresh backend type" if found["swap"] else f"cannot be told: {found['swap_reason']}"
    yield Check("communicator swap", State.REMARK, told, remedy)


def check_compiler() -> Check:
    found = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    remedy = "optional: install g++ to compile the extension; it works without"
    return judged("compiler", found is not None, found or "none", remedy, otherwise=State.REMARK)


# ---------------------------------------------------------------- network


def check_network_part() -> Check:
    """Whether the library for path failover was built with the package, and loads."""
    try:
        found = f"version {load().version()}, {find()}"
    except NotBuilt as error:
        what, _, remedy = str(error).partition("; ")
        return Check("network part", State.REMARK, what, f"optional: {remedy}")
    return Check("network part", State.WELL, found)


def check_loopback() -> Check:
    """Whether a process can reach another one on 127.0.0.1."""
    remedy = "bring the loopback interface up (`ip link set lo up`), and let a firewall pass 127.0.0.1"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname()[:2], timeout=2.0).close()
    except OSError as error:
        return Check("loopback", State.ILL, str(error), remedy)
    return Check("loopback", State.WELL, "127.0.0.1 can be reached")


def check_ports(path: Path) -> Check:
    """Whether there are enough ports for connections between workers."""
    try:
        low, high = map(int, path.read_text().split())
    except (OSError, ValueError) as error:
        return Check("ports", State.REMARK, f"cannot be told: {error}", "nothing, unless connections fail")
    remedy = "widen the range: sysctl net.ipv4.ip_local_port_range='32768 60999'"
    return judged("ports", high - low >= LEAST_PORTS, f"{low} to {high}", remedy, otherwise=State.REMARK)


# ---------------------------------------------------------------- memory, limits, disk


def check_memory(folder: Path) -> Check:
    """Whether the workers' pages and the agents' sockets can lie in memory."""
    try:
        with tempfile.TemporaryDirectory(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        remedy = f"make {folder} writable (containers: --shm-size); until then the temp directory is used"
        return Check("shared memory", State.REMARK, str(error), remedy)
    remedy = f"enlarge {folder} (containers: --shm-size=1g)"
    return judged("shared memory", free >= LEAST_MEMORY, f"{size_text(free)} free", remedy, otherwise=State.REMARK)


def check_limits() -> Check:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = files == resource.RLIM_INFINITY
    remedy = "allow more open files: ulimit -n 4096"
    found = "unlimited" if unlimited else f"{files} open files"
    return judged("limits", unlimited or files >= LEAST_FILES, found, remedy, otherwise=State.REMARK)


def check_disk(folder: Path) -> Check:
    """Whether the journal can be kept here."""
    free, kind = shutil.disk_usage(folder).free, file_system(folder)
    if kind in NETWORK_FILES:
        return Check("disk", State.ILL, f"{kind} file system", "use a --run-dir on a local disk: a journal needs one")
    if not os.access(folder, os.W_OK):
        return Check("disk", State.ILL, f"{folder} cannot be written", "change the folder, or name a --run-dir")
    return judged("disk", free >= LEAST_DISK, f"{size_text(free)} free, {kind or 'unknown kind'}", "free some space")


def file_system(folder: Path) -> str:
    """The kind of file system that a folder is on; empty if unknown."""
    best, kind = "", ""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    for mount in mounts:
        _, place, found, *_ = mount.split()
        if (folder == Path(place) or Path(place) in folder.parents) and len(place) >= len(best):
            best, kind = place, found
    return kind
