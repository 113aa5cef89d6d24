"""Schedule: what is lost in `compare`, and at which step: drawn by a seed, and the same for every system.

A published field test made a run on 64 GPUs fail as often as one on 30,000 would: 6.5 failures per 1,000 node-days are
one per 59 minutes there, and its 3,000 steps take 390 minutes undisturbed. What counts is that a job meets 6.6 faults;
the job here is shorter, and meets as many.

Faults come at steps, not at times. Processes start here in seconds, as anywhere, while the time between faults is
shortened some 500-fold: by the clock, whoever needs seconds to recover would meet the next fault before it has, and
never end. By steps all meet the same faults at the same progress, and what they lose can be compared. It spares those
that are slow: by the clock they would meet more.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

from torchrelay.economics.formulas.intervals import daly_h

RATE = 6.5  # failures per 1,000 node-days
GPUS, GPUS_A_NODE = 30_000, 8
FIELD_STEPS, FIELD_MINUTES, FIELD_EVERY = 3_000, 390, 100  # of the field test; a checkpoint every 100 steps
MTTF_MIN = 1000 * 24 * 60 / (RATE * GPUS / GPUS_A_NODE)
PER_JOB = FIELD_MINUTES / MTTF_MIN
SPREAD = (0.75, 1.25)  # gaps are uniform between these parts of their mean, as there
LAST = 0.95  # of the job: whoever is hit later has no time to go on before the end


class What(StrEnum):
    """What is done to a rank."""

    KILL = "kill"  # SIGKILL
    STOP = "stop"  # SIGSTOP, for good: it hangs, with its connections open
    NODE = "node"  # SIGKILL of all processes of a node at once
    LEAVE = "leave"  # it is asked to go


MIX = (What.KILL, What.KILL, What.KILL, What.LEAVE, What.NODE, What.STOP)


class Fault(Struct, frozen=True):
    """One fault: when the first rank has done so many steps, and to whom."""

    step: int
    what: What
    rank: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """Who is lost with it: on a node are two."""
        return (2, 3) if self.what is What.NODE else (self.rank,)


def faults(seed: int, steps: int, per_job: float = PER_JOB) -> tuple[Fault, ...]:
    """The faults of a job. Rank 0 is spared: it holds the store of some systems, whose loss would end them.

    Raises ValueError if the job is too short to hold so many.
    """
    if steps < 40 * per_job:
        raise ValueError(f"{steps} steps are too few for {per_job:.1f} faults: at least {round(40 * per_job + 1)}")
    dice, found, mean, at = random.Random(seed), list[Fault](), steps / per_job, 0.0
    while True:
        mix = list(MIX)
        dice.shuffle(mix)
        for what in mix:
            at += mean * dice.uniform(*SPREAD)
            rank = 2 if what is What.NODE else dice.choice((1, 2, 3))
            if round(at) > LAST * steps:
                return tuple(found)
            found.append(Fault(round(at), what, rank))


def arithmetic(steps: int, per_job: float, step_s: float) -> str:
    """How the rate of faults comes about, in words."""
    a_day = RATE * GPUS / GPUS_A_NODE / 1000
    return (
        f"{GPUS:,} GPUs are {GPUS // GPUS_A_NODE:,} nodes; {RATE} failures per 1,000 node-days are {a_day:.1f} a day, "
        f"one per {MTTF_MIN:.0f} minutes. {FIELD_STEPS:,} steps of the field test take {FIELD_MINUTES} minutes: "
        f"{PER_JOB:.1f} faults a job. This job: {steps:,} steps of {1000 * step_s:.1f} ms, {steps * step_s:.0f} s, and "
        f"a fault every {steps / per_job:.0f} steps ({steps / per_job * step_s:.1f} s) on average."
    )


def naive_interval(steps: int) -> int:
    """Steps between the checkpoints of somebody who has not thought about it: as in the field test."""
    return max(1, round(steps * FIELD_EVERY / FIELD_STEPS))


def tuned_interval(steps: int, per_job: float, step_s: float, *, copy_s: float, write_s: float) -> int:
    """Steps between checkpoints that are written beside the training, by Young and Daly.

    What one costs the training is the copy; but one must have been written before the next begins. All in seconds.
    """
    best_s = 3600 * daly_h(copy_s / 3600, steps * step_s / per_job / 3600)
    return max(1, round(max(best_s, 2 * write_s) / step_s))


TURN, BEFORE, AFTER = 25, 10, 100  # steps of a turn; and of what a fault needs before and after it


def turns(schedule: Sequence[Fault], steps: int) -> tuple[int, ...]:
    """After which steps a job waits, where jobs take turns: the first, every 25th, the last.

    But not around a fault: what it sets in motion, a new spare for one, is to come to its end in the same turn.
    """
    usual = range(TURN, steps - TURN // 2, TURN)
    near = [range(fault.step - BEFORE, fault.step + AFTER) for fault in schedule]
    return (1, *(at for at in usual if not any(at in one for one in near)), steps)
