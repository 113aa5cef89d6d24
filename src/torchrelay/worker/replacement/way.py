"""Way: what a replacement's script does between two recorded calls, before it has come to the last of them.

Its predecessor had trained when it did that; here the model is as it was built. So once a step lies behind, the state
is not read like that. If nothing ahead changes it, as sections that only evaluate or save do not, it is now what it is
at the point that we are brought to, and is brought from there. Else `UndeclaredError` is raised: no rank has it.
What the script writes into the state on its way counts for nothing, as all of it comes at the end; but what it has
written it may not read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torchrelay.errors import UndeclaredError
from torchrelay.worker.data.cursor import Cursor
from torchrelay.worker.replacement import tail
from torchrelay.worker.replacement.tail import NoCollectives, Waiting, name_of, storage_of, tensors_in
from torchrelay.worker.source.lines import is_library
from torchrelay.worker.state.state import State

REMEDY = (
    "a worker that takes over a rank does not have it: other calls have changed it since. Read it behind the last call "
    "of a turn, or in a step or section: run.atomic(function, ...)"
)


class Way:
    """From the first place behind a step to the last recorded call."""

    def __init__(self, state: State, cursor: Cursor, bring: Callable[[], None]) -> None:
        """`bring`: put the state of the point that we are brought to into the live tensors."""
        self._state = state
        self._cursor = cursor
        self._bring = bring
        self._values_known = False  # plain values are those of this place
        self._brought = False
        self._bringing = False
        self._held: set[int] = set()
        self._storages: set[int] = set()
        self._changes = tail.Changes(state)
        self._waiting: list[tuple[Any, Any]] = []  # optimizers, with their own state
        self._alone = NoCollectives()  # type: ignore[no-untyped-call]
        self._reading = _Reading(self)

    def begin(self) -> None:
        """From now on reads of the state are seen."""
        self._held, self._storages = tail.places_of(self._state)
        self._waiting = [(one, one.state) for one in self._state.optimizers()]
        for optimizer, kept in self._waiting:
            optimizer.state = Waiting(lambda: self._wanted("the state of an optimizer"), kept)
        self._alone.__enter__()  # type: ignore[no-untyped-call]
        self._reading.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """No longer."""
        self._reading.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._alone.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._give_back()

    def stands(self, *, values_known: bool) -> None:
        """The script goes on, behind a recorded call or in an item. `values_known`: learning rates and the like."""
        self._values_known = values_known

    def see(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A function of torch is about to be run. Raises `UndeclaredError` if it reads what no rank has."""
        name = name_of(func)
        if self._bringing or name in tail.HARMLESS:
            return
        places = {storage_of(each) for each in tensors_in(args, kwargs) if self._is_of_state(each)}
        if not places or not _is_of_the_script():
            return
        self._changes.see(name, args, kwargs, places)
        if not places & tail.written(name, args, kwargs):  # what comes of it is overwritten in the end
            self._wanted("the state")

    def _wanted(self, what: str) -> None:
        if self._bringing:
            return
        if not self._values_known or not self._cursor.still_ahead():
            raise UndeclaredError(f"the script reads {what} between two calls, after {self._cursor.point}: {REMEDY}")
        if self._brought:
            return
        self._bringing = True
        self._give_back()
        try:
            self._bring()
        finally:
            self._bringing = False
        self._brought = True

    def _give_back(self) -> None:
        for optimizer, kept in self._waiting:
            optimizer.state = kept
        self._waiting = []

    def _is_of_state(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._held or storage_of(tensor) in self._storages


class _Reading(TorchFunctionMode):
    """Sees each function of torch that is called with a tensor, before it is run."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self._way = way

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        given = kwargs or {}
        self._way.see(func, args, given)
        return func(*args, **given)


def _is_of_the_script() -> bool:
    """Whether it is not our own doing: the nearest caller outside of torch is no function of ours."""
    frame = sys._getframe(3)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("torchrelay."):
            return False
        if not name.startswith("torch.") and not is_library(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return True
