"""Names of things: jobs, nodes, workers, ranks, generations, and points in a job's history."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NewType

from msgspec import Struct

JobId = NewType("JobId", str)
NodeId = NewType("NodeId", str)
# One life of one worker process. Never used again: a process started anew has a new id.
WorkerId = NewType("WorkerId", str)
# Names of nodes and workers name files, too: nothing that leads out of a folder.
SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
Rank = NewType("Rank", int)
# Grows by one whenever all ranks are asked anew where they stand, or to stop; a job starts in generation 1. What was
# said in an earlier one counts no more.
Generation = NewType("Generation", int)


class Point(Struct, frozen=True, order=True):
    """A place in a job's history: optimizer updates committed, and sections committed since the last of them.

    Points are ordered. `Point(0, 0)` is the start: the worker has joined and nothing is committed.
    """

    step: int
    section: int = 0

    def after_step(self) -> Point:
        """The point reached when the next step commits."""
        return Point(self.step + 1, 0)

    def after_section(self) -> Point:
        """The point reached when the next section commits."""
        return Point(self.step, self.section + 1)

    def __str__(self) -> str:
        return f"{self.step}" if self.section == 0 else f"{self.step}+{self.section}"


START = Point(0, 0)


class WorkerPhase(StrEnum):
    """What a worker's main thread is doing, as far as the commit of a step is concerned."""

    BOOTING = "booting"  # before protect(): the script sets itself up
    BETWEEN = "between"  # after a commit, before the next step or section is entered
    COMPUTING = "computing"  # inside a step, before its gate
    SECTION = "section"  # inside a declared section, before its gate
    GATE = "gate"  # in the gate of a step or section: its own part is done, the others' not known
    UPDATING = "updating"  # past the gate, inside the local update: will finish without the others
    STOPPED = "stopped"  # at the safepoint of a step or section, waiting for orders
    FINISHED = "finished"  # the script ended with 0; the state is still served
