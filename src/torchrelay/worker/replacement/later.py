"""Later: parts of the state that a replacement has only as they became after the place where its script is."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterable, Mapping
from types import FrameType
from typing import Any

import torch

from torchrelay.errors import UndeclaredError
from torchrelay.worker.hidden_state import graph, variables
from torchrelay.worker.replacement.torch_functions import GIVES_AWAY, LOOKS, TELLS, storage_of, tensors_in
from torchrelay.worker.source.lines import is_library
from torchrelay.worker.state.state import State


class Later:
    """Parts that the script changes in this place, and that came as they are after that.

    What it computes of them is of no matter if it only comes into them again: they come once more. It must not come
    into anything else: a file, a number, or a variable that is read later.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.names = ""
        self._places: set[int] = set()
        self._owners: set[int] = set()
        self._made: list[weakref.ref[torch.Tensor]] = []  # tensors that were computed from them

    def are(self, moved: frozenset[str]) -> None:
        """These are, from now on."""
        self.end()
        self.names = ", ".join(sorted(moved))
        self._places = {storage_of(tensor) for path, tensor in self._state.given_besides() if path in moved} - {0}
        held = [part.held() for part in self._state.flat() if part.path in moved]
        modules = [each for one in held if isinstance(one, torch.nn.Module) for each in one.modules()]
        self._owners = {id(one) for one in (*held, *modules)}

    def came(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, state: Collection[int]
    ) -> None:
        """A function of this name has been run. `state`: where the tensors of the state lie."""
        if name in LOOKS or not self._is_in(args, kwargs):
            return
        for tensor in tensors_in((result,), {}):
            if storage_of(tensor) not in state and storage_of(tensor) not in self._places:
                self._made.append(weakref.ref(tensor))

    def check(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raises `UndeclaredError` if this gives away what no rank has any more."""
        if not self.names or not (name in GIVES_AWAY or name in TELLS) or not self._is_in(args, kwargs):
            return
        asking = _asking()
        if asking is None or (name in TELLS and self._is_of_its_own(asking)):
            return
        raise UndeclaredError(_LATER.format(self.names))

    def end(self) -> None:
        """The script comes to another place. Raises `UndeclaredError` if it keeps what was made of them."""
        made = {id(tensor) for reference in self._made if (tensor := reference()) is not None}
        self._made = []
        if made:
            kept = graph.Walk([(leaf.path, leaf.value) for leaf in variables.held()])
            if any(id(leaf.value) in made for leaf in kept.leaves.values()):
                raise UndeclaredError(_LATER.format(self.names))

    def is_in(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether some of these are such."""
        return bool(self.names) and self._is_in(tuple(tensors), {})

    def _is_in(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        made = [tensor for reference in self._made if (tensor := reference()) is not None]
        places = {storage_of(tensor) for tensor in made if storage_of(tensor)} | self._places
        ids = set(map(id, made))
        return any(id(each) in ids or storage_of(each) in places for each in tensors_in(args, kwargs))

    def _is_of_its_own(self, asking: FrameType) -> bool:
        """Whether a method of such an object asks, for what it does with itself: as for how many updates it had."""
        frame: FrameType | None = asking
        while frame is not None:
            if id(frame.f_locals.get("self")) in self._owners:
                return True
            if not is_library(frame.f_code.co_filename):
                return False
            frame = frame.f_back
        return False


def _asking() -> FrameType | None:
    """What has called a function of torch; None if that is a function of ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _WATCHING:
        frame = frame.f_back
    first = frame
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        frame = frame.f_back
    ours = frame is not None and frame.f_globals.get("__name__", "").startswith(_OURS)
    return None if ours else first


_OURS = "torchrelay."
_WATCHING = (__name__, "torchrelay.worker.replacement.tail")
_LATER = (
    "{} changes between two steps, and is saved or read there: a worker that takes over a rank has it only as it is "
    "afterwards. Change it in the step, after optimizer.step(), or put saving and reading it into "
    "run.atomic(function, ...)"
)
