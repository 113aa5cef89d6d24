"""`torchrelay doctor`: checks what a run needs from this machine; whatever is not well comes with what to do."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

from msgspec import Struct

from torchrelay.api.shown import size_text
from torchrelay.netpath.native.library import NotBuilt, find, load
from torchrelay.terminal.show import Output, show_json, table

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
