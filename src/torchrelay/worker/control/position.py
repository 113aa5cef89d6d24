"""Position: where this worker stands, as main thread and control thread both see it, and what it has promised.

    main thread       begin_call ... enter_gate ... pass_gate      and at a safepoint: stop, begin_wiring, hold, go_on
    control thread    interrupt, halt (the promises), hear, lift (orders)

Passing a gate and reporting exclude each other: both take the lock. A worker that has reported in a generation it is
not wired in is *poisoned*: it passes no gate until it is ordered to.

Beginning a call and reporting exclude each other, too. A worker that was *halted* is well, and wired in the generation
of the halt: it finishes its call, and begins none until it is told how far to go (`Decide`), and none behind that.
No torch here, and no socket.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torchrelay.protocol.health.stalls import SECTION, STEP, Spot
from torchrelay.protocol.messages.ids import Generation, Point, WorkerPhase
from torchrelay.protocol.messages.orders import Decide, Resume, Verdict, WorkerOrder
from torchrelay.wire.files.page import Page

O = TypeVar("O", bound=WorkerOrder)  # noqa: E741  an order
T = TypeVar("T")

_AWAY = "no sign of the orchestrator for {:g} s"


class OrdersStayedAway(BaseException):
    """This worker has stood still for longer than its patience, and nobody has told it what to do.

    A BaseException, as scripts that catch errors of their steps must not catch it.
    """


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker says when it is interrupted or halted; the fields are those of `WorkerReported`."""

    generation: Generation
    committed: Point | None
    phase: WorkerPhase
    pending: Point | None
    caught_up: Point | None


class Position:
    """One worker's position. What is written under the lock may be read without it, for a hint."""

    def __init__(self, page: Page, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._page = page
        self._clock_ns = clock_ns
        self._lock = threading.Lock()  # that of `_changed`, whose own `with` is Python: every step takes it five times
        self._changed = threading.Condition(self._lock)
        self._orders: dict[type[WorkerOrder], WorkerOrder] = {}
        self._report: Report | None = None
        self._halt: Generation | None = None  # in which we were halted last, until that is lifted
        self._entered_ns = 0  # of the last call
        self.entered_ns = 0  # of the last phase, but a gate
        self._word_s = time.monotonic()
        self.wired = Generation(0)  # the generation we are connected in, or were about to connect in
        # Interrupted, and not wired anew since: what is being computed will not be committed. No property: it is asked
        # several times in a step, when whatever has to be called has long been out of all caches.
        self.poisoned = False
        self.heard = Generation(0)  # the newest generation we have heard of
        self.committed: Point | None = None
        self.caught_up: Point | None = None
        self.pending: Point | None = None
        self.astray: Point | None = None  # a call was to commit it and came to nothing: the next one is to
        self.phase = WorkerPhase.BOOTING
        self.ended_at = ""  # the line of the script that ended it, if it was a call of exit()
        self.waiting = False  # the main thread waits in here
        self.resting = False  # the main thread is at a safepoint, and is not connecting

    @property
    def reported(self) -> Report | None:
        """The last report."""
        return self._report

    @property
    def halted(self) -> Generation | None:
        """The generation of the halt that holds; None if it was lifted, or if a newer generation has come."""
        return self._halt if self._halt == self.heard else None

    @property
    def barred(self) -> bool:
        """Whether a promise forbids to begin a call: after an interrupt, or a halt, if the boundary is not ahead."""
        if self.poisoned:
            return True
        if self._halt is None or self.halted is None:
            return False
        decided = self.order(Decide)
        return decided is None or self.committed is None or self.committed >= decided.point

    @property
    def blocked(self) -> bool:
        """Whether the main thread may be in a collective that must be broken.

        Not at a safepoint: by the time it has been woken by an order, others may have begun to connect to this process.
        """
        return self.poisoned and not self.waiting and not self.resting

    # ------------------------------------------------------------ the main thread, while training

    def enter(self, phase: WorkerPhase, pending: Point | None = None) -> None:
        """Say what the main thread does from now on, and which point it is on the way to commit, if any."""
        with self._lock:
            self._enter(phase, pending)

    def begin_call(self, phase: WorkerPhase, pending: Point) -> bool:
        """Enter a call, on the way to commit `pending`; False if that is forbidden by now."""
        with self._lock:
            if self.barred:
                return False
            self._enter(phase, pending)
        return True

    def _enter(self, phase: WorkerPhase, pending: Point | None = None) -> None:
        now = self._clock_ns()
        self.phase, self.pending = phase, pending
        self.resting = phase in (WorkerPhase.STOPPED, WorkerPhase.FINISHED)
        self.entered_ns = now
        if phase in (WorkerPhase.COMPUTING, WorkerPhase.SECTION):
            self._entered_ns = now
        self._page.enter(phase, now)

    def enter_gate(self) -> bool:
        """Go into the gate of the pending point; False if that is forbidden by now."""
        with self._lock:
            if self.poisoned:
                return False
            self.phase = WorkerPhase.GATE
        self._page.enter(WorkerPhase.GATE, self._clock_ns())
        return True

    def pass_gate(self) -> bool:
        """The gate has completed: commit the pending point. False if the worker has reported before: it must wait."""
        with self._lock:
            if self.poisoned:
                return False
            self._commit()
        return True

    def await_verdict(self, patience_s: float | None) -> bool:
        """In a gate, after the report: True if the pending point is committed by order, False if it is to be redone."""

        def obey() -> bool | None:
            decided = self.order(Decide)
            if decided is None:
                return None
            if decided.verdict is Verdict.ROLL_FORWARD and decided.point == self.pending:
                self._commit()
                return True
            self.phase, self.pending = WorkerPhase.STOPPED, None
            return False

        return self.wait(obey, patience_s)

    def _commit(self) -> None:
        assert self.pending is not None, "only a pending point can be committed"
        now = self._clock_ns()
        self.committed, self.pending, self.phase = self.pending, None, WorkerPhase.UPDATING
        self.astray = None
        self._page.commit(self.committed, WorkerPhase.UPDATING, now, now - self._entered_ns)

    def stray(self) -> None:
        """An exception has left the call that was to commit the pending point; that is for the next call to do."""
        with self._changed:
            self.astray = self.pending
            self._enter(WorkerPhase.BETWEEN)

    def start(self, point: Point) -> None:
        """Hold the state of `point` from now on: at protect(), for a worker of the first start."""
        with self._changed:
            self.committed = point
        self._page.commit(point, self.phase, self._clock_ns(), 0)

    # ------------------------------------------------------------ the main thread, at a safepoint

    def stop(self) -> bool:
        """Stand still at the entry of a call, if a promise asks for it: then orders are for the main thread alone."""
        with self._lock:
            if not self.barred:
                return False
            self._enter(WorkerPhase.STOPPED)
        return True

    def bring_to(self, point: Point) -> None:
        """The script is being brought to the safepoint after `point`: there is no way back from it.

        Called by what `wait` finds orders with, under the lock: no report comes between the order and this.
        """
        self.caught_up = point

    def begin_wiring(self, generation: Generation) -> bool:
        """Begin to connect in this generation; False if there is a newer one by now."""
        with self._changed:
            if self.heard != generation:
                return False
            self.wired = generation
            self._weigh()  # before: whoever was poisoned and does not rest is blocked
            self.resting = False
        return True

    def end_wiring(self) -> None:
        """Connected, or given up."""
        self.resting = True

    def hold(self, point: Point, generation: Generation) -> bool:
        """The state of `point` has arrived, verified; False, and it does not count, if there is a newer generation."""
        with self._changed:
            if self.heard != generation:
                return False
            self.committed = point
        self._page.commit(point, self.phase, self._clock_ns(), 0)
        return True

    def go_on(self, generation: Generation) -> bool:
        """Leave the safepoint, free of all promises; False if there is a newer generation by now."""
        return self._leave(generation, free=True)

    def go_further(self, generation: Generation) -> bool:
        """Leave the safepoint, which is before the boundary of a halt; False if there is a newer generation."""
        return self._leave(generation, free=False)

    def _leave(self, generation: Generation, *, free: bool) -> bool:
        with self._changed:
            if self.heard != generation:
                return False
            if free:
                self._halt = None
            self._enter(WorkerPhase.BETWEEN)
        return True

    def wait(self, find: Callable[[], T | None], patience_s: float | None) -> T:
        """Wait until `find`, called under the lock, finds something.

        Raises `OrdersStayedAway` when the agent has said nothing for `patience_s` (None: wait for ever).
        """
        begin_s = time.monotonic()
        with self._changed:
            self.waiting = True
            try:
                while True:
                    found = find()
                    if found is not None:
                        return found
                    since_s = max(begin_s, self._word_s)
                    left = None if patience_s is None else since_s + patience_s - time.monotonic()
                    if left is not None and left <= 0:
                        raise OrdersStayedAway(_AWAY.format(patience_s))
                    self._changed.wait(left)
            finally:
                self.waiting = False

    def rest(self, seconds: float, enough: Callable[[], bool]) -> None:
        """Do nothing for so long, or until an order comes after which `enough` holds."""
        with self._changed:
            self._changed.wait_for(enough, seconds)

    def have_patience(self, patience_s: float) -> None:
        """Raises `OrdersStayedAway` when the agent has said nothing for `patience_s`."""
        if time.monotonic() - self._word_s > patience_s:
            raise OrdersStayedAway(_AWAY.format(patience_s))

    def order(self, kind: type[O]) -> O | None:
        """The order of this kind in the newest generation, if there is one."""
        found = self._orders.get(kind)
        return found if isinstance(found, kind) else None

    def await_poison(self, wired: Generation, patience_s: float | None) -> bool:
        """Wait until this worker is interrupted. False if it is halted instead: `wired` is not its generation now."""

        def news() -> bool | None:
            return True if self.poisoned else (None if self.wired == wired else False)

        return self.wait(news, patience_s)

    def await_way(self, patience_s: float | None) -> bool:
        """Wait, at a place that is no safepoint, until a call may be begun. False if this worker is interrupted."""

        def news() -> bool | None:
            return False if self.poisoned else (None if self.barred else True)

        return self.wait(news, patience_s)

    # ------------------------------------------------------------ the control thread

    def word(self) -> None:
        """The agent has said something, whatever it was."""
        self._word_s = time.monotonic()

    def interrupt(self, generation: Generation) -> Report | None:
        """Promise to pass no gate, and say where we stand; the same answer again for the same generation.

        None if the generation is older than one we have heard of.
        """
        with self._changed:
            if generation < self.heard:
                return None
            self._hear(generation)
            if self._report is None or self._report.generation < generation:
                self._report = Report(generation, self.committed, self.phase, self.pending, self.caught_up)
                self._weigh()
            self._changed.notify_all()
            return self._report if self._report.generation == generation else None

    def halt(self, generation: Generation) -> Report | None:
        """Promise to begin no call, and say where we stand; the same answer again for the same generation.

        None if the generation is older than one we have heard of; or if we hold no state yet: then ask again.
        """
        with self._changed:
            if generation < self.heard or self.committed is None:
                return None
            report = self._report
            if report is None or report.generation < generation:
                report = self._promise(generation)
            self._changed.notify_all()
            return report if report.generation == generation else None

    def _promise(self, generation: Generation) -> Report:
        """Halted: nothing is wrong, so our connections are those of this generation from now on."""
        cut = self.poisoned
        self._hear(generation)
        phase, pending = self.phase, self.pending
        if self.astray is not None and pending is None:
            # The point that we stand at lies before that call for whoever is brought to it: it is no boundary for us.
            phase, pending = WorkerPhase.COMPUTING, self.astray
        self._report = Report(generation, self.committed, phase, pending, self.caught_up)
        if not cut:
            self.wired = self._halt = generation
        self._weigh()
        return self._report

    def _weigh(self) -> None:
        """We have reported, or are wired anew."""
        self.poisoned = self._report is not None and self._report.generation > self.wired

    def lift(self, generation: Generation) -> bool:
        """A halt is called off: go on, if the main thread has not stopped. False if it has, or if there is no halt."""
        with self._changed:
            if self.halted != generation or self.phase is WorkerPhase.STOPPED:
                return False
            self._halt = None
            self._changed.notify_all()
            return True

    def hear(self, order: WorkerOrder) -> bool:
        """Keep an order for the main thread; False if it is of an older generation, and dropped."""
        with self._changed:
            if order.generation < self.heard:
                return False
            trains = self.committed is not None and not self.poisoned
            if isinstance(order, Resume) and order.generation > self.heard and trains:
                self._promise(order.generation)  # of a halt that was called off before we heard of it
            self._hear(order.generation)
            self._orders[type(order)] = order
            self._changed.notify_all()
            return True

    def _hear(self, generation: Generation) -> None:
        if generation > self.heard:
            self.heard = generation
            self._orders.clear()

    def mark_spot(self, spot: Spot) -> None:
        """Where the main thread stands, as the control thread sees it."""
        self._page.mark_spot(spot)

    @property
    def kind(self) -> str:
        """Of the call under way: step, section, or none."""
        pending, committed = self.pending, self.committed
        if pending is None or committed is None:
            return ""
        return STEP if pending.step > committed.step else SECTION

    def beat(self, collectives: int, groups: Sequence[tuple[int, int]] | None = ()) -> None:
        """The control thread is alive; for `groups` see `Page.beat`."""
        self._page.beat(self._clock_ns(), collectives, self.wired, groups)
