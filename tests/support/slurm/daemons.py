"""The daemons of one machine of a cluster: munged, and slurmctld or slurmd."""

from __future__ import annotations

import secrets
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.machines.machine import Machine
from tests.support.machines.process import Process
from tests.support.machines.waiting import MachineError
from tests.support.slurm.conf import DEVICES, STATE, Site, cgroup_conf, gres_conf
from tests.support.slurm.needs import CONFIGURATION, find

MUNGE = "/run/munge"  # where clients of munge look for its socket
SOCKET = f"{MUNGE}/munge.socket.2"
END_S = 10.0


@dataclass
class Daemons:
    """What of a cluster runs on one machine, while it has power."""

    machine: Machine
    folder: Path  # of the test: for their words
    running: dict[str, Process] = field(default_factory=dict)  # in the order of their start

    def start(self, name: str, *flags: str) -> None:
        """Raises `OSError` if it cannot be started."""
        with self.log(name).open("ab") as log:
            command = [find(name) or name, *flags]
            self.running[name] = self.machine.popen(command, cwd="/", stdout=log, stderr=subprocess.STDOUT)

    def start_munged(self) -> None:
        """Raises `OSError` if it cannot be started."""
        paths = {"key-file": "key", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
        flags = [f"--{flag}={MUNGE}/{name}" for flag, name in paths.items()]
        self.start("munged", "--foreground", f"--socket={SOCKET}", *flags)

    def can_sign(self) -> bool:
        """Raises `MachineError` if munged has ended."""
        return self.all_live() and (self.machine.root / SOCKET.lstrip("/")).exists()

    def all_live(self) -> bool:
        """Raises `MachineError` with its last words if one has ended."""
        for name, process in self.running.items():
            if (code := process.poll()) is not None:
                said = self.log(name).read_text(errors="replace")[-2000:]
                raise MachineError(f"{name} on {self.machine.name} ended with {code}: {said}")
        return True

    def log(self, name: str) -> Path:
        return self.folder / f"{name}-{self.machine.name}.log"

    def kill(self) -> None:
        """At once: a slurmctld that is asked to end waits for answers of nodes that have no power."""
        for process in self.running.values():
            process.kill()
        for process in self.running.values():
            process.wait(END_S)
        self.running.clear()


def put_files(machine: Machine, key: bytes, conf: str, site: Site) -> None:
    """All that Slurm and munge read there."""
    munge, own = (machine.root / path.lstrip("/") for path in (MUNGE, STATE))
    munge.mkdir(mode=0o755)
    put_key(munge / "key", key)
    for folder in ("controller", "node", "dev", "etc"):
        (own / folder).mkdir(parents=True)
    for number in range(site.gpus):
        (machine.root / DEVICES.lstrip("/") / f"nvidia{number}").symlink_to("/dev/null")
    files = {"slurm.conf": conf, "gres.conf": gres_conf(site), "cgroup.conf": cgroup_conf()}
    for name, words in files.items():
        (own / "etc" / name).write_text(words)
    machine.run(["mount", "--bind", f"{STATE}/etc", str(CONFIGURATION)])


def put_key(path: Path, key: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(key)


def new_key() -> bytes:
    """For munge: who has it can sign as any user of the cluster."""
    return secrets.token_bytes(128)
