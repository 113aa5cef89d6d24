"""Training: what a simulated worker does, by ARCHITECTURE.md's "Step, gate, sections" and "Fault".

`main` is its main thread: start up, wait for a rank, connect, train call by call, serve its state until it may leave.
`hear` is its control thread: it answers an interrupt at once, and from then on the main thread moves by order only.
"""

from __future__ import annotations

from typing import Any

from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import START, Generation, Point, Rank, WorkerPhase
from torchrelay.simulation.model import script as sc
from torchrelay.simulation.model.life import Exit, Main, Wait
from torchrelay.simulation.ports import Kind, Members, Peers, Worker
from torchrelay.simulation.worker.safepoint import PASSED, Safepoint
from torchrelay.simulation.worker.shots import Shots
from torchrelay.simulation.worker.wiring import Broken, Differing, Replicas

EXIT_CODE = 3  # of a rank that a fault makes leave without a word


class ScriptFailed(Exception):
    """The script raised. `signature` is equal for equal errors."""


class Training(Safepoint):
    """One worker's two threads and all that they share."""

    def __init__(self, world: Peers, process: Worker) -> None:
        self.process = process
        self.world = world
        self.script = world.script
        # ---- what the lock guards
        self.committed: Point | None = None  # None: it holds no state
        self.pending: Point | None = None
        self.caught_up: Point | None = None
        self.reported = Generation(0)  # the newest generation in which it has promised to stand still
        self.report: ev.WorkerReported | None = None
        # ---- what was ordered and answered in the newest generation it has heard of
        self.heard = Generation(0)
        self.todo: dict[type[od.Order], Any] = {}
        self.answers: dict[type[od.Order], tuple[ev.Event, int]] = {}  # with the time when it was said
        self.assigned: od.Assign | None = None
        # ---- where the script is
        self.resumed = Generation(0)
        self.index = 0  # calls committed since the last start of all workers
        self.base = 0  # calls done before it, by the script's own checkpoint
        self.state = sc.RankState(0, 0)
        self.entered = False  # the code before the next call has run
        self.at_safepoint = False
        self.joined = False
        self.prepared = False  # the target of a move, waiting for the place to go to
        self.halted = Generation(0)  # in which it has promised to stop; 0: it has not
        self.limit: Point | None = None  # ... and after which point
        self.finished = False
        self.leaving: int | None = None
        self.failed_sources: set[Rank] = set()
        self.standing_news: ev.Event | None = None  # a fact to be told again to a new agent, as no order asks for it
        self.shots = Shots(self)
        self.replicas = Replicas(self)
        # ---- what a fault makes it do at the next occasion
        self.will_raise = ""
        self.will_hang = False
        self.will_stick = False
        self.will_exit = False

    # ================================================================ the control thread

    def hear(self, order: Any) -> None:
        """Take up an order; one that was obeyed before is answered again, one of an older generation is ignored."""
        if order.generation < self.heard:
            return
        if order.generation > self.heard:
            self.heard = order.generation
            self.halted, self.limit = Generation(0), None
            self.todo.clear()
            self.answers.clear()
            self.failed_sources.clear()
        kind = type(order)
        if kind is od.Interrupt:
            self.interrupt()
        elif kind is od.Halt:
            self.halt()
        elif kind is od.Recall:
            self.recall(order)
        elif kind is od.Resume and self.resumed and not self.interrupted and od.Reconfigure not in self.todo:
            self.lift()
        elif kind in self.answers:
            self.repeat(kind)
            return
        else:
            if kind is od.Assign:
                self.take_rank(order)
            self.todo[kind] = order
        self.process.poke()

    def take_rank(self, order: od.Assign) -> None:
        if self.assigned is None:
            self.assigned = order
            self.process.rank = order.rank
        elif order.rank != self.process.rank or order.replacement != self.assigned.replacement:
            self.world.checker.fail(f"{self.process.id} is given another role: {order}")

    def interrupt(self) -> None:
        """Promise to stand still and say where, then break what the main thread may be blocked in."""
        if self.heard > self.reported:
            self.reported = self.heard
            self.report = self.tell_standing()
            self.standing_news = None
            if self.process.wiring is not None and self.process.rank is not None:
                self.process.wiring.shut(self.process.rank)
        assert self.report is not None, "an interrupt was reported"
        self.process.say(self.report)

    def tell_standing(self) -> ev.WorkerReported:
        return ev.WorkerReported(
            **self.speaking(),
            committed=self.committed,
            phase=self.process.phase,
            pending=self.pending,
            caught_up=self.caught_up if self.committed is None else None,
            kept=self.shots.snapshot_store.kept,
        )

    def halt(self) -> None:
        """Promise to begin no call behind the one under way, and say how far that is. Nothing is cut."""
        if self.report is None or self.report.generation < self.heard:  # or it was called off before it was heard
            self.halted = self.resumed = self.heard
            self.report = self.tell_standing()
            self.limit = self.pending if self.pending is not None else self.committed
            if not isinstance(self.standing_news, ev.ReplicasDiffer):
                self.standing_news = None
            self.replicas.say_again()
        assert self.report is not None, "a halt was reported"
        self.process.say(self.report)

    def check_resumed(self) -> None:
        self.world.checker.resumed(self.process.id)

    def lift(self) -> None:
        """The move is called off: the promise of the halt is lifted. It may never have heard of that."""
        unheard = self.halted != self.heard
        self.halted, self.limit, self.resumed = Generation(0), None, self.heard
        if unheard:
            self.replicas.say_again()
        if self.report is None or self.report.generation < self.heard:
            self.report = self.tell_standing()
        self.answer(od.Resume, ev.WorkerResumed(**self.speaking()))

    def recall(self, order: od.Recall) -> None:
        """Hand out the copy of a ward's record."""
        data = self.process.copies.get((order.ward, order.point), b"")
        shot = self.shots.snapshot_store.find(order.ward, order.point, self.restarts)
        data = shot.record if shot is not None and not data else data
        self.process.say(ev.RecordKept(**self.speaking(), ward=order.ward, point=order.point, private=data))

    @property
    def bound(self) -> Point | None:
        """The point behind which it must begin no call; None if it has promised nothing."""
        if not self.halted:
            return None
        decided = self.todo.get(od.Decide)
        return decided.point if decided is not None else self.limit

    @property
    def interrupted(self) -> bool:
        return self.reported > self.resumed

    def speaking(self) -> dict[str, Any]:
        """The address of an answer."""
        return {
            "job": self.process.job,
            "generation": self.heard,
            "worker": self.process.id,
            "rank": self.process.rank,
        }

    def greet(self) -> None:
        """What a new agent must know of this worker."""
        if self.process.warm:
            self.process.say(ev.WorkerWarm(worker=self.process.id))
        if self.joined:
            self.say_joined()
        if self.prepared:
            self.process.say(ev.WorkerPrepared(worker=self.process.id))
        if self.standing_news is not None:
            self.process.say(self.standing_news)
        if self.report is not None and self.report.generation == self.heard:
            self.process.say(self.report)
        for kind in list(self.answers):
            self.repeat(kind)

    @property
    def takes_over(self) -> bool:
        """Whether it comes to a rank that others have held: the options of the start come with the state."""
        return self.prepared or (self.assigned is not None and self.assigned.replacement)

    def say_joined(self) -> None:
        rank = self.rank
        self.process.say(
            ev.WorkerJoined(
                worker=self.process.id,
                job=self.process.job,
                rank=rank,
                shard=self.script.shards[rank],
                snapshot_every=None if self.takes_over else self.world.plan.snapshots,
                snapshot_buddies=self.world.plan.buddies,
            )
        )

    def answer(self, kind: type[od.Order], event: ev.Event) -> None:
        self.answers[kind] = event, self.world.now
        self.process.say(event)

    def repeat(self, kind: type[od.Order]) -> None:
        """Say again what was answered, and how long ago that was."""
        event, at_ms = self.answers[kind]
        self.process.say(ev.age_event(event, self.world.now - at_ms))

    # ================================================================ the main thread

    @property
    def rank(self) -> Rank:
        assert self.process.rank is not None, "it acts for a rank only when it has one"
        return self.process.rank

    def main(self) -> Main[None]:
        """From the fork to the end."""
        try:
            yield from self.live()
        except ScriptFailed as error:
            yield from self.die_of("script", str(error), self.world.plan.script_code)

    def live(self) -> Main[None]:
        speed = self.world.plan.speed
        yield self.world.draw(speed.boot_ms)
        self.process.greet()
        yield self.world.draw(speed.warm_ms)
        self.process.warm = True
        self.process.say(ev.WorkerWarm(worker=self.process.id))
        while self.assigned is None:
            yield Wait.IDLE
        yield self.world.draw(speed.setup_ms)
        self.do_once()
        if self.assigned.replacement:
            yield from self.join()
            if self.assigned.examples:
                yield from self.rehearse()
            yield from self.stand()
        else:
            yield from self.stand()
            yield self.world.draw(speed.setup_ms)
            yield from self.join()
            self.start_from(self.assigned.restarts)
        yield from self.train()
        yield from self.finish()

    def do_once(self) -> None:
        """A side effect that must happen once per job and rank."""
        assert self.assigned is not None, "it has its rank"
        if "tracker" in dict(self.assigned.once):
            return
        value = f"{self.rank} by {self.process.id}".encode()
        recorded = ev.OnceRecorded(
            job=self.process.job, rank=self.rank, name="tracker", value=value, restarts=self.assigned.restarts
        )
        self.process.say(recorded)

    def join(self) -> Main[None]:
        if self.script.refused:
            yield from self.die_of("refused", "a model that differs between ranks", 93)
        self.joined = True
        self.say_joined()

    def rehearse(self) -> Main[None]:
        """The target of a move: training goes on meanwhile."""
        yield self.world.draw(self.world.plan.speed.compute_ms)
        if self.world.target_dies():
            self.world.checker.gone(self.process.id, "a doomed target")
            raise Exit(1, "doomed")
        self.prepared = True
        self.process.say(ev.WorkerPrepared(worker=self.process.id))

    def start_from(self, restarts: int) -> None:
        """The script's beginning: from its own checkpoint, if the job has fallen back to it."""
        self.base, states = self.world.checkpoint_of(restarts)
        self.state = states[self.rank]
        self.committed = START
        self.process.enter(WorkerPhase.BETWEEN)

    def die_of(self, kind: str, signature: str, code: int) -> Main[None]:
        """Tell of an exception that nobody catches, and end."""
        self.world.checker.raised(self.process.id, kind, signature)
        self.say_raised(kind, signature, fatal=True)
        yield self.world.chance.randint(1, 60)
        raise Exit(code, f"raised: {signature}")

    def say_raised(self, kind: str, signature: str, *, fatal: bool) -> None:
        event = ev.WorkerRaised(
            worker=self.process.id,
            job=self.process.job,
            rank=self.rank,
            point=self.committed,
            kind=kind,
            signature=signature,
            summary=signature,
            fatal=fatal,
        )
        if fatal:
            self.standing_news = event
        self.process.say(event)

    @property
    def restarts(self) -> int:
        return self.assigned.restarts if self.assigned is not None else 0

    # ------------------------------------------------------------ calls

    def train(self) -> Main[None]:
        while True:
            if not self.entered:
                yield from self.walk()
            if self.base + self.index == len(self.script.calls):
                return
            yield from self.call()

    def walk(self) -> Main[None]:
        """The code between two calls, up to the entry of the next one."""
        self.process.enter(WorkerPhase.BETWEEN)
        yield self.world.draw(self.world.plan.speed.between_ms)
        call = self.base + self.index
        self.misbehave()
        if call in self.script.undeclared:
            try:
                yield from self.collective(("undeclared", call), 0)
            except Broken as error:
                yield from self.die_of("undeclared", f"a collective between steps was cut: {error}", 1)
        self.state = sc.between(self.state)
        self.entered = True

    def call(self) -> Main[None]:
        """One step or section, as often as it takes; returns when it is committed."""
        while True:
            while self.interrupted or self.bound == self.committed != None:  # noqa: E711  None: it has no bound
                yield from self.stand()
            self.replicas.flip()
            before = self.state
            if (yield from self.attempt()) is PASSED:
                return
            self.state = before  # rewound: what forward and backward change is put back

    def attempt(self) -> Main[bool]:
        """One attempt at a call: compute, reduce, pass the gate, update."""
        assert self.committed is not None, "who trains holds state"
        call = self.base + self.index
        kind = self.script.calls[call]
        step = kind is WorkerPhase.COMPUTING
        self.pending = self.committed.after_step() if step else self.committed.after_section()
        state, given = self.state, tuple[int, ...]()
        try:
            self.process.enter(kind)
            self.shots.take()
            for group in self.script.groups(self.rank)[:1]:
                yield from self.collective(("gather", self.pending), 0, group)
            yield self.world.draw(self.world.plan.speed.compute_ms)
            yield from self.trouble(call)
            for group in self.script.groups(self.rank)[1:]:
                yield from self.collective(("sum", self.pending), 0, group)
            state = sc.drawn(state)
            share = sc.contribution(state, sc.batch_of(call, self.rank))
            given = yield from self.collective(("reduce", self.pending), share)
            if self.world.plan.compares and step:
                yield from self.replicas.compare()
            self.process.keep(self.pending, str(state.random).encode())
            self.process.give_copies(self.pending)
            yield from self.shots.wait()
            self.process.enter(WorkerPhase.GATE)
            yield from self.collective(("gate", self.pending), 0)
            passed = not self.interrupted or (yield from self.verdict())
        except ScriptFailed as error:
            if not self.interrupted:
                raise
            self.say_raised("script", str(error), fatal=False)
            passed = yield from self.verdict()
        except Differing as error:
            self.replicas.say(error)
            passed = yield from self.verdict()
        except Broken as error:
            yield from self.stick()
            if not self.interrupted:
                self.say_broken(error)
            passed = yield from self.verdict()
        if passed:
            yield from self.update(call, sc.updated(state, given))
        self.pending = None
        return passed

    def update(self, call: int, after: sc.RankState) -> Main[None]:
        """Past the gate: the call counts as committed, and the local update runs."""
        assert self.pending is not None, "a gate is passed on the way to a point"
        self.committed, self.pending = self.pending, None
        self.process.enter(WorkerPhase.UPDATING)
        self.world.checker.committed(self.process.id, call, after)
        self.shots.passed()
        yield self.world.draw(self.world.plan.speed.update_ms)
        self.process.keep(self.committed, str(after.random).encode())
        self.state = after
        self.index += 1
        self.entered = False
        self.process.enter(WorkerPhase.BETWEEN)

    def collective(self, kind: Kind, value: int, members: Members = ()) -> Main[tuple[int, ...]]:
        """Enter a collective, of all ranks if no others are named, and wait for all others in it.

        Raises `Broken`; in a poisoned attempt at once.
        """
        if self.interrupted:
            raise Broken("poisoned")
        assert self.process.wiring is not None, "who trains is connected"
        self.process.wiring.enter(self.process, self.rank, kind, value, members or self.script.everybody)
        result: tuple[int, ...] = yield Wait.BLOCKED
        return result

    def say_broken(self, error: Broken) -> None:
        event = ev.CollectiveFailed(
            worker=self.process.id, job=self.process.job, rank=self.rank, generation=self.resumed, summary=str(error)
        )
        self.standing_news = event
        self.process.say(event)

    def verdict(self) -> Main[bool]:
        """Wait for the interrupt, and for what is decided of this call."""
        while True:
            decided = self.todo.get(od.Decide) if self.interrupted else None
            if decided is None:
                yield Wait.ORDERED
                continue
            in_gate = self.process.phase is WorkerPhase.GATE and decided.point == self.pending
            return decided.verdict is od.Verdict.ROLL_FORWARD and in_gate

    def trouble(self, call: int) -> Main[None]:
        """The errors of the script itself, and those that a fault gave it."""
        error = self.script.error
        if error is not None and error.call == call and error.rank in (None, self.rank):
            raise ScriptFailed(f"error in call {call}")
        self.misbehave()
        if self.will_hang and self.script.calls[call] is WorkerPhase.COMPUTING and self.would_be_missed():
            self.world.tell(f"{self.process.id} (rank {self.rank}) hangs")
            self.world.checker.gone(self.process.id, "hangs")
            yield Wait.BLOCKED

    def stick(self) -> Main[None]:
        """A collective that never returns, though its connections are gone."""
        if self.will_stick and self.interrupted:
            self.world.tell(f"{self.process.id} (rank {self.rank}) is stuck")
            self.world.checker.gone(self.process.id, "stuck")
            yield Wait.BLOCKED

    def would_be_missed(self) -> bool:
        """A hang is found if others wait for it. Before the first commit it has ten minutes: too long for us."""
        return self.committed != START and self.world.checker.missed(self.process.rank)

    def misbehave(self) -> None:
        """Exit or raise, if a fault says so."""
        if self.will_exit:
            self.world.checker.exits(self.process.id)
            raise Exit(EXIT_CODE, f"os._exit({EXIT_CODE})")
        if self.will_raise:
            signature, self.will_raise = self.will_raise, ""
            raise ScriptFailed(signature)

    def finish(self) -> Main[None]:
        """The script has ended with 0: serve state until all have."""
        while self.bound is not None:  # the script's end is a safepoint like any other
            yield from self.stand()
        self.finished = True
        while True:
            if self.interrupted:
                yield from self.stand()
            self.process.enter(WorkerPhase.FINISHED)
            held = str(self.state.digest())
            self.standing_news = ev.WorkerFinished(**self.speaking(), point=self.committed, held=held)
            self.process.say(self.standing_news)
            told = self.heard
            while not self.interrupted and not (self.heard > told and not self.halted):
                self.leave()
                yield Wait.IDLE

    def leave(self) -> None:
        order = self.todo.get(od.Leave)
        if order is not None:
            raise Exit(order.code, "left")
