"""Proving: numbers that a replacement is to step with are shown to be right by those that its replicas step with.

Where a replacement came to the call of its place it computed the arguments without the state, which comes later: a
learning rate or a counter that is kept in the state was not there yet, and differs for a good reason. A counter of the
script's own differs for a bad one, and will the next time, too. So in the first step's gate after ranks have changed
hands all tell one another the digests of that step, and of the calls before the fault. A number that another rank had
then, too, must be one that it has now, or nobody passes. Scripts may have several steps: this goes on, step by step,
until the functions in doubt have been called again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
from msgspec import Struct

from torchrelay.errors import UnprovedError
from torchrelay.protocol.messages.ids import Rank
from torchrelay.worker.agreement import agreement
from torchrelay.worker.hidden_state.arguments import SIZE, is_scalar
from torchrelay.worker.replacement.given import Doubt

MOST = 64  # steps for which a function in doubt is waited for: each costs an exchange
FUNCTIONS = 64  # of which is known what they were called with last
REMEDY = (
    "Count by run.global_step, keep what is counted in protect(state=...), or return it from a step or section; read "
    "clocks inside the step"
)


class NobodyPasses(Exception):
    """A rank's numbers cannot be shown to be right. It says so itself; this rank waits for what follows."""


class Told(Struct, array_like=True, frozen=True):
    """What a rank tells the others. Functions are told apart by the digests of their names."""

    doubts: dict[bytes, list[int]]  # by function, entries in which it would have made calls otherwise
    before: dict[bytes, bytes]  # by function, the digests of its last call; as the rank's last holder made it
    now: bytes  # of this step


class Proving:
    """Of one rank."""

    def __init__(self, rank: Callable[[], Rank]) -> None:
        self._rank = rank
        self._before: dict[bytes, bytes] = {}
        self._doubts: dict[bytes, Doubt] = {}
        self.settled = True  # after the last exchange: no rank has a function in doubt that it has not called since

    def note(self, given: bytes) -> None:
        """A step was made with this, by us or by the rank's last holder. In the path of every step."""
        self._before[given[:SIZE]] = given
        if len(self._before) > FUNCTIONS:
            del self._before[next(iter(self._before))]

    def take_over(self, doubts: Mapping[bytes, Doubt]) -> None:
        """What a replacement would have called otherwise than its predecessor, by function."""
        self._doubts = dict(doubts)

    def look(self, now: bytes, steps: int) -> Callable[[], None]:
        """In a step's gate after a recovery: what all ranks have to do. `now`: see `Told`.

        `steps`: made since ranks have changed hands, this one included.
        """
        doubts = {function: list(doubt.entries) for function, doubt in self._doubts.items()}
        return partial(self._exchange, Told(doubts, dict(self._before), now), steps)

    def _exchange(self, mine: Told, steps: int) -> None:
        """Collective over all ranks. Raises `UnprovedError` where numbers are wrong, `NobodyPasses` on other ranks."""
        told = [msgspec.msgpack.decode(data, type=Told) for data in agreement.gather(msgspec.msgpack.encode(mine))]
        wrong = unproved(told)
        if self._rank() in wrong:
            what = ", ".join(doubt.what for doubt in self._doubts.values())
            raise UnprovedError(
                f"a worker that took over this rank steps with other numbers than its replicas: {what}. "
                f"They do not come from the state that it was given. {REMEDY}"
            )
        if wrong:
            raise NobodyPasses
        self.settled = not is_open(told) or steps >= MOST
        self._doubts.pop(_cut(mine.now, 0), None)
        if self.settled and self._doubts:
            what = ", ".join(doubt.what for doubt in self._doubts.values())
            print(f"torchrelay: not used for {steps} steps, so nobody can tell whether it is right: {what}",
                  file=sys.stderr, flush=True)  # fmt: skip
            self._doubts.clear()


def unproved(told: Sequence[Told]) -> list[int]:
    """The ranks with a number in doubt that no other rank shows to be right."""
    return [
        rank
        for rank, one in enumerate(told)
        if not all(
            any(_shows(other, one, function, entry) for other in told)
            for function, entries in one.doubts.items()
            for entry in entries
        )
    ]


def is_open(told: Sequence[Told]) -> bool:
    """Whether a rank has a function in doubt that is not the one it calls now."""
    return any(function != _cut(one.now, 0) for one in told for function in one.doubts)


def _shows(other: Told, one: Told, function: bytes, entry: int) -> bool:
    """Whether a rank beyond doubt had the same number before the fault, and has the same one now."""
    theirs, ours = other.before.get(function, b""), one.before.get(function, b"")
    if entry in other.doubts.get(function, ()) or not theirs or _cut(theirs, entry) != _cut(ours, entry):
        return False
    if function == _cut(one.now, 0):
        return _cut(other.now, entry) == _cut(one.now, entry)
    # Another function is called than before the fault: any of its numbers may come of the one in doubt.
    numbers = [at for at in range(len(one.now) // SIZE) if is_scalar(one.now, at)]
    return all(_cut(other.now, at) == _cut(one.now, at) for at in numbers)


def _cut(made: bytes, entry: int) -> bytes:
    return made[entry * SIZE : (entry + 1) * SIZE]
