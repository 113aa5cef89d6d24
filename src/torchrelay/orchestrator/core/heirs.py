"""Heirs: what the head does so that its node may be lost; see `protocol.succession`.

    each part of the journal goes to the heirs at once; whatever follows from it leaves when they have it
    an heir that is lost, or slow, is done without; a node that is there is appointed in its place
    all agents vote

Nothing here asks more than the heirs because of an event. Voters are asked when heirs or voters change.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Protocol

from msgspec import Struct, structs

from torchrelay.orchestrator.core.traffic import AgentPort
from torchrelay.orchestrator.store.journal import JournalUnavailable, Superseded
from torchrelay.orchestrator.store.parts import Row
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.succession.copying import Copying, forget, hear_held, let_leave, may_be_heirs, write
from torchrelay.protocol.succession.head import Head, hear_noted, propose
from torchrelay.protocol.succession.succession import CopyId, Place, Succession, VoterId, may_be_majority
from torchrelay.wire.messages.channel import Appoint, Note, Vote
from torchrelay.wire.messages.inheritance import Part

log = logging.getLogger("torchrelay.orchestrator")

HEIRS = 2  # any two nodes may be lost at once, if a majority of the nodes is left
FEWEST_VOTERS = 3  # of two nodes no majority is left when one is lost
SLOW_S = 1.5  # how long an heir may take to have a part before it is done without
AGAIN_S = 0.5  # between two proposals of the same
LOOK_S = 0.25  # between two looks whether the service has ended meanwhile
REFUSED_S = 3.0  # how long a proposal may wait for others than those who have promised a higher lease
IN_VAIN_S = 30.0  # how long anything may wait for heirs: a head that nothing leaves is none
MOMENT_S = 0.25  # so long may anything wait for heirs before time stands still meanwhile
COME_S = 30.0  # how long an appointed heir may take to have the whole journal


def at_once(action: Callable[[], None]) -> None:
    """Do it now."""
    action()


class Acting(Protocol):
    """A service that acts, with its heirs, if it has any. `over`: it has ended."""

    heirs: Heirs | None

    @property
    def over(self) -> bool: ...


async def safe(service: Acting) -> bool:
    """Wait until no loss of the head can undo what it has heard by now. False: the service has ended before."""
    if service.heirs is None:
        return True
    found: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    service.heirs.when_safe(partial(settle, found))
    while not found.done() and not service.over:
        await asyncio.wait((found,), timeout=LOOK_S)
    return found.done()


def settle(found: asyncio.Future[None]) -> None:
    if not found.done():
        found.set_result(None)


class Written(Protocol):
    """The head's journal. `on_part`: who is given each part, with its number."""

    part: int
    on_part: Callable[[int, tuple[Row, ...]], None] | None

    def keep_succession(self, proposed: Succession) -> None: ...


class HeirPort(Protocol):
    """The way to one heir. `send` never waits and never fails; who does not read is disconnected."""

    place: Place

    def send(self, message: Part) -> None: ...

    def close(self, reason: str) -> None: ...


class Appointed(Struct, frozen=True):
    """A node whose agent was told to keep a copy, until that has come."""

    node: NodeId
    copy: CopyId
    since_s: float


class Heirs:
    """Of one head. `node`: its own, if it is one of the run's. `now_s`: a clock that never goes back.

    `former`: the node of the head whose place this one has taken. Nobody need wait for that node to come back first.
    `draw`: a name of so many bytes that nobody can guess.
    """

    def __init__(
        self,
        head: Head,
        journal: Written,
        *,
        node: NodeId | None,
        now_s: Callable[[], float],
        former: NodeId | None = None,
        draw: Callable[[int], str] = secrets.token_hex,
    ) -> None:
        self.head = head
        self.former = former
        self.stuck = ""  # why this lease cannot go on: voters have promised a higher one
        self._journal = journal
        self.own = {node} - {None}  # its own nodes: none of them keeps a copy for when this machine is lost
        self.over = False  # it ends: what changes now is no change
        self._now_s = now_s
        self._draw = draw
        self._copying = Copying(written=journal.part)
        self._waiting: deque[tuple[int, float, Callable[[], None]]] = deque()  # since when
        self._ports: dict[CopyId, HeirPort] = {}
        self._behind_since_s: dict[CopyId, float] = {}
        self._appointed: dict[str, Appointed] = {}  # by key
        self._passed_over: deque[NodeId] = deque(maxlen=HEIRS)  # nodes that did not come, or were lost
        self._cluster: Cluster | None = None
        self._connections: Mapping[NodeId, AgentPort] = {}
        self._refused: set[VoterId] = set()
        self._proposed_s = self._told_s = 0.0
        journal.on_part = self._copy

    def listens_at(self, url: str) -> None:
        """Where agents and heirs find this one: the successions that it proposes say so."""
        settled = self.head.settled
        self.head = structs.replace(
            self.head, settled=structs.replace(settled, head=structs.replace(settled.head, url=url))
        )

    # ------------------------------------------------------------ what leaves

    def when_safe(self, action: Callable[[], None]) -> None:
        """Do this as soon as all heirs have what has been written by now: at once, if they have. In order."""
        self._copying = let_leave(self._copying, self.head)
        if self._waiting or self._copying.left < self._journal.part:
            self._waiting.append((self._journal.part, self._now_s(), action))
        else:
            action()

    @property
    def waits(self) -> bool:
        """Whether anything waits for heirs."""
        return bool(self._waiting)

    @property
    def late(self) -> bool:
        """Whether something has waited for heirs for so long that nobody may be called late for not answering it."""
        return self.waits and self._now_s() - self._waiting[0][1] > MOMENT_S

    def _let_out(self) -> None:
        self._copying = let_leave(self._copying, self.head)
        while self._waiting and self._waiting[0][0] <= self._copying.left:
            self._waiting.popleft()[2]()

    def _copy(self, number: int, rows: tuple[Row, ...]) -> None:
        self._copying = write(self._copying)
        if not self._ports:
            return
        part = Part(number, tuple((row.kind, row.values) for row in rows))
        now_s = self._now_s()
        for copy, port in list(self._ports.items()):
            self._behind_since_s.setdefault(copy, now_s)
            port.send(part)

    # ------------------------------------------------------------ heirs come and go

    def known(self, node: NodeId, copy: CopyId, key: str) -> bool:
        """Whether this one was appointed. A key opens once."""
        for given, appointed in self._appointed.items():
            if secrets.compare_digest(given.encode(), key.encode()) and (appointed.node, appointed.copy) == (
                node,
                copy,
            ):
                return True
        return False

    def join(self, port: HeirPort, part: int, key: str) -> None:
        """It gets the whole journal up to this part just now: from here on it gets each part."""
        self._appointed.pop(key, None)
        self._ports[port.place.copy] = port
        self._behind_since_s[port.place.copy] = self._now_s() + COME_S - SLOW_S
        log.info("%s gets a copy of the journal up to part %d", port.place.node, part)

    def hear_held(self, port: HeirPort, part: int) -> None:
        """It has this part."""
        copy = port.place.copy
        if self._ports.get(copy) is not port:
            return
        new = copy not in {place.copy for place in self.head.needed}
        self._copying = hear_held(self._copying, copy, part)
        if part >= self._copying.written:
            self._behind_since_s.pop(copy, None)
        elif copy in self._behind_since_s and self._behind_since_s[copy] <= self._now_s():
            self._behind_since_s[copy] = self._now_s()  # it gets on
        self._let_out()
        if new:
            self._soon()

    def end(self) -> None:
        """The head ends: what changes now is no change."""
        self.over = True
        for port in self._ports.values():
            port.close("the head ends")

    def leave(self, port: HeirPort) -> None:
        """Its connection is gone: it gets no part any more, and comes back as another one."""
        if self._ports.get(port.place.copy) is port:
            del self._ports[port.place.copy]
            self._behind_since_s.pop(port.place.copy, None)
            self._passed_over.append(port.place.node)
            self._soon()

    # ------------------------------------------------------------ the voters

    def mind(self, cluster: Cluster, connections: Mapping[NodeId, AgentPort]) -> None:
        """Look at what has changed: called at each tick. Raises as `Journal.append` does, also if it is stuck."""
        if self.stuck:
            raise Superseded(self.stuck)
        self._cluster, self._connections = cluster, connections
        self._part_with_slow()
        self._mind_what_is_in_vain()
        if self.head.proposed is None:
            self._propose(cluster)
        else:
            self._ask()
        if self.head.proposed is None:
            self._appoint(cluster)
        self._let_out()

    @property
    def out_of_reach(self) -> tuple[Place, ...]:
        """The heirs without which nothing leaves at the moment: one of them may have become head."""
        if not self._waiting and self.head.proposed is None:
            return ()
        return tuple(place for place in self.head.needed if place.copy not in self._ports)

    def _soon(self) -> None:
        """Look now. What fails is tried again at the next tick, which says so."""
        if self._cluster is not None and not self.over:
            with suppress(JournalUnavailable, Superseded):
                self.mind(self._cluster, self._connections)

    def introduce(self, connection: AgentPort) -> None:
        """An agent has attached: it is to know what is so."""
        if any(self.head.newest.electorates):
            connection.send(Note(self.head.newest))

    def hear_vote(self, vote: Vote) -> None:
        """A voter has noted what we proposed, or has promised that to somebody else. Raises as `mind`."""
        proposed = self.head.proposed
        if proposed is None:
            return
        noted = vote.ballot.noted
        if noted is not None and noted.order == proposed.order:
            self._refused.discard(vote.voter)
            self.head = hear_noted(self.head, vote.voter, proposed.order)
            if self.head.proposed is None:
                self._settled()
        elif vote.ballot.promised > proposed.lease:
            self._refused.add(vote.voter)
            if not all(may_be_majority(self._refused, group) for group in proposed.electorates):
                self.stuck = f"a majority of the agents has promised lease {vote.ballot.promised} to another node"

    def _mind_what_is_in_vain(self) -> None:
        """Those who could still make a majority may be lost for good. Then it waits at its door, as all others do.

        Who refuses notes a higher lease only; whoever was promised that need not have become head.
        """
        now_s = self._now_s()
        if self.head.proposed is not None and self._refused and now_s - self._proposed_s > REFUSED_S:
            self.stuck = "agents have promised a higher lease, and too few of the others answer"
        elif self._waiting and now_s - self._waiting[0][1] > IN_VAIN_S:
            self.stuck = f"for {IN_VAIN_S:g} s too few agents have answered, and nothing has left"
        if self.stuck:
            raise Superseded(self.stuck)

    def _settled(self) -> None:
        now = self.head.settled
        self._journal.keep_succession(now)
        kept = {place.copy for place in now.heirs}
        for copy in [copy for copy in self._copying.held if copy not in kept and copy not in self._ports]:
            self._copying = forget(self._copying, copy)
        where = ", ".join(place.node for place in now.heirs) or "no other node"
        log.info("settled: copies of the journal are on %s; %d nodes vote", where, len(now.voters))
        self._tell(Note(now))
        self._soon()

    def _propose(self, cluster: Cluster) -> None:
        voters = self._voters(cluster)
        after = propose(self.head, self._ready(cluster) if voters else (), voters)
        if after.proposed is None:
            return
        self._journal.keep_succession(after.proposed)  # first, as ever
        self.head = after
        self._refused.clear()
        self._proposed_s, self._told_s = self._now_s(), -AGAIN_S
        self._ask()

    def _ask(self) -> None:
        """Let voters note the proposal, again and again until they answer: it has the names of them all."""
        now_s = self._now_s()
        if self.head.proposed is None or now_s - self._told_s < AGAIN_S:
            return
        self._told_s = now_s
        if any(self.head.proposed.electorates):
            self._tell(Note(self.head.proposed), self.head.noted | self._refused)
        else:  # nobody is to be asked
            self.head = hear_noted(self.head, VoterId(""), self.head.proposed.order)
            self._settled()

    def _tell(self, message: Note, answered: Collection[VoterId] = ()) -> None:
        for connection in self._connections.values():
            if connection.voter and connection.voter not in answered:
                connection.send(message)

    def _voters(self, cluster: Cluster) -> tuple[VoterId, ...]:
        """All nodes that are not lost. One that is away for a moment remains what it was."""
        found: dict[NodeId, VoterId] = {}
        for voter in self.head.settled.voters:
            node = node_of(voter)
            if node in cluster.nodes and cluster.nodes[node].alive:
                found[node] = voter
        for node, connection in self._connections.items():
            if connection.voter and node in cluster.nodes and cluster.nodes[node].alive:
                found[node] = connection.voter
        return tuple(found[node] for node in sorted(found)) if len(found) >= FEWEST_VOTERS else ()

    def _ready(self, cluster: Cluster) -> tuple[Place, ...]:
        """Those that have the journal: all that has left, at least. Who is one stays one."""
        here = [port.place for port in self._ports.values() if is_alive(cluster, port.place.node)]
        before = [place.copy for place in self.head.settled.heirs]
        kept = [place for copy in before for place in here if place.copy == copy]
        new = [one for one in here if one.copy not in before and may_be_heirs(self._copying, [one])]
        return tuple([*kept, *sorted(new, key=lambda place: place.node)][:HEIRS])

    def _part_with_slow(self) -> None:
        now_s = self._now_s()
        for copy, since_s in list(self._behind_since_s.items()):
            if now_s - since_s > SLOW_S and copy in self._ports:
                port = self._ports[copy]
                log.warning("%s takes too long to copy the journal: it is done without", port.place.node)
                port.close("it takes too long to copy the journal")
                self.leave(port)
        for key, appointed in list(self._appointed.items()):
            if now_s - appointed.since_s > COME_S:
                log.warning("no copy of the journal has come to be on %s", appointed.node)
                self._passed_over.append(appointed.node)
                del self._appointed[key]

    def _appoint(self, cluster: Cluster) -> None:
        if not self.head.settled.voters:
            return
        taken = {port.place.node for port in self._ports.values()} | {one.node for one in self._appointed.values()}
        free = [node for node in self._connections if node not in taken and node not in self.own]
        free = [node for node in free if is_alive(cluster, node) and self._connections[node].voter]
        free.sort(key=lambda node: (node in self._passed_over, node))
        for node in free[: HEIRS - len(taken)] if len(taken) < HEIRS else ():
            order = Appoint(copy=CopyId(f"{node}.{self._draw(8)}"), key=self._draw(32))
            self._appointed[order.key] = Appointed(node, order.copy, self._now_s())
            self._connections[node].send(order)


def node_of(voter: VoterId) -> NodeId:
    """The node whose agent this voter is."""
    return NodeId(voter.rpartition(".")[0])


def is_alive(cluster: Cluster, node: NodeId) -> bool:
    found = cluster.nodes.get(node)
    return found is not None and found.alive
