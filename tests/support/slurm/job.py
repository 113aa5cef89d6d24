"""A job of a Slurm for tests, as its commands tell of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.support.machines.waiting import MachineError, wait_for

if TYPE_CHECKING:
    from tests.support.slurm.cluster import Slurm

DEADLINE_S = 30.0
ENDED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "DEADLINE", "OUT_OF_MEMORY")


@dataclass(frozen=True)
class Job:
    """By its number. All it says of itself was asked for just then."""

    slurm: Slurm
    number: int

    def look(self, what: str) -> str:
        """What `squeue -o` says; empty if Slurm does not know the job any more."""
        words = ["squeue", "-h", "-t", "all", "-j", str(self.number), "-o", what]
        return self.slurm.run(*words, check=False).stdout.strip()

    def state(self) -> str:
        """PENDING, RUNNING, COMPLETING, COMPLETED and so on."""
        return self.look("%T")

    def nodes(self) -> list[str]:
        """The batch node is the first of them, until it is lost."""
        return self.slurm.host_names(self.look("%N"))

    def batch_node(self) -> str:
        return self.look("%B")

    def comment(self) -> str:
        return self.look("%k")

    def steps(self) -> dict[str, list[str]]:
        """The steps that run, by their numbers or names, and their nodes."""
        words = ["squeue", "-h", "-s", "-j", str(self.number), "-o", "%i %N"]
        found = [line.split() for line in self.slurm.run(*words, check=False).stdout.splitlines()]
        return {name.partition(".")[2]: self.slurm.host_names(nodes) for name, nodes in found}

    def wait(self, *states: str, deadline_s: float = DEADLINE_S) -> str:
        """Until it is in one of these; says in which. Raises `MachineError`."""
        over = [state for state in ENDED if state not in states]
        return wait_in(f"job {self.number}", self.state, states, deadline_s, never_again=over)

    def cancel(self) -> None:
        """And wait until it holds no node any more."""
        self.slurm.run("scancel", str(self.number))
        self.wait(*ENDED)


def wait_in(
    what: str, look: Callable[[], str], states: Sequence[str], deadline_s: float, *, never_again: Sequence[str] = ()
) -> str:
    """Until it is in one of these states; says in which. Raises `MachineError` with the one that it is in instead."""
    seen = ""

    def is_there() -> bool:
        nonlocal seen
        seen = look()
        return seen in (*states, *never_again)

    wanted = f"{what} {' or '.join(states)}"
    try:
        wait_for(wanted, is_there, deadline_s)
    except MachineError as error:
        raise MachineError(f"{error}: it is {seen}") from None
    if seen in never_again:
        raise MachineError(f"{wanted}: it is {seen}")
    return seen
