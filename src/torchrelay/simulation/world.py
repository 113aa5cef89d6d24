"""World: one seeded world around the protocol core, how its end is judged, and what came of it.

One heap of (time, number, action), one `Random`, no threads.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.enclosed import Resumed
from torchrelay.protocol.messages.ids import START, Generation, NodeId, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.messages.orders import Park, Restore, Source
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.rules.cluster import Cluster
from torchrelay.simulation.faults import Faults
from torchrelay.simulation.head_faults import give_up_who_is_apart
from torchrelay.simulation.judge.checks import Reigns, Violation, check_dates, check_proofs
from torchrelay.simulation.judge.ending import judge
from torchrelay.simulation.judge.invariants import Checker
from torchrelay.simulation.machine.agents import Agent
from torchrelay.simulation.machine.court import Court
from torchrelay.simulation.machine.machines import Machine
from torchrelay.simulation.machine.shell import SMALL, Shell
from torchrelay.simulation.model import script as sc
from torchrelay.simulation.model.causes import Cause
from torchrelay.simulation.model.large import enlarge
from torchrelay.simulation.model.life import Life
from torchrelay.simulation.model.plans import JOB, On, Plan, draw, going_on
from torchrelay.simulation.model.snapshot_store import Shot
from torchrelay.simulation.ports import Got
from torchrelay.simulation.worker.processes import Process
from torchrelay.simulation.worker.training import Training
from torchrelay.simulation.worker.wiring import Wiring

CALM_BOUND_MS = 150_000  # after the faults have ceased, every job has ended within this time
MOST_RUNS = 3  # of one job that is parked again and again
SETTLE_MS = 4_000  # after a job's end, for its processes to go
DISK_FULL = 0.1  # of what is written down while there are faults
RETURN_MS = 100_000  # ... where agents have to find the head first
# More actions than any world needs: reaching it means that something goes round in circles.
MAX_ACTIONS = 400_000


class World:
    """Everything that one seed makes. `run` lets it live to the job's end and judges it; raises `Violation`."""

    def __init__(self, plan: Plan, *, story: bool = False, former: World | None = None) -> None:
        """`former`: the world in which the job was parked that goes on here."""
        self.plan = plan
        self.script = plan.script
        self.chance = Random(plan.seed ^ 0x5EED)
        self.now = 0
        self.stormy = True
        self.coverage: Counter[str] = Counter()
        self.story: list[str] | None = [] if story else None
        self.processes: dict[WorkerId, Process] = {}
        self.wirings: dict[tuple[Generation, str], Wiring] = {}
        self.checkpoint: tuple[int, tuple[sc.RankState, ...]] = (0, self._beginning())
        self._bases: dict[int, tuple[int, tuple[sc.RankState, ...]]] = {}
        self.shots: dict[ev.Snapshot, Shot] = {}  # all that were ever taken
        self.parked: dict[tuple[str, ev.Snapshot], Shot] = {}  # files, by their folder
        self.manifest = ""  # of the parking that is whole: the job goes on nowhere else
        self.reconfigures_that_break = 0
        self.fetches_that_break = 0
        self.fetches_that_differ = 0
        self.targets_that_die = 0
        self._heap: list[tuple[int, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._number = 0
        self.checker = Checker(self)
        self.reigns = Reigns(self.seen)
        self.court = None if plan.head is None else Court(self, NodeId(f"node-{plan.head}"))
        self.shell = Shell(self) if self.court is None else self.court.acting.shell
        self.shell.hear(ev.JobSubmitted(spec=plan.spec))
        make_agent = partial(Agent, self.shell) if self.court is None else self.court.make_agent
        self.machines: dict[NodeId, Machine] = {}
        for number, slots in enumerate(plan.slots):
            name = NodeId(f"node-{number}")
            self.machines[name] = Machine(self, make_agent, self.processes, name, slots)
        if former is not None:
            self._go_on_from(former)
        self.faults = Faults(self)
        self.after(plan.calm_ms, self.faults.cease)

    def _go_on_from(self, former: World) -> None:
        """Let the nodes find what was written there."""
        files = {what: shot for (name, what), shot in former.parked.items() if name == former.manifest}
        self.shots.update(files)
        for number, machine in enumerate(self.machines.values()):
            there = {what: s for what, s in files.items() if not self.plan.apart or self._lies_at(what.rank) == number}
            machine.snapshot_store.parked = there
        self.checkpoint, self._bases = former.checkpoint, dict(former._bases)
        self.checker.once.update(former.checker.once)
        self.checker.furthest, self.checker.disturbed = next(iter(files)).point, True

    def _lies_at(self, rank: Rank) -> int:
        """Where nodes share nothing: the number of the node on which the file of a rank lies."""
        return rank % len(self.plan.slots)

    def found(self, node: NodeId) -> dict[str, Any]:
        """What a worker on this node says of the parking that the job goes on from."""
        if self.plan.spec.resumes is None:
            return {}
        if not self.plan.apart:
            return {"all_parked": True}
        return {"parked": tuple(sorted(what.rank for what in self.machines[node].snapshot_store.parked))}

    def park(self, order: Park, what: ev.Snapshot, shot: Shot) -> bool:
        """A rank's file; False if it could not be written."""
        if self.stormy and self.chance.random() < DISK_FULL:
            return False
        self.parked[order.folder.rpartition("/")[2], what] = shot
        return True

    @property
    def whole(self) -> bool:
        """Whether the job is parked, and all that belongs to that is there."""
        there = {what.rank for name, what in self.parked if name == self.manifest}
        return bool(self.manifest) and len(there) == self.script.ranks

    def _seal(self, name: str) -> None:
        """The orchestrator writes the manifest, and may end before anybody has heard of it."""
        job = self.job
        if job is None or job.phase is not JobPhase.SEALING or job.parking.name != name:
            return
        if not self.shell.up or self.shell.frozen:
            self.after(50, self._seal, name)
        elif not self.manifest and self.stormy and self.chance.random() < DISK_FULL:
            self.shell.hear(ev.SealFailed(job=JOB, name=name, reason="disk full"))
        elif not self.manifest and self.stormy and self.chance.random() < DISK_FULL:
            self.manifest = name
            self.faults.crash_orchestrator(300)
            self.after(400, self._seal, name)
        else:
            self.manifest = name
            self.shell.hear(ev.ParkingSealed(job=JOB, name=name))

    def _beginning(self) -> tuple[sc.RankState, ...]:
        return tuple(sc.first_state(self.script, rank) for rank in range(self.script.ranks))

    # ------------------------------------------------------------ time and chance

    def after(self, ms: int, action: Callable[..., Any], *given: Any) -> None:
        """Do something `ms` from now."""
        self._number += 1
        heapq.heappush(self._heap, (self.now + ms, self._number, action, given))

    def draw(self, span: tuple[int, int]) -> int:
        return self.chance.randint(*span)

    def run(self) -> None:
        """Let it live, and judge it."""
        bound = self.plan.calm_ms + CALM_BOUND_MS
        most = MAX_ACTIONS * max(1, self.plan.spec.world_size // SMALL)
        until = bound
        while self._heap and self._number < most:
            at_ms, _, action, given = heapq.heappop(self._heap)
            if at_ms > until:
                break
            self.now = at_ms
            action(*given)
            if until == bound and self.phase is JobPhase.ENDED and not self.shell.waits:
                self.faults.cease()
                until = min(bound, self.now + (SETTLE_MS if self.court is None else RETURN_MS))
            if until != bound and self.court is not None and not self.left_running():
                break
        if self._number >= most:
            raise Violation("the world does not come to rest")
        judge(self.checker)

    def left_running(self) -> list[Process]:
        """Processes that ought to have ended with the job."""
        living = (each for each in self.processes.values() if each.alive and not each.undying)
        return [each for each in living if not self.machines[each.node].lost]

    # ------------------------------------------------------------ watching

    def tell(self, text: str) -> None:
        if self.story is not None:
            self.story.append(f"{self.now:7} {text}")

    def seen(self, what: str) -> None:
        self.coverage[what] += 1

    @property
    def job(self) -> Job | None:
        return self.shell.cluster.jobs.get(JOB)

    @property
    def phase(self) -> JobPhase | None:
        job = self.job
        return job.phase if job is not None else None

    @property
    def over(self) -> bool:
        return self.phase in (JobPhase.FINISHING, JobPhase.ENDING, JobPhase.ENDED)

    def heard(self, event: ev.Event, before: Cluster, after: Cluster) -> None:
        """The orchestrator has heard an event."""
        if isinstance(event, ev.NodeLost):
            self.checker.given_up(self.machines[event.node])
        was, now = before.jobs.get(JOB), after.jobs.get(JOB)
        assert now is not None, "the job was submitted"
        new = now.attempts
        old = new if was is None or now.phase is not JobPhase.STARTING else was.attempts
        if (old.starts, old.restarts) != (new.starts, new.restarts):
            self.checker.once.clear()  # all begin anew, and do again what was done once
            self.checker.furthest = START
        elif isinstance(event, ev.OnceRecorded) and event.restarts == now.attempts.restarts:
            self.checker.once.setdefault(event.rank, event.value)
        check_dates(self, event, after.now_ms, was, now)
        self.seen(f"event: {type(event).__name__} in {now.phase}")
        if was is not None:
            self.checker.requests(event, was, now)
            self.checker.goes_back(was, now)
        if self.story is not None and not isinstance(event, ev.Tick):
            self.tell(f"   heard {short(event)}")
        if was is not None and was.open_move is not None and now.open_move is None:
            self.seen(f"move: {now.moving.moves[-1].state}")
        if was is not None and was.moving.moves != now.moving.moves and now.moving.moves:
            move = now.moving.moves[-1]
            self.tell(f"   {move.name} {move.state}: {move.story[-1][1]}")
        if was is not None:
            check_proofs(self, was, now)
        if was is None or (was.phase, was.generation) == (now.phase, now.generation):
            return
        if now.phase is JobPhase.SEALING:
            self.after(self.chance.randint(1, 200), self._seal, now.parking.name)
        elif self.manifest and now.phase not in (JobPhase.ENDING, JobPhase.ENDED):
            raise Violation(f"the job is {now.phase} beside its parking")
        self.tell(f"== {now.phase}, generation {now.generation}: {now.why}")
        self.seen(f"phase: {now.phase}")
        self.note(was, now)
        self.after(0, self.faults.phase, On.JOB, now.phase)

    def note(self, was: Job, now: Job) -> None:
        """Count what was decided."""
        if now.phase is JobPhase.STARTING:
            self.checker.started_again = True
            if not now.accounting.incidents:
                raise Violation("all workers start again, and no incident tells of it")
        if now.phase is JobPhase.AGREEING and now.open_incident is None:
            raise Violation("training is interrupted, and no incident tells of it")
        if now.phase is JobPhase.PREPARING and now.open_incident is not None:
            self.seen(f"verdict: {now.open_incident.verdict.split(' to ')[0].split(' the ')[0]}")
        if now.phase is JobPhase.ENDING and now.outcome is not None:
            self.seen(f"outcome: {now.outcome.code}")
        if was.phase is JobPhase.RESUMING and now.phase is JobPhase.RUNNING:
            self.checker.trains_on(now)
        if was.open_incident is not None and now.open_incident is None:
            self.seen(f"resolution: {now.accounting.incidents[-1].resolution}")

    def came_to(self, phase: str) -> None:
        """The succession has come to something."""
        self.tell(f"-- {phase}")
        self.seen(f"succession: {phase}")
        if phase == "acts":
            give_up_who_is_apart(self)
        self.after(0, self.faults.phase, On.SUCCESSION, phase)

    def lose_power(self, machine: Machine) -> None:
        """All that runs on a node is gone."""
        machine.lose_power()
        if self.court is not None:
            self.court.lose_power(machine.node)

    def network_changed(self) -> None:
        """Nodes were cut off, or are back."""
        if self.court is not None:
            self.court.network_changed()

    def entered(self, phase: WorkerPhase, rank: Rank | None) -> None:
        """A worker's main thread enters a phase."""
        if self.faults.waiting and rank is not None:
            self.faults.phase(On.WORKER, phase, rank)

    # ------------------------------------------------------------ processes and what they share

    def at(self, address: str) -> Process | None:
        """The process whose state server listens there."""
        return self.processes.get(WorkerId(address.removeprefix("state:")))

    def wiring(self, generation: Generation, store: str) -> Wiring:
        key = (generation, store)
        if key not in self.wirings:
            self.wirings[key] = Wiring(self, generation, store)
        return self.wirings[key]

    def reconfigure_breaks(self) -> bool:
        """Whether a rank's attempt to connect fails by itself."""
        if not self.reconfigures_that_break:
            return False
        self.reconfigures_that_break -= 1
        self.checker.broke()
        return True

    def target_dies(self) -> bool:
        """Whether the target of a move dies while it is prepared."""
        if not self.targets_that_die or not self.stormy:
            return False
        self.targets_that_die -= 1
        return True

    def checkpoint_of(self, restarts: int) -> tuple[int, tuple[sc.RankState, ...]]:
        """Where the script begins in the job's n-th restart: the same for all ranks."""
        if restarts not in self._bases:
            self._bases[restarts] = self.checkpoint if restarts else (0, self._beginning())
        return self._bases[restarts]

    def serving(self, sources: tuple[Source, ...], rank: Rank, point: Point) -> Training | Shot | None:
        """The first source that serves the record of a point, its own or in a snapshot."""
        for source in sources:
            process = self.at(source.address)
            if process is not None and process.life is Life.RUNNING:
                training = process.training
                if training.at_safepoint and training.committed == point:
                    return training
                # A record tells where its script was: it is found even if the copy of the state is gone since.
                shot = self.shots.get(ev.Snapshot(rank, point, training.restarts))
                if shot is not None:
                    return shot
        return None

    def fetch(self, source: Source, order: Restore) -> Got | None:
        """The state that a source serves; None if it does not answer, or is in another generation."""
        process = self.at(source.address)
        if process is None or process.life is not Life.RUNNING:
            return None
        training = process.training
        state = training.state
        if order.snapshot:
            shot = training.shots.snapshot_store.find(order.rank, order.point, training.restarts)
            if shot is None:
                return None
            state = shot.state
        elif training.replicas.flipped:
            self.checker.spread()
        elsewhere = training.committed != order.point or training.heard != order.generation
        if not order.snapshot and (not training.at_safepoint or elsewhere):
            return None
        if self.fetches_that_break:
            self.fetches_that_break -= 1
            self.tell("** the transfer breaks")
            return None
        sent = state.digest()
        if self.fetches_that_differ:
            self.fetches_that_differ -= 1
            self.tell("** the transfer is damaged")
            self.checker.damaged(order.rank)
            return Got(sc.RankState(state.model ^ 1, 0), sent)
        return Got(state, sent)


def short(event: ev.Event) -> str:
    """An event on one line."""
    given = {name: getattr(event, name) for name in event.__struct_fields__}
    shown = {name: value for name, value in given.items() if value not in (None, "", (), 0, 0.0) and name != "job"}
    return f"{type(event).__name__}({', '.join(f'{name}={value}' for name, value in shown.items())})"


# ---------------------------------------------------------------- what came of it


@dataclass
class Result:
    """What one seed showed. `violation` is empty if nothing is wrong."""

    seed: int
    violation: str = ""
    coverage: Counter[str] = field(default_factory=Counter)
    story: list[str] = field(default_factory=list)
    actions: int = 0


def run_plan(plan: Plan, *, story: bool = False) -> Result:
    """Let one world live. Never raises for what the protocol does wrong: that is the result."""
    result = Result(plan.seed)
    worlds: list[World] = []
    try:
        worlds.append(World(plan, story=story))
        worlds[0].run()
        while worlds[-1].manifest and len(worlds) < MOST_RUNS:
            worlds.append(World(going_on(worlds[-1].plan, resumed(worlds[-1])), story=story, former=worlds[-1]))
            worlds[-1].run()
            result.coverage["a parked job has gone on"] += 1
    except AssertionError as error:
        result.violation = str(error) or type(error).__name__
    for world in worlds:
        result.coverage.update(world.coverage)
        result.story += world.story or []
    result.coverage.update(f"lack: {lack}" for lack in plan.lacks)
    for what, times in list(result.coverage.items()):
        if what.startswith("event: "):
            result.coverage[what.partition(" in ")[0]] += times
    return result


def resumed(world: World) -> Resumed:
    """What the next run is told of the parking of this one."""
    job = world.job
    assert job is not None, "it was submitted"
    assert job.boundary is not None, "it has parked"
    return Resumed(
        folder=f"/parked/{world.manifest}",
        point=job.boundary,
        restarts=job.attempts.restarts,
        every=job.rollback.every,
        buddies=job.rollback.buddies,
        once=tuple(job.once.items()),
    )


def run_seed(seed: int, *, story: bool = False) -> Result:
    """One seed, one schedule, one outcome."""
    return run_plan(draw(seed), story=story)


def run_large(seed: int, nodes: int, *, story: bool = False) -> Result:
    """The same with so many nodes of eight ranks."""
    return run_plan(enlarge(draw(seed, crowned=False), nodes), story=story)


__all__ = ["Cause", "Rank", "Result", "World", "run_large", "run_plan", "run_seed"]
