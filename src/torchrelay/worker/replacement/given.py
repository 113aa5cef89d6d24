"""Given: what a call is made with, as its record tells it, and how what a replacement has otherwise is proved right.

Whoever takes over a rank makes the recorded calls of its place again without running them. What it would have made
them with must be what its predecessor made them with, or its next calls are made with other data, too. A call is made
with the function's arguments, and with what a step reads besides.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from torchrelay.errors import UnprovedError
from torchrelay.protocol.messages.ids import Rank
from torchrelay.worker.agreement import agreement
from torchrelay.worker.hidden_state.hidden import Hidden
from torchrelay.worker.replacement.examples import name_of
from torchrelay.worker.replacement.foresight import Foresight
from torchrelay.worker.replacement.reads import NOTHING, Elsewhere, Reads, never
from torchrelay.worker.tensors import arguments
from torchrelay.worker.tensors.arguments import SIZE, is_scalar

STEP = "step"
OF_DATA = (
    "Its data, its random numbers or its counters are not those of the lost worker, so nothing is trained on it. "
    "Track loaders, run.batches(loader); count by run.global_step; keep what changes in protect(state=...), or "
    "return it from a step or section; seed generators that protect() is not given"
)
IN_PLACE = (
    "Let a step leave its arguments as they are (clone what it changes), and keep what it counts in protect(state=...)"
)


class Doubt(Struct, frozen=True):
    """Numbers with which a replacement would have made a call otherwise than its predecessor."""

    entries: tuple[int, ...] = ()
    what: str = ""

    def and_also(self, other: Doubt) -> Doubt:
        """Both, of two calls of one function."""
        entries = tuple(sorted({*self.entries, *other.entries}))
        return Doubt(entries, other.what if self.what == other.what else f"{self.what}, {other.what}")


NONE = Doubt()


class Function:
    """A function that is called as a step or section."""

    def __init__(self, call: Callable[..., Any], kind: str, elsewhere: Elsewhere, carried: Elsewhere = never) -> None:
        """`elsewhere`, `carried`: see `Reads`."""
        self.call = call
        self.kind = kind
        self.name = name_of(call)
        self.foresight = Foresight()
        self._elsewhere = elsewhere
        self._carried = carried
        self._reads: Reads | None = None  # made at the first call, when all of its variables are there

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], bytes]:
        """Begin with what tells this call from others; what is returned gives it."""
        made = arguments.begin(self.name, args, kwargs)
        if self.kind != STEP:
            return made
        if self._reads is None:
            self._reads = Reads(self.call, self._elsewhere, self._carried)
        read = self._reads.digests()
        return (lambda: made() + read) if read else made

    def returned(self) -> None:
        """A call has returned, of this function or of another one."""
        if self._reads is not None:
            self._reads.returned()

    def mark(self) -> None:
        """At the entry of a call: keep what it may rebind."""
        if self._reads is not None:
            self._reads.mark()

    def rewind(self) -> None:
        """Before the call is made again."""
        if self._reads is not None:
            self._reads.rewind()

    def check_replayed(self, recorded: bytes, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: str) -> Doubt:
        """Whether a replacement makes this call with what its predecessor made it with: `NONE` if it does.

        Numbers that a step is called with may come from state that has not arrived yet: the next step will tell (see
        `Proving`). Raises `UnprovedError` if anything else differs.
        """
        own = self.begin(args, kwargs)()
        if self._reads is not None and len(recorded) == len(own):
            self._reads.counted(recorded[len(own) - arguments.SIZE * len(self._reads.names) :])
            own = self.begin(args, kwargs)()
        if not recorded or own == recorded:
            return NONE
        entries = arguments.differing(recorded, own)
        entries = [at for at in entries if recorded[at * arguments.SIZE : (at + 1) * arguments.SIZE] != NOTHING]
        if not entries and len(recorded) == len(own):
            return NONE  # its predecessor says nothing of these: they come in another way
        what = self._differing(recorded, own, args, kwargs)
        numbers = all(arguments.is_scalar(made, at) for made in (recorded, own) for at in entries)
        if self.kind == STEP and numbers and 0 not in entries:
            return Doubt(tuple(entries), what)
        raise UnprovedError(
            f"a worker that takes over a rank came to {call} with other data than the lost one: {what}. {OF_DATA}"
        )

    def check_again(self, first: bytes, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: str) -> None:
        """Raises `UnprovedError` if a call that is made again would be made with something else than the first time."""
        now = self.begin(args, kwargs)()
        if now != first:
            what = self._differing(first, now, args, kwargs)
            raise UnprovedError(
                f"{call} was cut by a fault and cannot be made again, as it has changed {what}. {IN_PLACE}"
            )

    def _differing(self, one: bytes, other: bytes, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        short = f"{self.name.rpartition('.')[2]}()"
        names = [f"{name} of {short}" for name in arguments.names_of(args, kwargs, _parameters(self.call))]
        names[0] = f"which function it is, here {short}"
        names += self._reads.names if self._reads is not None else []
        found = [names[at] if at < len(names) else "their number" for at in arguments.differing(one, other)]
        return ", ".join(found[:3])


class Functions:
    """All functions of a script that are called as steps or sections."""

    def __init__(self, state: Iterable[Any], hidden: Hidden) -> None:
        """`state`: the objects that it is made of, which are held elsewhere: so no other has the id of one."""
        self._ids = frozenset(map(id, state))
        self._hidden = hidden
        self._steps: weakref.WeakSet[Function] = weakref.WeakSet()

    def add(self, call: Callable[..., Any], kind: str) -> Function:
        """One more."""
        made = Function(call, kind, self._is_elsewhere, self._hidden.carries)
        if kind == STEP:
            self._steps.add(made)
        return made

    def returned(self) -> None:
        """A call is over: what changes from now on is changed between two calls."""
        if self._hidden.state.kept:
            for function in self._steps:
                function.returned()

    def _is_elsewhere(self, holder: Any, name: str, value: Any) -> bool:
        """Whether a replacement gets this with the state."""
        del holder, name
        return id(value) in self._ids


def _parameters(call: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(call).parameters)
    except (TypeError, ValueError):
        return []


# ---------------------------------------------------------------- proving

# Numbers in doubt are shown to be right by those that replicas step with.
#
# Where a replacement came to the call of its place it computed the arguments without the state, which comes later: a
# learning rate or a counter that is kept in the state was not there yet, and differs for a good reason. A counter of
# the script's own differs for a bad one, and will the next time, too. So in the first step's gate after ranks have
# changed hands all tell one another the digests of that step, and of the calls before the fault. A number that another
# rank had then, too, must be one that it has now, or nobody passes. Scripts may have several steps: this goes on, step
# by step, until the functions in doubt have been called again.

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
            print(
                f"torchrelay: not used for {steps} steps, so nobody can tell whether it is right: {what}",
                file=sys.stderr,
                flush=True,
            )
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
