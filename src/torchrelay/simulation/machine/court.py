"""Court: all offices of a world, and the network between nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from random import Random
from typing import Protocol

from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.succession import head as heads
from torchrelay.protocol.succession.head import Head
from torchrelay.protocol.succession.succession import CopyId, Place, Succession, VoterId
from torchrelay.simulation.machine.agents import Memory, VotingAgent
from torchrelay.simulation.machine.machines import Machine
from torchrelay.simulation.machine.offices import Office
from torchrelay.simulation.machine.reigns import Reign
from torchrelay.simulation.machine.shell import Shell
from torchrelay.simulation.ports import Watched
from torchrelay.wire.messages.channel import Appoint

OPENS_MS = (1, 600)  # how long an heir's process takes to be there


class Realm(Watched, Protocol):
    """A world with nodes, and with an orchestrator that changes its place."""

    shell: Shell

    @property
    def machines(self) -> Mapping[NodeId, Machine]: ...
    def came_to(self, phase: str) -> None: ...


class Court:
    """The first office is founded with the world."""

    def __init__(self, world: Realm, node: NodeId) -> None:
        self.world = world
        self.chance = Random(world.plan.seed ^ 0x50CC)  # apart, so that chance elsewhere stays what it was
        self.offices: dict[str, Office] = {}  # by where they listen
        self.memories: dict[NodeId, Memory] = {}
        self.sides: dict[NodeId, int] = {}  # of a network that is split into two halves
        self.lines_hold = False  # only agents are cut off, and journals are copied as before
        self._appointed: dict[NodeId, CopyId] = {}
        head = heads.first(Place(node, CopyId(f"{node}.first"), f"{node}/head"), 1)
        self.first: Succession = head.settled
        office = Office(self, self.first.head, self.first, kept=True)
        self.offices[office.place.url] = office
        self.acting = Reign(self, office, head, None)
        self.acting.begin()
        world.reigns.acts(self.first, self.acting.shell.journal)

    def draw_name(self, size: int) -> str:
        return f"{self.chance.getrandbits(8 * size):0{2 * size}x}"

    # ------------------------------------------------------------ who acts

    def act(self, office: Office, head: Head, former: NodeId | None) -> None:
        """An office has its lease: its orchestrator goes on with its copy. Who waited comes back to it."""
        before = self.acting
        for visit in list(office.visitors.values()):
            if not visit.connection.cut:
                visit.agent.disconnect()
        office.visitors.clear()
        reign = Reign(self, office, head, former)
        if reign.lease > before.lease:
            before.shell.superseded = True
            self.acting, self.world.shell = reign, reign.shell
        else:
            reign.shell.superseded = True
        reign.begin()
        self.world.reigns.acts(head.settled, reign.shell.journal)
        self.reached("acts")

    @property
    def acting_office(self) -> Office | None:
        """Where somebody acts now."""
        office = self.acting.office
        return office if office.up and office.reign is not None else None

    @property
    def others(self) -> list[Office]:
        """Processes that do not act; those that stand come first."""
        offices = [one for one in self.offices.values() if one.up and one.reign is None]
        return sorted(offices, key=lambda one: (one.door.candidacy is None, one.place.url))

    def reached(self, phase: str) -> None:
        self.world.came_to(phase)

    def end(self, office: Office) -> None:
        """Its process ends for good."""
        if self.offices.get(office.place.url) is office:
            del self.offices[office.place.url]

    # ------------------------------------------------------------ where they are

    def make_agent(self, machine: Machine, incarnation: str) -> VotingAgent:
        return VotingAgent(self, machine, incarnation)

    def memory_of(self, node: NodeId) -> Memory:
        return self.memories.setdefault(node, Memory(VoterId(f"{node}.1")))

    def office_at(self, url: str) -> Office | None:
        """Whose process listens there."""
        office = self.offices.get(url)
        return office if office is not None and office.up else None

    def is_silent(self, node: NodeId, url: str) -> bool:
        """Whether nothing comes back from there."""
        there, office = NodeId(url.partition("/")[0]), self.office_at(url)
        frozen = office is not None and office.frozen
        return frozen or self.world.machines[there].dark or not self.reaches(node, there)

    def leader_at(self, node: NodeId, url: str) -> int:
        """The lease of who acts there, as an office on this node is answered; 0 if nobody does."""
        office = None if self.is_silent(node, url) else self.office_at(url)
        return office.reign.lease if office is not None and isinstance(office.reign, Reign) else 0

    def can_find(self, node: NodeId, office: Office) -> bool:
        """Whether the agent of a node looks for the head there, sooner or later: by what it is told at doors, too."""
        noted = self.memory_of(node).ballot.noted
        chain = [self.first] if noted is None else list(noted.chain)
        urls = [place.url for one in chain for place in (one.head, *one.heirs)]
        for url in urls:
            there = None if noted is None else self.office_at(url)
            if there is not None:
                told = [place.url for one in there.known.chain for place in (one.head, *one.heirs)]
                urls += [each for each in told if each not in urls]
        return office.place.url in urls

    def appoint(self, node: NodeId, order: Appoint, url: str) -> None:
        """The agent of a node starts an heir, in place of whatever it has started before."""
        there = self.offices.get(f"{node}/heir")
        if there is not None and there.up and there.place.copy == order.copy:
            return
        if there is not None:
            there.end()
        self._appointed[node] = order.copy
        self.world.after(self.chance.randint(*OPENS_MS), self._open, node, order, url)

    def _open(self, node: NodeId, order: Appoint, url: str) -> None:
        head = None if self.is_silent(node, url) else self.office_at(url)
        if self.world.machines[node].dark or self._appointed.get(node) != order.copy:
            return
        if head is None or not isinstance(head.reign, Reign):
            return
        heir = Office(self, Place(node, order.copy, f"{node}/heir"), head.known, kept=False)
        if not head.reign.join(heir, order.key):
            heir.up = False

    def open(self, office: Office) -> None:
        """It has the whole journal, and listens from now on."""
        if self._appointed.get(office.node) == office.place.copy:
            self.offices[office.place.url] = office
        else:
            office.kill()

    def lose_power(self, node: NodeId) -> None:
        """A node's processes are gone, and what its agents have noted and promised."""
        number = int(self.memory_of(node).voter.rpartition(".")[2])
        self.memories[node] = Memory(VoterId(f"{node}.{number + 1}"))
        self._appointed.pop(node, None)
        for office in [one for one in self.offices.values() if one.node == node]:
            del self.offices[office.place.url]
            office.vanish()

    # ------------------------------------------------------------ the network

    def reaches(self, one: NodeId, other: NodeId) -> bool:
        machines = self.world.machines
        if one == other or not machines:
            return True
        split = machines[one].split or machines[other].split
        return not split and self.sides.get(one, 0) == self.sides.get(other, 0)

    def copies_to(self, one: NodeId, other: NodeId) -> bool:
        """Whether what one office writes comes to another."""
        dark = self.world.machines[one].dark or self.world.machines[other].dark
        return not dark and (self.lines_hold or self.reaches(one, other))

    def split(self, cut: Collection[NodeId], *, lines_hold: bool) -> None:
        """These nodes are cut off from the others."""
        self.sides.update(dict.fromkeys(cut, 1))
        self.lines_hold = lines_hold
        self.world.tell(f"   {', '.join(sorted(cut))} are cut off")
        with_head = [node for node in self.world.machines if (node in cut) == (self.acting.office.node in cut)]
        majority = 2 * len(with_head) > len(self.world.machines)
        self.world.seen(f"split: the head is {'with' if majority else 'without'} a majority")
        self.network_changed()

    def rejoin(self, node: NodeId) -> None:
        """It is no more."""
        self.sides.pop(node, None)
        self.network_changed()

    def network_changed(self) -> None:
        """Connections stall, or flow again."""
        for office in list(self.offices.values()):
            for visit in list(office.visitors.values()):
                visit.connection.cut = not self.reaches(visit.agent.node, office.node)
                if not visit.connection.cut:
                    visit.connection.flow()
