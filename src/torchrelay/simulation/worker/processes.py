"""Process: a simulated worker. Its main thread is a generator; its control thread is `hear`; a lock is not needed,
because in one world only one of them runs at a time.

The main thread yields what it waits for: a number of milliseconds, `BLOCKED` in something that will wake it, or the
next order: `ORDERED` at most as long as its patience lasts, `IDLE` for as long as it takes. Every wait has a ticket; a
wake-up with an older ticket comes too late and does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import JobId, NodeId, Point, Rank, WorkerId, WorkerPhase
from torchrelay.simulation.model.life import Exit, Life, Main, Wait
from torchrelay.simulation.model.snapshot_store import SnapshotStore
from torchrelay.simulation.ports import Members, Node, Peers, Wires
from torchrelay.simulation.worker.training import Training


class Process:
    """One worker process: its threads, its page, and what the kernel knows of it."""

    def __init__(self, world: Peers, machine: Node, order: od.StartWorker, pid: int) -> None:
        self.world = world
        self.machine = machine
        self.id: WorkerId = order.worker
        self.node: NodeId = order.node
        self.slot = order.slot
        self.guest = order.guest
        self.job: JobId = order.job
        self.pid = pid
        self.address = f"state:{self.id}"
        self.store = f"store:{self.id}"
        self.life = Life.RUNNING
        self.greeted = False  # its link is up
        self.undying = False  # it waits in the kernel: no signal reaches it
        self.warm = False
        self.ticket = 0
        self.phase = WorkerPhase.BOOTING
        self.phase_since_ms = world.now
        self.rank: Rank | None = None
        self.wiring: Wires | None = None
        self.begun: dict[Members, int] = {}  # how many collectives, by the ranks that they are among
        self.page: list[ev.PrivateRecord] = []
        self.inherited: ev.PrivateRecord | None = None  # of the rank's last holder, where this one goes on
        self.buddies: tuple[Rank, ...] = ()
        self.copies: dict[tuple[Rank, Point], bytes] = {}  # of its wards
        self.cpu_ms = 0
        self.exited: ev.WorkerExited | None = None
        self.ended_ms = 0
        self._waiting: Wait | None = None
        self._backlog: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self.training = Training(world, self)
        self._main: Main[None] = self.training.main()
        world.after(0, self._run, None, None)

    # ------------------------------------------------------------ the kernel's side

    @property
    def alive(self) -> bool:
        return self.life is not Life.ENDED

    @property
    def waits_for_orders(self) -> bool:
        """Whether its main thread does, and will lose its patience."""
        return self.life is Life.RUNNING and self._waiting is Wait.ORDERED

    @property
    def snapshot_store(self) -> SnapshotStore:
        """Where the snapshots of its node lie."""
        return self.machine.snapshot_store

    def kill(self, *, signal: int | None = None, code: int | None = None, cause: str = "") -> None:
        """The process ends now. Its connections close; its page stays."""
        if self.life is Life.ENDED or (self.undying and signal is not None):
            return
        self.life, self.ended_ms = Life.ENDED, self.world.now
        self.world.tell(f"{self.id} (rank {self.rank}) ends: {cause or signal or code}")
        self.exited = ev.WorkerExited(
            worker=self.id, node=self.node, code=code, signal=signal, cause=cause, private=self.records()
        )
        self.world.checker.died(self.id)
        if self.wiring is not None and self.rank is not None:
            self.wiring.shut(self.rank)
        self.machine.ended(self.id, self.exited)

    def stop(self) -> None:
        """SIGSTOP: neither thread runs."""
        if self.life is Life.RUNNING:
            self.life = Life.STOPPED
            self.world.tell(f"{self.id} (rank {self.rank}) is stopped in {self.phase}")

    def wake_up(self) -> None:
        """SIGCONT: what came meanwhile is taken up now, in its order."""
        if self.life is not Life.STOPPED:
            return
        self.life = Life.RUNNING
        self.world.tell(f"{self.id} (rank {self.rank}) wakes up")
        missed, self._backlog = self._backlog, []
        for action, given in missed:
            self.world.after(0, action, *given)

    def _held(self, action: Callable[..., object], *given: Any) -> bool:
        """Whether this must wait for a SIGCONT, or for ever."""
        if self.life is Life.STOPPED:
            self._backlog.append((action, given))
        return self.life is not Life.RUNNING

    # ------------------------------------------------------------ the main thread

    def wake(self, ticket: int, value: Any) -> None:
        """The wait with this ticket is over."""
        if ticket == self.ticket and not self._held(self.wake, ticket, value):
            self._run(value, None)

    def fail(self, ticket: int, error: Exception) -> None:
        """The wait with this ticket ends with an error."""
        if ticket == self.ticket and not self._held(self.fail, ticket, error):
            self._run(None, error)

    def poke(self) -> None:
        """There is an order to look at."""
        if self._waiting in (Wait.ORDERED, Wait.IDLE):
            self._waiting = None
            self.world.after(0, self.wake, self.ticket, None)

    def _run(self, value: Any, error: Exception | None) -> None:
        if self._held(self._run, value, error):
            return
        try:
            wanted = self._main.send(value) if error is None else self._main.throw(error)
        except Exit as end:
            self.kill(code=end.code, cause=end.cause)
            return
        self.ticket += 1
        if isinstance(wanted, int):
            self._waiting = None
            self.world.after(wanted, self.wake, self.ticket, None)
        else:
            self._waiting = wanted
            if wanted is Wait.ORDERED:
                self.world.after(self.world.plan.patience_ms, self._lose_patience, self.ticket)

    def _lose_patience(self, ticket: int) -> None:
        """It has waited long. If the orchestrator is not there either, it ends."""
        if ticket != self.ticket or self._held(self._lose_patience, ticket):
            return
        if self.machine.reached:
            self.world.after(self.world.plan.patience_ms, self._lose_patience, ticket)
        else:
            self.world.checker.lost_patience(self.id)
            self.kill(code=92, cause="the orchestrator stayed away")

    # ------------------------------------------------------------ the control thread

    def hear(self, order: od.AnyOrder) -> None:
        """An order arrives over the link."""
        if self.life is Life.ENDED or self._held(self.hear, order):
            return
        self.training.hear(order)

    def say(self, event: ev.Event) -> None:
        """Tell the agent. What is said before the end is heard before it."""
        if self.alive:
            self.machine.hear_worker(event)

    def enter(self, phase: WorkerPhase) -> None:
        """The main thread enters a phase."""
        self.phase = phase
        self.phase_since_ms = self.world.now
        self.world.entered(self.phase, self.rank)

    def keep(self, point: Point, data: bytes) -> None:
        """Write the private record of a point into the page: four slots, as in `wire.files.page`."""
        same = [record for record in self.page if record.point == point]
        if len(same) >= 2:
            self.page.remove(same[0])
        self.page = [*self.page, ev.PrivateRecord(point, data)][-4:]

    def give_copies(self, point: Point) -> None:
        """Give the record of a point to the buddies."""
        own = (self.inherited, *self.records())
        found = [record.data for record in own if record is not None and record.point == point]
        for buddy in self.buddies if found and self.wiring is not None and self.rank is not None else ():
            assert self.wiring is not None, "just asked"
            keeper = self.wiring.members.get(buddy)
            if keeper is not None and self.rank is not None:
                keeper.keep_copy(self.rank, point, found[-1])

    def keep_copy(self, ward: Rank, point: Point, data: bytes) -> None:
        """The last two points of each ward are kept."""
        self.copies[ward, point] = data
        points = sorted(kept for of, kept in self.copies if of == ward)
        for old in points[:-2]:
            del self.copies[ward, old]

    def records(self) -> tuple[ev.PrivateRecord, ...]:
        """What the page holds: the newest record of each point, older points first."""
        newest = {record.point: record for record in self.page}
        return tuple(newest[point] for point in sorted(newest))

    # ------------------------------------------------------------ what others learn

    def greet(self) -> None:
        """Say what a new link must know."""
        self.greeted = True
        started = ev.WorkerStarted(
            worker=self.id,
            node=self.node,
            slot=self.slot,
            pid=self.pid,
            job=self.job,
            address=self.address,
            store=self.store,
            **self.world.found(self.node),
        )
        self.say(started)
        self.training.greet()

    def seen(self) -> ev.WorkerSeen:
        """As its agent knows it."""
        return ev.WorkerSeen(
            worker=self.id,
            slot=self.slot,
            pid=self.pid,
            warm=self.warm,
            job=self.job,
            rank=self.rank,
            generation=self.training.heard,
            address=self.address,
            store=self.store,
        )
