"""Story: faults one after the other, each waiting for facts of the job and not for the clock, so that it repeats.

One line a strike, in the words of the transcripts; blank lines and `#` comments are skipped:

    kill   rank=2    step>=40
    stop   rank=1    step>=90  spares>=1
    kill   rank=0,3  step>=180 spares>=2
    kill   rank=1    at=rewiring

A strike is due when those before it have struck and all its conditions hold. Without `at=` it waits until all ranks
train; with `at=` it strikes while the job is in that phase.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torchrelay.chaos.faults import Fault


@dataclass(frozen=True, slots=True)
class Facts:
    """What a story asks of a job, as the orchestrator's API tells it.

    step     the newest committed anywhere; None before the first rank has joined
    phase    the job's, in one word
    training every rank is held by a worker that trains
    spares   how many are warm
    pids     of the workers, by rank
    """

    step: int | None
    phase: str
    training: bool
    spares: int
    pids: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault on one or more ranks at once, and when it is due."""

    fault: Fault
    ranks: tuple[int, ...]
    step: int = 0
    spares: int = 0
    at: str = ""

    def due(self, facts: Facts) -> bool:
        """Whether all its conditions hold."""
        now = facts.phase == self.at if self.at else facts.training
        there = all(rank in facts.pids for rank in self.ranks)
        reached = facts.step is not None and facts.step >= self.step
        return now and there and reached and facts.spares >= self.spares

    def __str__(self) -> str:
        ranks = ",".join(str(rank) for rank in self.ranks)
        rest = [f"step>={self.step}"] if self.step else []
        rest += [f"spares>={self.spares}"] if self.spares else []
        rest += [f"at={self.at}"] if self.at else []
        return " ".join([self.fault, f"rank={ranks}", *rest])


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
        if strike is None or not strike.due(facts):
            return None
        self.told += 1
        return strike


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
    if name not in list(Fault):
        raise ValueError(f"no fault {name!r}; there are {', '.join(Fault)}")
    ranks: tuple[int, ...] = ()
    step = spares = 0
    at = ""
    for condition in conditions:
        match condition.replace(">=", "=").split("="):
            case ["rank", numbers]:
                ranks = tuple(int(number) for number in numbers.split(","))
            case ["step", number]:
                step = int(number)
            case ["spares", number]:
                spares = int(number)
            case ["at", phase]:
                at = phase
            case _:
                raise ValueError(f"{condition!r} is none of rank=, step>=, spares>=, at=")
    if not ranks:
        raise ValueError("say whom it hits: rank=2, or rank=0,3")
    return Strike(Fault(name), ranks, step, spares, at)
