"""Safepoint: a simulated worker at a safepoint. It moves by order only: is ready, connects, is restored, goes on."""

from __future__ import annotations

from typing import Any

from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.enclosed import Snapshot
from torchrelay.protocol.messages.ids import Generation, Point, Rank, WorkerPhase
from torchrelay.simulation.model import script as sc
from torchrelay.simulation.model.life import Main, Wait
from torchrelay.simulation.ports import Peers, Worker
from torchrelay.simulation.worker.shots import Shots
from torchrelay.simulation.worker.wiring import Broken

REDONE, PASSED = False, True


class Safepoint:
    """What a worker does while it stands. `Training` adds what it does between two safepoints."""

    process: Worker
    world: Peers
    committed: Point | None
    caught_up: Point | None
    reported: Generation
    heard: Generation
    halted: Generation
    resumed: Generation
    todo: dict[type[od.Order], Any]
    answers: dict[type[od.Order], tuple[ev.Event, int]]
    index: int
    base: int
    state: sc.RankState
    entered: bool
    at_safepoint: bool
    joined: bool
    finished: bool
    failed_sources: set[Rank]
    shots: Shots
    stands_for = Generation(0)  # the halt for which it stands; 0: it waits to be connected

    @property
    def interrupted(self) -> bool:
        raise NotImplementedError

    @property
    def restarts(self) -> int:
        raise NotImplementedError

    @property
    def bound(self) -> Point | None:
        raise NotImplementedError

    @property
    def rank(self) -> Rank:
        raise NotImplementedError

    def speaking(self) -> dict[str, Any]:
        raise NotImplementedError

    def answer(self, kind: type[od.Order], event: ev.Event) -> None:
        raise NotImplementedError

    def check_resumed(self) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------ the safepoint

    def stand(self) -> Main[None]:
        """At a safepoint: move by order only, until resumed."""
        if self.joined and not self.finished:
            self.process.enter(WorkerPhase.STOPPED)
        self.at_safepoint = True
        self.stands_for = self.halted if not self.interrupted else Generation(0)
        while not (yield from self.obey()):
            pass
        self.at_safepoint = False

    def obey(self) -> Main[bool]:
        """Do one thing that was ordered, or wait for an order. True once resumed."""
        todo, done = self.todo, self.answers
        if self.released:
            return True
        try:
            if od.Decide in todo and od.Decide not in done:
                self.be_ready(od.Decide, todo[od.Decide].point, todo[od.Decide].hand_over)
            elif od.Assign in todo and od.Assign not in done and not todo[od.Assign].replacement:
                self.be_ready(od.Assign, None)
            elif od.Replay in todo and od.Replay not in done:
                yield from self.replay(todo[od.Replay])
            elif od.Reconfigure in todo and od.Reconfigure not in done:
                yield from self.connect(todo[od.Reconfigure])
            elif od.Restore in todo and od.Restore not in done:
                yield from self.restore(todo[od.Restore])
            elif od.Park in todo and od.Park not in done:
                yield from self.park(todo[od.Park])
            elif od.Resume in todo:
                return self.resume(todo[od.Resume])
            else:
                yield Wait.ORDERED if self.interrupted or self.stands_for else Wait.IDLE
        except Broken as error:
            self.give_up_connecting(error)
        return False

    @property
    def released(self) -> bool:
        """Whether it stands here for a move that was called off, or that lets it go on for one more call."""
        if self.heard != self.stands_for or self.interrupted:
            return False
        return not self.halted or self.bound != self.committed

    def be_ready(self, kind: type[od.Order], point: Point | None, hand_over: bool = False) -> None:
        if point != self.committed:
            self.world.checker.fail(f"{self.process.id} stands at {self.committed} and is told {kind.__name__} {point}")
        left = [record.data for record in self.process.records() if record.point == point] if hand_over else []
        self.answer(kind, ev.WorkerReady(**self.speaking(), point=point, private=left[-1] if left else b""))

    def give_up_connecting(self, error: Broken) -> None:
        """Connecting failed: say so, unless a newer generation is the reason."""
        order = self.todo.pop(od.Reconfigure, None)
        if order is not None:
            self.process.say(ev.ReconfigureFailed(**self.speaking(), reason=str(error)))

    def connect(self, order: od.Reconfigure) -> Main[None]:
        self.process.wiring = self.world.wiring(order.generation, order.store)
        self.process.begun = dict.fromkeys(
            self.world.script.groups(self.rank), 0
        )  # a group is counted before it is used
        if self.world.reconfigure_breaks():
            yield 20
            raise Broken("no route")
        if order.generation != self.heard:
            return
        self.process.wiring.arrive(self.rank, self.process)
        yield Wait.BLOCKED
        # Before anybody goes on, all records of this point are with their new buddies.
        point = self.committed if self.committed is not None else self.caught_up
        self.process.buddies = order.buddies
        if point is not None:
            self.process.give_copies(point)
        if order.generation == self.heard:
            self.answer(od.Reconfigure, ev.WorkerReconfigured(**self.speaking(), took_ms=1.0))

    def resume(self, order: od.Resume) -> bool:
        if order.point != self.committed or (self.interrupted and order.generation != self.reported):
            self.world.checker.fail(f"{self.process.id} at {self.committed} is told to resume from {order.point}")
        if od.Reconfigure in self.answers:
            self.shots.renew()
        self.resumed = order.generation
        self.check_resumed()
        self.answer(od.Resume, ev.WorkerResumed(**self.speaking()))
        return True

    def park(self, order: od.Park) -> Main[None]:
        """Write this rank down; its disk may be full."""
        yield self.world.draw(self.world.plan.speed.restore_ms)
        if order.generation != self.heard:
            return
        if order.point != self.committed:
            self.world.checker.fail(f"{self.process.id} stands at {self.committed} and is to park at {order.point}")
        shot = self.shots.shot(order.point)
        if not self.world.park(order, Snapshot(self.rank, order.point, self.restarts), shot):
            self.answer(od.Park, ev.ParkFailed(**self.speaking(), reason="disk full"))
            return
        node, digest = self.process.node, str(shot.state.digest())
        parked = ev.WorkerParked(**self.speaking(), node=node, point=order.point, size=8, private="p", digest=digest)
        self.answer(od.Park, parked)

    # ------------------------------------------------------------ a replacement's way

    def replay(self, order: od.Replay) -> Main[None]:
        """Bring the script to the safepoint after a point, with the record that a source serves."""
        if self.caught_up is None:
            while (source := self.world.serving(order.sources, order.rank, order.point)) is None:
                yield 20
                order = self.todo.get(od.Replay, order)  # the newest one names the newest sources
                if order.generation != self.heard:
                    return
            self.caught_up = order.point
            self.process.inherited = ev.PrivateRecord(order.point, order.private)
            self.base, self.index = source.base, source.index
            yield self.world.draw(self.world.plan.speed.replay_ms)
            self.state = sc.between(sc.RankState(0, int(order.private)))
            self.entered = True
        if self.caught_up != order.point:
            self.world.checker.fail(f"{self.process.id} was brought to {self.caught_up}, and is sent to {order.point}")
        if order.generation == self.heard:
            self.answer(od.Replay, ev.WorkerReady(**self.speaking(), point=order.point))

    def restore(self, order: od.Restore) -> Main[None]:
        """Fetch the state from the first source that was not tried yet, and compare its digest.

        A large one comes from all sources, and if one fails from the others: only one whose digest differs is told of.
        """
        self.todo.pop(od.Restore)
        left = [source for source in order.sources if source.rank not in self.failed_sources] or list(order.sources)
        if not self.world.chance.randrange(2):
            del left[1:]
        while True:
            source = left.pop(0)
            yield self.world.draw(self.world.plan.speed.restore_ms)
            got = self.world.fetch(source, order)
            if got is None:
                yield self.world.chance.choice((1, 400))  # refused, or a time-out
            if order.generation != self.heard:
                return
            if got is not None and got.sent == got.state.digest():
                break
            mismatch = got is not None
            if mismatch or not left:
                self.failed_sources.add(source.rank)
                reason = "digest differs" if mismatch else "no answer"
                said = ev.RestoreFailed(**self.speaking(), source=source.rank, reason=reason, mismatch=mismatch)
                self.process.say(said)
            if not left:
                return
        self.state = sc.RankState(got.state.model, self.state.random)
        if order.snapshot:
            self.shots.snapshot_store.clear_after(order.point, self.restarts)
        self.committed = order.point
        said_restored = ev.StateRestored(
            **self.speaking(), point=order.point, sources=(source.rank,), digest=str(got.sent), size=8
        )
        self.answer(od.Restore, said_restored)
