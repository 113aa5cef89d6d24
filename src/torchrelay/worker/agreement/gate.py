"""Gate: the commit. All ranks tell one another that they have come, just before the update of a step.

An `Attempt` comes to it, and what follows it is looked at by `Afterwards`.

Its completion on any rank means that every rank had entered it, so that every rank holds final gradients. On the CPU it
goes over lanes (`rounds`); on a GPU it is an all-reduce of four bytes, which the device does behind all its reductions.

    completes, nobody has asked        passed
    completes, but we have reported    the verdict decides
    fails                              say so, wait for the interrupt, then for the verdict

With ranks on several nodes, private records go to buddies before it: see `buddies`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torchrelay.errors import RefusedError, StepInterrupted
from torchrelay.protocol.health.wait_for_graph import DEFAULT
from torchrelay.protocol.messages.ids import Point
from torchrelay.worker.agreement.blame import tell_failed
from torchrelay.worker.data import cursor as places
from torchrelay.worker.hardware import device
from torchrelay.worker.process_groups import groups
from torchrelay.worker.retry.returned import Returned
from torchrelay.worker.session import Session
from torchrelay.worker.state import random_state

MARKS = 1 << 16
LACKS = 1_000_003  # is added by a rank that lacks its snapshot: odd, so that how many did can be told from any sum
WORDS = 1 << 32
_UNDONE = pow(LACKS, -1, WORDS)


class Exchange(Protocol):
    """How all ranks know that all have come."""

    def exchange(self, point: Point, lacking: bool) -> bool | None:
        """Returns when all ranks have entered: whether none lacks its snapshot; None if they are at different calls.

        Raises `RuntimeError` if that cannot be known.
        """


class Sum:
    """An all-reduce of one int32. Ranks of one job go through the same gates: a sum tells if one is elsewhere."""

    def __init__(self, group: dist.ProcessGroup, on: torch.device) -> None:
        """`group`: of all ranks; `on`: the device on which it communicates."""
        self._group = group
        # Made once: what lies between backward and the update should be little.
        self._flags = [torch.zeros(1, dtype=torch.int32, device=on)]
        self._size = group.size()

    def exchange(self, point: Point, lacking: bool) -> bool | None:
        groups.count_aside(1)  # it is counted by itself
        mark = (point.step * 31 + point.section) % MARKS + 1
        (flag,) = self._flags
        flag.fill_(mark + LACKS * lacking)
        self._group.allreduce(self._flags).wait()
        lacks = how_many_lack(int(flag.item()), mark, self._size)  # the host's wait
        return None if lacks is None else lacks == 0


class Gate:
    """The gate of all calls of this worker."""

    def __init__(self, session: Session, exchange: Exchange) -> None:
        self._session = session
        self._position = session.position
        self._buddies = session.buddies
        self._snapshots = session.snapshots
        self._exchange = exchange.exchange

    def enter(self, pending: Point, *record: bytes | memoryview, also: Callable[[], None] | None = None) -> bool | None:
        """Commit `pending`, or raise `StepInterrupted`. `record`: the parts of the private record, which is kept first.

        Returns whether no rank lacks its snapshot; None if that is not known, after a roll forward.

        `also`: what all ranks do together in this gate, when it is known that all are in it; they pass if it returns.
        Raises `RefusedError` if another rank is in the gate of another point, and what `also` raises.
        """
        self._session.page.keep(pending, *record)
        position = self._position
        if not position.enter_gate():
            raise StepInterrupted
        groups.count_aside(-1)  # who waits in here is waited for by nobody: it has begun as much as who has come
        lacking = False
        try:
            snapshots = self._snapshots
            if snapshots is not None and not snapshots.idle:
                snapshots.at_gate()
                lacking = snapshots.lacking
            if self._buddies.active:
                self._buddies.at_gate(pending, record)
            complete = self._exchange(pending, lacking)
            if also is not None and complete is not None:
                also()
        except RuntimeError as error:  # Gloo raises nothing more precise, and torch's own errors derive from it
            self.broken(error)
        else:
            if complete is None and not position.poisoned:
                raise RefusedError(
                    f"the ranks are at different calls: this one commits {pending}",
                    "let every rank make the same steps and sections, in the same order",
                )
            if position.pass_gate():
                return complete
        # After the report: roll forward by order, or not at all.
        if not position.await_verdict(self._session.welcome.patience_s):
            raise StepInterrupted
        return None

    def broken(self, error: BaseException) -> None:
        """A collective has failed: if nobody has interrupted us yet, say so, and wait until somebody does.

        A halt does not help: the connections that have failed are those of its generation now, so it is said again.
        """
        self.await_interrupt(lambda: tell_failed(self._session, error))

    def await_interrupt(self, say: Callable[[], None]) -> None:
        """Wait to be interrupted. `say`: why we wait; said again in the generation of a halt."""
        await_interrupt(self._session, say)


def await_interrupt(session: Session, say: Callable[[], None]) -> None:
    """Wait to be interrupted. `say`: why we wait; said again in the generation of a halt."""
    position = session.position
    while not position.poisoned:
        wired = position.wired
        say()
        position.await_poison(wired, session.welcome.patience_s)


def world_group() -> tuple[dist.ProcessGroup, torch.device]:
    """The group of all ranks, and the device on which it communicates."""
    group = c10d._get_default_group()
    on_cpu = "cpu:" in repr(c10d._world.pg_backend_config[group])
    return group, torch.device("cpu") if on_cpu else device.own()


def on_lanes() -> bool:
    """Whether there are lanes for gates: not where nothing can be trained on the CPU."""
    return "cpu:" in repr(c10d._world.pg_backend_config[c10d._get_default_group()])


def exchange_of(session: Session, devices: Collection[str]) -> Exchange:
    """How the ranks of this job know that all have come. `devices`: types of those on which gradients are.

    With NCCL the host runs ahead of the GPU, also where the group has Gloo for the CPU beside: only what the GPU does
    itself comes after its reductions. A rank that trains nothing goes with those that have a GPU.
    """
    group = c10d._get_default_group()
    on_gpu = device.ACCELERATOR in devices or (not devices and torch.cuda.is_available())
    if on_gpu and f"{device.ACCELERATOR}:nccl" in repr(c10d._world.pg_backend_config[group]):
        return Sum(group, device.own())
    return session.rounds if on_lanes() else Sum(*world_group())


def largest_of_ranks(values: list[float]) -> list[float]:
    """Collective over all ranks: of each of these numbers the largest that any rank has."""
    group, on = world_group()
    told = torch.tensor(values, dtype=torch.float64, device=on)
    options = c10d.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    group.allreduce([told], options).wait()
    return [float(value) for value in told.tolist()]


def how_many_lack(total: int, mark: int, size: int) -> int | None:
    """How many ranks have added `LACKS` to their mark; None if they are at different calls. int32 sums wrap around."""
    count = (total - mark * size) * _UNDONE % WORDS
    return count if count <= size else None


# ---------------------------------------------------------------- before and behind it


class Attempt:
    """One run of a call's function, from its entry until it is committed or cut short."""

    __slots__ = (
        "begun",
        "call",
        "compares",
        "entered",
        "foresight",
        "gathered",
        "given",
        "kind",
        "passed",
        "pending",
        "private",
        "rng",
        "rng_at_gate",
    )

    def __init__(self, kind: str, pending: Point, rng: random_state.Seen, begun: Point) -> None:
        self.kind = kind
        self.begun = begun  # the point at its entry
        self.given: Callable[[], bytes] = bytes  # tells what the call is made with
        self.foresight: Any = None  # of its function, see `Foresight`
        self.entered: Any = None  # of a section, see `Returned`
        self.pending = pending  # the point that it is to commit
        self.rng = rng  # at the entry
        self.compares = False  # replicas compare what they hold, in its gate
        self.rng_at_gate: random_state.Seen | None = None
        self.private = b""  # the private state at the gate, as it was kept
        self.passed = False
        self.call: places.Call | None = None
        self.gathered = False  # ZeRO's parameters, behind the gate

    def describe(self, returned: Returned, behind: int) -> None:
        """At its gate: what a replacement has to know of what lies between the call before it and this one.

        `behind`: calls, and loops that are over, in the same turn of the innermost loop.
        """
        call, entered = self.call, self.entered
        assert call is not None, "begun"
        if 0 < behind < places.MANY:
            call.since = places.Since(*returned.since())
        if entered is not None:
            call.still, call.before, call.moved = returned.is_still(entered), entered.before, entered.moved


def do_all(steps: Sequence[Callable[[], None]]) -> None:
    """One after the other, as all ranks do."""
    for step in steps:
        step()


# ---------------------------------------------------------------- after the gate

# Nothing but local work may follow the gate of a step, as it is not repeated and nobody helps with it.
#
# What a step has begun in its groups after its gate is compared with what it had begun there. In the default group one
# time is enough. In other groups also the script's own threads may communicate (a checkpoint that is written in the
# background does), at any time: there it counts if the step does it every time that it is looked at.


class Afterwards:
    """What this worker's steps begin after their gates."""

    def __init__(self) -> None:
        self._at_gate: dict[int, int] = {}
        self._before: frozenset[int] | None = None  # the groups in which the step that was looked at last communicated

    def note(self) -> None:
        """At the gate of a step that is to be looked at."""
        self._at_gate = _begun()

    def excuse(self, act: Callable[[], None]) -> None:
        """What `act` begins after the gate does not count: it can be repeated, and will be if it is cut."""
        before = _begun()
        act()
        for key, begun in _begun().items():
            self._at_gate[key] = self._at_gate.get(key, 0) + begun - before.get(key, 0)

    def found(self) -> bool:
        """At the end of that step: whether it communicates after its gate."""
        now = _begun()
        moved = frozenset(key for key, begun in now.items() if begun != self._at_gate.get(key, 0))
        before, self._before = self._before, moved
        return DEFAULT in moved or bool(before and before & moved)


def _begun() -> dict[int, int]:
    return {DEFAULT: groups.collectives(), **dict(groups.begun_elsewhere() or ())}
