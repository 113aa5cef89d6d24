"""Trial: one system at work, with the faults of the schedule; and all that is seen of it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from compare_figures import Line, Mark, Seen, Struck
from compare_processes import cpu_s
from compare_schedule import Fault
from compare_systems import RANKS, System

POLL_S = 0.02
START_S = 180
WARM_UP = 10  # steps before CPU time is counted
T = TypeVar("T")


class Tail:
    """The lines that a file gains; a last line without its end is left for later."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read(self, kind: type[T]) -> list[T]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                whole, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole) + len(end)
        return [msgspec.json.decode(line, type=kind) for line in whole.splitlines()]


class Trial:
    """Runs a system to its end, or until `limit_s` after its first step, for which it has `START_S`."""

    def __init__(self, system: System, faults: tuple[Fault, ...], limit_s: float, say: Callable[[str], None]) -> None:
        self._system, self._due, self._limit_s, self._say = system, list(faults), limit_s, say
        order = system.job.order
        self._not_before = 0  # the step before which no fault comes, as the one before came late
        self._steps, self._early = int(order["steps"]), int(order["early"])
        self._tails = {rank: Tail(system.folder / "log" / f"rank-{rank}.jsonl") for rank in range(RANKS)}
        self._lines: dict[int, list[Line]] = {rank: [] for rank in range(RANKS)}
        self._struck: list[Struck] = []
        self._furthest, self._begun, self.reason = 0, False, ""
        self._spawned = self._until = 0.0  # by the monotonic clock
        self._cpu: list[tuple[int, dict[int, float]]] = []  # the furthest step, and CPU seconds by process

    def run(self) -> Seen:
        """Raises nothing that the system is at fault for: `Seen.reason` tells why it did not come to the end."""
        try:
            self.begin()
            while not self.over():
                time.sleep(POLL_S)
            return self.seen()
        finally:
            self.end()

    def begin(self) -> None:
        self._spawned = time.monotonic()
        self._until = self._spawned + START_S
        self._system.start()

    def over(self) -> bool:
        """Do what is due, a look at what the ranks have written first. Whether it has ended or is given up."""
        code = self._system.ended()
        self._look()
        if code is not None:
            self.reason = "" if self._furthest >= self._steps and code == 0 else self._why(code)
            return True
        if self._furthest and not self._begun:
            self._until, self._begun = time.monotonic() + self._limit_s, True
        if time.monotonic() > self._until:
            self.reason = self._too_long()
            return True
        self._system.tend()
        self._count_cpu()
        self._strike()
        return False

    def at(self, step: int) -> bool:
        """Whether all ranks have done so many steps."""
        return all(rows and rows[-1].step >= step for rows in self._lines.values())

    def seen(self) -> Seen:
        """All that was seen, when it is over."""
        self._look()
        return self._seen(self._spawned, self.reason, self._system.ledger())

    def end(self) -> None:
        self._system.stop()

    def _why(self, code: int) -> str:
        said = plainly(self._system.tail(4))
        return f"ended with code {code} after step {self._furthest} of {self._steps}: {said[-300:]}"

    def _too_long(self) -> str:
        if not self._furthest:
            return f"no step within {time.monotonic() - self._spawned:.0f} s: {plainly(self._system.tail(2))[-200:]}"
        return f"given up after {self._limit_s:.0f} s, at step {self._furthest} of {self._steps}"

    def _look(self) -> None:
        for rank, tail in self._tails.items():
            new = tail.read(Line)
            self._lines[rank] += new
            self._furthest = max([self._furthest, *(line.step for line in new)])

    def _count_cpu(self) -> None:
        """Between the first steps and the first fault: all processes of the system, reserves and agents included."""
        if len(self._cpu) < 2 and self._furthest >= (WARM_UP, self._early)[len(self._cpu)]:
            self._cpu.append((self._furthest, {pid: cpu_s(pid) for pid in self._system.cpu_pids()}))

    def _strike(self) -> None:
        """The next fault, when it is due, and whom it hits is there and has done a step with all others.

        One that comes late, for want of that, keeps its distance to the next: two at once are another trial.
        """
        if not self._due or self._furthest >= self._steps or self._furthest < max(self._due[0].step, self._not_before):
            return
        fault = self._due[0]
        for rank in fault.ranks:
            rows = self._lines[rank]
            if not rows or rows[-1].pid != self._system.pid_of(rank) or rows[-1].together < RANKS:
                return
        try:
            at = time.monotonic_ns()
            ranks = self._system.strike(fault)
        except ProcessLookupError:
            return  # it has just ended; soon there is another
        self._due.pop(0)
        if self._due:
            self._not_before = self._furthest + self._due[0].step - fault.step
        self._struck.append(Struck(what=fault.what, ranks=ranks, at_ns=at, step=self._furthest))
        self._say(f"step {self._furthest} of {self._steps}: {fault.what} of {', '.join(map(str, ranks))}")

    def _cpu_a_step(self) -> float | None:
        if len(self._cpu) < 2:
            return None
        (first, before), (last, after) = self._cpu
        return sum(used - before.get(pid, 0.0) for pid, used in after.items()) / max(1, last - first)

    def _seen(self, spawned: float, reason: str, ledger: list[dict[str, Any]] | None) -> Seen:
        folder = self._system.folder
        marks = {rank: Tail(folder / "marks" / f"rank-{rank}.jsonl").read(Mark) for rank in range(RANKS)}
        return Seen(
            ranks=RANKS,
            steps=self._steps,
            early=self._early,
            lines=self._lines,
            marks=marks,
            struck=self._struck,
            missed=len(self._due),
            spawned_ns=round(spawned * 1e9),
            reason=reason,
            ledger=ledger,
            wall_ns=time.time_ns() - time.monotonic_ns(),
            cpu_a_step_s=self._cpu_a_step(),
            digests=texts(folder / "digests"),
            early_digests=texts(folder / "early"),
        )


def plainly(said: str) -> str:
    """In one line, and without the name of a home: it goes into reports."""
    home = str(Path.home())
    said = said.replace("\n", " / ")
    return said if home == "/" else re.sub(rf"(?<![\w.-]){re.escape(home)}(?![\w.-])", "~", said)


class Costs(Struct, frozen=True):
    """What a checkpoint costs: to copy the state, and to write it; in seconds, each measured some times."""

    copy: list[float]
    write: list[float]


def costs_of(folder: Path) -> Costs:
    """Raises FileNotFoundError if they were not measured there."""
    return msgspec.json.decode((folder / "costs.json").read_bytes(), type=Costs)


def texts(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("rank-*"))]
