"""Offices: the processes that have a copy of the journal. One of them acts; the others wait at their doors.

What an office has on its disk outlives its process: the copy, what it knows of the succession, and the highest lease
that it has stood for. It is lost with its node.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple, Protocol

import msgspec

from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.succession import door as doors
from torchrelay.protocol.succession import head as heads
from torchrelay.protocol.succession.candidate import Elected, Excluded
from torchrelay.protocol.succession.door import Door
from torchrelay.protocol.succession.head import Head
from torchrelay.protocol.succession.succession import Place, Succession, VoterId
from torchrelay.protocol.succession.voter import Ballot, is_bound_elsewhere
from torchrelay.simulation.machine.lines import Line
from torchrelay.simulation.machine.network import Connection
from torchrelay.simulation.machine.shell import Shell
from torchrelay.simulation.ports import Carrier, Entry, Watched

TICK_MS = 250
REPEAT_MS = 1_000
STARTS_MS = 100  # a process that has ended by itself is started again


class Visitor(Carrier, Protocol):
    """An agent that can vote."""

    def hear_head(self, connection: Connection, lease: int, places: tuple[Place, ...]) -> None: ...
    def hear_known(self, connection: Connection, succession: Succession, there: bool) -> None: ...
    def hear_ask(self, connection: Connection, lease: int, place: Place) -> None: ...
    def hear_note(self, connection: Connection, succession: Succession, settled: bool) -> None: ...
    def hear_appoint(self, connection: Connection, lease: int, place: Place) -> None: ...


class Visit(NamedTuple):
    """Who has connected."""

    connection: Connection
    agent: Visitor


class Reigns(Protocol):
    """What an office does while it acts."""

    @property
    def shell(self) -> Shell: ...
    def greet(self, visit: Visit) -> None: ...
    def settled(self) -> None: ...
    def connect(self, office: Office) -> None: ...
    def end(self) -> None: ...


class Surroundings(Protocol):
    """All offices, and the network between them."""

    @property
    def world(self) -> Watched: ...
    @property
    def chance(self) -> Random: ...
    def copies_to(self, one: NodeId, other: NodeId) -> bool: ...
    def reaches(self, one: NodeId, other: NodeId) -> bool: ...
    def reached(self, phase: str) -> None: ...
    def act(self, office: Office) -> None: ...
    def end(self, office: Office) -> None: ...


class Office:
    """One process, with its copy."""

    def __init__(self, court: Surroundings, door: Door, journal: list[Entry]) -> None:
        self.court, self.world = court, court.world
        self.door = door
        self.journal = journal
        self.up = True
        self.frozen = False
        self.starts = 0
        self.visitors: dict[VoterId, Visit] = {}
        self._unread: list[Connection] = []  # of those who have come since it was stopped, and before
        self.noted: dict[VoterId, tuple[tuple[int, int], bool]] = {}  # what each of them is known to have noted
        self.head: Head | None = None
        self.reign: Reigns | None = None  # if it acts
        self.line: Line | None = None  # to the head
        self.head_says_so = False  # that it acts
        self.held = 0  # the newest part of the head's that it has
        self._frozen_ms = 0
        self._repeated_ms = self.world.now
        self.world.after(TICK_MS, self.tick, 0)

    @property
    def place(self) -> Place:
        return self.door.place

    @property
    def node(self) -> NodeId:
        return self.door.place.node

    # ------------------------------------------------------------ its process

    def kill(self) -> None:
        """Its process ends; all that is connected with it sees that."""
        self.up = False
        self.stop_acting()
        for visit in list(self.visitors.values()):
            visit.agent.disconnect()
        if self.line is not None:
            self.line.close()
            self.line = None
        self.door = msgspec.structs.replace(self.door, here=frozenset(), candidacy=None, refused=False)
        self.visitors, self.noted, self.head = {}, {}, None

    def restart(self) -> None:
        """Its process is there again, with what its disk has."""
        if self.up:
            return
        self.up, self.frozen = True, False
        self.starts += 1
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
        """Somebody was promised a higher lease: it must stand again itself, if it still can."""
        self.court.reached("steps down")
        self.kill()
        self.world.after(STARTS_MS, self.restart)

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
        if self.frozen:
            return
        if self.line is not None and (self.line.closed or self.line.is_silent(up=False)):
            self.drop_line()
        if self.shell is None:
            self.look()
        if self.world.now - self._repeated_ms >= REPEAT_MS:
            self._repeated_ms = self.world.now
            self.ask()
            self.say_what_to_note()

    # ------------------------------------------------------------ who waits

    def come(self, visit: Visit, voter: VoterId, ballot: Ballot) -> None:
        """An agent has connected."""
        visit.connection.deaf = self.frozen
        if self.frozen:
            self._unread.append(visit.connection)
        self.visitors[voter] = visit
        visit.connection.at_once(self._welcome, visit, voter, ballot)

    def _welcome(self, visit: Visit, voter: VoterId, ballot: Ballot) -> None:
        self.door = doors.come(self.door, voter, ballot)
        if self.head is not None:
            if is_bound_elsewhere(ballot, self.head.newest.lease, self.place.copy):
                self.lose_office()
            else:
                self.say_what_to_note()
        if self.reign is not None:
            self.reign.greet(visit)
        else:
            visit.connection.down(visit.agent.hear_known, visit.connection, self.door.known, self.hears_head)
        self.look()
        self.ask()

    def go(self, connection: Connection, voter: VoterId) -> None:
        """It has left."""
        if voter in self.visitors and self.visitors[voter].connection is connection:
            del self.visitors[voter]
            self.noted.pop(voter, None)
            self.door = doors.go(self.door, voter)

    # ------------------------------------------------------------ standing

    def look(self) -> None:
        """Whether it is to stand now."""
        if not self.up or self.shell is not None:
            return
        if doors.may_stand(self.door):
            self.head = None
            self.door = doors.stand(self.door)
            self.drop_line()
            self.court.reached("stands")
            self.ask()
        self.weigh()

    def ask(self) -> None:
        if self.head is not None or self.door.candidacy is None:
            return
        for voter in doors.to_ask(self.door):
            if voter in self.visitors:
                connection, agent = self.visitors[voter]
                connection.down(agent.hear_ask, connection, self.door.candidacy.lease, self.place)

    def hear_promise(self, voter: VoterId, ballot: Ballot, lease: int, granted: bool) -> None:
        """A voter answers what it was asked."""
        if self.up and self.shell is None:
            self.door = doors.hear_answer(self.door, voter, ballot, lease=lease, granted=granted)
            self.look()

    def weigh(self) -> None:
        """What has come of it so far."""
        if self.head is not None or self.door.candidacy is None or not self.up:
            return
        verdict = doors.judge(self.door)
        if isinstance(verdict, Excluded):
            self.court.reached("excluded")
            self.kill()
            self.court.end(self)
        elif isinstance(verdict, Elected):
            lease = self.door.candidacy.lease
            if verdict.settled and not verdict.base.voters:
                self.head = heads.first(self.place, lease)  # nobody else can act, and nobody is asked
            else:
                self.head = heads.take_office(self.place, lease, verdict.base, settled=verdict.settled)
            self.door = doors.learn(self.door, self.head.newest, settled=False)
            self.court.reached("elected")
            self.say_what_to_note()
            self.act_if_settled()

    # ------------------------------------------------------------ what voters are to note

    def say_what_to_note(self) -> None:
        """To whom has not noted it yet."""
        if self.head is None:
            return
        newest, settled = self.head.newest, self.head.proposed is None
        for voter, (connection, agent) in list(self.visitors.items()):
            if self.noted.get(voter) != (newest.order, settled):
                connection.down(agent.hear_note, connection, newest, settled)

    def hear_noted(self, voter: VoterId, succession: Succession, settled: bool, ballot: Ballot, granted: bool) -> None:
        """A voter has noted a succession, or refused to."""
        if not self.up or self.head is None:
            return
        if not granted:
            if is_bound_elsewhere(ballot, self.head.newest.lease, self.place.copy):
                self.door = msgspec.structs.replace(self.door, heard=max(self.door.heard, ballot.promised))
                self.lose_office()
            return
        if voter in self.visitors:
            self.noted[voter] = (succession.order, settled)
        before = self.head
        self.head = heads.hear_noted(self.head, voter, succession.order)
        if self.head is not before and self.head.proposed is None:
            self.act_if_settled()
            self.say_what_to_note()

    def propose(self) -> None:
        """There is a next one; it is on the disk before anybody hears of it."""
        assert self.head is not None, "who proposes is head"
        self.door = doors.learn(self.door, self.head.newest, settled=False)
        self.say_what_to_note()

    def act_if_settled(self) -> None:
        """With its first succession settled it acts; with the next ones other heirs are needed."""
        if self.head is None or self.head.proposed is not None:
            return
        self.door = doors.learn(self.door, self.head.settled, settled=True)
        if self.reign is None:
            self.court.act(self)
        else:
            self.reign.settled()

    def lose_office(self) -> None:
        """Somebody was promised a higher lease."""
        if self.shell is not None:
            self.step_down()
        else:
            self.head = None
            self.door = msgspec.structs.replace(self.door, refused=True)
            self.look()

    # ------------------------------------------------------------ copying

    @property
    def hears_head(self) -> bool:
        """Whether it hears a head that says that it acts."""
        return self.line is not None and self.line.is_fresh and self.head_says_so

    def drop_line(self) -> None:
        """It is no more connected with the head: it takes parts under another name only."""
        if self.line is not None:
            self.line.close()
            self.line = None

    def take_journal(
        self, line: Line, lease: int, entries: list[Entry], held: int, answer: Callable[[int], None]
    ) -> None:
        """The whole journal arrives."""
        if self.line is line and doors.takes_parts(self.door, lease):
            self.journal, self.held = list(entries), held
            line.up(answer, held)

    def take_part(self, line: Line, lease: int, part: int, entry: Entry, answer: Callable[[int], None]) -> None:
        """The next part arrives."""
        if self.line is line and doors.takes_parts(self.door, lease) and part == self.held + 1:
            self.journal.append(entry)
            self.held = part
            line.up(answer, part)

    def hear_ping(self, line: Line, says_so: bool, answer: Callable[[], None]) -> None:
        """The head is there, and acts, or cannot tell."""
        self.head_says_so = says_so
        line.up(answer)

    def take_succession(self, line: Line, succession: Succession, settled: bool) -> None:
        """The head says what it proposes, or what is settled."""
        if self.line is not line:
            return
        dismissed = self.door.known.has_copy(self.place.copy) and not succession.has_copy(self.place.copy)
        self.door = doors.learn(self.door, succession, settled=settled)
        if dismissed and settled:
            self.kill()
            self.court.end(self)
