"""What machines need of this one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

SSHD = Path("/usr/sbin/sshd")


def obstacle() -> str:
    """Why there can be no machines here; empty if there can."""
    if os.geteuid() != 0:
        return "machines need namespaces and mounts, which only root may make"
    if shutil.which("ip") is None:
        return "machines need `ip`: install iproute2"
    if missing := [kind for kind in ("net", "mnt", "pid", "uts", "ipc") if not Path("/proc/self/ns", kind).exists()]:
        return f"machines need namespaces that this kernel has not: {', '.join(missing)}"
    if b"CapEff:\t" in (status := Path("/proc/self/status").read_bytes()):
        powers = int(status.split(b"CapEff:\t")[1].split()[0], 16)
        if not powers >> 21 & 1:  # CAP_SYS_ADMIN
            return "machines need mounts, which this root may not make (no CAP_SYS_ADMIN)"
    return ""


def sshd_obstacle() -> str:
    """Why machines can have no sshd; empty if they can."""
    if not SSHD.exists():
        return f"{SSHD} is not here: install openssh-server"
    missing = [tool for tool in ("ssh", "ssh-keygen") if shutil.which(tool) is None]
    return obstacle() or (f"`{missing[0]}` is not here: install openssh-client" if missing else "")


needs_machines = pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "-")
needs_sshd = pytest.mark.skipif(bool(sshd_obstacle()), reason=sshd_obstacle() or "-")
