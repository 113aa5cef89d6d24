"""Given: what a call is made with, as its record tells it: by the function's arguments, and what a step reads besides.

Whoever takes over a rank makes the recorded calls of its place again without running them. What it would have made
them with must be what its predecessor made them with, or its next calls are made with other data, too.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct

from torchrelay.errors import UnprovedError
from torchrelay.worker.hidden_state import arguments
from torchrelay.worker.hidden_state.hidden import Hidden
from torchrelay.worker.hidden_state.reads import NOTHING, Elsewhere, Reads, never
from torchrelay.worker.replacement.examples import name_of

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
        `proving`). Raises `UnprovedError` if anything else differs.
        """
        own = self.begin(args, kwargs)()
        if self._reads is not None and len(recorded) == len(own):
            self._reads.counted(recorded[len(own) - arguments.SIZE * len(self._reads.names) :])
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
