"""What tests of bench compare share."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from compare_figures import (
    Line,
    Mark,
    Plain,
    Seen,
    Struck,
)
from compare_schedule import (
    What,
)

RANKS, STEP_NS = 4, 100_000_000


@dataclass
class World:
    """Ranks that write down what they do, in a time that is counted by hand."""

    steps: int = 40
    now: int = 1_000_000_000
    lines: dict[int, list[Line]] = field(default_factory=lambda: {rank: [] for rank in range(RANKS)})
    marks: dict[int, list[Mark]] = field(default_factory=lambda: {rank: [] for rank in range(RANKS)})
    struck: list[Struck] = field(default_factory=list)

    def train(self, first: int, last: int, ranks: tuple[int, ...] = (0, 1, 2, 3), *, pid: int = 1) -> None:
        """Steps first+1 to last, by these ranks together."""
        for step in range(first, last):
            self.now += STEP_NS
            for rank in ranks:
                line = Line(step + 1, self.now, self.now // 2, step * RANKS + rank, len(ranks), pid, 1)
                self.lines[rank].append(line)

    def refuse(self, step: int) -> None:
        self.now += STEP_NS
        for rank in (0, 1, 3):
            self.lines[rank].append(Line(step, self.now, 0, -1, 3, 1, 0))

    def lose(self, what: What, *ranks: int) -> None:
        self.struck.append(Struck(what=what, ranks=ranks, at_ns=self.now, step=self.lines[0][-1].step))

    def wait(self, seconds: float) -> None:
        self.now += round(1e9 * seconds)

    def mark(self, name: str) -> None:
        for rank in range(RANKS):
            self.marks[rank].append(Mark(name, self.now, 2))

    def seen(self, digest: str = "same") -> Seen:
        return Seen(
            ranks=RANKS,
            steps=self.steps,
            early=12,
            lines=self.lines,
            marks=self.marks,
            struck=self.struck,
            digests=[digest] * RANKS,
            early_digests=["early"] * RANKS,
            cpu_a_step_s=0.3,
        )


PLAIN = Plain(jct_s=3.9, step_s=0.1, cpu_a_step_s=0.2, digest="same", early_digest="early")


def restarted() -> World:
    """A kill after step 20, all gone for 3 s, and on again from the checkpoint of step 16."""
    world = World()
    world.train(0, 20)
    world.lose(What.KILL, 2)
    for name, seconds in (("started", 0.5), ("imported", 2.0), ("connected", 0.25), ("loaded", 0.25)):
        world.wait(seconds)
        world.mark(name)
    world.train(16, 40, pid=2)
    return world


def fewer() -> World:
    """A kill after step 20: a second of standing, a step refused, ten steps by three, and all again."""
    world = World()
    world.train(0, 20)
    world.lose(What.KILL, 2)
    world.wait(0.9)
    world.refuse(20)
    world.train(20, 30, ranks=(0, 1, 3))
    world.train(30, 43)
    return world


def with_ledger(seen: Seen, *lines: dict[str, object]) -> Seen:
    """The same with a ledger, dated by a clock that is so much ahead."""
    return msgspec.structs.replace(seen, ledger=list(lines), wall_ns=10**18)


def dated(at_ns: int, **phases_ms: int) -> dict[str, object]:
    """A line of a ledger of that moment."""
    at = datetime.fromtimestamp((at_ns + 10**18) / 1e9, UTC).isoformat(timespec="milliseconds")
    return {"at": at, "phases": phases_ms}


def left() -> World:
    """A rank is asked to leave after step 10, and another one is killed after step 30; each costs half a second."""
    world = World()
    world.train(0, 10)
    world.lose(What.LEAVE, 1)
    world.wait(0.5)
    world.train(10, 30)
    world.lose(What.KILL, 2)
    world.wait(0.5)
    world.train(30, 40)
    return world
