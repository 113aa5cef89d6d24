"""Environment: what a worker finds in `os.environ` before it knows its rank; torchrun's names, and ours."""

from __future__ import annotations

import ipaddress
import zlib
from collections.abc import Mapping
from pathlib import Path

from torchrelay.protocol.messages.events import JobSpec
from torchrelay.protocol.messages.ids import NodeId, WorkerId
from torchrelay.wire.files.launch import Launch


def is_loopback(host: str) -> bool:
    """Whether workers that listen on `host` are on one machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def base_environment(launch: Launch, host: str) -> dict[str, str]:
    """The operator's environment with our defaults, for the forkserver.

    OMP_NUM_THREADS counts when torch is imported, which the forkserver does; so it must be set here.
    """
    env = dict(launch.env)
    if launch.nproc_per_node > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    if is_loopback(host):
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # The order of a set of texts is a matter of chance in each process, unless all have the same seed: a replacement
    # that is forked on another node, or later, must not come to another order of its data.
    env.setdefault("PYTHONHASHSEED", str(zlib.crc32(f"{launch.master_port} {launch.script}".encode())))
    # Broken connections are our daily bread; c10d would print a stack trace for each of them.
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return env


def torchrun_environment(launch: Launch, spec: JobSpec) -> dict[str, str]:
    """torchrun's variables that are the same for every rank. Those of the rank come with it."""
    nodes = max(1, spec.world_size // spec.nproc_per_node)
    return {
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_WORLD_SIZE": str(spec.nproc_per_node),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_WORLD_SIZE": str(spec.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": launch.master_addr,
        "MASTER_PORT": str(launch.master_port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.job,
    }


def worker_environment(
    base: Mapping[str, str], launch: Launch, spec: JobSpec, *,
    node: NodeId, worker: WorkerId, slot: int, link: Path, page: Path, logs: Path, guest: bool = False,
    network: Mapping[str, str] | None = None,
) -> dict[str, str]:  # fmt: skip
    """The whole environment of one worker. It holds no secret of ours: that comes with the link's welcome.

    `guest`: another rank uses the device of this slot. NCCL refuses two ranks on one device of one host, so this one
    says that it is on a host of its own (NCCL_HOSTID), and talks to the others over the network. `network`: where its
    network core reports to.
    """
    ours = {
        "TORCHRELAY_WORKER": worker,
        "TORCHRELAY_LINK": str(link),
        "TORCHRELAY_PAGE": str(page),
        "TORCHRELAY_JOB": spec.job,
        "TORCHRELAY_NODE": node,
        "TORCHRELAY_SLOT": str(slot),
        "TORCHRELAY_LOGS": str(logs),
    }
    if launch.code:
        ours["TORCHRELAY_CODE"] = launch.code
    if guest:
        ours["NCCL_HOSTID"] = worker
    return {**base, **torchrun_environment(launch, spec), **(network or {}), **ours}
