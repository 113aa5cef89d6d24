"""Switch: the network between pretended machines, in a network namespace of its own, so that nobody outside meets it.

A port that is cut is taken out of the bridge: its machine sees a link that is up, and packets that vanish.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

NAMESPACES = Path("/run/netns")
PREFIX = "trm-"
BRIDGE = "br0"


def ip(*words: str, namespace: str = "") -> None:
    """Raises `CalledProcessError`, with what ip(8) said in its notes."""
    inside = ("-n", namespace) if namespace else ()
    done = subprocess.run(["ip", *inside, *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Switch:
    """One bridge, and further ones while it is split."""

    def __init__(self) -> None:
        sweep()
        number = 0
        while (NAMESPACES / f"{PREFIX}{os.getpid()}-{number}").exists():
            number += 1
        self.namespace = f"{PREFIX}{os.getpid()}-{number}"
        ip("netns", "add", self.namespace)
        self._bridges: list[str] = []
        self._bridge(0)

    def plug(self, port: str, pid: int, address: str) -> None:
        """A cable from this port to the network namespace of a process, where it is eth0."""
        ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(pid), namespace=self.namespace)
        ip("link", "set", port, "master", BRIDGE, "up", namespace=self.namespace)
        inside = ["nsenter", "-t", str(pid), "-n", "ip"]
        subprocess.run([*inside, "addr", "add", f"{address}/16", "dev", "eth0"], check=True)
        subprocess.run([*inside, "link", "set", "eth0", "up"], check=True)

    def unplug(self, port: str) -> None:
        """Take the cable away; nothing if the kernel has done so."""
        try:
            ip("link", "del", port, namespace=self.namespace)
        except OSError:
            pass

    def cut(self, port: str, *, carrier: bool = True) -> None:
        """Packets vanish; without `carrier` the machine sees that its cable is out."""
        ip("link", "set", port, "nomaster", *([] if carrier else ["down"]), namespace=self.namespace)

    def mend(self, port: str) -> None:
        ip("link", "set", port, "master", BRIDGE, "up", namespace=self.namespace)

    def split(self, *groups: Sequence[str]) -> None:
        """Ports of one group reach one another and no others."""
        for number, ports in enumerate(groups):
            for port in ports:
                ip("link", "set", port, "master", self._bridge(number), namespace=self.namespace)

    def _bridge(self, number: int) -> str:
        name = f"br{number}"
        if name not in self._bridges:
            ip("link", "add", name, "type", "bridge", "forward_delay", "0", namespace=self.namespace)
            ip("link", "set", name, "up", namespace=self.namespace)
            self._bridges.append(name)
        return name

    def close(self) -> None:
        ip("netns", "del", self.namespace)


def sweep() -> None:
    """Remove the switches of processes that are gone."""
    for path in NAMESPACES.glob(f"{PREFIX}*") if NAMESPACES.is_dir() else ():
        owner = path.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            ip("netns", "del", path.name)
