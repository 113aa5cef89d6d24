"""Shots: how a simulated worker takes its snapshots; `torchrelay.worker.peers.snapshots` is the real thing."""

from __future__ import annotations

from functools import partial

from torchrelay.protocol.messages.events import Snapshot
from torchrelay.protocol.messages.ids import Point
from torchrelay.simulation.model import script as sc
from torchrelay.simulation.model.life import Life, Main
from torchrelay.simulation.model.snapshot_store import Shot, SnapshotStore
from torchrelay.simulation.ports import Trainee, Worker
from torchrelay.simulation.worker.wiring import Broken


class Shots:
    """The snapshots of one worker: at home, and with one buddy or two."""

    def __init__(self, training: Trainee) -> None:
        self._training = training
        self._world = training.world
        self._base: Point | None = None  # from which they are counted: the first of this generation
        self._taken: Point | None = None  # the last one
        self._settled: Point | None = None  # the one before, which all ranks have
        self._clears = False  # in the next gate: what is older than the base is of no use
        self._under_way = 0  # buddies that have not got the last one yet
        self._turn = 0  # of taking one: what was sent in an earlier one is cut

    @property
    def awaited(self) -> bool:
        """Some buddy has not got it yet: to wait for that counts as being in the gate."""
        return self._under_way > 0

    @property
    def snapshot_store(self) -> SnapshotStore:
        return self._training.process.snapshot_store

    def renew(self) -> None:
        """Connected anew: they are counted from here."""
        self._base, self._under_way = None, 0
        self._turn += 1

    def take(self) -> None:
        """At the entry of a call: one at the first of a generation, and then one every so many steps."""
        training, every = self._training, self._world.plan.snapshots
        point = training.committed
        assert point is not None, "who enters a call holds state"
        if not every or not point.step:
            return
        if self._base is None:
            self._base, self._clears = point, True
        elif point.section or (point.step - self._base.step) % every:
            return
        if self._taken != point:
            self._settled, self._taken = self._taken, point
        what = Snapshot(training.rank, point, training.restarts)
        shot = self._world.shots[what] = self.shot(point)
        self.snapshot_store.put(what, shot, self._settled)
        process = training.process
        buddies = process.buddies[: self._world.plan.buddies]
        self._under_way = len(buddies)
        self._turn += 1
        give = partial(self._give, self._turn)
        if process.wiring is not None:
            for buddy in buddies:
                keeper = process.wiring.members[buddy]
                self._world.after(self._world.chance.randint(1, 120), give, keeper, what, shot, self._settled)

    def shot(self, point: Point) -> Shot:
        """What there is to write down at this point."""
        training = self._training
        records = (training.process.inherited, *training.process.records())
        found = [record.data for record in records if record is not None and record.point == point]
        return Shot(sc.RankState(training.state.model, 0), found[-1] if found else b"", training.base, training.index)

    def _give(self, turn: int, keeper: Worker, what: Snapshot, shot: Shot, keep: Point | None) -> None:
        """It arrives with a buddy, if both are there."""
        training = self._training
        if turn != self._turn:
            return
        lives = {keeper.life, training.process.life}
        if lives == {Life.RUNNING, Life.STOPPED} or lives == {Life.STOPPED}:
            self._world.after(20, self._give, turn, keeper, what, shot, keep)
        elif lives == {Life.RUNNING} and not training.interrupted:
            keeper.snapshot_store.put(what, shot, keep)
            self._under_way -= 1

    def wait(self) -> Main[None]:
        """Before the gate: all buddies have it."""
        while self.awaited:
            if self._training.interrupted:
                raise Broken("poisoned")
            yield 3

    def passed(self) -> None:
        """A gate was passed: so all ranks have what was taken before it."""
        if self._clears and self._base is not None:
            self.snapshot_store.clear_before(self._base, self._training.restarts)
            self._clears = False
