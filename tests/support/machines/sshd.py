"""Sshd: a real ssh server in each pretended machine, with keys that are made for one test."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.support.machines.machines import Machine, Machines, until

SSHD = "/usr/sbin/sshd"
PLACE = "/root/ssh"


def no_ssh() -> str:
    """Why there is no ssh; empty if there is."""
    missing = [tool for tool in (SSHD, "ssh", "ssh-keygen") if shutil.which(tool) is None]
    return f"{', '.join(missing)} not installed" if missing else ""


def open_doors(machines: Machines, folder: Path) -> list[str]:
    """Start a server on each machine; returns the ssh command by which each reaches the others."""
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    for machine in machines:
        open_door(machine, folder)
    return ["ssh", "-F", f"{PLACE}/client"]


def open_door(machine: Machine, folder: Path) -> None:
    place = machine.path(PLACE)
    place.mkdir(mode=0o700)
    for name in ("host", "user"):
        (place / name).touch(mode=0o600)
        (place / name).write_text((folder / name).read_text())
    (place / "authorized").write_text((folder / "user.pub").read_text())
    (place / "server").write_text(
        f"HostKey {PLACE}/host\nAuthorizedKeysFile {PLACE}/authorized\nPidFile {PLACE}/pid\nPort 22\nUsePAM no\n"
        "PasswordAuthentication no\nPermitRootLogin yes\nStrictModes no\nMaxStartups 100\n"
    )
    (place / "client").write_text(
        f"IdentityFile {PLACE}/user\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"
    )
    machine.path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    log = folder / f"{machine.name}.sshd"
    with log.open("w") as out:
        server = machine.popen([SSHD, "-D", "-e", "-f", f"{PLACE}/server"], stdout=out)
    for _ in until(f"the ssh server of {machine.name}"):
        assert server.poll() is None, log.read_text()
        if (place / "pid").exists():
            return
