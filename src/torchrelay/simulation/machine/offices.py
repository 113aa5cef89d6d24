"""Offices: the processes that have a copy of the journal. One of them acts; the others wait at their doors.

An office does what `orchestrator.doorway`, `orchestrator.heir` and `orchestrator.__main__` do. What it has on its disk
outlives its process: the copy, and the highest lease that it has asked for. It is lost with its node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import NamedTuple, Protocol

from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.succession import door as doors
from torchrelay.protocol.succession import head as heads
from torchrelay.protocol.succession.door import Door
from torchrelay.protocol.succession.head import Head
from torchrelay.protocol.succession.succession import CopyId, Place, Succession, VoterId, others_in
from torchrelay.simulation.machine.lines import Line
from torchrelay.simulation.machine.network import Connection
from torchrelay.simulation.machine.shell import Shell
from torchrelay.simulation.ports import Carrier, Entry, Watched
from torchrelay.wire.messages.channel import Appoint, Vote

TICK_MS = 250
# As `orchestrator.doorway` has them.
LEAST_MS, MOST_MS = 1_000, 2_000
GATHER_MS = 1_000
LOOK_MS = 2_000
PINGED_MS = 15_000  # after so long without a word an heir knows that its connection is none


class Visitor(Carrier, Protocol):
    """An agent that can vote."""

    incarnation: str

    def hear_attached(self, connection: Connection, lease: int) -> None: ...
    def hear_known(self, connection: Connection, known: Succession) -> None: ...
    def hear_ask(self, connection: Connection, lease: int, copy: CopyId) -> None: ...
    def hear_note(self, connection: Connection, succession: Succession) -> None: ...
    def hear_appoint(self, connection: Connection, order: Appoint) -> None: ...


class Visit(NamedTuple):
    """Who has connected."""

    connection: Connection
    agent: Visitor
    voter: VoterId
    joined: ev.NodeJoined


class Reigns(Protocol):
    """What an office does while it acts."""

    @property
    def shell(self) -> Shell: ...
    def greet(self, visit: Visit) -> None: ...
    def hear_vote(self, vote: Vote) -> None: ...
    def end(self) -> None: ...


class Surroundings(Protocol):
    """All offices, and the network between them."""

    @property
    def world(self) -> Watched: ...
    @property
    def chance(self) -> Random: ...
    def leader_at(self, node: NodeId, url: str) -> int: ...
    def reached(self, phase: str) -> None: ...
    def act(self, office: Office, head: Head, former: NodeId | None) -> None: ...
    def open(self, office: Office) -> None: ...
    def end(self, office: Office) -> None: ...


class Office:
    """One process, with its copy. `kept`: it is started again when it ends."""

    asked = 0  # the highest lease that it has asked for

    def __init__(self, court: Surroundings, place: Place, known: Succession, *, kept: bool) -> None:
        self.court, self.world = court, court.world
        self.known = known  # what stands in its copy
        self.door = Door(place=place, known=known, under=known.lease)
        self.journal: list[Entry] = []
        self.kept = kept
        self.up = True
        self.frozen = False
        self.starts = 0
        self.visitors: dict[VoterId, Visit] = {}
        self.reign: Reigns | None = None  # if it acts
        self.line: Line | None = None  # to the head that it follows
        self.held = 0  # the newest part of the head's that it has
        self._unread: list[Connection] = []  # of those who have come since it was stopped, and before
        self._frozen_ms = 0
        self._heard_ms = self._looked_ms = self.world.now
        self._again_ms = 0  # when it stands again, or says again that it is elected
        self.world.after(TICK_MS, self.tick, 0)

    @property
    def place(self) -> Place:
        return self.door.place

    @property
    def node(self) -> NodeId:
        return self.door.place.node

    @property
    def follows(self) -> bool:
        """Whether it hears the head, as far as it knows."""
        return self.line is not None

    # ------------------------------------------------------------ its process

    def kill(self) -> None:
        """Its process ends; all that is connected with it sees that."""
        self.up = False
        self.stop_acting()
        for visit in list(self.visitors.values()):
            if not visit.connection.cut:
                visit.agent.disconnect()
        self.visitors.clear()
        self.follow_no_more()

    def end(self) -> None:
        """Its process ends for good."""
        self.kill()
        self.court.end(self)

    def restart(self) -> None:
        """Its process is there again, with what its disk has: see `orchestrator.__main__.elected`."""
        if self.up:
            return
        self.up, self.frozen = True, False
        self.starts += 1
        known = self.known
        self.door = Door(place=self.place, known=known, under=known.lease, heard=self.asked)
        self._again_ms = 0
        if known.base is None and not known.voters:
            self.court.act(self, heads.first(self.place, known.lease + 1), None)
        self.tick(self.starts)

    @property
    def shell(self) -> Shell | None:
        return None if self.reign is None else self.reign.shell

    def stop_acting(self) -> None:
        """What acts here acts no more; what it wrote is in the copy."""
        if self.reign is not None:
            reign, self.reign = self.reign, None
            self.journal = reign.shell.journal
            reign.end()
            reign.shell.crash()

    def step_down(self) -> None:
        """Its lease was promised away: it must stand again itself, if it still can."""
        self.court.reached("steps down")
        self.kill()
        self.restart()

    def freeze(self, frozen: bool) -> None:
        """Its process is stopped, or goes on and reads what came meanwhile."""
        self.frozen = frozen
        if frozen:
            self._frozen_ms = self.world.now
        if self.shell is not None and frozen:
            self.shell.frozen = True
        elif self.shell is not None:
            self.shell.wake_up(self._frozen_ms)
        if frozen:
            self._unread = [visit.connection for visit in self.visitors.values()]
        unread = list(self._unread)
        for connection in unread:
            connection.deaf = frozen
        for connection in unread if not frozen else ():
            connection.flow()

    def vanish(self) -> None:
        """Its node has no power any more: nobody sees that at once."""
        self.up = False
        if self.shell is not None:
            self.shell.up = False
        for visit in self.visitors.values():
            visit.connection.cut = True

    def tick(self, start: int) -> None:
        if start != self.starts or not self.up:
            return
        self.world.after(TICK_MS, self.tick, start)
        if self.frozen or self.reign is not None:
            return
        if self.line is not None and (self.line.is_seen_closed or self.world.now - self._heard_ms > PINGED_MS):
            self.follow_no_more()
        elif self.line is not None and self.line.passes() and self.line.above.up and not self.line.above.frozen:
            self._heard_ms = self.world.now  # it answers a ping
        if not self.follows and self.world.now - self._looked_ms >= LOOK_MS:
            self._looked_ms = self.world.now
            self.look_for_another(others_in(self.door.known, self.place.copy), partial(doors.gives_way_to, self.door))
        self.look()

    def look_for_another(self, places: Sequence[Place], gives_way_to: Callable[[int], bool]) -> None:
        """Whether somebody has become head in its place: then it ends."""
        for place in places:
            newer = self.court.leader_at(self.node, place.url)
            if gives_way_to(newer):
                self.court.reached("gives way")
                known = Succession(lease=newer, version=0, head=place)
                for visit in self.visitors.values():
                    visit.connection.down(visit.agent.hear_known, visit.connection, known)
                self.end()
                return

    # ------------------------------------------------------------ who waits

    def come(self, visit: Visit) -> None:
        """An agent has connected."""
        visit.connection.deaf = self.frozen
        if self.frozen:
            self._unread.append(visit.connection)
        self.visitors[visit.voter] = visit
        visit.connection.at_once(self._welcome, visit)

    def _welcome(self, visit: Visit) -> None:
        if self.reign is not None:
            self.reign.greet(visit)
            return
        self.door = doors.come(self.door, visit.voter)
        if self.follows:  # unless a majority comes, this one had better go back to the head
            self.world.after(GATHER_MS, self._send_back, visit)
        visit.connection.down(visit.agent.hear_known, visit.connection, self.door.known)
        if not self.follows:  # else it knows all that the head does
            self.ask(visit)
        self.look()

    def _send_back(self, visit: Visit) -> None:
        if self.follows and self.up and self.visitors.get(visit.voter) is visit and not visit.connection.cut:
            visit.agent.disconnect()

    def go(self, connection: Connection, voter: VoterId) -> None:
        """It has left."""
        if voter in self.visitors and self.visitors[voter].connection is connection:
            del self.visitors[voter]
            self.door = doors.go(self.door, voter)

    # ------------------------------------------------------------ standing

    def look(self) -> None:
        """What is to be done by now."""
        if not self.up or self.frozen or self.reign is not None:
            return
        if self.door.excluded is not None:
            self.court.reached("excluded")
            self.end()
        elif self.door.head is not None and self.door.acts:
            self.court.act(self, self.door.head, self.door.former)
        elif self.world.now >= self._again_ms:
            self.stand()

    def stand(self) -> None:
        """Ask for a lease, if enough are here; or say again that it has one."""
        if self.door.head is not None:
            self._again_ms = self.world.now + LEAST_MS
            self.ask_all()
        elif doors.may_stand(self.door):
            self._again_ms = self.world.now + self.court.chance.randint(LEAST_MS, MOST_MS)
            standing = doors.stand(self.door)
            assert standing.candidacy is not None, "it stands"
            self.asked = standing.candidacy.lease
            self.follow_no_more()
            self.court.reached("stands")
            before, self.door = self.door, standing
            self.ask_all()
            self._become(before)

    def ask_all(self) -> None:
        for visit in list(self.visitors.values()):
            self.ask(visit)

    def ask(self, visit: Visit) -> None:
        """What is to be asked of who waits."""
        if self.door.head is not None:
            visit.connection.down(visit.agent.hear_note, visit.connection, self.door.head.newest)
        else:
            lease = 0 if self.door.candidacy is None else self.door.candidacy.lease
            visit.connection.down(visit.agent.hear_ask, visit.connection, lease, self.place.copy)

    def hear_vote(self, connection: Connection, vote: Vote) -> None:
        """A voter answers."""
        visit = self.visitors.get(vote.voter)
        if not self.up or visit is None or visit.connection is not connection:
            return
        if self.reign is not None:
            self.reign.hear_vote(vote)
        else:
            before = self.door
            self.door = doors.hear_vote(self.door, vote.voter, vote.ballot, granted=vote.granted)
            self._become(before)

    def _become(self, before: Door) -> None:
        """What has come of an answer, or of asking."""
        if before.head is None and self.door.head is not None:
            self._again_ms = self.world.now + LEAST_MS
            self.court.reached("elected")
            self.ask_all()
        self.look()

    # ------------------------------------------------------------ copying

    def follow_no_more(self) -> None:
        """It hears the head no more, or will not: it takes no part of its journal any more."""
        if self.line is not None:
            self.line.close()
            self.line = None

    def take_whole(self, line: Line, journal: list[Entry], known: Succession, part: int, answer: Hold) -> None:
        """The whole journal arrives."""
        if self.line is line:
            self.journal, self.held = list(journal), part
            self.court.open(self)
            self.learn(known)
            line.up(answer, part)

    def take_part(self, line: Line, number: int, part: Sequence[Entry] | Succession, answer: Hold) -> None:
        """The next part arrives."""
        if self.line is not line:
            return
        assert number == self.held + 1, "parts come in their order"
        self._heard_ms = self.world.now
        self.held = number
        if isinstance(part, Succession):
            self.learn(part)
        else:
            self.journal += part
        line.up(answer, number)

    def learn(self, known: Succession) -> None:
        """The head has proposed this, or settled it."""
        self.known = known
        self.door = doors.learn(self.door, known)
        self.look()


Hold = Callable[[int], None]
