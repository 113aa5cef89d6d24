"""Driving: migration as the protocol core decides it. Faults and repairs are told to the core as its own events.

Which spare takes a rank, whether slots are shared, whether all wait, go back to snapshots, to the checkpoint, or end:
that is read off the core's state, as are its deadlines. How long everybody takes to do what it orders is drawn
(`Crew`). What the core cannot know is simulated here: what training was worth, and that a job that has ended is
submitted again.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from torchrelay.forecast.inputs.faults import Cause, Fault
from torchrelay.forecast.inputs.settings import SECOND_H
from torchrelay.forecast.play.buckets import Bucket
from torchrelay.forecast.play.crew import Crew
from torchrelay.forecast.play.cutout import CutOut, node_name
from torchrelay.forecast.play.engine import World
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.ids import WorkerId
from torchrelay.protocol.messages.orders import Fence, Order, singly
from torchrelay.protocol.model.incident import Resolution
from torchrelay.protocol.model.job import BEFORE_CUTOVER, Job, JobPhase
from torchrelay.protocol.model.roster import Life
from torchrelay.protocol.placement.policy import DYING_MS, ENDING_MS
from torchrelay.protocol.recovery.recovery import ALL_SILENT, MOST_SILENT, SEVERAL_SILENT
from torchrelay.protocol.rules.cluster import advance
from torchrelay.protocol.rules.standing import StandingOrders

HOUR_MS = 3_600_000
PATIENCE_MS = 600_000  # how often the core is asked while something other than a recovery is under way
WARNING = "forecast/warning"
TRAINS = BEFORE_CUTOVER | {JobPhase.RUNNING}


@dataclass(frozen=True)
class Heard:
    """Something that the core will hear of."""

    event: ev.Event
    loss: bool = False  # said of the dead, not by them
    felt: bool = False  # training has stood since it happened


class Driving:
    """One job under the protocol core."""

    def __init__(self, world: World) -> None:
        settings = world.settings
        self.world = world
        self.settings = settings
        self.lent = list(range(settings.pool, settings.pool + settings.floating))
        self.lent_down: set[int] = set()
        self.under_way: set[int] = set()  # nodes that other jobs are giving up just now
        self.incarnations: dict[int, int] = {}
        self.submit_ms: float | None = None  # when a job that ended is submitted again; infinite: when there are nodes
        self.begin_with(range(settings.nodes), range(settings.nodes, settings.pool))

    def begin_with(self, places: range | list[int], spares: range | list[int]) -> None:
        """A job that trains on these nodes."""
        known = {node_name(number): str(count) for number, count in self.incarnations.items()}
        self.cut = CutOut(self.settings.spec(1), self.settings.placed, places, spares, known)
        self.crew = Crew(self.settings, self.cut, self.world.chance)
        self.dead: set[WorkerId] = set()
        self.unheard = 0  # faults that training has felt, and the core has not heard of
        self._standing = StandingOrders()
        self._heap: list[tuple[int, int, Heard]] = []
        self._number = 0
        self._tick_ms = math.inf
        self._restarts = self._moved = 0
        self._crowd = 1
        self._waits_ms: int | None = None
        self.crew.step = self.steps_done()

    # ------------------------------------------------------------ as the engine sees it

    @property
    def speed(self) -> float:
        stands = self.submit_ms is not None or self.unheard or self.cut.job.phase not in TRAINS
        return 0.0 if stands else 1.0 / self._crowd

    @property
    def bucket(self) -> Bucket:
        job = self.cut.job
        if self.submit_ms is not None or job.waiting_ms is not None:
            return Bucket.RECOVERY
        if job.phase is JobPhase.STARTING:
            up = self.now_ms - job.phase_ms >= self.settings.costs.startup_h * HOUR_MS
            return Bucket.RESTORE if up else Bucket.STARTUP
        if job.phase is JobPhase.RECONFIGURING and all(seat.reconfigured for seat in job.seats.values()):
            return Bucket.RESTORE
        return Bucket.RECOVERY

    def due_h(self) -> float:
        first = self._heap[0][0] if self._heap else math.inf
        again = math.inf if self.submit_ms is None else self.submit_ms
        return min(first, self._tick_ms, again) / HOUR_MS

    @property
    def now_ms(self) -> int:
        return round(self.world.now_h * HOUR_MS)

    def act(self) -> None:
        """Whatever is said now is heard; then everybody is told what to do."""
        now = self.now_ms
        if self.submit_ms is not None and self.submit_ms <= now:
            self.submit_again()
        if self._tick_ms <= now:
            self._tick_ms = math.inf
            self.hear(ev.Tick())
        while self._heap and self._heap[0][0] <= now:
            heard = heapq.heappop(self._heap)[2]
            self.unheard -= heard.felt
            if heard.loss or getattr(heard.event, "worker", None) not in self.dead:
                self.crew.heard(heard.event)
                self.hear(heard.event)
        self.follow()

    # ------------------------------------------------------------ faults

    def fault(self, fault: Fault) -> bool:
        gone = fault.cause is not Cause.PROCESS
        if fault.node in self.lent:
            if gone:
                self.lent.remove(fault.node)
                self.lent_down.add(fault.node)
            return False
        if self.submit_ms is not None:  # nobody runs
            return False
        ranks = self.cut.ranks_on(fault.node)
        name = node_name(fault.node)
        if not ranks and name not in self.cut.cluster.nodes:
            return False
        felt = bool(ranks)
        if felt:
            if self.speed:
                self.interrupt()
            self.cut.attend(ranks, keep=self.unheard > 0)
        there = [worker for worker in self.cut.cluster.workers.values() if worker.node == name]
        if not gone:
            there = [worker for worker in there if worker.life is not Life.FENCING][:1]
        self.dead |= {worker.worker for worker in there}
        seconds = self.crew.foresee()["detect"]
        if gone:
            lost = ev.NodeLost(
                node=name,
                incarnation=self.cut.incarnations.get(name, "0"),
                reason=fault.cause,
                age_ms=round(seconds * 1000),
            )
            self.later(seconds, Heard(lost, loss=True, felt=felt))
            self.unheard += felt
        for worker in there if not gone else ():
            self.later(seconds, Heard(self.crew.ended(worker.worker, name, signal=6), loss=True, felt=felt))
            self.unheard += felt
        return felt

    def interrupt(self) -> None:
        """Training stands. The step under way is done again."""
        step_h = self.settings.step_s * SECOND_H
        self.crew.step = max(self.crew.step, self.steps_done())
        done = self.world.account.done_h
        self.world.account.lose(max(0.0, done - math.floor(done / step_h + 1e-9) * step_h))

    def steps_done(self) -> int:
        """Steps that are committed; the first was before the beginning, as the core knows no job without one."""
        return 1 + int(self.world.account.done_h / (self.settings.step_s * SECOND_H) + 1e-9)

    def repaired(self, node: int) -> None:
        if node in self.lent_down:
            self.lent_down.discard(node)
            self.lent.append(node)
            if self.submit_ms is not None and math.isinf(self.submit_ms):
                self.plan_submission()
            elif self.submit_ms is None:
                self.borrow()
        elif node in self.under_way:
            pass  # it failed while others gave it up, and is well again before they have: it comes as was planned
        elif self.world.usage.in_use and not self.short():  # others get it for the one that they have given up
            self.world.usage.in_use -= 1
            self.lent.append(node)
        else:
            self.join(node)

    def short(self) -> bool:
        """Whether the job lacks a node just now."""
        return self.submit_ms is not None or self.cut.job.waiting_ms is not None

    def join(self, node: int) -> None:
        """A node is there, or there again."""
        count = self.incarnations[node] = self.incarnations.get(node, 0) + 1
        name = node_name(node)
        self.cut.incarnations[name] = str(count)
        if self.submit_ms is not None:
            if math.isinf(self.submit_ms):
                self.plan_submission()
            return
        self.hear(ev.TaintCleared(node=name, key=WARNING, source="forecast"))
        self.hear(ev.NodeJoined(node=name, incarnation=str(count), slots=1))
        self.follow()

    def uses(self, node: int) -> bool:
        return self.submit_ms is None and self.cut.hosts(node)

    def warned(self, node: int) -> None:
        """It is likely to fail: the core moves what runs there."""
        name = node_name(node)
        if self.submit_ms is not None or node in self.lent:
            return
        self.cut.attend(self.cut.ranks_on(node), keep=self.unheard > 0)
        if name in self.cut.cluster.nodes:
            self.crew.step = max(self.crew.step, self.steps_done()) if self.speed else self.crew.step
            self.hear(ev.TaintSet(node=name, key=WARNING, reason="likely to fail", source="forecast"))
            self.follow()

    def cleared(self, node: int) -> None:
        if self.submit_ms is None:
            self.hear(ev.TaintCleared(node=node_name(node), key=WARNING, source="forecast", healed=True))
            self.follow()

    # ------------------------------------------------------------ the core

    def hear(self, event: ev.Event) -> None:
        before = self.cut.job
        if self.speed:
            self.crew.step = max(self.crew.step, self.steps_done())
        self.cut.cluster = advance(self.cut.cluster, event, self.now_ms)
        self.see(before, self.cut.job)

    def later(self, seconds: float, heard: Heard) -> None:
        self._number += 1
        heapq.heappush(self._heap, (self.now_ms + round(seconds * 1000), self._number, heard))

    def follow(self) -> None:
        """Carry out the orders that are new, and find out when the core is to be asked again."""
        if self.submit_ms is not None:
            return
        fresh = singly(self._standing.follow(self.cut.cluster))
        for order in sorted(fresh, key=lambda one: (type(one).__name__, getattr(one, "worker", ""))):
            silent = getattr(order, "worker", "") in self.dead and not isinstance(order, Fence)
            if not silent and not self.is_down(order):
                for seconds, event in self.crew.answer(order):
                    self.later(seconds, Heard(event, loss=isinstance(order, Fence)))
        self.borrow()
        self._crowd = self.cut.crowd() if any(w.guest for w in self.cut.cluster.workers.values()) else 1
        self._tick_ms = self.next_tick()

    def is_down(self, order: Order) -> bool:
        return any(node_name(node) == order.node for node in self.world.down)

    def see(self, before: Job, job: Job) -> None:
        """What the core has decided, and what it means for the work."""
        if job.attempts.restarts != self._restarts:
            self._restarts = job.attempts.restarts
            self.world.roll_back()
            self.crew.new.clear()
            self.crew.step = self.steps_done()
        if job.rollback.point is not None and job.rollback.point != before.rollback.point:
            lost = max(0, self.crew.step - job.rollback.point.step)
            self.world.account.lose(lost * self.settings.step_s * SECOND_H)
            self.world.back_to_snapshots += 1
            self.crew.step = job.rollback.point.step
        if job.phase is JobPhase.RUNNING and before.phase is not JobPhase.RUNNING:
            self.crew.resumed()
            self.world.usage.taken += sum(self.cut.has_moved(seat) for seat in before.seats.values())
        if before.open_incident is not None and job.open_incident is None and job.accounting.incidents:
            last = job.accounting.incidents[-1]
            # What was resumed is clean: here every rank commits, sooner or later.
            resolution = Resolution.CLEAN if last.resolution is Resolution.RESUMED else last.resolution
            self.world.verdicts[resolution] += last.kind == "unplanned"
        if job.moving.named != self._moved:
            self.world.moves += job.moving.named - self._moved
            self._moved = job.moving.named
        self.see_waiting(job)
        if job.phase in (JobPhase.ENDING, JobPhase.ENDED) and self.submit_ms is None:
            self.world.roll_back()
            self.world.verdicts[Resolution.ENDED] += before.open_incident is None
            self._heap.clear()
            self._tick_ms, self.unheard = math.inf, 0
            self.plan_submission()

    def see_waiting(self, job: Job) -> None:
        """For how long a place was waited for."""
        waits = job.waiting_ms is not None or job.phase in (JobPhase.ENDING, JobPhase.ENDED)
        if waits and self._waits_ms is None:
            self._waits_ms = self.now_ms
        elif not waits and self._waits_ms is not None:
            self.world.usage.waited_h += (self.now_ms - self._waits_ms) / HOUR_MS
            self._waits_ms = None

    def next_tick(self) -> float:
        """When a deadline of the core passes, at the earliest after now."""
        job, now, spec = self.cut.job, self.now_ms, self.cut.spec
        if self.cut.quiet():
            return now + PATIENCE_MS if spec.return_home and self.cut.away() else math.inf
        if job.phase in TRAINS:
            return now + PATIENCE_MS if not self._heap else math.inf
        spans = (
            spec.report_ms // 2,
            *(times * spec.report_ms for times in (1, SEVERAL_SILENT, ALL_SILENT, MOST_SILENT)),
            spec.ready_ms,
            spec.reconfigure_ms,
            spec.reconfigure_ms + spec.restore_ms,
            DYING_MS,
            ENDING_MS,
        )
        times = [since + span for since in (job.phase_ms, job.answered_ms) if since is not None for span in spans]
        if job.waiting_ms is not None:
            times.append(job.waiting_ms + spec.spare_wait_ms)
        return min((at for at in times if at > now), default=now + PATIENCE_MS)

    def close(self) -> None:
        if self._waits_ms is not None:
            self.world.usage.waited_h += (self.now_ms - self._waits_ms) / HOUR_MS

    # ------------------------------------------------------------ nodes of others, and a job that ends

    def borrow(self) -> None:
        """The core waits for a place: other jobs give up as many nodes as are missing, if they have them."""
        job = self.cut.job
        if job.waiting_ms is not None:
            self.preempt(sum(seat.worker is None for seat in job.seats.values()) - len(self.under_way))

    def preempt(self, count: int) -> None:
        for _ in range(min(count, len(self.lent))):
            node = self.lent.pop(0)
            self.under_way.add(node)
            self.world.usage.in_use += 1
            self.world.usage.preempted += 1
            self.world.after(self.settings.preempt_h, self.arrive, node)

    def arrive(self, node: int) -> None:
        self.under_way.discard(node)
        if node not in self.world.down:
            self.join(node)

    def plan_submission(self) -> None:
        """The job has ended: it is submitted again when there are enough nodes, and comes up from its checkpoint.

        Other jobs give up nodes for that, too.
        """
        costs, missing = self.settings.costs, self.settings.nodes - len(self.able())
        enough = missing <= 0
        self.preempt(missing - len(self.under_way))
        hours = self.world.about(costs.replacement_h + costs.restore_h + costs.startup_h)
        # Whole milliseconds: the core's clock would never come to a part of one.
        self.submit_ms = self.now_ms + math.ceil(hours * HOUR_MS) if enough else math.inf

    def able(self) -> list[int]:
        others = {*self.world.down, *self.lent, *self.lent_down, *self.under_way}
        return [node for node in range(self.world.every) if node not in others]

    def submit_again(self) -> None:
        able = self.able()
        if len(able) < self.settings.nodes:
            self.submit_ms = math.inf
            return
        self.submit_ms = None
        nodes = self.settings.nodes
        if self._waits_ms is not None:
            self.world.usage.waited_h += (self.now_ms - self._waits_ms) / HOUR_MS
        self.begin_with(able[:nodes], able[nodes:])
