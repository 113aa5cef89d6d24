"""Machines: nodes that hold worker processes, and the agent of each. An agent keeps facts until they are acknowledged.

What a forkserver knows (who runs, who has ended, which ids ever lived) outlives the agent; what the agent keeps in
memory does not.
"""

from __future__ import annotations

from msgspec import structs

from torchrelay.protocol.health.pulses import Beat, Sample
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import NodeId, WorkerId
from torchrelay.simulation.machine.network import Connection
from torchrelay.simulation.machine.shell import Shell
from torchrelay.simulation.model.life import Life
from torchrelay.simulation.model.snapshot_store import SnapshotStore
from torchrelay.simulation.ports import Peers
from torchrelay.simulation.worker.processes import Process

BEAT_MS = 500  # as often as real ones
RETRY_MS = 700
RECONNECT_MS = 100
STANDS_MS = 1_000  # what a worker has begun is told when it has been in its phase for so long


class Machine:
    """One node: its processes, and its agent if that runs."""

    def __init__(self, world: Peers, shell: Shell, workers: dict[WorkerId, Process], node: NodeId, slots: int) -> None:
        self.world = world
        self.shell = shell
        self.workers = workers  # of all machines, and those that have ended too
        self.node = node
        self.slots = slots
        self.processes: dict[WorkerId, Process] = {}
        self.ended_ids: dict[WorkerId, ev.WorkerExited | None] = {}  # None: its end was acknowledged
        self.agent: Agent | None = None
        self.split = False  # cut off from the orchestrator
        self.lost = False  # for ever
        self.agents = 0
        self.pids = 1000
        self.snapshot_store = SnapshotStore()
        self.start_agent()

    @property
    def reached(self) -> bool:
        """Whether the orchestrator can talk to this node's agent now."""
        return self.agent is not None and self.agent.connection is not None and self.shell.up

    def start_agent(self) -> None:
        """A new agent; it adopts the workers that are there."""
        if self.agent is not None or self.lost:
            return
        self.agents += 1
        self.agent = Agent(self, f"{self.node}-{self.agents}")
        for process in list(self.processes.values()):
            if process.greeted:
                process.greet()
        for worker, exited in list(self.ended_ids.items()):
            if exited is not None:
                self.agent.report_end(worker)

    def crash_agent(self) -> None:
        """The agent dies; its workers go on without one."""
        if self.agent is not None:
            self.agent.stop()
            self.agent = None

    def lose_power(self) -> None:
        """Everything on this node is gone, and so are the pages."""
        self.snapshot_store.clear()
        self.crash_agent()
        for process in list(self.processes.values()):
            process.page = []
            process.kill(cause="power")
        self.ended_ids.clear()

    # ------------------------------------------------------------ processes

    def start(self, order: od.StartWorker) -> None:
        """Keep a worker running; an id that has ended is reported, never started again."""
        if order.worker in self.processes:
            return
        if order.worker in self.ended_ids:
            self._remind(order.worker)
            return
        self.world.checker.free_slot(self.node, order)
        self.pids += 1
        process = Process(self.world, self, order, self.pids)
        self.processes[order.worker] = self.workers[order.worker] = process

    def fence(self, worker: WorkerId) -> None:
        process = self.processes.get(worker)
        if process is not None:
            process.kill(signal=9, cause="fenced")
        else:
            if worker not in self.ended_ids:
                self.ended_ids[worker] = ev.WorkerExited(worker=worker, node=self.node, cause="unknown here")
            self._remind(worker)

    def ended(self, worker: WorkerId, exited: ev.WorkerExited) -> None:
        """A process has ended; the forkserver sees it within milliseconds."""
        self.processes.pop(worker, None)
        self.ended_ids[worker] = exited
        self.world.after(self.world.chance.randint(1, 4), self._report, worker)

    def _report(self, worker: WorkerId) -> None:
        if self.agent is not None and self.ended_ids.get(worker) is not None:
            self.agent.report_end(worker)

    def _remind(self, worker: WorkerId) -> None:
        """Report an end again that the orchestrator does not seem to know."""
        if self.agent is not None:
            self.agent.report_end(worker)

    def hear_worker(self, event: ev.Event) -> None:
        """A worker says something. Without an agent nobody hears it."""
        if self.agent is not None:
            self.agent.tell(event)


class Agent:
    """The agent's process: carries words, keeps events until they are acknowledged, beats."""

    def __init__(self, machine: Machine, incarnation: str) -> None:
        self.machine = machine
        self.world, self.shell = machine.world, machine.shell
        self.incarnation = incarnation
        self.kept: dict[int, tuple[ev.Event, int]] = {}  # with the time at which it happened
        self.leaving: set[WorkerId] = set()  # whose end is told and not acknowledged
        self.connection: Connection | None = None
        self._seq = 0
        self._running = True
        self.world.after(self.world.chance.randint(1, 20), self._connect)

    @property
    def node(self) -> NodeId:
        return self.machine.node

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
        if self.connection is not None and seq in self.kept:
            self.connection.up(self._deliver, self.connection, seq, *self.kept[seq])

    def _deliver(self, connection: Connection, seq: int, event: ev.Event, at_ms: int) -> None:
        """It is read. How old it is by then, the two ends find out: see `orchestrator.core.agents`."""
        aged = ev.age_event(event, self.world.now - at_ms)
        self.shell.hear_agent(connection, aged, lambda: connection.down(self.hear_ack, seq))

    def hear_ack(self, seq: int) -> None:
        event, _ = self.kept.pop(seq, (None, 0))
        if isinstance(event, ev.WorkerExited):
            self.leaving.discard(event.worker)
            self.machine.ended_ids[event.worker] = None

    def _beat(self) -> None:
        if not self._running or self.connection is None:
            return
        samples = tuple(sample_of(process) for process in self.machine.processes.values())
        beat = Beat(node=self.machine.node, incarnation=self.incarnation, samples=samples)
        self.shell.hear_beat(self.connection, beat)
        self.world.after(BEAT_MS, self._beat)

    # ------------------------------------------------------------ down

    def obey(self, batch: tuple[od.AnyOrder, ...]) -> None:
        """Orders for this node arrive."""
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
        workers = [process.seen() for process in self.machine.processes.values() if process.greeted]
        workers += self._ended_seen()
        joined = ev.NodeJoined(
            node=self.machine.node, incarnation=self.incarnation, slots=self.machine.slots, workers=tuple(workers)
        )
        self.shell.attach(self.connection, joined)
        for seq in list(self.kept):
            self._send(seq)
        self._beat()
        self._retry(self.connection)

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
        self.connection = None
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
