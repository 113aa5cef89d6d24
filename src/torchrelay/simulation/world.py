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
from torchrelay.protocol.messages.ids import START, Generation, NodeId, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.messages.orders import Restore, Source
from torchrelay.protocol.model.incident import Resolution
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.recovery.ending import NO_SPARE, NO_STATE, REFUSED, STOPPED
from torchrelay.protocol.rules.cluster import Cluster
from torchrelay.protocol.succession.succession import is_majority
from torchrelay.simulation.faults import Faults
from torchrelay.simulation.judge.checks import Reigns, Violation, check_dates, check_proofs
from torchrelay.simulation.judge.invariants import MANY_MOVES, Checker
from torchrelay.simulation.machine.agents import Agent
from torchrelay.simulation.machine.court import Court
from torchrelay.simulation.machine.machines import Machine
from torchrelay.simulation.machine.shell import SMALL, Shell
from torchrelay.simulation.model import script as sc
from torchrelay.simulation.model.causes import Cause
from torchrelay.simulation.model.life import Life
from torchrelay.simulation.model.plans import JOB, Lack, On, Plan, draw, enlarge
from torchrelay.simulation.model.snapshot_store import Shot
from torchrelay.simulation.ports import Got
from torchrelay.simulation.scene import Scene
from torchrelay.simulation.worker.processes import Process
from torchrelay.simulation.worker.training import EXIT_CODE, Training
from torchrelay.simulation.worker.wiring import Wiring

CALM_BOUND_MS = 150_000  # after the faults have ceased, every job has ended within this time
SETTLE_MS = 4_000  # after a job's end, for its processes to go
RETURN_MS = 100_000  # ... where agents have to find the head first
# More actions than any world needs: reaching it means that something goes round in circles.
MAX_ACTIONS = 400_000


class World:
    """Everything that one seed makes. `run` lets it live to the job's end and judges it; raises `Violation`."""

    def __init__(self, plan: Plan, *, story: bool = False) -> None:
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
        self.faults = Faults(self)
        self.after(plan.calm_ms, self.faults.cease)

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
            if until == bound and self.phase is JobPhase.ENDED and not self.shell.holds:
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
        if isinstance(event, ev.OnceRecorded) and event.restarts == now.attempts.restarts:
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
    world = None
    try:
        world = World(plan, story=story)
        world.run()
    except AssertionError as error:
        result.violation = str(error) or type(error).__name__
    if world is not None:
        result.coverage = world.coverage
        result.coverage.update(f"lack: {lack}" for lack in plan.lacks)
        for what, times in list(result.coverage.items()):
            if what.startswith("event: "):
                result.coverage[what.partition(" in ")[0]] += times
        result.story = world.story or []
    return result


def run_seed(seed: int, *, story: bool = False) -> Result:
    """One seed, one schedule, one outcome."""
    return run_plan(draw(seed), story=story)


def run_large(seed: int, nodes: int, *, story: bool = False) -> Result:
    """The same with so many nodes of eight ranks."""
    return run_plan(enlarge(draw(seed, crowned=False), nodes), story=story)


__all__ = ["Cause", "Rank", "Result", "World", "run_large", "run_plan", "run_seed"]


# ---------------------------------------------------------------- its end, judged


def judge(checker: Checker) -> None:
    """The end of the job, against what the world did to it."""
    job = checker.world.shell.cluster.jobs[JOB]
    if job.outcome is None:
        judge_no_end(checker, job)
        return
    code, reason = job.outcome.code, job.outcome.reason
    if job.moving.named > MANY_MOVES:
        checker.fail(f"{job.moving.named} moves were begun: they do not come to rest")
    resolutions = {incident.resolution for incident in job.accounting.incidents}
    if Resolution.OPEN in resolutions:
        checker.fail("an incident is left open")
    if not reason or any(not incident.cause for incident in job.accounting.incidents):
        checker.fail("an end, or an incident, without a reason")
    if code == 0:
        _judge_success(checker)
    else:
        _judge_failure(checker, code, reason)
    if Resolution.ROLLED_BACK in resolutions and not checker.unheld:
        checker.fail("all went back to a snapshot, and every shard had a holder")
    lost = max(incident.lost for incident in job.accounting.incidents) if job.accounting.incidents else 0
    if lost > checker.world.plan.snapshots and not checker.node_was_lost:
        checker.fail(f"{lost} steps were made again, with snapshots every {checker.world.plan.snapshots}")
    if Resolution.FELL_BACK in resolutions and not checker.must_lose():
        checker.fail(f"fell back without a cause: {reason}")
    for process in checker.world.left_running():
        court = checker.world.court
        if court is None or court.can_find(process.node, court.acting.office):
            checker.fail(f"{process.id} is left running")
        checker.world.seen("an agent cannot find the head")


def judge_no_end(checker: Checker, job: Job) -> None:
    """There is none: then nobody could make one."""
    world = checker.world
    if any(each.lost and each.node not in world.shell.cluster.nodes for each in world.machines.values()):
        return  # it waits for a node that was lost before it had joined
    if world.court is None or may_go_on(world, world.court):
        checker.fail(f"the job has no end: {job.phase} since {job.phase_ms} ms, {job.why}")
    judge_without_head(checker)


def may_go_on(world: Scene, court: Court) -> bool:
    """Whether a copy lives that counts under all that may be settled, and a majority of the voters of each of that."""
    living = [machine.node for machine in world.machines.values() if machine.agent is not None]
    memories = [court.memory_of(node) for node in living]
    told = [one.ballot.noted for one in memories if one.ballot.settled and one.ballot.noted is not None]
    known = [office.door.known for office in court.offices.values() if office.door.settled]
    settled = world.reigns.settled({one.voter for one in memories}, (court.first, *told, *known))
    newer = world.reigns.newer(settled.order)
    groups = [settled.voters, *(group for one in newer for group in one.groups)]
    for office in court.offices.values():
        whole = all(one.has_copy(office.place.copy) for one in (settled, *newer))
        voters = {court.memory_of(node).voter for node in living if court.can_find(node, office)}
        if office.up and whole and all(is_majority(voters, group) for group in groups):
            return True
    return False


def judge_without_head(checker: Checker) -> None:
    """Who needs nobody has trained to the end, and who needs an orchestrator has lost its patience."""
    processes = [each for each in checker.world.processes.values() if not checker.world.machines[each.node].lost]
    for process in processes:
        if process.waits_for_orders:
            checker.fail(f"{process.id} waits for orders for ever")
    sound = [each.training for each in checker.sound() if each.training.resumed and not each.training.interrupted]
    if {training.rank for training in sound} == set(range(checker.world.script.ranks)):
        for training in sound:
            if not training.finished:
                checker.fail(f"rank {training.rank} needs nobody, and has not finished")
    checker.world.seen("nobody acts any more")


def _judge_success(checker: Checker) -> None:
    for rank in range(checker.world.script.ranks):
        done = [p for p in checker.world.processes.values() if p.rank == rank and p.training.finished]
        end = checker.history.entered[-1][rank]
        if not any(each.training.state == end or checker.spoiled for each in done):
            checker.fail(f"the job ended with 0, and rank {rank} has not finished")
    error = checker.world.script.error
    if error is not None and not checker.causes - {Cause.SCRIPT}:
        checker.fail("the script's own error was trained over")


def _judge_failure(checker: Checker, code: int, reason: str) -> None:
    """Every end but success has a cause in the world, and its code says which."""
    spare_capacity = checker.usable_slots() >= checker.world.script.ranks
    causes = checker.causes
    match code:
        case c if c == NO_SPARE:
            just = Cause.UNDYING in causes or checker.node_was_lost or not spare_capacity
        case c if c == NO_STATE:
            just = bool(causes - {Cause.SCRIPT, Cause.TWICE, Cause.REFUSED, Cause.CANCELLED})
        case c if c == REFUSED:
            just = Cause.REFUSED in causes
        case c if c == STOPPED:
            just = checker.cancelled
        case c if c == checker.world.plan.script_code:
            just = bool(causes & {Cause.SCRIPT, Cause.NEVER_STARTED, Cause.NEVER_CONNECTS, Cause.FROZEN})
        case c if c == EXIT_CODE and Cause.TWICE in causes:
            just = True
        case _:
            just = bool(causes & {Cause.NEVER_STARTED, Cause.NEVER_CONNECTS, Cause.FROZEN})
    if not just:
        checker.fail(f"the job ends with {code} ({reason}); the world knows no cause for it: {sorted(causes)}")
    if code == checker.world.plan.script_code and checker.world.plan.script.error is not None:
        _judge_burnt(checker)


def _judge_burnt(checker: Checker) -> None:
    """On an error of the script no spare is burnt; one that strikes one rank only needs a second opinion."""
    error = checker.world.script.error
    weather = checker.world.plan.weather
    late = weather.reordered or weather.lost or weather.late or Lack.SLOW in checker.world.plan.lacks
    if checker.unheld or checker.struck or late:
        return  # something else has cost a spare (so may being slow), or what was raised is heard too late
    if error is not None and len(checker.replacements) > (0 if error.rank is None else 1):
        checker.fail(f"{len(checker.replacements)} spares were burnt on an error of the script")
