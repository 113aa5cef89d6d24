"""The switches: bridges in the keeper's network namespace, one for each link that the machines have.

A link that is cut leaves its bridge: both its ends keep their carrier, and what they send is lost without a word. A
partition is one more bridge for each part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tests.support.machines.kernel import in_network_of
from torchrelay.schedulers.network import ip

BRIDGE = "type bridge forward_delay 0 stp_state 0"


@dataclass
class Port:
    """One machine's place at one switch."""

    machine: str
    link: int
    mac: str
    name: str = ""  # of its interface; with each power-on another, as the kernel removes the last one in its own time
    cut: bool = False
    carrier: bool = True
    part: int = 0

    def words(self) -> str:
        """For `ip`: it becomes what it is to be."""
        if not self.carrier:
            return f"link set {self.name} nomaster down"
        return f"link set {self.name} {'nomaster' if self.cut else f'master {bridge(self.link, self.part)}'} up"


class Switches:
    """One for each link, in parts while there is a partition."""

    def __init__(self, keeper: int, links: int) -> None:
        self.keeper, self.links = keeper, links
        self.ports: list[Port] = []
        self.parts = 0
        self.plugged = 0
        self.add_part()

    def ip(self, lines: Iterable[str]) -> None:
        """Raises `SchedulerError` with what `ip` said."""
        with in_network_of(self.keeper):
            ip("-batch", "-", words="\n".join(lines))

    def add_part(self) -> None:
        """One more bridge for each link."""
        bridges = [bridge(link, self.parts) for link in range(self.links)]
        self.ip(line for name in bridges for line in (f"link add {name} {BRIDGE}", f"link set {name} up"))
        self.parts += 1

    def plug(self, port: Port, pid: int) -> None:
        """A cable from the port to the machine whose init this is; there it is eth<link>, still without address."""
        self.plugged += 1
        port.name = f"p{self.plugged}"
        self.ip(
            [
                f"link add {port.name} type veth peer name eth{port.link} address {port.mac} netns {pid}",
                port.words(),
            ]
        )

    def unplug(self, ports: Iterable[Port]) -> None:
        """They leave their bridges for good. Those that were cut by a test stay cut when power comes back."""
        self.ip([f"link set {port.name} nomaster" for port in ports])

    def set(self, ports: Iterable[Port], *, cut: bool, carrier: bool = True) -> None:
        """Cut or mended. A port without power is as it was told when power comes back."""
        for port in ports:
            port.cut, port.carrier = cut, carrier
        self.show(ports)

    def part(self, groups: Iterable[Iterable[str]]) -> None:
        """The machines of each group reach one another only."""
        found = [set(group) for group in groups]
        while self.parts < len(found):
            self.add_part()
        for port in self.ports:
            port.part = next(place for place, group in enumerate(found) if port.machine in group)
        self.show(self.ports)

    def show(self, ports: Iterable[Port]) -> None:
        """Make of the interfaces what the ports say, in one go."""
        if lines := [port.words() for port in ports if port.name]:
            self.ip(lines)


def bridge(link: int, part: int) -> str:
    return f"s{link}part{part}"
