"""Proving: numbers that a replacement is to step with are shown to be right by those that its replicas step with.

Where a replacement came to the call of its place it computed the arguments without the state, which comes later: a
learning rate or a counter that is kept in the state was not there yet, and differs for a good reason. A counter of the
script's own differs for a bad one, and will the next time, too. So in the first step's gate after ranks have changed
hands all tell one another the digests of that step, and of the call before the fault. A number that another rank had
then, too, must be one that it has now, or nobody passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from msgspec import Struct

from torchrelay.errors import Unproved
from torchrelay.protocol.ids import Rank
from torchrelay.worker import agreement
from torchrelay.worker.arguments import SIZE, is_scalar
from torchrelay.worker.given import NONE

REMEDY = (
    "Count by run.committed, keep what is counted in join(extra=...), or return it from a step or section; a clock is "
    "best read inside the step"
)


class NobodyPasses(Exception):
    """A rank's numbers cannot be shown to be right. It says so itself; this rank waits for what follows."""


class Told(Struct, array_like=True, frozen=True):
    """What a rank tells the others."""

    doubt: list[int]  # entries in which it would have made the call before the fault otherwise than its predecessor
    before: bytes  # the digests of that call, as its predecessor made it
    now: bytes  # of this step


class Proving:
    """Of one rank."""

    def __init__(self, rank: Callable[[], Rank]) -> None:
        self._rank = rank
        self.doubt = NONE

    def look(self, before: bytes, now: bytes) -> Callable[[], None]:
        """In the first step's gate after a recovery: what all ranks have to do. `before`, `now`: see `Told`."""
        return partial(self._exchange, Told(list(self.doubt.entries), before, now))

    def _exchange(self, mine: Told) -> None:
        """Collective over all ranks. Raises `Unproved` on a rank whose numbers are wrong, `NobodyPasses` on others."""
        told = [msgspec.msgpack.decode(data, type=Told) for data in agreement.gather(msgspec.msgpack.encode(mine))]
        wrong = unproved(told)
        if self._rank() in wrong:
            raise Unproved(
                f"a worker that took over this rank steps with other numbers than its replicas: {self.doubt.what}. "
                f"They do not come from the state that it was given. {REMEDY}"
            )
        if wrong:
            raise NobodyPasses
        self.doubt = NONE


def unproved(told: Sequence[Told]) -> list[int]:
    """The ranks with a number in doubt that no other rank shows to be right."""
    return [
        rank
        for rank, one in enumerate(told)
        if not all(any(_shows(other, one, entry) for other in told) for entry in one.doubt)
    ]


def _shows(other: Told, one: Told, entry: int) -> bool:
    """Whether a rank beyond doubt had the same number before the fault, and has the same one now."""
    if entry in other.doubt or _cut(other.before, entry) != _cut(one.before, entry):
        return False
    if _cut(one.before, 0) == _cut(one.now, 0):
        return _cut(other.now, entry) == _cut(one.now, entry)
    # Another function is called than before the fault: any of its numbers may come of the one in doubt.
    numbers = [at for at in range(len(one.now) // SIZE) if is_scalar(one.now, at)]
    return all(_cut(other.now, at) == _cut(one.now, at) for at in numbers)


def _cut(made: bytes, entry: int) -> bytes:
    return made[entry * SIZE : (entry + 1) * SIZE]
