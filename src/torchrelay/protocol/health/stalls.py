"""Stalls: ranks that stand still at different calls of the script, and so wait for one another for ever.

Every call (a step, a section) ends in a gate that needs all ranks, and every collective needs all members of its group.
So it is certain that nobody gets on any more if, after the same point,

    one is in a step, another in a section
    one is in a call, another's script has ended
    one is in a call, another waits in a collective outside of any call
    one waits in a collective, or idly in a backward pass outside of any call, another's script has ended
    two wait in the collective of the same number in one group, and one calls it barrier, the other all_reduce

None of that is judged before both have stood for a while: then both places are known, too. A worker tells of its place
when it stands (`Lookout`): its line, and which collective it is in, as Python's stack shows it. What goes from
one rank to another (send, recv) proves nothing of third ones, and is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from torchrelay.protocol.health.wait_for_graph import DEFAULT
from torchrelay.protocol.messages.ids import Point, Rank, WorkerId, WorkerPhase

STEP, SECTION = "step", "section"
GATE = "the gate"  # what a rank waits in at the end of its call, as others are in a barrier
BACKWARD = "backward"
CALLS = {WorkerPhase.COMPUTING: STEP, WorkerPhase.SECTION: SECTION}
OUTSIDE = frozenset({WorkerPhase.BETWEEN, WorkerPhase.BOOTING})


class Spot(Struct, frozen=True, omit_defaults=True):
    """Where the main thread of a worker that stands still is.

    line    of the script: "train.py:63"; empty if none is known
    call    of torch.distributed: "barrier"; "backward", in which gradients are reduced; empty if it is in neither
    group   the key of the group that communicates (see `Position.begun`)
    direct  from one rank to another
    kind    of the call of ours under way: "step" or "section"; empty outside
    """

    line: str = ""
    call: str = ""
    group: int = DEFAULT
    direct: bool = False
    kind: str = ""


class Stalled(Struct, frozen=True):
    """A rank that stands still. `begun`: as in `Position`, as far as it is known. `idle`: without work."""

    worker: WorkerId
    rank: Rank
    point: Point | None
    phase: WorkerPhase
    begun: Mapping[int, int]
    spot: Spot
    idle: bool = False

    @property
    def kind(self) -> str:
        """Of the call that it is in: "step", "section", or empty if it is in none, or if that is not known."""
        return CALLS.get(self.phase, self.spot.kind if self.phase is WorkerPhase.GATE else "")

    @property
    def called(self) -> bool:
        """Whether it is in a call of ours."""
        return self.phase in CALLS or self.phase is WorkerPhase.GATE

    @property
    def waits_outside(self) -> bool:
        """Whether it waits in a collective, and in no call."""
        return self.phase in OUTSIDE and bool(self.spot.call) and self.spot.call != BACKWARD and not self.spot.direct

    @property
    def waits_in_backward(self) -> bool:
        """Whether it waits for its gradients, as it computes nothing: of a script that has no calls, as it seems."""
        return self.phase in OUTSIDE and self.spot.call == BACKWARD and self.idle

    def among(self, group: int) -> bool:
        """Whether it is a member of this group, as far as is known."""
        return group == DEFAULT or group in self.begun

    @property
    def meets(self) -> tuple[int, int, str] | None:
        """The collective in which it waits, if it is one of a whole group: group, number, and name."""
        if self.phase is WorkerPhase.GATE:
            return DEFAULT, self.begun.get(DEFAULT, 0), GATE
        if not self.spot.call or self.spot.direct or self.spot.group not in self.begun:
            return None
        return self.spot.group, self.begun[self.spot.group], self.spot.call

    def __str__(self) -> str:
        """For people: "rank 0 is in a step (all_reduce, train.py:63)"."""
        said = self.phase is WorkerPhase.GATE or self.waits_in_backward
        where = ", ".join(filter(None, ("" if said else self.spot.call, self.spot.line)))
        return f"rank {self.rank} {self._how()}{f' ({where})' if where else ''}"

    def _how(self) -> str:
        match self.phase:
            case WorkerPhase.FINISHED:
                return "has ended its script"
            case WorkerPhase.GATE:
                return f"waits at the end of {f'a {self.kind}' if self.kind else 'its call'}"
            case _ if self.waits_in_backward:
                return "waits in a backward pass"
            case _:
                return f"is in a {self.kind}" if self.kind else "waits in a collective outside of any step or section"


class Parting(Struct, frozen=True):
    """Two ranks of which one waits in vain for the other; `one` is of the fewer."""

    one: Stalled
    other: Stalled
    remedy: str

    def __str__(self) -> str:
        after = f"after {self.one.point} " if self.one.point is not None else ""
        return f"{after}{self.one}, and {self.other}: the script has taken different ways. {self.remedy}"


COUNTERS = (
    "Let control flow depend on run.global_step and on results of calls, not on counters such as enumerate(), and "
    "give every rank the same number of batches"
)
UNEVEN = "Give every rank the same number of batches (drop_last, or a DistributedSampler), and let all end together"
OUTSIDE_OF_CALLS = (
    "Put communication between steps into run.atomic(function, ...), and let it depend on run.global_step, not on a "
    "counter of the script's own"
)
MATCHING = "Let all ranks of a group make the same collectives, in the same order"


def find_parting(ways: Iterable[Stalled]) -> Parting | None:
    """Two of these ranks that wait for one another in vain; None if it is not certain that any do."""
    stood = sorted(ways, key=lambda way: way.rank)
    return different_calls(stood) or ended_early(stood) or outside_of_calls(stood) or unlike(stood)


def different_calls(ways: list[Stalled]) -> Parting | None:
    """In a step and in a section after the same point."""
    kinds: dict[Point | None, dict[str, list[Stalled]]] = {}
    for way in ways:
        if way.kind and way.point is not None:
            kinds.setdefault(way.point, {}).setdefault(way.kind, []).append(way)
    for found in kinds.values():
        if len(found) > 1:
            few, many = sorted(found.values(), key=len)
            return Parting(few[0], many[0], COUNTERS)
    return None


def ended_early(ways: list[Stalled]) -> Parting | None:
    """One has ended, and another needs it. Who has ended enters no gate and no collective any more."""
    ended = [way for way in ways if way.phase is WorkerPhase.FINISHED]
    for one in ended[:1]:
        for other in ways:
            behind = one.point is not None and other.point is not None and other.point >= one.point
            outside = other.waits_in_backward or (other.waits_outside and other.spot.group == DEFAULT)
            if outside or (other.called and behind):
                return Parting(one, other, UNEVEN)
    return None


def outside_of_calls(ways: list[Stalled]) -> Parting | None:
    """One waits in a collective between two calls, and another that it needs there is in the next call already."""
    called: dict[Point | None, list[Stalled]] = {}
    for way in ways:
        if way.called:
            called.setdefault(way.point, []).append(way)
    for one in ways:
        if one.waits_outside and one.point is not None:
            for other in called.get(one.point, ()):
                if other.among(one.spot.group):
                    return Parting(one, other, OUTSIDE_OF_CALLS)
    return None


def unlike(ways: list[Stalled]) -> Parting | None:
    """Two are in the collective of the same number in one group, and it is not the same one."""
    met: dict[tuple[int, int], dict[str, Stalled]] = {}
    for way in ways:
        if way.meets is not None:
            group, number, name = way.meets
            met.setdefault((group, number), {}).setdefault(name, way)
    for names in met.values():
        if len(names) > 1:
            one, other, *_ = names.values()
            return Parting(one, other, MATCHING)
    return None
