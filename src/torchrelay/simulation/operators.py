"""Operators: what they ask for, and say again where nobody has answered; and the world, as what strikes it sees it."""

from __future__ import annotations

from typing import Protocol

import msgspec

from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.ids import Rank
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.placement.taints import TOLD
from torchrelay.simulation.judge.invariants import Checker
from torchrelay.simulation.machine.machines import Machine
from torchrelay.simulation.machine.shell import Shell
from torchrelay.simulation.model.causes import Cause
from torchrelay.simulation.model.plans import JOB, FaultKind, Strike
from torchrelay.simulation.scene import Scene

ASKED_AGAIN_MS = 500
AGAIN_MS = 5_000


def cancel(world: Struck, strike: Strike) -> bool:
    del strike
    if world.shell.up:
        world.checker.cancelled = True
        say(world, ev.JobCancelled(job=JOB, reason="stopped by the operator"))
    return world.shell.up


def say(world: Struck, event: ev.Event) -> bool:
    """Something that an operator or a detector says; again while the orchestrator is away."""
    if world.over:
        return False
    shell = world.shell
    if not shell.up or shell.frozen:
        world.after(200, say, world, event)
        return True
    answered: list[int] = []

    def hear_answer(known: int) -> None:
        answered.append(known)
        if shell.copied is not None:
            world.reigns.answered(shell.copied.lease, known)

    shell.hear_operator(event, hear_answer)
    if not answered:
        world.after(ASKED_AGAIN_MS, ask_again, world, event, shell, answered)
    return True


def ask_again(world: Struck, event: ev.Event, shell: Shell, answered: list[int]) -> None:
    """Who has no answer, and whose orchestrator is lost, says it to the next one."""
    if answered:
        return
    if world.shell is shell and shell.up:
        world.after(ASKED_AGAIN_MS, ask_again, world, event, shell, answered)
    else:
        say(world, event)


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
    if ttl is None:
        cleared = ev.TaintCleared(
            node=machine.node, slot=slot, key=key, source=source, healed=strike.rank == 0, yields=yields
        )
        world.after(strike.length_ms, say, world, cleared)
    return say(
        world,
        ev.TaintSet(node=machine.node, slot=slot, key=key, source=source, ttl_ms=ttl, planned=drain, yields=yields),
    )


def freeze(world: Struck, strike: Strike) -> bool:
    """What fails while the job is frozen ends it, as without us."""
    world.checker.causes.add(Cause.FROZEN)
    world.after(strike.length_ms, say, world, ev.FreezeCleared(source="operator"))
    if world.court is not None:
        world.after(strike.length_ms + AGAIN_MS, lift, world)
    return say(world, ev.FreezeSet(source="operator", reason="audit"))


def lift(world: Struck) -> None:
    """A freeze that nobody had answered may have been said again after it was to be over."""
    if not world.over:
        if world.shell.cluster.freezes:
            say(world, ev.FreezeCleared(source="operator"))
        world.after(AGAIN_MS, lift, world)


# ---------------------------------------------------------------- the world that is struck


class Struck(Scene, Protocol):
    """A world that can be struck."""

    stormy: bool
    reconfigures_that_break: int
    fetches_that_break: int
    fetches_that_differ: int
    targets_that_die: int

    @property
    def checker(self) -> Checker: ...
    def lose_power(self, machine: Machine) -> None: ...
    def network_changed(self) -> None: ...


def machine_of(world: Struck, strike: Strike) -> Machine:
    machines = list(world.machines.values())
    return machines[strike.rank % len(machines)]
