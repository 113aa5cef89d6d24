"""Head faults: what strikes the orchestrator on one of the nodes, its heirs, and the network between them."""

from __future__ import annotations

from torchrelay.protocol.messages.ids import NodeId
from torchrelay.simulation.machine.offices import Office
from torchrelay.simulation.model.plans import On, Strike
from torchrelay.simulation.operators import Struck

NEVER_RETURNS_MS = 5_000  # a node that is lost for so long does not return at all
SHORT_MS = 2_000  # less than any deadline
APART_MS = 3_000  # the nodes of one half come back within this time, in any order


def lose_node(world: Struck, node: NodeId, length_ms: int) -> None:
    machine = world.machines[node]
    world.checker.node_gone(machine)
    world.lose_power(machine)
    if length_ms < NEVER_RETURNS_MS:
        world.after(length_ms, machine.start_agent)
    else:
        machine.lost = True


def lose_head(world: Struck, strike: Strike) -> bool:
    office = None if world.court is None else world.court.acting_office
    if office is not None:
        world.checker.shake()
        lose_node(world, office.node, strike.length_ms)
    return office is not None


def lose_heir(world: Struck, strike: Strike) -> bool:
    found = [] if world.court is None else world.court.others
    if found:
        lose_node(world, found[0].node, strike.length_ms)
    return bool(found)


def end_heir(world: Struck, strike: Strike) -> bool:
    """Its process alone."""
    found = [] if world.court is None else world.court.others
    if found:
        crash(world, found[0], strike.length_ms)
    return bool(found)


def crash(world: Struck, office: Office, length_ms: int) -> None:
    """Its process ends. A head is started again by its launcher; an heir, or who was one, by nobody."""
    if office.kept:
        office.kill()
        world.after(length_ms, office.restart)
    else:
        office.end()


def freeze_head(world: Struck, strike: Strike) -> bool:
    """Who stands, if a strike waited for that; else who acts."""
    office = None if world.court is None else world.court.acting_office
    if world.court is not None and strike.on is On.SUCCESSION and strike.phase in ("stands", "elected"):
        office = next(iter(world.court.others), None)
    if office is None or office.frozen:
        return False
    world.checker.shake()
    office.freeze(True)
    world.after(strike.length_ms, thaw, office)
    return True


def thaw(office: Office) -> None:
    if office.frozen and office.up:
        office.freeze(False)


def split_in_halves(world: Struck, strike: Strike) -> bool:
    """Some nodes are cut off from the others, and come back one after the other."""
    if world.court is None or len(world.machines) < 2 or any(world.court.sides.values()):
        return False
    world.checker.shake()
    chance = world.court.chance
    cut = chance.sample(sorted(world.machines), chance.randint(1, len(world.machines) - 1))
    world.court.split(cut, lines_hold=strike.rank % 4 == 0)
    if strike.length_ms > SHORT_MS:
        give_up_who_is_apart(world)
    apart_ms = chance.choice((0, APART_MS))
    for node in cut:
        world.after(strike.length_ms + chance.randint(0, apart_ms), world.court.rejoin, node)
    return True


def give_up_who_is_apart(world: Struck) -> None:
    """Whoever acts may give up the nodes that it does not reach, before they are back."""
    court = world.court
    for machine in world.machines.values():
        if court is not None and not court.reaches(court.acting.office.node, machine.node):
            world.checker.node_gone(machine)


def calm(world: Struck) -> None:
    """Nothing strikes any more: what was split is whole, who was stopped goes on, processes are there again."""
    if world.court is not None:
        for office in list(world.court.offices.values()):
            thaw(office)
            if office.kept:
                office.restart()
        for node in world.machines:
            world.court.rejoin(node)
