"""Deeds: carries a wish out on the processes and links of a run, and undoes what was meant to last for a while only."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import Struct

from torchrelay.agent.workers.oom import own_cgroup_file
from torchrelay.chaos import leaving
from torchrelay.chaos.faults import Fault, Gone, Victim, observe, strike
from torchrelay.chaos.phases import await_phase, catch, last_phase
from torchrelay.chaos.whereabouts import Refusal, Whereabouts
from torchrelay.chaos.wishes import Cut, Deed, Facts, How, Phase, Wish
from torchrelay.protocol.messages.ids import NodeId, WorkerId
from torchrelay.schedulers import network as net

AWAY = "away"  # in a node's folder: for how many seconds its agent is to be deaf and dumb
LASTS_S = 30.0  # a partition or a slow spell without --for
# One turn of the duty cycle that makes a process slow: shorter than any patience with a stopped worker.
TURN_S = 0.1


class Step(Struct, frozen=True, kw_only=True):
    """One thing that is done, to one process or one link."""

    what: str
    pid: int | None = None
    node: NodeId | None = None
    worker: WorkerId | None = None


@dataclass
class Plan:
    """What will be done. `act` does it and says in words what happened; `lasts_s` and `undo`: if it is to end again."""

    wish: Wish
    steps: tuple[Step, ...]
    act: Callable[[], str]
    lasts_s: float | None = None
    undo: Callable[[], None] = field(default=lambda: None)


def plan_deed(wish: Wish, facts: Facts, where: Whereabouts) -> Plan:
    """What will be done, to whom. Raises `Refusal`; nothing is done yet."""
    match wish.deed:
        case Deed.KILL | Deed.EXIT | Deed.OOM | Deed.STOP | Deed.SLOW:
            return plan_for_rank(wish, facts, where)
        case Deed.NODE if wish.how is How.POWER:
            return plan_power(wish, where)
        case Deed.NODE:
            return plan_node(wish, facts, where)
        case Deed.PATH:
            return plan_path(wish, where)
        case Deed.PARTITION:
            return plan_partition(wish, where)
        case Deed.AGENT:
            pid = where.agent(node_of(wish))
            step = Step(what="SIGKILL to the agent", pid=pid, node=wish.node)
            return Plan(wish, (step,), killing([pid]))
        case Deed.ORCHESTRATOR:
            pid = where.orchestrator()
            return Plan(wish, (Step(what="SIGKILL to the orchestrator", pid=pid),), killing([pid]))
        case Deed.MEND:
            return plan_mending(wish, facts, where)


def node_of(wish: Wish) -> NodeId:
    if wish.node is None:
        raise Refusal(f"say which node: --node, for {wish.deed}")
    return wish.node


def killing(pids: list[int]) -> Callable[[], str]:
    """SIGKILL to all of them, one right after the other. Who they are is noted now, so that no stranger is hit."""
    victims = [observe(pid) for pid in pids]

    def act() -> str:
        gone = 0
        for victim in victims:
            try:
                strike(victim, Fault.KILL)
            except Gone:
                gone += 1
        told = f"SIGKILL to {len(victims) - gone} process{'es' if len(victims) - gone != 1 else ''}"
        return f"{told}; {gone} had ended before" if gone else told

    return act


# ---------------------------------------------------------------- one rank


def plan_for_rank(wish: Wish, facts: Facts, where: Whereabouts) -> Plan:
    if wish.rank is None:
        raise Refusal(f"say which rank: --rank, for {wish.deed}")
    row = facts.holder(wish.rank)
    assert row.pid is not None, "a holder has one"
    assert row.worker is not None, "a holder has one"
    assert row.node is not None, "a holder has one"
    where.check_is_here(row.node)
    victim, page = observe(row.pid), where.page(row.node, row.worker)
    what, strike_it = way_of(wish, victim)

    def act() -> str:
        if wish.phase is not Phase.ANY and wish.deed in (Deed.KILL, Deed.STOP):
            catch(page, wish.phase, victim)  # one that stands is hit in the same phase
        else:
            await_phase(page, wish.phase)
        told = strike_it()
        phase = last_phase(page)
        return f"{told}, in phase {phase}" if phase and wish.deed in (Deed.KILL, Deed.STOP) else told

    at = "" if wish.phase is Phase.ANY else f", when it is in {wish.phase}"
    step = Step(what=f"{what} to rank {wish.rank}{at}", pid=row.pid, node=row.node, worker=row.worker)
    undo = going_on([victim]) if wish.deed is Deed.STOP else (lambda: None)
    return Plan(wish, (step,), act, wish.for_s if wish.deed is Deed.STOP else None, undo)


def way_of(wish: Wish, victim: Victim) -> tuple[str, Callable[[], str]]:
    """What is done to the process, in words and as a function."""

    def send(fault: Fault, told: str) -> Callable[[], str]:
        def act() -> str:
            strike(victim, fault)
            return told

        return act

    code = 1 if wish.code is None else wish.code
    obstacle = leaving.obstacle()
    match wish.deed:
        case Deed.STOP:
            lasts = f" for {wish.for_s:g} s, then SIGCONT" if wish.for_s is not None else ""
            return f"SIGSTOP{lasts}", send(Fault.STOP, "it is stopped")
        case Deed.EXIT if not obstacle:
            return f"exit_group({code}), by ptrace,", lambda: leave(victim, code)
        case Deed.EXIT:
            return f"SIGTERM (an exit code cannot be given to it: {obstacle})", send(Fault.TERMINATE, "it got SIGTERM")
        case Deed.OOM if possible(victim.pid):
            return "a memory cgroup without room, so that the kernel kills it,", lambda: starve(victim)
        case Deed.OOM:
            told = "SIGKILL as from the kernel's OOM killer (no memory cgroup here: the cause will read SIGKILL)"
            return told, send(Fault.KILL, "SIGKILL")
        case Deed.SLOW:
            lasts_s = LASTS_S if wish.for_s is None else wish.for_s
            what = f"SIGSTOP and SIGCONT in turn for {lasts_s:g} s, so that it runs 1/{wish.factor:g} of the time,"
            return what, lambda: slow(victim, wish.factor, lasts_s)
        case _:
            return "SIGKILL", send(Fault.KILL, "it is killed")


def leave(victim: Victim, code: int) -> str:
    leaving.leave(victim, code)
    return f"it exited with {code}"


def slow(victim: Victim, factor: float, lasts_s: float) -> str:
    """Stop it for a part of each turn; turns differ a little, so that they fall in step with nothing."""
    until = time.monotonic() + lasts_s
    try:
        while time.monotonic() < until:
            turn_s = TURN_S * random.uniform(0.8, 1.2)
            strike(victim, Fault.STOP)
            time.sleep(turn_s * (1 - 1 / factor))
            strike(victim, Fault.CONTINUE)
            time.sleep(turn_s / factor)
    finally:
        going_on([victim])()
    return f"it ran 1/{factor:g} of the time for {lasts_s:g} s"


def going_on(victims: list[Victim]) -> Callable[[], None]:
    """SIGCONT to those that are still there."""

    def act() -> None:
        for victim in victims:
            try:
                strike(victim, Fault.CONTINUE)
            except Gone:
                continue

    return act


# ---------------------------------------------------------------- one node


def plan_node(wish: Wish, facts: Facts, where: Whereabouts) -> Plan:
    """Agent, forkserver and workers at once, and what they shared with each other: as if the machine had gone."""
    node = node_of(wish)
    agent = where.agents().get(node)
    family = where.family(node, [row.pid for row in facts.on(node) if row.pid is not None])
    pids = ([agent] if agent is not None else []) + family
    if not pids:
        known = ", ".join(sorted(where.agents())) or "none"
        raise Refusal(f"nothing runs on {node} that could be killed; nodes of this run: {known}")
    names = {row.pid: row.worker for row in facts.on(node)}
    roles: dict[int | None, str] = {agent: "the agent"} | dict.fromkeys(family[:1], "the forkserver")
    steps = [
        Step(what=f"SIGKILL to {roles.get(pid, 'a worker')}", pid=pid, node=node, worker=names.get(pid)) for pid in pids
    ]
    folder = where.folder(node)
    steps.append(Step(what=f"remove its pages and sockets ({folder})", node=node))
    kill = killing(pids)

    def act() -> str:
        told = kill()
        shutil.rmtree(folder, ignore_errors=True)
        return f"{told}, pages removed"

    return Plan(wish, tuple(steps), act)


def plan_power(wish: Wish, where: Whereabouts) -> Plan:
    node, network = node_of(wish), where.network
    if network is None:
        raise Refusal("--how power cuts the node's network link: start the run with --isolate, or use --how kill")
    link = network.link(node)
    if net.is_cut(network, node):
        raise Refusal(f"the link of {node} is down already: `torchrelay chaos mend --node {node}` puts it up")

    def act() -> str:
        net.cut(network, node)
        return f"{link.interface} is down: nothing is closed, and its processes live on unseen"

    return Plan(
        wish,
        (Step(what=f"ip link set {link.interface} down", node=node),),
        act,
        wish.for_s,
        lambda: net.mend(network, node),
    )


def plan_path(wish: Wish, where: Whereabouts) -> Plan:
    """One path of the node is lost; its other links are not touched."""
    node, network = node_of(wish), where.network
    if network is None:
        raise Refusal("nodes have no paths of their own: start the run with --isolate --links 2 --net-failover")
    path = network.link(node).path(wish.path)
    lost = net.cut_path if wish.cut is Cut.DOWN else net.swallow_path
    what = f"ip link set {path.interface} down" if wish.cut is Cut.DOWN else f"all packets over {path.name} are lost"
    lasts = f" for {wish.for_s:g} s" if wish.for_s is not None else ""

    def act() -> str:
        lost(network, node, wish.path)
        return f"{path.name} of {node} is {'down' if wish.cut is Cut.DOWN else 'silent'}"

    step = Step(what=f"{what}{lasts}", node=node)
    return Plan(wish, (step,), act, wish.for_s, lambda: net.mend_path(network, node, wish.path))


def plan_partition(wish: Wish, where: Whereabouts) -> Plan:
    """Agent and orchestrator lose each other; the workers keep one another."""
    node, network = node_of(wish), where.network
    lasts_s = LASTS_S if wish.for_s is None else wish.for_s
    if network is not None:
        link = network.link(node)
        what = f"packets between {link.address} and the orchestrator's {network.address} are lost for {lasts_s:g} s"

        def part() -> str:
            net.part(network, node)
            return "they lose each other's packets"

        return Plan(wish, (Step(what=what, node=node),), part, lasts_s, lambda: net.rejoin(network, node))
    agent = observe(where.agent(node))
    note = where.folder(node) / AWAY

    def ask() -> str:
        note.write_text(str(lasts_s))
        send(agent, signal.SIGUSR1)
        return "its agent neither hears nor speaks"

    def undo() -> None:
        note.unlink(missing_ok=True)

    what = f"the agent is asked to be deaf and dumb towards the orchestrator for {lasts_s:g} s"
    return Plan(wish, (Step(what=what, pid=agent.pid, node=node),), ask, lasts_s, undo)


def send(victim: Victim, number: signal.Signals) -> None:
    """A signal of our own protocol, not a fault."""
    handle = os.pidfd_open(victim.pid)
    try:
        if observe(victim.pid) != victim:
            raise Gone(f"process {victim.pid} is another one by now")
        signal.pidfd_send_signal(handle, number)
    finally:
        os.close(handle)


def plan_mending(wish: Wish, facts: Facts, where: Whereabouts) -> Plan:
    """What may have been left broken: a link that is down, lost packets, stopped workers."""
    node, network = node_of(wish), where.network
    stopped = [observe(row.pid) for row in facts.on(node) if row.pid is not None and row.process in ("T", "t")]
    steps = [Step(what="SIGCONT to a stopped worker", pid=victim.pid, node=node) for victim in stopped]
    if network is not None:
        steps.append(
            Step(what=f"ip link set {' '.join(net.ends(network, node))} up; packets find their way again", node=node)
        )

    def act() -> str:
        going_on(stopped)()
        if network is not None:
            net.mend(network, node)
            net.rejoin(network, node)
        return "mended"

    return Plan(wish, tuple(steps), act)


# ---------------------------------------------------------------- memory

# A real out-of-memory kill of one process, by a memory cgroup of its own that has no room (root only).

# What the process may have on top of what it has: its next allocations go beyond it.
ROOM = 1 << 20
WITHIN_S = 20.0
LOOK_S = 0.01
LIMITS = ("memory.max", "memory.limit_in_bytes")  # of cgroup version 2, and of version 1


@dataclass(frozen=True, slots=True)
class Cramped:
    """A memory cgroup that holds next to nothing."""

    folder: Path

    @classmethod
    def of(cls, pid: int) -> Cramped:
        """Make one below the group of this process. Raises OSError where that is not possible."""
        counter = own_cgroup_file(Path(f"/proc/{pid}/cgroup"))
        if counter is None:
            raise FileNotFoundError(f"no memory cgroup of process {pid} to be found")
        folder = counter.parent / f"torchrelay-chaos-{pid}"
        folder.mkdir()
        made = cls(folder)
        try:
            limit = next((folder / name for name in LIMITS if (folder / name).exists()), None)
            if limit is None:
                raise FileNotFoundError(f"{folder} has no memory limit: the controller is not delegated")
            limit.write_text(str(ROOM))
        except OSError:
            made.remove()
            raise
        return made

    def take(self, pid: int) -> None:
        (self.folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Remove it, when the kernel has let go of its last process."""
        until = time.monotonic() + 2.0
        while self.folder.exists() and time.monotonic() < until:
            try:
                os.rmdir(self.folder)
            except OSError:
                time.sleep(LOOK_S)


def possible(pid: int) -> bool:
    """Whether the kernel can be brought to it here."""
    try:
        Cramped.of(pid).remove()
    except OSError:
        return False
    return True


def starve(victim: Victim, within_s: float = WITHIN_S) -> str:
    """Let the kernel kill it for memory. Says what happened: a process that asks for no more memory is killed by us."""
    group = Cramped.of(victim.pid)
    try:
        group.take(victim.pid)
        until = time.monotonic() + within_s
        while lives(victim):
            if time.monotonic() >= until:
                strike(victim, Fault.KILL)
                return f"it asked for no memory for {within_s:g} s: SIGKILL instead"
            time.sleep(LOOK_S)
    except (Gone, ProcessLookupError):
        pass
    finally:
        group.remove()
    return "the kernel killed it for memory"


def lives(victim: Victim) -> bool:
    try:
        return Path(f"/proc/{victim.pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
