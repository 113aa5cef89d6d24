"""Faults: how each kind strikes the world. A strike that finds nothing to hit is no fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import msgspec

from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.ids import Rank
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.placement.taints import TOLD
from torchrelay.simulation.judge.invariants import Checker
from torchrelay.simulation.machine.machines import Machine
from torchrelay.simulation.model.causes import Cause
from torchrelay.simulation.model.life import Life
from torchrelay.simulation.model.plans import JOB, FaultKind, On, Strike
from torchrelay.simulation.scene import Scene
from torchrelay.simulation.worker.processes import Process

NEVER_RETURNS_MS = 5_000  # a node that is lost for so long does not return at all
SHORT_MS = 2_000  # less than any deadline
NEVER_RECONFIGURES = 60  # attempts, of all ranks together: more than any budget of generations


class Struck(Scene, Protocol):
    """A world that can be struck."""

    stormy: bool
    reconfigures_that_break: int
    fetches_that_break: int
    fetches_that_differ: int
    targets_that_die: int

    @property
    def checker(self) -> Checker: ...


class Faults:
    """The strikes of a plan, waiting for their triggers."""

    def __init__(self, world: Struck) -> None:
        self.world = world
        self.waiting: list[Strike] = []
        for strike in world.plan.strikes:
            if strike.on is On.TIME:
                world.after(strike.delay_ms, self.strike, strike)
            else:
                self.waiting.append(strike)

    def phase(self, on: On, phase: str, rank: Rank | None = None) -> None:
        """The job, or the holder of a rank, enters a phase."""
        for number, strike in enumerate(self.waiting):
            if strike.on is not on or strike.phase != phase or (rank is not None and strike.rank != rank):
                continue
            if strike.skip:
                self.waiting[number] = replace(strike, skip=strike.skip - 1)
            else:
                del self.waiting[number]
                self.world.after(strike.delay_ms, self.strike, strike)
                return

    def cease(self) -> None:
        """From now on it is calm: splits heal and who is away returns; what was broken stays broken."""
        self.waiting.clear()
        self.world.stormy = False
        self.world.reconfigures_that_break = 0
        self.world.shell.restart()
        for machine in self.world.machines.values():
            machine.split = False
            machine.start_agent()

    def strike(self, strike: Strike) -> None:
        if not self.world.stormy or self.world.over:
            return
        self.world.tell(f"** {strike.kind} (rank {strike.rank})")
        phase = self.world.phase
        self.world.checker.struck = True
        if STRIKES[strike.kind](self.world, strike):
            self.world.seen(f"fault: {strike.kind}")
            self.world.seen(f"fault: {strike.kind} in {phase}")


# ---------------------------------------------------------------- ranks


def holder_of(world: Struck, rank: int) -> Process | None:
    """Who holds a rank, as the world sees it: the newest living process that was given it."""
    found = [process for process in world.processes.values() if process.rank == rank and process.alive]
    training = [process for process in found if process.training.resumed]
    return training[-1] if training else (found[-1] if found else None)


def hit(strike_one: Callable[[Struck, Strike, Process], None]) -> Callable[[Struck, Strike], bool]:
    """A strike on the holder of a rank."""

    def strike_holder(world: Struck, strike: Strike) -> bool:
        process = holder_of(world, strike.rank)
        if process is None or process.life is not Life.RUNNING:
            return False
        strike_one(world, strike, process)
        return True

    return strike_holder


def kill(world: Struck, strike: Strike, process: Process) -> None:
    world.checker.gone(process.id, strike.kind)
    process.kill(signal=9, cause="SIGKILL")


def make_exit(world: Struck, strike: Strike, process: Process) -> None:
    del world, strike
    process.training.will_exit = True


def make_raise(world: Struck, strike: Strike, process: Process) -> None:
    del strike
    process.training.will_raise = f"once, at {world.now}, in {process.id}"


def make_hang(world: Struck, strike: Strike, process: Process) -> None:
    del world, strike
    process.training.will_hang = True


def make_stuck(world: Struck, strike: Strike, process: Process) -> None:
    del world, strike
    process.training.will_stick = True


def make_flip(world: Struck, strike: Strike, process: Process) -> None:
    del world, strike
    process.training.replicas.will_flip = True


def stop(world: Struck, strike: Strike, process: Process) -> None:
    """SIGSTOP. When all ranks are stopped nobody waits for anybody: that is a pause of the job, and no fault."""
    others = [each for each in world.processes.values() if each.life is Life.RUNNING and each.rank is not None]
    if strike.kind is not FaultKind.PAUSE and not any(each.rank != process.rank for each in others):
        return
    world.checker.gone(process.id, strike.kind)
    process.stop()


def pause(world: Struck, strike: Strike, process: Process) -> None:
    stop(world, strike, process)
    world.after(strike.length_ms, process.wake_up)


def make_undying(world: Struck, strike: Strike, process: Process) -> None:
    stop(world, strike, process)
    if process.life is Life.STOPPED:
        process.undying = True
        world.checker.causes.add(Cause.UNDYING)


def kill_two(world: Struck, strike: Strike) -> bool:
    victims = [holder_of(world, (strike.rank + step) % world.script.ranks) for step in (0, 1)]
    for process in victims:
        if process is not None:
            world.checker.gone(process.id, strike.kind)
            process.kill(signal=9, cause="SIGKILL")
    return None not in victims


def kill_replacement(world: Struck, strike: Strike) -> bool:
    del strike
    for process in world.processes.values():
        order = process.training.assigned
        if process.alive and order is not None and order.replacement and process.training.resumed == 0:
            world.checker.gone(process.id, "replacement killed")
            process.kill(signal=9, cause="SIGKILL")
            return True
    return False


# ---------------------------------------------------------------- spares


def spare_of(world: Struck) -> Process | None:
    spares = [each for each in world.processes.values() if each.rank is None and each.life is Life.RUNNING]
    return world.chance.choice(spares) if spares else None


def kill_spare(world: Struck, strike: Strike) -> bool:
    del strike
    spare = spare_of(world)
    if spare is not None:
        world.checker.gone(spare.id, "spare killed")
        spare.kill(signal=9, cause="SIGKILL")
    return spare is not None


def stop_spare(world: Struck, strike: Strike) -> bool:
    del strike
    spare = spare_of(world)
    if spare is not None:
        world.checker.gone(spare.id, "spare stopped")
        spare.stop()
    return spare is not None


# ---------------------------------------------------------------- connections and state


def cut(world: Struck, strike: Strike) -> bool:
    """One rank's connections are reset, and some others see it."""
    process = holder_of(world, strike.rank)
    if process is None or process.wiring is None:
        return False
    world.checker.broke()
    process.wiring.feel(Rank(strike.rank))
    return True


def break_reconfigures(world: Struck, strike: Strike) -> bool:
    del strike
    world.reconfigures_that_break += world.chance.randint(1, 3)
    return True


def break_all_reconfigures(world: Struck, strike: Strike) -> bool:
    del strike
    world.checker.causes.add(Cause.NEVER_CONNECTS)
    world.reconfigures_that_break += NEVER_RECONFIGURES
    return True


def break_restores(world: Struck, strike: Strike) -> bool:
    del strike
    world.fetches_that_break += world.chance.randint(1, 3)
    return True


def corrupt(world: Struck, strike: Strike) -> bool:
    del strike
    world.fetches_that_differ += world.chance.randint(1, 3)
    return True


# ---------------------------------------------------------------- nodes, agents, the orchestrator


def machine_of(world: Struck, strike: Strike) -> Machine:
    machines = list(world.machines.values())
    return machines[strike.rank % len(machines)]


def crash_agent(world: Struck, strike: Strike) -> bool:
    machine = machine_of(world, strike)
    world.checker.broke()
    machine.crash_agent()
    world.after(strike.length_ms, machine.start_agent)
    return True


def split(world: Struck, strike: Strike) -> bool:
    machine = machine_of(world, strike)
    world.checker.broke()
    if strike.kind is FaultKind.LONG_SPLIT:
        world.checker.node_gone(machine)
    machine.split = True
    if machine.agent is not None:
        machine.agent.disconnect()
    world.after(strike.length_ms, heal, machine)
    return True


def deafen(world: Struck, strike: Strike) -> bool:
    """Nobody reaches the orchestrator: that is its own affair, and nobody is lost by it.

    For long only where the silence of all is waited for: other phases have other deadlines, and a place must come in
    time.
    """
    job = world.job
    anew = job is not None and job.answered_ms is None and job.phase in (JobPhase.AGREEING, JobPhase.PREPARING)
    patient = job is None or (job.waiting_ms is None and (anew or job.phase is JobPhase.RUNNING))
    world.checker.broke()
    for machine in world.machines.values():
        machine.split = True
        if machine.agent is not None:
            machine.agent.disconnect()
        world.after(strike.length_ms if patient else min(strike.length_ms, SHORT_MS), heal, machine)
    return True


def heal(machine: Machine) -> None:
    machine.split = False


def lose_power(world: Struck, strike: Strike) -> bool:
    machine = machine_of(world, strike)
    world.checker.node_gone(machine)
    machine.lose_power()
    if strike.length_ms < NEVER_RETURNS_MS:
        world.after(strike.length_ms, machine.start_agent)
    else:
        machine.lost = True
    return True


def lose_rack(world: Struck, strike: Strike) -> bool:
    """Nodes that follow one another, `length_ms` apart."""
    machines = list(world.machines.values())
    for number in range(world.plan.rack):
        machine = machines[(strike.rank + number) % len(machines)]
        world.after(number * strike.length_ms, lose_for_good, world, machine)
    return world.plan.rack > 0


def lose_for_good(world: Struck, machine: Machine) -> None:
    world.checker.node_gone(machine)
    machine.lose_power()
    machine.lost = True


def crash_orchestrator(world: Struck, strike: Strike) -> bool:
    if not world.shell.up:
        return False
    world.checker.broke()
    world.shell.crash()
    world.after(strike.length_ms, world.shell.restart)
    return True


def cancel(world: Struck, strike: Strike) -> bool:
    del strike
    if world.shell.up:
        world.checker.cancelled = True
        world.shell.hear(ev.JobCancelled(job=JOB, reason="stopped by the operator"))
    return world.shell.up


# ---------------------------------------------------------------- moves and what disturbs them


def say(world: Struck, event: ev.Event) -> bool:
    """Something that an operator or a detector says; again while the orchestrator is away."""
    if world.over:
        return False
    if not world.shell.up:
        world.after(200, say, world, event)
        return True
    world.shell.hear(event)
    return True


def in_the_midst(world: Struck, event: ev.Event, tries: int = 400) -> None:
    """Say it when all are being asked to stop for a move, or stand there."""
    if world.phase in (JobPhase.QUIESCING, JobPhase.HALTING):
        say(world, event)
    elif tries and not world.over:
        world.after(5, in_the_midst, world, event, tries - 1)


def move(world: Struck, strike: Strike) -> bool:
    """One rank or two, to a certain node or anywhere; it may be withdrawn, or another node be named, in the midst."""
    count = 2 if strike.kind is FaultKind.MOVE_TWO else 1
    ranks = tuple(Rank((strike.rank + step) % world.script.ranks) for step in range(count))
    to = world.chance.choice((None, None, *world.machines)) if strike.kind is not FaultKind.MOVE_TWO else None
    world.checker.disturbed = True
    asked = ev.MoveAsked(job=JOB, ranks=ranks, to=to, reason="maintenance", source="operator")
    if strike.kind is FaultKind.MOVE_AND_BACK:
        elsewhere = msgspec.structs.replace(asked, to=world.chance.choice(tuple(world.machines)))
        back = ev.MoveWithdrawn(job=JOB, ranks=ranks, source="operator")
        if world.chance.randint(0, 1):
            world.after(world.chance.randint(0, 600), say, world, back)
        else:
            in_the_midst(world, elsewhere)
    return say(world, asked)


def park(world: Struck, strike: Strike) -> bool:
    """With a signal that is passed on if it comes to nothing in time, or just so; or all agents were told to end."""
    del strike
    grace_ms = world.chance.choice((None, None, 5_000))
    world.checker.disturbed = True
    world.checker.cancelled |= grace_ms is not None
    number = 0 if grace_ms is None else 15
    if number and world.chance.random() < 0.5:
        for machine in world.machines.values():
            world.checker.taint(machine, None)
            told = ev.TaintSet(node=machine.node, key=TOLD, value="15", source="agent")
            told = msgspec.structs.replace(told, gone_in_ms=world.chance.choice((None, grace_ms)))
            world.after(world.chance.randint(0, 300), say, world, told)
        return True
    return say(world, ev.ParkAsked(job=JOB, reason="the nodes go", source="operator", grace_ms=grace_ms, number=number))


def taint(world: Struck, strike: Strike) -> bool:
    """A slot, or for a drain a node, that is to be left; it is cleared after a while, or its time is over.

    By an operator, or by a detector, which leaves alone what the other has set.
    """
    machine = machine_of(world, strike)
    drain = strike.kind is FaultKind.DRAIN
    slot = None if drain else world.chance.randrange(machine.slots)
    world.checker.taint(machine, slot)
    ttl = strike.length_ms if world.chance.random() < 0.5 else None
    key = "drain" if drain else "ecc"
    yields = not drain and strike.rank % 2 == 1
    source = "detector" if yields else "operator"
    place: dict[str, Any] = {"node": machine.node, "slot": slot, "key": key, "source": source, "yields": yields}
    if ttl is None:
        world.after(strike.length_ms, say, world, ev.TaintCleared(**place, healed=strike.rank == 0))
    return say(world, ev.TaintSet(**place, ttl_ms=ttl, planned=drain))


def freeze(world: Struck, strike: Strike) -> bool:
    """What fails while the job is frozen ends it, as without us."""
    world.checker.causes.add(Cause.FROZEN)
    world.after(strike.length_ms, say, world, ev.FreezeCleared(source="operator"))
    return say(world, ev.FreezeSet(source="operator", reason="audit"))


def targets_of(world: Struck) -> list[Process]:
    """The targets of the open move, that run."""
    open_move = world.job.open_move if world.job is not None else None
    found = [world.processes.get(worker) for worker in open_move.targets.values()] if open_move is not None else []
    return [process for process in found if process is not None and process.life is Life.RUNNING]


def kill_target(world: Struck, strike: Strike) -> bool:
    targets = targets_of(world)
    if not targets:
        return False
    target = targets[strike.rank % len(targets)]
    world.checker.gone(target.id, "target")
    if strike.kind is FaultKind.STOP_TARGET:
        target.stop()
    else:
        target.kill(signal=9, cause="SIGKILL")
    return True


def doom_targets(world: Struck, strike: Strike) -> bool:
    """So many that a move is given up."""
    del strike
    world.targets_that_die = 3
    return True


def kill_outgoing(world: Struck, strike: Strike) -> bool:
    """Who is to leave in the open move, or stands there still."""
    open_move = world.job.open_move if world.job is not None else None
    if open_move is None:
        return False
    outgoing_workers = [world.processes.get(worker) for worker in open_move.outgoing_workers.values()]
    living = [process for process in outgoing_workers if process is not None and process.life is Life.RUNNING]
    if not living:
        return False
    outgoing = living[strike.rank % len(living)]
    world.checker.gone(outgoing.id, "outgoing")
    outgoing.kill(signal=9, cause="SIGKILL")
    return True


STRIKES: dict[FaultKind, Callable[[Struck, Strike], bool]] = {
    FaultKind.KILL: hit(kill),
    FaultKind.EXIT: hit(make_exit),
    FaultKind.RAISE: hit(make_raise),
    FaultKind.STOP: hit(stop),
    FaultKind.PAUSE: hit(pause),
    FaultKind.HANG: hit(make_hang),
    FaultKind.STUCK: hit(make_stuck),
    FaultKind.FLIP: hit(make_flip),
    FaultKind.TWO: kill_two,
    FaultKind.KILL_REPLACEMENT: kill_replacement,
    FaultKind.KILL_SPARE: kill_spare,
    FaultKind.STOP_SPARE: stop_spare,
    FaultKind.CUT: cut,
    FaultKind.RECONFIGURE_BREAKS: break_reconfigures,
    FaultKind.NEVER_RECONFIGURES: break_all_reconfigures,
    FaultKind.RESTORE_BREAKS: break_restores,
    FaultKind.MISMATCH: corrupt,
    FaultKind.AGENT: crash_agent,
    FaultKind.SPLIT: split,
    FaultKind.LONG_SPLIT: split,
    FaultKind.DEAF: deafen,
    FaultKind.POWER: lose_power,
    FaultKind.RACK: lose_rack,
    FaultKind.ORCHESTRATOR: crash_orchestrator,
    FaultKind.UNDYING: hit(make_undying),
    FaultKind.CANCEL: cancel,
    FaultKind.PARK: park,
    FaultKind.MOVE: move,
    FaultKind.MOVE_TWO: move,
    FaultKind.MOVE_AND_BACK: move,
    FaultKind.TAINT: taint,
    FaultKind.DRAIN: taint,
    FaultKind.FREEZE: freeze,
    FaultKind.KILL_TARGET: kill_target,
    FaultKind.STOP_TARGET: kill_target,
    FaultKind.KILL_OUTGOING: kill_outgoing,
    FaultKind.DOOMED_TARGETS: doom_targets,
}
