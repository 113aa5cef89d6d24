"""The harness: so many machines, the switches between them, and the end of it all."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

from tests.support.machines.keeping import Keeper
from tests.support.machines.machine import Machine
from tests.support.machines.plan import Plan, make_plan
from tests.support.machines.process import Process
from tests.support.machines.sshd import SSH_CONFIG, Keys, start_sshd
from tests.support.machines.switch import Port, Switches

MOST = 200
NET = 10, 77  # the first two numbers of addresses; each further link counts the second up
_counted = itertools.count()


class Machines:
    """N machines, called m1, m2, ..., each with `links` links; `shared`: the host's folders that all may write.

    `visible`: further folders of the host that shall be seen where a machine has its own, as below /tmp.
    """

    ssh_config = SSH_CONFIG  # on each machine with a sshd: what `ssh m2` reads

    def __init__(
        self,
        count: int,
        *,
        links: int = 1,
        shared: Mapping[str, str | Path] | None = None,
        visible: Iterable[str | Path] = (),
    ) -> None:
        if not 1 <= count <= MOST:
            raise ValueError(f"{count} machines: between 1 and {MOST} are possible")
        self.count, self.links = count, links
        self.shared, self.visible = dict(shared or {}), tuple(visible)
        self.tag = (os.getpid() + 31 * next(_counted)) % 254 + 1  # so that addresses in reports differ
        self.keys: Keys | None = None
        self.all: list[Machine] = []

    # ------------------------------------------------------------ from start to end

    def __enter__(self) -> Machines:
        """Raises `MachineError` or `SchedulerError` if there can be no such machines, and leaves nothing."""
        self.keeper = Keeper()
        try:
            self.switches = Switches(self.keeper.pid, self.links)
            self.all = [self._machine(place) for place in range(1, self.count + 1)]
            for machine in self.all:
                machine.power_on()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """All processes end, and with them all there is."""
        powers = [machine.power for machine in self.all if machine.power is not None]
        for machine in self.all:
            machine.power = None
        self.keeper.close(powers)

    def _machine(self, place: int) -> Machine:
        ports = tuple(
            Port(machine=f"m{place}", link=link, mac=f"02:77:{link:02x}:{self.tag:02x}:00:{place:02x}")
            for link in range(self.links)
        )
        self.switches.ports += ports
        addresses = tuple(f"{NET[0]}.{NET[1] + link}.{self.tag}.{place}" for link in range(self.links))
        return Machine(name=f"m{place}", addresses=addresses, ports=ports, harness=self)

    def plan_of(self, machine: Machine) -> Plan:
        """What its init is told."""
        addresses = {one.name: one.address for one in self.all}
        return make_plan(machine.name, addresses, self.visible, self.shared)

    # ------------------------------------------------------------ the machines

    def __iter__(self) -> Iterator[Machine]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)

    def __getitem__(self, which: str | int) -> Machine:
        """By its name, or by its place from 0 on."""
        if isinstance(which, int):
            return self.all[which]
        return next(machine for machine in self.all if machine.name == which)

    # ------------------------------------------------------------ what befalls all

    def partition(self, *groups: Iterable[str]) -> None:
        """Machines of different groups lose each other's packets, silently. Each machine is named once."""
        found = [tuple(group) for group in groups]
        named = sorted(name for group in found for name in group)
        if named != sorted(machine.name for machine in self.all):
            raise ValueError(f"a partition names each machine once; this one: {', '.join(named)}")
        self.switches.part(found)

    def heal(self) -> None:
        """No partition any more. Links that were cut stay cut."""
        self.switches.part([[machine.name for machine in self.all]])

    def start_sshd(self, machine: Machine) -> Process:
        """As `Machine.start_sshd`: with keys that this harness makes for itself."""
        if self.keys is None:
            self.keys = Keys.made_on(machine)
        return start_sshd(machine, self.keys, [name for one in self.all for name in (one.name, one.address)])
