"""Story: faults one after the other, each waiting for facts of the job and not for the clock, so that it repeats.

One line a strike, in the words of the transcripts; blank lines and `#` comments are skipped:

    kill   rank=2    step>=40  in=backward
    stop   rank=1    step>=90  spares>=1
    kill   rank=0,3  step>=180 spares>=2
    kill   rank=1    at=reconfiguring
    node   of=3      spares>=2           a whole node: the one on which rank 3 is
    taint  of=1      ttl=20              the slot on which rank 1 is, for 20 s
    drain  of=0      spares>=1           the node on which rank 0 is
    undrain                              whatever was drained, when it is empty
    orchestrator     step>=300

A strike is due when those before it have struck and all its conditions hold. Without `at=` it waits until all ranks
train; with `at=` it strikes while the job is in that phase.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from torchrelay.chaos.faults import Fault


@dataclass(frozen=True, slots=True)
class Facts:
    """What a story asks of a job, as the orchestrator's API tells it.

    step     the newest committed anywhere; None before the first rank has joined
    phase    the job's, in one word
    places   where each rank is: node/slot
    moving   a move is under way, or waits for room
    training every rank is held by a worker that trains
    spares   how many are warm
    pids     of the workers, by rank
    resolved how many incidents are over; None: not asked
    """

    step: int | None
    phase: str
    training: bool
    spares: int
    pids: Mapping[int, int]
    places: Mapping[int, str] = field(default_factory=dict)
    moving: bool = False
    resolved: int | None = None


class Act(StrEnum):
    """What is done to a place, or to the orchestrator, in the words of the command line."""

    NODE = "node"  # agent, forkserver and all workers of a node, at once
    TAINT = "taint"
    DRAIN = "drain"
    UNDRAIN = "undrain"
    ORCHESTRATOR = "orchestrator"


PLACED = (Act.NODE, Act.TAINT, Act.DRAIN)


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault on one or more ranks at once, or one act, and when it is due. `of`: whose place an act is about."""

    fault: Fault | Act
    ranks: tuple[int, ...]
    step: int = 0
    spares: int = 0
    at: str = ""
    of: int | None = None
    ttl: int = 0  # seconds
    within: str = ""  # what the victim does when it is hit: backward, gate, update, section

    @property
    def interrupts(self) -> bool:
        """Whether training must notice it, so that the ledger has it."""
        return self.fault not in (Act.UNDRAIN, Act.ORCHESTRATOR)

    def hits(self, facts: Facts) -> tuple[int, ...]:
        """The ranks that it is about, as things stand."""
        if self.of is None:
            return self.ranks
        place = facts.places[self.of]
        if self.fault is Act.TAINT:
            return (self.of,)
        return tuple(sorted(rank for rank, other in facts.places.items() if node_of(other) == node_of(place)))

    def due(self, facts: Facts) -> bool:
        """Whether all its conditions hold."""
        now = facts.phase == self.at if self.at else facts.training
        there = all(rank in facts.pids for rank in self.ranks) and (self.of is None or self.of in facts.places)
        reached = facts.step is not None and facts.step >= self.step
        done = self.fault is not Act.UNDRAIN or not facts.moving
        return now and there and reached and done and facts.spares >= self.spares

    def __str__(self) -> str:
        ranks = ",".join(str(rank) for rank in self.ranks)
        whom = [f"rank={ranks}"] if self.ranks else []
        whom += [f"of={self.of}"] if self.of is not None else []
        rest = [f"in={self.within}"] if self.within else []
        rest += [f"ttl={self.ttl}"] if self.ttl else []
        rest += [f"step>={self.step}"] if self.step else []
        rest += [f"spares>={self.spares}"] if self.spares else []
        rest += [f"at={self.at}"] if self.at else []
        return " ".join([self.fault, *whom, *rest])


def node_of(place: str) -> str:
    """The node of a place written node/slot."""
    return place.rpartition("/")[0]


@dataclass(slots=True)
class Story:
    """Strikes in order, and how far it has been told."""

    strikes: tuple[Strike, ...]
    told: int = field(default=0)

    @property
    def next(self) -> Strike | None:
        """The strike that is waited for; None at the end."""
        return self.strikes[self.told] if self.told < len(self.strikes) else None

    def advance(self, facts: Facts) -> Strike | None:
        """The next strike if it is due now: it then counts as told, and it is for the caller to carry it out."""
        strike = self.next
        if strike is None or not strike.due(facts) or self._awaits_incident(strike, facts):
            return None
        self.told += 1
        return strike

    def _awaits_incident(self, strike: Strike, facts: Facts) -> bool:
        """Whether a strike before this one has not led to its incident yet, or that is not over.

        On a busy machine several are due at once. Two of them about one rank would be one incident, and whose it is
        nobody could tell. One that is meant to come in a phase of a recovery says so (`at=`).
        """
        before = sum(one.interrupts for one in self.strikes[: self.told])
        return not strike.at and facts.resolved is not None and facts.resolved < before


def parse(text: str) -> Story:
    """Read a story. Raises `ValueError` with the line that is not understood."""
    return Story(tuple(strikes(text)))


def strikes(text: str) -> Iterator[Strike]:
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if words:
            try:
                yield parse_strike(words)
            except ValueError as error:
                raise ValueError(f"line {number}, {line.strip()!r}: {error}") from error


def parse_strike(words: list[str]) -> Strike:
    name, conditions = words[0], words[1:]
    if name not in [*Fault, *Act]:
        raise ValueError(f"no fault {name!r}; there are {', '.join([*Fault, *Act])}")
    what = Fault(name) if name in list(Fault) else Act(name)
    found = Strike(what, ())
    for condition in conditions:
        found = with_condition(found, condition)
    if isinstance(what, Fault) and not found.ranks:
        raise ValueError("say whom it hits: rank=2, or rank=0,3")
    if what in PLACED and found.of is None:
        raise ValueError("say whose place it is about: of=2")
    if found.within and (what is not Fault.KILL or len(found.ranks) != 1):
        raise ValueError("in= is for the kill of one rank")
    return found


def with_condition(strike: Strike, condition: str) -> Strike:
    """The strike with one more word of its line."""
    match condition.replace(">=", "=").split("="):
        case ["rank", numbers]:
            return replace(strike, ranks=tuple(int(number) for number in numbers.split(",")))
        case ["step", number]:
            return replace(strike, step=int(number))
        case ["spares", number]:
            return replace(strike, spares=int(number))
        case ["at", phase]:
            return replace(strike, at=phase)
        case ["of", number]:
            return replace(strike, of=int(number))
        case ["in", phase]:
            return replace(strike, within=phase)
        case ["ttl", number]:
            return replace(strike, ttl=int(number))
    raise ValueError(f"{condition!r} is none of rank=, in=, of=, ttl=, step>=, spares>=, at=")
