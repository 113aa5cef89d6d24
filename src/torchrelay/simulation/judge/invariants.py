"""Invariants: what must always be true (docs/protocol.md), judged by what the world knows and not by asking the core.

one owner      a rank is connected once in a generation; who was fenced is ordered nothing but its end
no half step   whoever resumes or commits has the state that the undisturbed run has there: this is the chain
exactly once   of `script`, which one missing, doubled or foreign batch changes for ever
bit-equal      ... and so does one wrong random number
verified       nobody resumes without the state, and what arrives damaged is not taken
never worse    the job ends in bounded time, with 0 and without loss unless the world gave it a cause
kept promises  what an operator asked for is done, withdrawn or given up, and a move tells of it
monotonic      the point that a job resumes from does not go back, except by a fall-back
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import START, Generation, NodeId, Point, Rank, WorkerId
from torchrelay.protocol.model.job import Job, JobPhase
from torchrelay.protocol.model.state import Cluster
from torchrelay.simulation.judge.checks import Violation, check_cutover, check_settled, check_together
from torchrelay.simulation.machine.machines import Machine
from torchrelay.simulation.model import script as sc
from torchrelay.simulation.model.causes import Cause
from torchrelay.simulation.model.life import Life
from torchrelay.simulation.model.plans import FaultKind, Lack
from torchrelay.simulation.scene import Scene
from torchrelay.simulation.worker.processes import Process
from torchrelay.simulation.worker.training import Training

START_BUDGET = 3
# More than all strikes of a plan can ask for, each tried again and again.
MANY_MOVES = 60


class Checker:
    """Watches one world."""

    def __init__(self, world: Scene) -> None:
        self.world = world
        self.history = sc.undisturbed(world.script.ranks, world.script.shards, len(world.script.calls))
        self.causes: set[Cause] = set()
        self.victims: set[WorkerId] = set()  # whom a fault has hit
        self.fenced: dict[WorkerId, Generation] = {}  # and in which generation
        self.deaths: Counter[tuple[NodeId, int]] = Counter()
        self.hit_before_commit: set[int] = set()  # when
        self.resumed_from: dict[int, Point] = {}  # restarts -> the newest point resumed from
        self.furthest = START  # that any rank has committed, in what counts still
        self.lost_in = self.lost = self.rolls = 0  # in which incident, how many steps, and how often all went back
        self.exited_at: set[tuple[Rank | None, Point]] = set()
        self.replacements: set[WorkerId] = set()
        self.differing: Counter[Rank] = Counter()
        self.once: dict[Rank, bytes] = {}  # what each rank's first holder recorded
        self.disturbed = False  # something broke without a victim
        self.cancelled = False
        self.struck = False  # by any fault
        self.orphans: dict[Rank, Process] = {}  # lost with their node and page; not yet replaced
        self.node_was_lost = False
        self.away: set[Machine] = set()  # given up, though they live: what is there is of no use
        self.shaken = False  # the orchestrator was lost, or some nodes could not reach it
        self.tainted: set[tuple[NodeId, int]] = set()  # slots that were not to be used, at any time
        self.spoiled = False  # a flipped bit has spread
        self.unheld = False  # a shard was without a holder
        self.going: list[Machine] = []  # nodes being lost
        self.started_again = False  # all workers, and slots were freed whose workers had died unheard

    def fail(self, text: str) -> None:
        raise Violation(text)

    def trains_on(self, job: Job) -> None:
        """Whoever resumed from a point has joined before, and has said so once: moves wait for those who have not."""
        weather = self.world.plan.weather
        if weather.lost or weather.late or weather.reordered or job.resume_point is None:
            return  # it may be heard later
        for rank, seat in job.seats.items():
            if not seat.joined:
                self.fail(f"rank {rank} trains on, and nobody remembers that {seat.worker} has joined")

    # ------------------------------------------------------------ requests

    def requests(self, event: ev.Event, was: Job, now: Job) -> None:
        """What operators have asked for, before and after an event that the orchestrator has heard."""
        check_cutover(was, now)
        withdrawn = event.ranks if isinstance(event, ev.MoveWithdrawn) else ()
        for rank, request in was.moving.requests.items() if now.stop is None else ():  # who leaves moves nowhere
            kept = now.moving.requests.get(rank)
            if kept is not None:
                if self.world.phase is JobPhase.RUNNING and kept.worker != now.seats[rank].worker:
                    self.fail(f"rank {rank} is to move, and that is asked of {kept.worker}, which does not hold it")
            elif rank not in withdrawn and not self.world.over:
                check_settled(self.world, now, rank, request)

    # ------------------------------------------------------------ faults

    def gone(self, worker: WorkerId, why: str) -> None:
        """A fault hits this process: from now on nobody may count on it."""
        del why
        self.victims.add(worker)
        self.disturbed = True
        self.weigh_shard(self.world.processes[worker])
        self.weigh_records()
        if not any(has_trained(each) for each in self.sound()):
            self.start_hit()

    def weigh_records(self) -> None:
        """Whether the private state of a rank is gone with its node, since none of its buddies is left."""
        sound = self.sound()
        newest = max((each.training.committed or START for each in sound), default=START)
        for rank in self.orphans:
            kept = any((rank, newest) in each.copies for each in sound)
            if not any(each.training.joined for each in sound) or (newest > START and not kept):
                self.causes.add(Cause.NODE)

    def taint(self, machine: Machine, slot: int | None) -> None:
        """A slot, or a whole node, is not to be used."""
        self.disturbed = True
        slots = range(machine.slots) if slot is None else (slot,)
        self.tainted.update((machine.node, each) for each in slots)

    def weigh_shard(self, process: Process) -> None:
        """Whether a part of the state is gone with this process."""
        # A record in the page may be of a gate that was passed: nobody can tell any more.
        if process.rank is not None and (has_trained(process) or process.page):
            shards = self.world.script.shards
            trained = [each for each in self.sound() if has_trained(each)]
            if not any(shards[each.training.rank] == shards[process.rank] for each in trained):
                self.weigh_snapshots()

    def weigh_snapshots(self) -> None:
        """A shard has no holder left. Whether there is a snapshot of every rank."""
        self.unheld = True
        there = [one for one in self.world.machines.values() if not one.lost and one not in self.going]
        told = [one.snapshot_store.kept for one in there if self._slots_of(one)]
        common = [
            {one.point for kept in told for one in kept if one.rank == rank and one.restarts == self.restarts}
            for rank in range(self.world.script.ranks)
        ]
        if not set.intersection(*common):
            self.causes.add(Cause.NO_REPLICA)

    @property
    def restarts(self) -> int:
        return self.world.job.attempts.restarts if self.world.job is not None else 0

    @property
    def rolling(self) -> bool:
        """Whether all ranks go back to a snapshot, as they must."""
        job = self.world.job
        return job is not None and (self.may_roll or job.resuming) and job.rollback.point is not None

    @property
    def may_roll(self) -> bool:
        """Whether something was lost that only snapshots have: a shard, or a rank's private state."""
        return self.unheld or Cause.NODE in self.causes

    def weigh_victims(self) -> None:
        """They may have woken up and trained on before they were found; or the last of their shard has left since."""
        for worker in self.victims:
            process = self.world.processes.get(worker)
            if process is not None:
                self.weigh_shard(process)

    def start_hit(self) -> None:
        """A start is hit before anything was committed."""
        self.hit_before_commit.add(self.world.now)
        if len(self.hit_before_commit) >= START_BUDGET:
            self.causes.add(Cause.NEVER_STARTED)

    def spread(self) -> None:
        """A state with a flipped bit is given to a replacement before anybody has compared: then most may be wrong."""
        self.spoiled = True
        self.doubted()

    def doubted(self) -> None:
        """Replicas differ, or may, and nobody can tell which of them are right."""
        self.causes.add(Cause.DOUBT)

    def flipped(self, worker: WorkerId) -> None:
        """A bit flips in what a worker holds. Its slot is tainted by the second one, for good."""
        self.gone(worker, "a flipped bit")
        process = self.world.processes[worker]
        self.tainted.add((process.node, process.slot))

    def broke(self) -> None:
        """A connection breaks, or is not made, and nobody is lost."""
        self.disturbed = True
        if not any(has_trained(each) for each in self.sound()):
            self.start_hit()

    def sound(self) -> list[Process]:
        """Living holders of ranks that no fault has hit."""
        return [
            each
            for each in self.world.processes.values()
            if each.alive and each.rank is not None and each.id not in self.victims and each.id not in self.fenced
        ]

    def holders(self, rank: Rank) -> int:
        """How many of them train, and hold what this rank holds."""
        shards = self.world.script.shards
        trained = [each for each in self.sound() if has_trained(each) and each.training.resumed]
        return sum(shards[each.training.rank] == shards[rank] for each in trained)

    def missed(self, rank: Rank | None) -> bool:
        """Whether others train, and would wait for this rank."""
        return any(
            each.life is Life.RUNNING
            and each.rank not in (None, rank)
            and each.training.resumed
            and not each.training.will_hang
            for each in self.world.processes.values()
        )

    def given_up(self, machine: Machine) -> None:
        """It was silent for too long. One crash of its agent is short, or one split; one after the other may not be."""
        short = {FaultKind.AGENT, FaultKind.SPLIT, FaultKind.DEAF, FaultKind.ORCHESTRATOR}
        if self.shaken or sum(strike.kind in short for strike in self.world.plan.strikes) > 1:
            self.away |= {machine} if self.shaken else set()
            self.node_gone(machine)
        elif machine in self.going:  # cut off from the orchestrator alone, its workers have gone on until now
            self.orphan(machine)
            self.weigh_records()

    def shake(self) -> None:
        """Some nodes have lost the orchestrator: who does not come to the next one in time is given up."""
        self.broke()
        self.shaken = self.node_was_lost = True

    def node_gone(self, machine: Machine) -> None:
        self.node_was_lost = self.disturbed = True  # also with workers that were only to start there
        self.going.append(machine)
        if self.unheld:
            self.weigh_snapshots()
        # It is lost twice: for its peers at once, and again when its silence has lasted too long.
        self.hit_before_commit.add(self.world.now + 1)
        self.orphan(machine)
        for process in list(machine.processes.values()):
            self.gone(process.id, "its node")

    def orphan(self, machine: Machine) -> None:
        """The ranks that are held there lose their pages with the node."""
        for process in list(machine.processes.values()):
            joined = process.training.joined and not is_target(process)
            if process.rank is not None and process.id not in self.fenced and joined:
                self.orphans[process.rank] = process

    def raised(self, worker: WorkerId, kind: str, signature: str) -> None:
        """A worker raises, and ends of it."""
        self.gone(worker, "raised")
        if kind == "undeclared":
            self.causes.add(Cause.UNDECLARED)
        elif kind == "refused":
            self.causes.add(Cause.REFUSED)
        elif self.world.script.error is not None and signature.startswith("error in call"):
            self.causes.add(Cause.SCRIPT)

    def exits(self, worker: WorkerId) -> None:
        """A worker ends by itself. Twice at the same point nobody can tell that from the script's own error."""
        self.gone(worker, "exits")
        one = self.world.processes[worker]
        place = one.rank, max((record.point for record in one.records()), default=START)
        if place in self.exited_at:
            self.causes.add(Cause.TWICE)
        self.exited_at.add(place)

    def damaged(self, target: Rank) -> None:
        """What arrives at a target is damaged. Who delivers so once is not asked again in the same incident."""
        self.differing[target] += 1
        shards = self.world.script.shards
        replicas = [each for each in self.sound() if has_trained(each) and shards[each.training.rank] == shards[target]]
        if self.differing[target] >= len(replicas):
            self.causes.add(Cause.MISMATCH)
            self.unheld = True

    def lost_patience(self, worker: WorkerId) -> None:
        self.causes.add(Cause.PATIENCE)
        self.gone(worker, "patience")

    # ------------------------------------------------------------ orders

    def stands(self, standing: frozenset[od.Order], expected: frozenset[od.Order]) -> None:
        """What stands is what the state says. `expected`: all that it says, read off it anew."""
        if standing != expected:
            self.fail(f"orders stand that differ from what the state says: {sorted(map(str, standing ^ expected))[:4]}")
        check_together(standing)

    def ordered(self, fresh: Iterable[od.Order]) -> None:
        """Orders are given for the first time."""
        fresh = list(fresh)
        if not fresh:
            return
        if any(isinstance(order, od.Fence) for order in fresh):
            self.weigh_victims()
        for order in fresh:
            self.world.seen(f"order: {type(order).__name__}")
            if isinstance(order, od.Fence):
                self.fence(order.worker)
            elif isinstance(order, od.WorkerOrder):
                self.check_order(order)

    def fence(self, worker: WorkerId) -> None:
        """Nobody is fenced whom no fault has hit, unless all start again or the job ends."""
        job = self.world.job
        self.fenced.setdefault(worker, job.generation if job is not None else Generation(0))
        process = self.world.processes.get(worker)
        if process is None or not process.alive or worker in self.victims or self.must_lose():
            return
        training = process.training
        if self.has_left(worker) or (training.prepared and not training.resumed):
            return  # an outgoing worker, or a target that has not gone on: the rank is its outgoing worker's
        if has_trained(process) and not self.world.over and not self.rolling:
            self.fail(f"{worker} is fenced although it is sound and has trained")
        weather = self.world.plan.weather
        if not self.disturbed and not self.world.over and not (weather.lost or weather.late):
            self.fail(f"{worker} is fenced although nothing has happened")

    def has_left(self, worker: WorkerId) -> bool:
        """Whether it was to leave its rank, and another holds that now."""
        job = self.world.job
        if job is None or any(seat.worker == worker for seat in job.seats.values()):
            return False
        return any(worker in move.outgoing_workers.values() for move in job.moving.moves)

    def check_order(self, order: od.WorkerOrder) -> None:
        if order.worker in self.fenced:
            self.fail(f"{order.worker} was fenced and is told {type(order).__name__}")
        if isinstance(order, od.Assign):
            self.check_assign(order)
        if isinstance(order, od.Replay | od.Restore):
            for source in order.sources:
                self.check_source(order, source)
        if isinstance(order, od.Reconfigure) and not any(
            each.store == order.store and each.id not in self.fenced for each in self.world.processes.values()
        ):
            self.fail(f"nobody hosts {order.store}")

    def check_assign(self, order: od.Assign) -> None:
        """Whoever takes a rank hears what its former holders have done once and for all."""
        if order.replacement and not order.examples:
            self.replacements.add(order.worker)
        for other in self.world.processes.values():
            if other.rank != order.rank or other.id == order.worker or not other.alive or self.node_was_lost:
                continue
            if not order.examples and not is_target(other) and not self.has_left(other.id):
                self.fail(f"rank {order.rank} is given to {order.worker} while {other.id} still runs")
        recorded = self.once.get(order.rank)
        if recorded is not None and dict(order.once).get("tracker") != recorded:
            self.fail(f"{order.worker} is not told what rank {order.rank} has done once")

    def check_source(self, order: od.WorkerOrder, source: od.Source) -> None:
        """A source holds the rank that it is named for, and the same shard."""
        process = self.world.at(source.address)
        known = process is not None and (process.rank == source.rank or (self.rolling and process.rank is None))
        if process is None or process.id in self.fenced or not known:
            self.fail(f"{source} is no source for {order.worker}")
        elif isinstance(order, od.Restore):
            shards = self.world.script.shards
            if order.snapshot:
                if process.training.shots.snapshot_store.find(order.rank, order.point, self.restarts) is None:
                    self.world.seen("a snapshot that was told of is not there")
            elif shards[source.rank] != shards[order.rank] or process.id == order.worker:
                self.fail(f"rank {order.rank} is to be restored from rank {source.rank}, another shard")

    def free_slot(self, node: NodeId, order: od.StartWorker) -> None:
        """One process in a slot, or as many as may share one; and none of a job that is over."""
        others = [each for each in self.world.machines[node].processes.values() if each.slot == order.slot]
        hosts = [process.id for process in others if not process.guest]
        if hosts and not order.guest:
            self.fail(f"{order.worker} is started in the slot of {hosts[0]}, which runs")
        living = [process.id for process in others if process.id not in self.fenced]
        if len(living) >= self.world.plan.spec.ranks_per_slot:
            self.fail(f"{order.worker} is started in the slot of {', '.join(living)}, which is full")
        if order.guest:
            self.world.seen("a slot is shared")
        died = any(
            each.node == node
            and each.slot == order.slot
            and each.id != order.worker  # it ended before anybody had heard of it
            and not each.alive
            and each.id in self.victims - set(self.fenced)
            for each in self.world.processes.values()
        )
        # A guest may be sent to one whose death nobody has heard of yet.
        if died and not order.guest and not self.started_again and Lack.REFILL in self.world.plan.lacks:
            self.fail(f"slot {order.slot} of {node} is filled again, which the job did not want")

    # ------------------------------------------------------------ training

    def committed(self, worker: WorkerId, call: int, after: sc.RankState) -> None:
        """A rank commits a call: with the batch, the random numbers and the state of the undisturbed run."""
        training = self.world.processes[worker].training
        self.world.seen(f"commit: {self.world.script.calls[call]}")
        if after != self.history.left[call][training.rank] and not self.spoiled:
            self.fail(f"{worker} commits call {call} with another state than the undisturbed run")
        self.furthest = max(self.furthest, training.committed or START)
        if training.interrupted:
            self.check_promise(training)
        if call in self.world.script.saves and training.rank == 0:
            self.world.checkpoint = (call + 1, self.history.left[call])

    def check_promise(self, training: Training) -> None:
        """Who has reported passes a gate only if that was decided, in the newest generation it has heard of."""
        decided = training.todo.get(od.Decide)
        allowed = decided is not None and decided.verdict is od.Verdict.ROLL_FORWARD
        if not allowed or decided is None or decided.point != training.committed:
            self.fail(f"{training.process.id} passes the gate of {training.committed} after its report")

    def resumed(self, worker: WorkerId) -> None:
        """A rank trains on: at the point of all, with the state that belongs there."""
        training = self.world.processes[worker].training
        if worker in self.fenced and training.resumed > self.fenced[worker]:
            self.fail(f"{worker} was fenced and resumes in a later generation")
        if training.committed is None:
            if training.assigned is not None and training.assigned.replacement:
                self.fail(f"{worker} resumes without any state")
            return
        expected = self.history.entered[training.base + training.index][training.rank]
        spoiled = self.spoiled or training.replicas.flipped  # nobody has compared yet
        if not training.entered or (training.state != expected and not spoiled):
            self.fail(f"{worker} resumes from {training.committed} with another state than the undisturbed run")
        restarts = training.assigned.restarts if training.assigned is not None else 0
        job = self.world.job
        # Where sections alone were made since the snapshot, going back to it loses no step.
        open_one = None if job is None else job.open_incident
        rolling = open_one is not None and open_one.lost
        back = job is not None and (rolling or job.rollback.point == training.committed)
        if training.committed < self.resumed_from.get(restarts, START) and not back:
            self.fail(f"{worker} resumes from {training.committed}: the job has been further")
        self.resumed_from[restarts] = training.committed
        if worker not in self.victims:
            self.orphans.pop(training.rank, None)

    def replayed(self, before: Cluster, after: Cluster) -> None:
        if before != after or before.now_ms != after.now_ms:
            self.fail("the journal's replay gives another state")

    # ------------------------------------------------------------ the end

    def died(self, worker: WorkerId) -> None:
        process = self.world.processes[worker]
        if process.exited is not None and process.exited.code != 0:
            self.deaths[process.node, process.slot] += 1

    def goes_back(self, was: Job, now: Job) -> None:
        """All go back to a snapshot: the ledger tells how many steps that costs, but for the one under way."""
        point, incident = now.rollback.point, now.open_incident
        if point is None or incident is None or point == was.rollback.point:
            return
        if self.lost_in != incident.number:
            self.lost_in, self.lost, self.rolls = incident.number, 0, 0
        self.lost, self.rolls, self.furthest = self.lost + self.furthest.step - point.step, self.rolls + 1, point
        if abs(incident.lost - self.lost) > self.rolls and not self.node_was_lost:
            self.fail(f"{self.lost} steps are made again from {point}, and the ledger tells of {incident.lost}")

    def must_lose(self) -> bool:
        """Whether the world has done something that this job need not survive without loss."""
        return bool(self.causes) or self.usable_slots() < self.world.script.ranks

    def usable_slots(self) -> int:
        """Slots that are surely there and not cordoned."""
        there = (machine for machine in self.world.machines.values() if not machine.lost and machine not in self.away)
        return sum(map(self._slots_of, there))

    def _slots_of(self, machine: Machine) -> int:
        spec = self.world.plan.spec
        limit = 1 if not spec.refill else spec.slot_faults or 1_000_000
        return (
            sum(
                self.deaths[machine.node, slot] < limit
                for slot in range(machine.slots)
                if (machine.node, slot) not in self.tainted
            )
            * spec.ranks_per_slot
        )


def has_trained(process: Process) -> bool:
    """Whether it holds state that something was committed to."""
    point = process.training.committed
    return point is not None and point > START


def is_target(process: Process) -> bool:
    """Whether it is prepared for a rank that it has never held."""
    return process.training.prepared and process.training.committed is None
