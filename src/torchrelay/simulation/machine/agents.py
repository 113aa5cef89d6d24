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
from torchrelay.protocol.succession.search import Search
from torchrelay.protocol.succession.succession import CopyId, Succession, VoterId
from torchrelay.protocol.succession.voter import Ballot
from torchrelay.simulation.machine.network import Connection
from torchrelay.simulation.machine.offices import Office, Visit
from torchrelay.simulation.machine.shell import Shell
from torchrelay.simulation.model.life import Life
from torchrelay.simulation.model.snapshot_store import SnapshotStore
from torchrelay.simulation.ports import Peers
from torchrelay.simulation.worker.processes import Process
from torchrelay.wire.messages.channel import Appoint, Vote

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
                case od.PassOn():
                    pass  # the script does nothing about it, and is ended when its time is over
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
        connection.at_once(self.shell.attach, connection, self._joined())
        for seq in list(self.kept):
            self._send(seq)
        self._beat()
        self._retry(connection)

    def _joined(self) -> ev.NodeJoined:
        workers = [process.seen() for process in self.machine.processes.values()]
        workers += self._ended_seen()
        return ev.NodeJoined(
            node=self.node, incarnation=self.incarnation, slots=self.machine.slots, workers=tuple(workers)
        )

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

# As `agent.uplink` has them.
FIRST_PAUSE_MS, LONGEST_PAUSE_MS = 50, 1_000
HALF_MS = 1_000  # of the time between two pings
UNHEARD = 7  # pings without an answer, where nobody else may take its place


@dataclass
class Memory:
    """What a node's folder keeps for its agents: what was noted and promised, and whom to obey."""

    voter: VoterId
    ballot: Ballot = field(default_factory=Ballot)
    obeyed: int = 0


class Acting(Protocol):
    """Who acts."""

    @property
    def shell(self) -> Shell: ...


class Doors(Protocol):
    """Where an agent looks for an orchestrator."""

    first: Succession
    chance: Random

    @property
    def acting(self) -> Acting: ...
    def memory_of(self, node: NodeId) -> Memory: ...
    def office_at(self, url: str) -> Office | None: ...
    def is_silent(self, node: NodeId, url: str) -> bool: ...
    def appoint(self, node: NodeId, order: Appoint, url: str) -> None: ...


class VotingAgent(Agent):
    """An agent on a node where voters decide. It does what `agent.uplink` and `agent.allegiance` do."""

    def __init__(self, doors: Doors, machine: Host, incarnation: str) -> None:
        self.doors = doors
        self.memory = doors.memory_of(machine.node)
        self.office: Office | None = None
        self.search = Search()
        self.here = ""  # where the orchestrator was looked for last
        self._pause_ms = FIRST_PAUSE_MS
        self._plans = False  # to try again
        self._heard = 0  # messages
        super().__init__(doors.acting.shell, machine, incarnation)

    # ------------------------------------------------------------ the connection

    def _connect(self) -> None:
        self._plans = False
        if not self._running or self.connection is not None:
            return
        noted = self.memory.ballot.noted
        self.search, url = searching.look(self.search, noted, self.world.now)
        self.here = url or self.doors.first.head.url
        office = self.doors.office_at(self.here)
        if self.doors.is_silent(self.node, self.here):
            self._plans = True
            self.world.after(searching.answer_ms(noted), self._hear_nothing)
        elif office is None:
            self._try_again()
        else:
            self.office, self.connection = office, Connection(self.world, self)
            wait_ms = searching.door_ms(self.search, noted, self.here, self.doors.chance.random())
            self.world.after(wait_ms, self._wait_no_longer, self.connection)
            office.come(Visit(self.connection, self, self.memory.voter, self._joined()))

    def _hear_nothing(self) -> None:
        self._plans = False
        self.search = searching.hear_nothing(self.search)
        self._try_again()

    def _try_again(self) -> None:
        if self._running and not self._plans:
            self._plans = True
            self.world.after(self._pause_ms, self._connect)
            self._pause_ms = min(2 * self._pause_ms, LONGEST_PAUSE_MS)

    def _wait_no_longer(self, connection: Connection) -> None:
        if connection is self.connection and not self.attached:
            self.disconnect()

    def disconnect(self) -> None:
        if self.connection is None:
            return
        connection, office = self.connection, self.office
        if self.attached:
            connection.hang_up(self.shell.detach, connection)
            self._pause_ms = FIRST_PAUSE_MS
        self.connection, self.attached, self.office = None, False, None
        if office is not None:
            connection.hang_up(office.go, connection, self.memory.voter)
        connection.close()
        self._try_again()

    def hear_attached(self, connection: Connection, lease: int) -> None:
        """Who acts welcomes this agent."""
        if connection is not self.connection or self.office is None or self.office.shell is None:
            return
        if lease < self.memory.obeyed:
            self.disconnect()
            return
        self.memory.obeyed = connection.lease = lease
        self.search, self.attached, self.shell = Search(), True, self.office.shell
        for seq in list(self.kept):
            self._send(seq)
        self._beat()
        self._retry(connection)
        self.world.after(HALF_MS, self._ping, connection, 0)

    def _ping(self, connection: Connection, unheard: int) -> None:
        self._heard = 0
        self.world.after(HALF_MS, self._listen, connection, unheard)

    def _listen(self, connection: Connection, unheard: int) -> None:
        """Where another one may take its place, it answers soon, or is lost."""
        if connection is not self.connection:
            return
        unheard = unheard + 1 if (connection.cut or connection.deaf) and not self._heard else 0
        if unheard >= (1 if searching.may_move(self.memory.ballot.noted) else UNHEARD):
            self.disconnect()
        else:
            self.world.after(HALF_MS, self._ping, connection, unheard)

    def _beat(self) -> None:
        connection = self.connection
        if connection is not None and (connection.cut or connection.deaf) and self._running:
            self.world.after(RECONNECT_MS, self._beat)
            return
        super()._beat()

    # ------------------------------------------------------------ what it is asked

    def hear_known(self, connection: Connection, known: Succession) -> None:
        """Where nobody acts, or acts any more, this is known."""
        if connection is self.connection:
            self.search = searching.hear_known(self.search, self.memory.ballot.noted, known)

    def hear_ask(self, connection: Connection, lease: int, copy: CopyId) -> None:
        """A candidate asks for a promise. It is on the disk before the answer leaves."""
        if connection is self.connection and self.office is not None:
            self.memory.ballot, granted = voters.promise(self.memory.ballot, lease, copy)
            vote = Vote(voter=self.memory.voter, granted=granted, ballot=self.memory.ballot)
            connection.up(self.office.hear_vote, connection, vote)

    def hear_note(self, connection: Connection, succession: Succession) -> None:
        """A head says what to note."""
        if connection is not self.connection or self.office is None:
            return
        self._heard += 1
        self.memory.ballot, granted = voters.note(self.memory.ballot, succession)
        if granted:
            self.world.reigns.noted(self.memory.voter, succession)
        vote = Vote(voter=self.memory.voter, granted=granted, ballot=voters.in_short(self.memory.ballot))
        connection.up(self.office.hear_vote, connection, vote)

    def hear_appoint(self, connection: Connection, order: Appoint) -> None:
        """The head wants a copy of its journal on this node."""
        if connection is self.connection and self.attached:
            self._heard += 1
            self.doors.appoint(self.node, order, self.here)

    # ------------------------------------------------------------ orders and acknowledgements

    def obey(self, batch: tuple[od.AnyOrder, ...], known: int = 0) -> None:
        assert self.connection is not None, "orders come over a connection"
        if not self.attached or self.connection.lease < self.memory.obeyed:
            return
        self._heard += 1
        self.world.reigns.obeyed(self.connection.lease, known, self.node)
        super().obey(batch, known)

    def hear_ack(self, seq: int, known: int) -> None:
        assert self.connection is not None, "acknowledgements come over a connection"
        self._heard += 1
        self.world.reigns.acknowledged(self.connection.lease, known, self.node)
        super().hear_ack(seq, known)
