"""A real sshd on a machine, with keys that only this harness has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.machines.needs import SSHD
from tests.support.machines.process import Process
from tests.support.machines.waiting import MachineError, wait_for

if TYPE_CHECKING:
    from tests.support.machines.machine import Machine

SSH_CONFIG = "/root/.ssh/config"
FOLDER = "/run/sshd"  # where it also wants an empty folder of this name to be
PORT = 22
# What a login gets of the environment; without it, none of the harness's.
PASSED = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PATH")


@dataclass(frozen=True)
class Keys:
    """Of the host and of its user: private and public."""

    host: tuple[str, str]
    user: tuple[str, str]

    @classmethod
    def made_on(cls, machine: Machine) -> Keys:
        """Made there, and nothing of them stays on a disk."""
        found = []
        for name in ("host", "user"):
            path = f"/run/key-{name}"
            machine.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", path])
            inside = machine.root / path.lstrip("/")
            found.append((inside.read_text(), inside.with_name(f"{inside.name}.pub").read_text()))
        return cls(*found)


def start_sshd(machine: Machine, keys: Keys, names: Iterable[str]) -> Process:
    """Start it, and wait until it listens. `names`: of all machines, and their addresses."""
    put_files(machine, keys, names)
    log = machine.root / "run/sshd.log"
    with log.open("wb") as file:
        process = machine.popen([str(SSHD), "-D", "-e", "-f", "/run/sshd_config"], stdout=file, stderr=file)

    def listens() -> bool:
        if process.poll() is not None:
            raise MachineError(f"sshd on {machine.name} ended with {process.returncode}: {log.read_text()}")
        return "Server listening" in log.read_text()

    wait_for(f"sshd on {machine.name}", listens)
    return process


def put_files(machine: Machine, keys: Keys, names: Iterable[str]) -> None:
    """Its configuration, and what a client on it needs."""
    (machine.root / FOLDER.lstrip("/")).mkdir(exist_ok=True)
    (machine.root / "root/.ssh").mkdir(mode=0o700, exist_ok=True)
    passed = {name: value for name, value in machine.environment().items() if name in PASSED}
    files = {
        "run/sshd_host_key": keys.host[0],
        "run/sshd_config": server_config(passed),
        "root/.ssh/id_ed25519": keys.user[0],
        "root/.ssh/id_ed25519.pub": keys.user[1],
        "root/.ssh/authorized_keys": keys.user[1],
        "root/.ssh/known_hosts": f"{','.join(names)} {keys.host[1]}",
        "root/.ssh/config": "Host *\n  User root\n  BatchMode yes\n  StrictHostKeyChecking yes\n",
    }
    for path, words in files.items():
        write_private(machine.root / path, words)


def write_private(path: Path, words: str) -> None:
    path.touch(mode=0o600)
    path.write_text(words)


def server_config(passed: dict[str, str]) -> str:
    """For sshd: keys only, and no program of the host's around it."""
    lines = [
        f"Port {PORT}",
        "HostKey /run/sshd_host_key",
        "PidFile /run/sshd.pid",
        "UsePAM no",
        "PasswordAuthentication no",
        "PermitRootLogin prohibit-password",
        "AuthorizedKeysFile .ssh/authorized_keys",
        "Subsystem sftp internal-sftp",
    ]
    if passed:  # only the first line of this word counts
        lines.append("SetEnv " + " ".join(f'{name}="{value}"' for name, value in passed.items()))
    return "\n".join([*lines, ""])
