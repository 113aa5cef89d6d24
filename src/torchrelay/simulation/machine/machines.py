"""Machines: nodes that hold worker processes, and the agent of each.

What a forkserver knows (who runs, who has ended, which ids ever lived) outlives the agent; what the agent keeps in
memory does not.
"""

from __future__ import annotations

from collections.abc import Callable

from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import NodeId, WorkerId
from torchrelay.simulation.machine.agents import Agent
from torchrelay.simulation.model.snapshot_store import SnapshotStore
from torchrelay.simulation.ports import Peers
from torchrelay.simulation.worker.processes import Process


class Machine:
    """One node: its processes, and its agent if that runs."""

    def __init__(
        self,
        world: Peers,
        make_agent: Callable[[Machine, str], Agent],
        workers: dict[WorkerId, Process],
        node: NodeId,
        slots: int,
    ) -> None:
        self.world = world
        self.workers = workers  # of all machines, and those that have ended too
        self.node = node
        self.slots = slots
        self._make_agent = make_agent
        self.processes: dict[WorkerId, Process] = {}
        self.ended_ids: dict[WorkerId, ev.WorkerExited | None] = {}  # None: its end was acknowledged
        self.agent: Agent | None = None
        self.split = False  # cut off from the orchestrator
        self.lost = False  # for ever
        self.dark = False  # without power
        self.agents = 0
        self.pids = 1000
        self.snapshot_store = SnapshotStore()
        self.start_agent()

    @property
    def reached(self) -> bool:
        """Whether the orchestrator can talk to this node's agent now."""
        return self.agent is not None and self.agent.reached

    def start_agent(self) -> None:
        """A new agent; it adopts the workers that are there."""
        if self.agent is not None or self.lost:
            return
        self.dark = False
        self.agents += 1
        self.agent = self._make_agent(self, f"{self.node}-{self.agents}")
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
        self.dark = True
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
