"""Reigns: what an office does while it acts. Its heirs are those of `orchestrator.core.heirs`, the real ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import structs

from torchrelay.orchestrator.core.heirs import Heirs
from torchrelay.orchestrator.core.traffic import AgentPort
from torchrelay.orchestrator.store.journal import Superseded
from torchrelay.orchestrator.store.parts import Row
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.rules.cluster import Cluster
from torchrelay.protocol.succession.head import Head
from torchrelay.protocol.succession.succession import Succession
from torchrelay.simulation.machine.lines import Line
from torchrelay.simulation.machine.offices import LOOK_MS, TICK_MS, Office, Surroundings, Visit
from torchrelay.simulation.machine.shell import Shell
from torchrelay.simulation.ports import Entry
from torchrelay.wire.messages.channel import Appoint, Note, ToAgent, Vote
from torchrelay.wire.messages.inheritance import Part


class Offices(Surroundings, Protocol):
    """All offices, as who acts sees them."""

    def draw_name(self, size: int) -> str: ...
    def reaches(self, one: NodeId, other: NodeId) -> bool: ...
    def copies_to(self, one: NodeId, other: NodeId) -> bool: ...


class Port:
    """The way to one agent."""

    def __init__(self, visit: Visit) -> None:
        self.node: NodeId = visit.agent.node
        self.incarnation = visit.agent.incarnation
        self.voter = visit.voter
        self._visit = visit

    def send(self, message: ToAgent) -> None:
        connection, agent = self._visit.connection, self._visit.agent
        match message:
            case Note(succession):
                connection.down(agent.hear_note, connection, succession)
            case Appoint():
                connection.down(agent.hear_appoint, connection, message)
            case _:
                raise AssertionError(f"heirs send no {type(message).__name__}")

    def close(self, reason: str) -> None:
        raise AssertionError(f"heirs close no connection of an agent: {reason}")


class Stream:
    """The way to one heir."""

    def __init__(self, reign: Reign, heir: Office) -> None:
        self.reign, self.heir = reign, heir
        self.place = structs.replace(heir.place, url="")
        court, above = reign.court, reign.office
        self.line = Line(above.world, court.chance, above, heir, lambda: court.copies_to(above.node, heir.node))

    def begin(self) -> None:
        """It gets the whole journal."""
        reign = self.reign
        whole = list(reign.shell.journal), reign.office.known, reign.part
        self.line.down(self.heir.take_whole, self.line, *whole, self.hear_held)

    def send(self, message: Part) -> None:
        part = self.reign.written[message.number - 1]
        self.line.down(self.heir.take_part, self.line, message.number, part, self.hear_held)

    def close(self, reason: str) -> None:
        del reason
        if not self.line.closed and self.reign.acts:
            self.reign.court.reached("loses an heir")
        self.line.close()

    def hear_held(self, part: int) -> None:
        self.place = self.heir.place
        self.reign.heirs.hear_held(self, part)


class Reign:
    """Its journal, from when it began, and who has a copy. `former`: the node of the head whose place it has taken."""

    def __init__(self, court: Offices, office: Office, head: Head, former: NodeId | None) -> None:
        self.court, self.world, self.office = court, court.world, office
        self.written: list[Sequence[Entry] | Succession] = []
        self.part = 0
        self.on_part: Callable[[int, tuple[Row, ...]], None] | None = None
        self.lease = head.settled.lease
        self.former = former
        self.keep_succession(head.settled)
        self.heirs = Heirs(
            head, self, node=office.node, now_s=lambda: self.world.now / 1000, former=former, draw=court.draw_name
        )
        self.ports: dict[NodeId, AgentPort] = {}
        self.streams: list[Stream] = []
        self._looked_ms = self.world.now
        self.shell = Shell(self.world, self, up=False)
        office.reign = self

    def begin(self) -> None:
        """From now on it acts."""
        self.shell.succeed(self.office.journal)
        self.tick()

    @property
    def acts(self) -> bool:
        return self.office.reign is self and self.office.up

    # ------------------------------------------------------------ its journal

    def write(self, entries: Sequence[Entry]) -> None:
        """Its journal goes on by these, which are written in one go."""
        self._write(tuple(entries))

    def keep_succession(self, proposed: Succession) -> None:
        """It proposes this, or says that it is settled."""
        self.office.known = proposed
        if self.on_part is not None:
            self.court.reached("proposes" if proposed.base is not None else "settles")
            if proposed.base is None and proposed.heirs:
                self.court.reached("has heirs")
        self._write(proposed)

    def _write(self, part: Sequence[Entry] | Succession) -> None:
        self.part += 1
        self.written.append(part)
        if self.on_part is not None:
            self.on_part(self.part, (Row("event", (self.part,)),))

    # ------------------------------------------------------------ what may leave

    @property
    def waits(self) -> bool:
        return self.heirs.waits

    @property
    def late(self) -> bool:
        return self.heirs.late

    def leave(self, action: Callable[[], None]) -> None:
        """Something leaves when the heirs have all that it depends on."""
        self.heirs.when_safe(action)

    # ------------------------------------------------------------ agents

    def greet(self, visit: Visit) -> None:
        """An agent has come."""
        visit.connection.welcome(visit.agent.hear_attached, visit.connection, self.lease)
        self.ports[visit.agent.node] = port = Port(visit)
        self.heirs.introduce(port)
        self.shell.attach(visit.connection, visit.joined)

    def hear_vote(self, vote: Vote) -> None:
        """A voter has noted what was proposed, or promised otherwise."""
        self.heirs.hear_vote(vote)

    # ------------------------------------------------------------ heirs

    def join(self, heir: Office, key: str) -> bool:
        """An appointed one has come: it gets the whole journal, and then each part."""
        if not self.acts or not self.heirs.known(heir.node, heir.place.copy, key):
            return False
        stream = Stream(self, heir)
        heir.line = stream.line
        self.streams.append(stream)
        stream.begin()
        self.heirs.join(stream, self.part, key)
        return True

    def mind(self, cluster: Cluster) -> None:
        """Look at what has changed."""
        try:
            self.heirs.mind(cluster, {node: port for node, port in self.ports.items() if node in self.shell.links})
        except Superseded:
            self.world.after(0, self._step_down)

    def _step_down(self) -> None:
        if self.acts:
            self.office.step_down()

    def tick(self) -> None:
        if not self.acts:
            return
        self.world.after(TICK_MS, self.tick)
        if self.office.frozen:
            return
        for stream in [stream for stream in self.streams if stream.line.is_seen_closed]:
            self.streams.remove(stream)
            self.court.reached("loses an heir")
            self.heirs.leave(stream)
        if self.world.now - self._looked_ms >= LOOK_MS:
            self._looked_ms = self.world.now
            self.office.look_for_another(self.heirs.out_of_reach, lambda lease: lease > self.lease)

    def end(self) -> None:
        """It acts no more."""
        self.heirs.over = True
        for stream in self.streams:
            stream.close("")
