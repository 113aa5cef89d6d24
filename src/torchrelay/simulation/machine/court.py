"""Court: all offices of a world, the network between nodes, and what the one does that acts: its *reign*."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from random import Random
from typing import Protocol

import msgspec

from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.succession import copying as copies
from torchrelay.protocol.succession import head as heads
from torchrelay.protocol.succession.appointing import to_appoint, want
from torchrelay.protocol.succession.copying import Copying
from torchrelay.protocol.succession.door import Door
from torchrelay.protocol.succession.head import Head
from torchrelay.protocol.succession.succession import CopyId, Place, Succession
from torchrelay.protocol.succession.voter import node_of, voter_of
from torchrelay.simulation.machine.agents import Memory, VotingAgent
from torchrelay.simulation.machine.lines import Line
from torchrelay.simulation.machine.machines import Machine
from torchrelay.simulation.machine.offices import TICK_MS, Office, Surroundings, Visit
from torchrelay.simulation.machine.shell import Shell
from torchrelay.simulation.ports import Entry, Watched

DISK_LOST = 0.3
OPENS_MS = (1, 60)  # how long an heir's process takes to be there


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
        self.offices: dict[NodeId, Office] = {}
        self.memories: dict[NodeId, Memory] = {}
        self.sides: dict[NodeId, int] = {}  # of a network that is split into two halves
        self.lines_hold = False  # only agents are cut off, and journals are copied as before
        self._opened = 0
        head = heads.first(Place(node, CopyId(f"{node}#1")), 1)
        self.first: Succession = head.settled
        nodes = [NodeId(f"node-{number}") for number in range(len(world.plan.slots))] if world.plan.roams else []
        self.everywhere = tuple(Place(each, CopyId("")) for each in nodes)
        office = Office(self, Door(place=self.first.head, known=self.first, settled=True), [])
        office.head = head
        self.offices[node] = office
        self.acting = Reign(self, office, first=True)
        world.reigns.acts(self.first, self.acting.shell.journal)
        self.acting.begin()

    # ------------------------------------------------------------ who acts

    def act(self, office: Office) -> None:
        """An office has its lease: its orchestrator goes on with its copy."""
        before = self.acting
        reign = Reign(self, office)
        if reign.lease > before.lease:
            before.shell.superseded = True
            self.acting, self.world.shell = reign, reign.shell
        else:
            reign.shell.superseded = True
        reign.begin()
        self.world.reigns.acts(reign.head.newest, reign.shell.journal)
        self.reached("acts")
        reign.beat()

    @property
    def acting_office(self) -> Office | None:
        """Where somebody acts now."""
        office = self.acting.office
        return office if office.up and office.reign is not None else None

    @property
    def others(self) -> list[Office]:
        """Processes that do not act; those that stand come first."""
        offices = [one for one in self.offices.values() if one.up and one.reign is None]
        return sorted(offices, key=lambda one: (one.door.candidacy is None, one.node))

    def reached(self, phase: str) -> None:
        self.world.came_to(phase)

    def end(self, office: Office) -> None:
        """It is excluded: its process ends for good."""
        if self.offices.get(office.node) is office:
            del self.offices[office.node]

    # ------------------------------------------------------------ where they are

    def make_agent(self, machine: Machine, incarnation: str) -> VotingAgent:
        return VotingAgent(self, machine, incarnation)

    def memory_of(self, node: NodeId) -> Memory:
        return self.memories.setdefault(node, Memory(voter_of(node, "1")))

    def _forget(self, node: NodeId) -> None:
        """The disk of a node is lost: its agent is another voter from then on."""
        number = int(self.memory_of(node).voter.rpartition("/")[2])
        self.memories[node] = Memory(voter_of(node, str(number + 1)))

    def office_on(self, node: NodeId) -> Office | None:
        """The office of a node, if its process listens."""
        office = self.offices.get(node)
        return office if office is not None and office.up else None

    def can_find(self, node: NodeId, office: Office) -> bool:
        """Whether the agent of a node finds its way to an office, where it looks and by what it is told there."""
        places = (*(self.memory_of(node).places or self.first.copies), *self.everywhere)
        known = [place.node for place in places]
        for each in known:
            there = self.office_on(each)
            if there is office:
                return True
            if there is not None:
                known += [place.node for place in there.door.known.copies if place.node not in known]
        return False

    def open(self, place: Place, lease: int, head: Office) -> None:
        """A node is appointed: an heir's process with an empty copy, in place of whatever is there."""
        del lease
        there = self.offices.get(place.node)
        if there is not None and there.place.copy == place.copy:
            return
        if there is not None:
            there.kill()
        known = head.door.known
        self.offices[place.node] = office = Office(self, Door(place=place, known=known), [])
        self.world.after(self.chance.randint(*OPENS_MS), self._connect, office, head)

    def _connect(self, office: Office, head: Office) -> None:
        if office.up and head.up and head.reign is not None and self.reaches(office.node, head.node):
            head.reign.connect(office)

    def lose_power(self, node: NodeId) -> None:
        """A node's office is gone with it; sometimes its disk is, too."""
        if self.chance.random() < DISK_LOST:
            self._forget(node)
        office = self.offices.pop(node, None)
        if office is not None:
            office.vanish()

    # ------------------------------------------------------------ the network

    def reaches(self, one: NodeId, other: NodeId) -> bool:
        machines = self.world.machines
        if one == other:
            return True
        split = machines[one].split or machines[other].split
        return not split and self.sides.get(one, 0) == self.sides.get(other, 0)

    def copies_to(self, one: NodeId, other: NodeId) -> bool:
        """Whether what one office writes comes to another."""
        return self.lines_hold or self.reaches(one, other)

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
        for machine in self.world.machines.values():
            agent = machine.agent
            if not isinstance(agent, VotingAgent) or agent.connection is None or agent.office is None:
                continue
            listens = self.offices.get(agent.office.node) is agent.office
            agent.connection.cut = not listens or not self.reaches(agent.node, agent.office.node)
            if not agent.connection.cut:
                agent.connection.flow()


# ---------------------------------------------------------------- a reign

BEAT_MS = 500
UNSURE_MS = 1_500  # for so long it may be that an heir is only slow
APPOINTED_MS = 3_000  # a node that has no copy by then is left alone


class Reign:
    """What an office does while it acts. `base`: what stood in the journal when it began."""

    def __init__(self, court: Surroundings, office: Office, *, first: bool = False) -> None:
        self.court, self.world, self.office = court, court.world, office
        self.base = len(office.journal)
        assert office.head is not None, "it acts"
        self.lease = office.head.newest.lease
        self.copying = Copying()
        self.lines: dict[CopyId, Line] = {}
        self.appointed: dict[CopyId, tuple[Place, int]] = {}  # with the time; those that have a line too
        self.appointments = 0
        self._unsure_ms: int | None = None
        self._beat_ms = self.world.now
        self.shell = Shell(self.world, self, up=first)
        office.reign = self

    def begin(self) -> None:
        """From now on it acts."""
        if not self.shell.up:
            self.shell.succeed(self.office.journal)
        self.tick()

    @property
    def acts(self) -> bool:
        return self.office.reign is self and self.office.up

    @property
    def head(self) -> Head:
        assert self.office.head is not None, "it acts"
        return self.office.head

    # ------------------------------------------------------------ what may leave

    def write(self, entry: Entry) -> None:
        """The next part of the journal: it goes to all that copy it."""
        part = self.copying.written + 1
        self.copying = msgspec.structs.replace(self.copying, written=part)
        for copy, line in self.lines.items():
            line.down(self._below(line).take_part, line, self.lease, part, entry, self._hearer(copy, line))

    def may_leave(self) -> int:
        """What depends on so much of the journal, or on less, may leave."""
        if not self.acts:
            return 0
        return self.base + copies.may_leave(self.copying, self.head)

    @property
    def sure(self) -> bool:
        """Whether all heirs are there, so that what it decides can leave, and nobody else can act."""
        return all(place.copy in self.lines for place in self.head.needed)

    @property
    def says_so(self) -> bool:
        """Whether it says that it acts: not if it has not been able to tell for a while whether another one does."""
        return self._unsure_ms is None or self.world.now - self._unsure_ms <= UNSURE_MS

    @property
    def stuck(self) -> bool:
        return self._unsure_ms is not None

    # ------------------------------------------------------------ its heirs

    def govern(self) -> None:
        """Appoint who is missing, and propose what is wanted."""
        if not self.acts or self.office.frozen:
            return
        before = self.head
        attached = {node_of(voter): voter for voter in self.office.visitors if node_of(voter) in self.shell.links}
        living = {name for name, node in self.shell.cluster.nodes.items() if node.alive}
        full = [place for copy, (place, _) in self.appointed.items() if self.is_whole(copy)]
        self.office.head = want(before, living=living | set(attached), attached=attached, whole=full)
        if self.head is not before:
            self.court.reached("proposes")
            self.office.propose()
            self.tell_heirs()
        copying = {copy: place for copy, (place, _) in self.appointed.items()}
        for node in to_appoint(self.head, attached=attached, copying=copying):
            self.appoint(node, self.office.visitors[attached[node]])

    def is_whole(self, copy: CopyId) -> bool:
        """Whether it has all that is written, or is about to have it as one of the heirs."""
        if copy not in self.lines:
            return False
        heir = any(place.copy == copy for place in self.head.needed)
        return heir or self.copying.held.get(copy) == self.copying.written

    def appoint(self, node: NodeId, visit: Visit) -> None:
        self.appointments += 1
        place = Place(node, CopyId(f"{node}#{self.lease}.{self.appointments}"))
        self.appointed[place.copy] = place, self.world.now
        visit.connection.down(visit.agent.hear_appoint, visit.connection, self.lease, place)
        self.beat()

    def attached(self) -> None:
        """An agent is here."""
        self.govern()

    def connect(self, office: Office) -> None:
        """An heir's process has come: it gets the whole journal."""
        copy = office.place.copy
        if not self.acts or copy not in self.appointed or copy in self.lines:
            return
        line = Line(self.world, self.court.chance, self.office, office, self._way_to(office.node))
        self.lines[copy] = office.line = line
        journal, held = list(self.shell.journal), self.copying.written
        line.down(office.take_journal, line, self.lease, journal, held, self._hearer(copy, line))
        line.down(office.take_succession, line, self.head.newest, self.head.proposed is None)

    def settled(self) -> None:
        """Other heirs are needed from now on."""
        self.tell_heirs()
        self.shell.let_leave()
        if self.head.settled.heirs:
            self.court.reached("has heirs")
        self.govern()

    def tell_heirs(self) -> None:
        """What is proposed, or settled now."""
        for line in self.lines.values():
            line.down(self._below(line).take_succession, line, self.head.newest, self.head.proposed is None)

    def _way_to(self, node: NodeId) -> Callable[[], bool]:
        return lambda: self.court.copies_to(self.office.node, node)

    def _below(self, line: Line) -> Office:
        assert isinstance(line.below, Office), "heirs are offices"
        return line.below

    def _hearer(self, copy: CopyId, line: Line) -> Callable[[int], None]:
        return lambda part: self.hear_held(copy, line, part)

    def hear_held(self, copy: CopyId, line: Line, part: int) -> None:
        """An heir has so much of it."""
        if not self.acts or self.lines.get(copy) is not line:
            return
        self.copying = copies.hear_held(self.copying, copy, part)
        self.shell.let_leave()
        if part == self.copying.written:
            self.govern()

    def hear_alive(self) -> None:
        """An heir answers: that it was heard is all there is to it."""

    # ------------------------------------------------------------ time

    def tick(self) -> None:
        if not self.acts:
            return
        self.world.after(TICK_MS, self.tick)
        if self.office.frozen:
            return
        for copy, line in list(self.lines.items()):
            if line.closed or line.is_silent(up=True):
                self.drop(copy)
            else:
                line.down(self._below(line).hear_ping, line, self.says_so, self.hear_alive)
        for copy, (_, at_ms) in list(self.appointed.items()):
            if copy not in self.lines and self.world.now - at_ms > APPOINTED_MS:
                del self.appointed[copy]
        if self.sure:
            self._unsure_ms = None
        elif self._unsure_ms is None:
            self._unsure_ms = self.world.now
        self.govern()
        if self.acts and self.world.now - self._beat_ms >= BEAT_MS:
            self.beat()

    def beat(self) -> None:
        """Say that it acts."""
        self._beat_ms = self.world.now
        for visit in list(self.office.visitors.values()):
            self.greet(visit)

    def greet(self, visit: Visit) -> None:
        """Say so to one agent."""
        if not self.says_so:
            return
        visit.connection.down(visit.agent.hear_head, visit.connection, self.lease, self.places)

    @property
    def places(self) -> tuple[Place, ...]:
        """Where it has begun to copy its journal to."""
        return tuple(place for place, _ in self.appointed.values())

    def drop(self, copy: CopyId) -> None:
        """This copy takes nothing any more."""
        self.lines.pop(copy).close()
        self.appointed.pop(copy, None)
        self.copying = copies.forget(self.copying, copy)
        self.court.reached("loses an heir")

    def end(self) -> None:
        """It acts no more."""
        for line in self.lines.values():
            line.close()
