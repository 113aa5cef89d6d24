"""Cells: a fault of a process in a phase of its training, and second faults in the recovery from it."""

from __future__ import annotations

from dataclasses import dataclass

HOWS = ("kill", "raise", "exit", "stop", "oom", "comm")
PHASES = ("forward", "backward", "gate", "update", "between", "section")
# Second faults: what a survivor or the replacement is doing when it is hit, while a recovery is under way.
RECOVERY = ("report", "catch up", "reconfigure", "restore", "resume")
# An exception cannot be raised from outside in the main thread while it waits in the gate.
IMPOSSIBLE = {("raise", "gate"), ("comm", "gate"), ("comm", "between"), ("comm", "update")}


@dataclass(frozen=True)
class Cell:
    """One kind of fault at one place; `second` strikes another worker during the recovery from the first."""

    how: str
    phase: str
    second: str = ""

    def __str__(self) -> str:
        return f"{self.how} in {self.phase}" + (f", then kill in {self.second}" if self.second else "")


ALL = [Cell(how, phase) for how in HOWS for phase in PHASES if (how, phase) not in IMPOSSIBLE]
SECONDS = [Cell("kill", "backward", second) for second in RECOVERY] + [Cell("kill", "gate", "reconfigure")]
