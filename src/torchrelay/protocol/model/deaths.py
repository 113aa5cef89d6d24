"""Deaths: the same end of two workers that held a rank, at the same point, is the script's own.

What a process does to itself counts, while it trains, or while a replacement's script runs to where its rank was lost:
an exit that told of no exception, and signals by which it ends through its own
doing (SIGABRT, SIGSEGV, ...). What comes from outside (SIGKILL, SIGTERM) says nothing of the script. Nothing that was
said or resolved between the two makes them unlike: the second has done again what the first did.
"""

from __future__ import annotations

import signal

from msgspec import Struct

from torchrelay.protocol.messages.events import WorkerExited
from torchrelay.protocol.messages.ids import Point, Rank, WorkerId

# By which a process ends through what it has done itself.
OWN_SIGNALS = frozenset(
    {signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS}
)
# Ours: no orders came, or it could not start. Nothing that the script did.
OUR_CODES = frozenset({92, 94})
# What agents say of an abort of Gloo for data of another size than was expected.
MISMATCH = "the collectives of the ranks do not match"
KEPT = 64  # deaths remembered of a job


class Death(Struct, frozen=True):
    """How a worker that held a rank ended by itself.

    point    the newest that it left a record of; of a replacement, the one that its script was on the way to
    trained  it was no replacement any more; two replacements that end alike may be in a bad place
    """

    worker: WorkerId
    rank: Rank
    point: Point
    how: str
    cause: str
    trained: bool

    def same(self, other: Death) -> bool:
        """Whether another worker has ended alike. Which rank is hit by collectives that do not match is chance."""
        alike = (self.how, self.point) == (other.how, other.point) and self.worker != other.worker
        return alike and (self.trained or other.trained) and (self.rank == other.rank or self.how == MISMATCH)


def death_of(event: WorkerExited, rank: Rank, cause: str, coming_to: Point | None = None) -> Death | None:
    """This end, if it may be the script's own. `coming_to`: of a replacement, the point that it is brought to.

    None also for one that left no record, and for an exception: that is judged by what was raised.
    """
    point = coming_to or max((record.point for record in event.private), default=None)
    if point is None:
        return None
    if MISMATCH in event.cause:
        how = MISMATCH
    elif event.signal is not None:
        if event.signal not in OWN_SIGNALS:
            return None
        how = f"signal {event.signal}"
    elif event.code is not None and event.code not in OUR_CODES:
        how = f"exit code {event.code}"
    else:
        return None
    return Death(event.worker, rank, point, how, cause, trained=coming_to is None)


def remember_death(deaths: tuple[Death, ...], death: Death) -> tuple[Death, ...]:
    """The deaths of a job, and this one."""
    return (*deaths[1 - KEPT :], death)


def same_death_twice(deaths: tuple[Death, ...]) -> tuple[Death, Death] | None:
    """The last death and an earlier one that is the same; None if there is none."""
    if not deaths:
        return None
    last = deaths[-1]
    return next(((other, last) for other in deaths if other.same(last)), None)
