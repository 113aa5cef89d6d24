"""What tests of bench trials share."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from compare_schedule import What
from compare_systems import Job, System

ORDER = {"steps": 60, "early": 5}


class Puppet(System):
    """A system whose ranks are moved by hand: each look at it is a step of all, in processes of the wished numbers."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, Path(sys.executable))
        self.step, self.away, self.hits = 0, set[int](), list[tuple[int, What]]()
        (self.folder / "log").mkdir()

    def start(self) -> None: ...

    def ended(self) -> int | None:
        if self.step == self.job.order["steps"]:
            return 0
        self.step += 1
        for rank in {0, 1, 2, 3} - self.away:
            line = [self.step, self.step * 10**6, 0, (self.step - 1) * 4 + rank, 4 - len(self.away), 100 + rank, 1]
            with (self.folder / "log" / f"rank-{rank}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        return None

    def pid_of(self, rank: int) -> int | None:
        return None if rank in self.away else 100 + rank

    def hit(self, what: What, pid: int) -> None:
        self.hits.append((pid, what))
