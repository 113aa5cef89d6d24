"""Engine: one run of a job on a simulated cluster, from event to event. Its `Handling` says what a fault leads to.

Between two events a job trains, with a checkpoint at each interval, or it stands; either way the time goes to exactly
one place in the `Account`. Events are faults, repairs, warnings, and whatever the way of recovering has asked for.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from torchrelay.economics.formulas.rates import Counting, Unreasonable
from torchrelay.forecast.inputs.faults import Again, Cause, Fault, Stream
from torchrelay.forecast.inputs.settings import MOST_FAULTS, SECOND_H, Settings
from torchrelay.forecast.inputs.trace import replay
from torchrelay.forecast.play.buckets import Account, Bucket
from torchrelay.forecast.play.spares import Usage
from torchrelay.wire.files.launch import PathLimits

# How long a path is lost before its node is at fault (`torchrelay run --net-down`).
PATH_PATIENCE_H = PathLimits().down_s * SECOND_H
MOST_AHEAD = 1_000  # faults that are drawn ahead for their warnings
MOST_AT_ONCE = 100_000  # things that happen at one time: a burst that takes all nodes has far fewer


class Handling(Protocol):
    """How a job gets over faults. `speed` 0: it does not train, and its time goes to `bucket`."""

    @property
    def speed(self) -> float: ...

    @property
    def bucket(self) -> Bucket: ...

    def fault(self, fault: Fault) -> bool:
        """A node or process is at fault. Whether that was the job's own, and so an interruption."""
        ...

    def repaired(self, node: int) -> None: ...

    def warned(self, node: int) -> None: ...

    def uses(self, node: int) -> bool:
        """Whether training depends on this node now."""
        ...

    def cleared(self, node: int) -> None:
        """A warning was a false alarm: the node has been looked at."""
        ...

    def due_h(self) -> float:
        """When it wants to be called next."""
        ...

    def act(self) -> None: ...

    def close(self) -> None:
        """The run is over, whatever is under way."""
        ...


class Stuck(RuntimeError):
    """Nothing can happen any more, and the job does not train."""


class World:
    """One run. `way` is given after the world is there, as it looks at it."""

    handling: Handling

    def __init__(self, settings: Settings, seed: int) -> None:
        self.settings = settings
        # Generators of their own for faults, refailures and false alarms, so that all ways of recovering meet the same.
        self.chance = np.random.default_rng([seed, 0])
        nature = np.random.default_rng([seed, 1])
        self.alarming = np.random.default_rng([seed, 3])
        self.account = Account()
        self.usage = Usage()
        self.now_h = 0.0
        self.run_h = 0.0  # how long the job has run, for faults that are counted so
        self.interval_h = settings.interval_h()
        self.save_h = settings.costs.save_h if settings.checkpoint else 0.0
        self.into_h = 0.0  # how far it is in the present interval, its save included
        self.down: set[int] = set()
        self.paths: Counter[int] = Counter()  # network paths that are lost now, by node
        self.faults = 0  # of any node
        self.interruptions = 0
        self.rollbacks = 0  # to a checkpoint
        self.back_to_snapshots = 0
        self.verdicts: Counter[str] = Counter()  # how incidents were resolved, in the words of the core
        self.alarms = 0
        self.moves = 0
        self.pauses_h: list[float] = []
        self._stood_h: float | None = None
        self._heap: list[tuple[float, int, Callable[[int], None], int]] = []
        self._number = 0
        self.every = settings.pool + settings.floating
        self.stream = Stream(
            settings.faults, self.every, self.mean_gap_h(), nature, repairs=settings.spares is not None
        )
        self.again = Again(settings.faults, seed)
        source = replay(settings.trace, self.every, settings.trace_file) if settings.trace else self.stream
        self._coming: Iterator[Fault] = iter(source)
        self._next: Fault | None = None
        self._drawn: deque[Fault] = deque()  # after the next one: drawn so far, because they may be warned of
        self.draw_next()
        self.plan_alarm()

    def mean_gap_h(self) -> float | None:
        """Of all nodes that are looked at, where it was given for the job's own."""
        gap = self.settings.gap_h
        return None if gap is None else gap * self.settings.nodes / self.every

    # ------------------------------------------------------------ time

    def after(self, hours: float, action: Callable[[int], None], node: int) -> None:
        self._number += 1
        heapq.heappush(self._heap, (self.now_h + hours, self._number, action, node))

    def run(self) -> None:
        """To the end of the time, or of the work. Raises `Stuck`."""
        rounds = 0
        while True:
            at = min(self.fault_h(), self._heap[0][0] if self._heap else math.inf, self.handling.due_h(), self.end_h())
            if math.isinf(at):
                raise Stuck(f"after {self.now_h:.1f} h the job waits for a node, and none is being repaired")
            rounds = 0 if at > self.now_h else rounds + 1
            if rounds > MOST_AT_ONCE:
                raise Stuck(
                    f"at {self.now_h:.4f} h things happen without end: a defect of the forecast, please report it"
                )
            self.pass_until(at)
            if self.over():
                break
            if self._heap and self._heap[0][0] <= at:
                _, _, action, node = heapq.heappop(self._heap)
                action(node)
            elif self.handling.due_h() <= at:
                self.handling.act()
            elif self._next is not None and self.fault_h() <= at:
                fault = self._next
                self.draw_next()
                self.strike(fault)
            self.note()
        self.handling.close()
        self.account.close()
        if self._stood_h is not None:
            self.pauses_h.append(self.now_h - self._stood_h)

    def over(self) -> bool:
        work = self.settings.work_h
        return self.account.done_h >= work - 1e-9 if work is not None else self.now_h >= self.settings.hours - 1e-9

    def end_h(self) -> float:
        """When the run is over if nothing happens before. Of a job with fixed work: a bound from below."""
        work = self.settings.work_h
        if work is None:
            return self.settings.hours
        speed = self.pace()
        return self.now_h + max(1e-9, (work - self.account.done_h) / speed) if speed else math.inf

    def pace(self) -> float:
        """How fast it trains now; 1 is undisturbed. All wait for the node that has lost most paths."""
        lost = max((count for node, count in self.paths.items() if self.handling.uses(node)), default=0)
        return self.handling.speed * self.settings.path_speed**lost

    def pass_until(self, at: float) -> None:
        hours = max(0.0, at - self.now_h)
        self.usage.borrowed_h += self.usage.in_use * hours
        speed, bucket = self.pace(), self.handling.bucket
        self.now_h = max(at, self.now_h)
        if speed == 0:
            self.account.spend(bucket, hours)
        else:
            self.run_h += hours
            self.train(hours, speed)

    def train(self, hours: float, speed: float) -> None:
        """Train for a while, with whole cycles of an interval and its save done at once."""
        interval, cycle = self.interval_h, self.interval_h + self.save_h
        total = self.into_h + hours
        whole = 0 if math.isinf(cycle) else int(total / cycle)
        into = total - whole * cycle if whole else total
        trained = min(into, interval) - min(self.into_h, interval) + (whole * interval if whole else 0.0)
        self.account.train(trained, trained * speed)
        self.account.spend(Bucket.SAVE, hours - trained)
        self.into_h = into
        if whole:
            rest = min(into, interval)
            self.account.keep(but_run_h=rest, but_work_h=rest * speed)

    def note(self) -> None:
        """Whether training stands, and how long it stood."""
        if self.handling.speed == 0 and self._stood_h is None:
            self._stood_h = self.now_h
        elif self.handling.speed and self._stood_h is not None:
            self.pauses_h.append(self.now_h - self._stood_h)
            self._stood_h = None

    # ------------------------------------------------------------ faults

    def fault_h(self) -> float:
        """When the next fault comes, on the wall clock; or its warning, if that is earlier."""
        if self._next is None:
            return math.inf
        if self.settings.counting is Counting.WALL:
            return max(self._next.at_h, self.now_h)
        return self.now_h + max(0.0, self._next.at_h - self.run_h) if self.handling.speed else math.inf

    def draw_next(self) -> None:
        """The next fault, and the warnings that are due before it.

        What is drawn ahead reaches as far beyond the next fault as warnings do, so that one is never late because
        another fault comes before. Only a fault nearer to the beginning than its lead is warned of at once.
        """
        self._next = self._drawn.popleft() if self._drawn else self.drawn()
        ahead = self.settings.faults.lead_h if self.warns() and self.settings.faults.foreseen else 0.0
        while self._next is not None and ahead:
            far = self._drawn and self._drawn[-1].at_h > self._next.at_h + ahead
            if far or len(self._drawn) >= MOST_AHEAD:
                break
            fault = self.drawn()
            if fault is None:
                break
            self._drawn.append(fault)

    def drawn(self) -> Fault | None:
        """One more, and its warning."""
        fault = next(self._coming, None)
        if fault is not None and fault.lead_h and self.warns():
            self.after(max(0.0, fault.at_h - fault.lead_h - self.now_h), self.warn, fault.node)
        return fault

    def warns(self) -> bool:
        """Whether there are warnings: a trace has none, and faults that come in running time have no time for one."""
        settings = self.settings
        return settings.trace is None and settings.counting is Counting.WALL

    def warn(self, node: int) -> None:
        if node not in self.down:
            self.handling.warned(node)

    def plan_alarm(self, _: int = 0) -> None:
        """False alarms: as many to each true one as the precision says."""
        precision = self.settings.faults.precision
        rate = (1 - precision) / precision / self.stream.warned_h()
        if rate > 0 and self.warns():
            self.after(
                float(self.alarming.exponential(1 / rate)), self.false_alarm, int(self.alarming.integers(self.every))
            )

    def false_alarm(self, node: int) -> None:
        self.plan_alarm()
        if node not in self.down:
            self.alarms += 1
            self.handling.warned(node)
            self.after(self.settings.check_h, self.clear, node)

    def clear(self, node: int) -> None:
        if node not in self.down:
            self.handling.cleared(node)

    def strike(self, fault: Fault) -> None:
        """A fault happens. A node that is down already can not fail, and one that trains through it slows all."""
        settings = self.settings
        if fault.node in self.down:
            return
        self.faults += 1
        if self.faults > 2 * MOST_FAULTS:
            done = f"{self.now_h:,.0f} h only {self.account.done_h:,.1f} h of work are done"
            why = f"after {2 * MOST_FAULTS:,} faults and {done}: it will hardly ever be"
            raise Unreasonable("work_h", why, why)
        if fault.cause is Cause.PATH and settings.failover:
            self.paths[fault.node] += 1
            self.after(PATH_PATIENCE_H, self.leave, fault.node)
            self.after(fault.repair_h, self.path_back, fault.node)
            return
        if not settings.during_recovery and self.handling.speed == 0:
            if fault.lead_h:  # it was foreseen, and does not come: its node is as good as before
                self.clear(fault.node)
            return
        lasting = fault.cause is not Cause.PROCESS and settings.spares is not None
        if lasting:
            self.down.add(fault.node)
            self.usage.most_down = max(self.usage.most_down, len(self.down))
            if math.isfinite(fault.repair_h):
                back = self.mended if fault.cause is Cause.PATH else self.repair
                self.after(fault.repair_h, back, fault.node)
        self.interruptions += self.handling.fault(fault)

    def leave(self, node: int) -> None:
        """A path stays lost: its node is to be left."""
        if self.paths[node]:
            self.warn(node)

    def path_back(self, node: int) -> None:
        self.paths[node] -= 1
        if not self.paths[node]:
            del self.paths[node]
            self.clear(node)

    def mended(self, node: int) -> None:
        self.down.discard(node)
        self.handling.repaired(node)

    def repair(self, node: int) -> None:
        """A node is back, and may soon fail again."""
        self.mended(node)
        again = None if self.settings.trace else self.again.draw(node)
        if again is not None:
            hours, fault = again
            self.after(hours, lambda _: self.strike(fault), node)

    # ------------------------------------------------------------ for ways of recovering

    def roll_back(self) -> None:
        """All since the last checkpoint is to be done again."""
        self.rollbacks += 1
        self.account.lose()
        self.into_h = 0.0

    def redo_step(self) -> None:
        """The step under way is done again: on average half of one."""
        self.account.lose(float(self.chance.random()) * self.settings.step_s * SECOND_H)

    def about(self, hours: float) -> float:
        """A time around this mean, as `Costs.spread` has it."""
        spread = self.settings.costs.spread
        if not spread or not hours:
            return hours
        sigma2 = math.log1p(spread**2)
        return float(hours * math.exp(math.sqrt(sigma2) * self.chance.standard_normal() - sigma2 / 2))
