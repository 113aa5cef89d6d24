"""Buckets: where the time of a simulated run goes. What was trained is good only when nothing can take it back.

The names are those of ml-goodput-measurement, so that a forecast can be laid beside what others measure. A bucket of
theirs that this model has nothing to say about (data loading, accelerator init) is there and stays 0.
"""

from __future__ import annotations

from enum import StrEnum


class Bucket(StrEnum):
    """A kind of time that is not productive."""

    ACCELERATOR_INIT = "accelerator init"
    TRAINING_PREP = "training prep"
    STARTUP = "program start-up"
    DATA_SYNC = "data loading sync"
    DATA_ASYNC = "data loading async"
    SAVE = "checkpoint save"
    RESTORE = "checkpoint restore"
    WASTED = "wasted progress from disruption"
    RECOVERY = "infrastructure recovery"
    CUSTOM = "custom"  # steps that take longer: of a strategy, a lost path, a shared slot, a missing replica
    OTHER = "other"


class Account:
    """The time of one run, in hours. `productive` and all buckets together are the wall time."""

    def __init__(self) -> None:
        self.productive_h = 0.0
        self.bad_h = dict.fromkeys(Bucket, 0.0)
        self.run_h = 0.0  # trained since the last save: may still be lost
        self.work_h = 0.0  # what that comes to at full speed
        self.dropped_h = 0.0  # work whose samples were not used: steps without a replica group

    @property
    def done_h(self) -> float:
        """Work that is held now, at full speed: saved or in memory."""
        return self.productive_h + self.work_h

    def train(self, hours: float, work_h: float) -> None:
        self.run_h += hours
        self.work_h += work_h

    def spend(self, bucket: Bucket, hours: float) -> None:
        self.bad_h[bucket] += hours

    def keep(self, *, but_run_h: float = 0.0, but_work_h: float = 0.0) -> None:
        """A checkpoint is complete: what was trained is kept, but for what came after it was begun."""
        kept, good = self.run_h - but_run_h, self.work_h - but_work_h
        self.productive_h += good
        self.bad_h[Bucket.CUSTOM] += kept - good
        self.run_h, self.work_h = but_run_h, but_work_h

    def lose(self, work_h: float | None = None) -> float:
        """So much work is to be done again (None: all since the last save). Returns how much it was."""
        lost = self.work_h if work_h is None else min(work_h, self.work_h)
        share = 1.0 if work_h is None or self.work_h == 0 else lost / self.work_h
        self.bad_h[Bucket.WASTED] += self.run_h * share
        self.run_h -= self.run_h * share
        self.work_h -= lost
        return lost

    def close(self) -> None:
        """The end of the run: what is held counts."""
        self.keep()
