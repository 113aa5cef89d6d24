"""Agents: each keeps facts until they are acknowledged, and finds its way back to the orchestrator.

Where the orchestrator is on one of the nodes, agents vote on who takes its place, and look for whoever does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from msgspec import structs

from torchrelay.protocol.health.pulses import Beat, Sample
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import NodeId, WorkerId
from torchrelay.protocol.succession import search as searching
from torchrelay.protocol.succession import voter as voters
from torchrelay.protocol.succession.search import SILENT_MS
from torchrelay.protocol.succession.succession import Place, Succession, VoterId
from torchrelay.protocol.succession.voter import Ballot
from torchrelay.simulation.machine.network import Connection
from torchrelay.simulation.machine.offices import Office, Visit
from torchrelay.simulation.machine.shell import Shell
from torchrelay.simulation.model.life import Life
from torchrelay.simulation.model.snapshot_store import SnapshotStore
from torchrelay.simulation.ports import Peers
from torchrelay.simulation.worker.processes import Process

BEAT_MS = 500  # as often as real ones
RETRY_MS = 700
RECONNECT_MS = 100
STANDS_MS = 1_000  # what a worker has begun is told when it has been in its phase for so long


class Host(Protocol):
    """The node of an agent, as the agent sees it."""

    processes: dict[WorkerId, Process]
    ended_ids: dict[WorkerId, ev.WorkerExited | None]
    split: bool

    @property
    def world(self) -> Peers: ...
    @property
    def node(self) -> NodeId: ...
    @property
    def slots(self) -> int: ...
    @property
    def workers(self) -> dict[WorkerId, Process]: ...
    @property
    def snapshot_store(self) -> SnapshotStore: ...
    def start(self, order: od.StartWorker) -> None: ...
    def fence(self, worker: WorkerId) -> None: ...


class Agent:
    """The agent's process: carries words, keeps events until they are acknowledged, beats."""

    def __init__(self, shell: Shell, machine: Host, incarnation: str) -> None:
        self.machine = machine
        self.world, self.shell = machine.world, shell
        self.incarnation = incarnation
        self.kept: dict[int, tuple[ev.Event, int]] = {}  # with the time at which it happened
        self.leaving: set[WorkerId] = set()  # whose end is told and not acknowledged
        self.connection: Connection | None = None
        self.attached = False
        self._seq = 0
        self._running = True
        self.world.after(self.world.chance.randint(1, 20), self._connect)

    @property
    def node(self) -> NodeId:
        return self.machine.node

    @property
    def reached(self) -> bool:
        """Whether the orchestrator can talk to it now."""
        return self.attached and self.shell.up

    def stop(self) -> None:
        self._running = False
        self.disconnect()

    # ------------------------------------------------------------ up

    def tell(self, event: ev.Event, at_ms: int | None = None) -> None:
        self._seq += 1
        self.kept[self._seq] = event, self.world.now if at_ms is None else at_ms
        self._send(self._seq)

    def report_end(self, worker: WorkerId) -> None:
        """Tell of an end, unless it is on its way already."""
        if worker in self.leaving:
            return
        self.leaving.add(worker)
        gone = ev.WorkerExited(worker=worker, node=self.machine.node, cause="gone")
        process = self.machine.workers.get(worker)
        at_ms = None if process is None or process.alive else process.ended_ms  # its forkserver has seen it
        ended = self.machine.ended_ids[worker] or gone
        self.tell(structs.replace(ended, kept=self.machine.snapshot_store.kept), at_ms)

    def _send(self, seq: int) -> None:
        if self.connection is not None and self.attached and seq in self.kept:
            self.connection.up(self._deliver, self.connection, seq, *self.kept[seq])

    def _deliver(self, connection: Connection, seq: int, event: ev.Event, at_ms: int) -> None:
        """It is read. How old it is by then, the two ends find out: see `orchestrator.core.agents`."""
        aged = ev.age_event(event, self.world.now - at_ms)
        self.shell.hear_agent(connection, aged, lambda known: connection.down(self.hear_ack, seq, known))

    def hear_ack(self, seq: int, known: int) -> None:
        """The orchestrator has written it down; so much stood in its journal then."""
        del known
        event, _ = self.kept.pop(seq, (None, 0))
        if isinstance(event, ev.WorkerExited):
            self.leaving.discard(event.worker)
            self.machine.ended_ids[event.worker] = None

    def _beat(self) -> None:
        if not self._running or self.connection is None or not self.attached:
            return
        samples = tuple(sample_of(process) for process in self.machine.processes.values())
        beat = Beat(node=self.machine.node, incarnation=self.incarnation, samples=samples)
        self.shell.hear_beat(self.connection, beat)
        self.world.after(BEAT_MS, self._beat)

    # ------------------------------------------------------------ down

    def obey(self, batch: tuple[od.AnyOrder, ...], known: int = 0) -> None:
        """Orders for this node arrive. `known`: how much stood in the journal when they were given."""
        del known
        for order in batch:
            match order:
                case od.StartWorker():
                    self.machine.start(order)
                case od.Fence(worker=worker):
                    self.machine.fence(worker)
                case _:
                    process = self.machine.processes.get(order.worker)
                    if process is not None and process.greeted:
                        process.hear(order)

    # ------------------------------------------------------------ the connection

    def _connect(self) -> None:
        if not self._running or self.connection is not None:
            return
        if self.machine.split or not self.shell.up:
            self.world.after(RECONNECT_MS, self._connect)
            return
        self.connection = Connection(self.world, self)
        self._attach(self.connection)

    def _attach(self, connection: Connection) -> None:
        """Join the orchestrator at the other end."""
        self.attached = True
        workers = [process.seen() for process in self.machine.processes.values() if process.greeted]
        workers += self._ended_seen()
        joined = ev.NodeJoined(
            node=self.machine.node, incarnation=self.incarnation, slots=self.machine.slots, workers=tuple(workers)
        )
        connection.at_once(self.shell.attach, connection, joined)
        for seq in list(self.kept):
            self._send(seq)
        self._beat()
        self._retry(connection)

    def _ended_seen(self) -> list[ev.WorkerSeen]:
        """Workers that have ended while the orchestrator has not acknowledged it."""
        return [ev.WorkerSeen(worker=worker, slot=0, pid=0) for worker, end in self.machine.ended_ids.items() if end]

    def _retry(self, connection: Connection) -> None:
        """Where messages are lost, send again what is not acknowledged."""
        if connection is self.connection and self.world.plan.weather.lost and self._running:
            for seq in list(self.kept):
                self._send(seq)
            self.world.after(RETRY_MS, self._retry, connection)

    def disconnect(self) -> None:
        """The connection breaks; what is on its way is lost."""
        if self.connection is None:
            return
        self.connection.close()
        self.shell.detach(self.connection)
        self.connection, self.attached = None, False
        if self._running:
            self.world.after(RECONNECT_MS, self._connect)


def sample_of(process: Process) -> Sample:
    """A worker as its agent samples it. What it has begun in its groups is told when it has stood for a while."""
    training = process.training
    if process.life is Life.RUNNING:
        process.cpu_ms += 1
    everybody = process.world.script.everybody
    others = {members: begun for members, begun in process.begun.items() if members != everybody}
    phase_ms = process.world.now - process.phase_since_ms
    groups = tuple((sum(1 << rank for rank in members), begun) for members, begun in others.items())
    return Sample(
        worker=process.id,
        rank=process.rank,
        generation=training.resumed,
        point=training.committed,
        phase=process.phase,
        phase_ms=phase_ms,
        step_ms=100.0 if training.index else 0.0,
        collectives=process.begun.get(everybody, 0) + training.shots.awaited,
        beat_ms=0,
        process="T" if process.life is Life.STOPPED else "S",
        cpu_ms=process.cpu_ms,
        elsewhere=sum(others.values()),
        groups=groups if phase_ms >= STANDS_MS else None,
    )


# ---------------------------------------------------------------- agents that vote

MIND_MS = 100


@dataclass
class Memory:
    """What a node's disk keeps for its agents: what was noted and promised, whom to obey, and where to look for it."""

    voter: VoterId
    ballot: Ballot = field(default_factory=Ballot)
    obeyed: int = 0
    places: tuple[Place, ...] = ()  # where a head may be found


class Acting(Protocol):
    """Who acts."""

    @property
    def shell(self) -> Shell: ...


class Doors(Protocol):
    """Where an agent looks for an orchestrator."""

    first: Succession
    chance: Random
    everywhere: tuple[Place, ...]

    @property
    def acting(self) -> Acting: ...
    def memory_of(self, node: NodeId) -> Memory: ...
    def office_on(self, node: NodeId) -> Office | None: ...
    def reaches(self, one: NodeId, other: NodeId) -> bool: ...
    def open(self, place: Place, lease: int, head: Office) -> None: ...


class VotingAgent(Agent):
    """An agent on a node where voters decide."""

    def __init__(self, doors: Doors, machine: Host, incarnation: str) -> None:
        self.doors = doors
        self.memory = doors.memory_of(machine.node)
        self.office: Office | None = None
        self.search = searching.begin(machine.world.now)
        self._heard_ms = machine.world.now
        super().__init__(doors.acting.shell, machine, incarnation)

    @property
    def places(self) -> tuple[Place, ...]:
        """Where to look; as long as it has heard of nobody, where its user told it to go."""
        return searching.gather(self.memory.places or self.doors.first.copies, self.doors.everywhere)

    # ------------------------------------------------------------ the connection

    def _connect(self) -> None:
        if not self._running or self.connection is not None:
            return
        now, places = self.world.now, self.places
        if searching.is_over(self.search, now):
            self._go_on()
        office = self.doors.office_on(searching.place_of(self.search, places).node)
        if office is None or not self.doors.reaches(self.node, office.node):
            if searching.passes_over(self.search):
                self._go_on()
            self.world.after(RECONNECT_MS, self._connect)
            return
        self.office, self._heard_ms = office, now
        self.connection = Connection(self.world, self)
        office.come(Visit(self.connection, self), self.memory.voter, self.memory.ballot)
        self.world.after(MIND_MS, self._mind, self.connection)

    def _go_on(self) -> None:
        self.search = searching.go_on(self.search, self.places, self.world.now, self.doors.chance.random())

    def _mind(self, connection: Connection) -> None:
        """Whether the head is still there, or somebody here becomes one."""
        if connection is not self.connection:
            return
        if self.attached:
            over = self.world.now - self._heard_ms >= SILENT_MS
        else:
            over = searching.is_over(self.search, self.world.now)
        if over:
            self.disconnect()
        else:
            self.world.after(MIND_MS, self._mind, connection)

    def disconnect(self) -> None:
        if self.connection is None:
            return
        connection, office = self.connection, self.office
        if self.attached:
            connection.hang_up(self.shell.detach, connection)
            self.search = searching.begin(self.world.now)
        self.connection, self.attached, self.office = None, False, None
        if office is not None:
            connection.hang_up(office.go, connection, self.memory.voter)
        connection.close()
        if self._running:
            self.world.after(RECONNECT_MS, self._connect)

    def hear_head(self, connection: Connection, lease: int, places: tuple[Place, ...]) -> None:
        """Who acts says so."""
        if connection is not self.connection or self.office is None:
            return
        if lease < self.memory.obeyed:
            self.disconnect()
            self._go_on()
            return
        self._heard_ms = self.world.now
        self.memory.places = searching.gather(self.memory.places, (*self.doors.first.copies, *places))
        if not self.attached and self.office.shell is not None:
            self.memory.obeyed = connection.lease = lease
            self.shell = self.office.shell
            self._attach(connection)

    def _beat(self) -> None:
        connection = self.connection
        if connection is not None and (connection.cut or connection.deaf) and self._running:
            self.world.after(RECONNECT_MS, self._beat)
            return
        super()._beat()

    # ------------------------------------------------------------ what it is asked

    def hear_known(self, connection: Connection, succession: Succession, there: bool) -> None:
        """Where nobody acts, the newest succession that is known there, and whether its head is heard there."""
        if connection is self.connection and not self.attached:
            if there:
                self.memory.places = searching.gather(succession.copies, self.memory.places)
                self.search = searching.send_back(self.search, self.places, self.world.now)
            else:
                self.memory.places = searching.gather(self.memory.places, succession.copies)

    def hear_ask(self, connection: Connection, lease: int, place: Place) -> None:
        """A candidate asks for a promise. It is on the disk before the answer leaves."""
        office = self.office
        if connection is not self.connection or office is None:
            return
        ballot, granted = voters.promise(self.memory.ballot, lease, place.copy)
        self.memory.ballot = ballot
        connection.up(office.hear_promise, self.memory.voter, ballot, lease, granted)

    def hear_note(self, connection: Connection, succession: Succession, settled: bool) -> None:
        """A head says what to note."""
        office = self.office
        if connection is not self.connection or office is None:
            return
        ballot, granted = voters.note(self.memory.ballot, succession, settled=settled)
        if granted and not self.attached and succession.head == office.place:
            self.search = searching.begin(self.world.now)  # it is the first place of this succession
        self.memory.ballot = ballot
        if granted:
            self.memory.places = searching.remember(self.memory.places, succession, settled=ballot.settled)
            self.world.reigns.noted(self.memory.voter, succession)
        connection.up(office.hear_noted, self.memory.voter, succession, settled, ballot, granted)

    def hear_appoint(self, connection: Connection, lease: int, place: Place) -> None:
        """The head wants a copy of its journal on this node."""
        if connection is self.connection and self.office is not None and lease >= self.memory.obeyed:
            self.doors.open(place, lease, self.office)

    # ------------------------------------------------------------ orders and acknowledgements

    def obey(self, batch: tuple[od.AnyOrder, ...], known: int = 0) -> None:
        assert self.connection is not None, "orders come over a connection"
        if self.connection.lease < self.memory.obeyed:
            return
        self.world.reigns.obeyed(self.connection.lease, known, self.node)
        super().obey(batch, known)

    def hear_ack(self, seq: int, known: int) -> None:
        assert self.connection is not None, "acknowledgements come over a connection"
        self.world.reigns.acknowledged(self.connection.lease, known, self.node)
        super().hear_ack(seq, known)
