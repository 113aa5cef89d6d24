"""Changes: what a script writes into the state between two steps, and reads of it there."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch

from torchrelay.errors import UndeclaredError
from torchrelay.worker.parallel.torch_functions import storage_of, tensors_in, written
from torchrelay.worker.state.parts import ContainerPart, StatefulPart
from torchrelay.worker.state.state import State


def places_of(state: State) -> tuple[set[int], set[int]]:
    """The tensors of a state by their ids, and the memory in which they lie."""
    found = [value for value in state.objects() if isinstance(value, torch.Tensor)]
    held = set(map(id, found))
    for optimizer in state.optimizers():
        for kept in optimizer.state.values():
            found += [value for value in kept.values() if isinstance(value, torch.Tensor)]
    for part in state.flat():
        if isinstance(part, StatefulPart):
            found += tensors_in((part.value.state_dict(),), {})
        elif isinstance(part, ContainerPart):
            found += tensors_in((part.value,), {})
    return held, {place for tensor in found if (place := storage_of(tensor))}


SWAPPED = (
    "the script changes parameters between two steps, and reads them there: a worker that takes over a rank may have "
    "them only as they are afterwards. Change them, and put them back, inside run.atomic(function, ...)"
)


class Changes:
    """What the script writes into parameters between two calls, and what it reads of them there.

    Other ranks may have come further in that code: what is brought from them may be what they have written. A script
    that only writes, as clipping does, gets the right values in the end; one that also reads, as an average does that
    takes the place of the parameters for an evaluation, would get others.
    """

    def __init__(self, state: State) -> None:
        besides = {storage_of(tensor) for _, tensor in state.given_besides()}
        self._tracked = {storage_of(parameter) for _, parameter in state.parameters()} - besides - {0}
        self._read: set[int] = set()
        self._written: set[int] = set()
        self.wrote = False  # anything

    def see(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], places: set[int]) -> None:
        """A function that takes what lies in these places is about to be run. Raises `UndeclaredError`."""
        all_targets = written(name, args, kwargs)
        self.wrote = self.wrote or bool(all_targets & places)
        targets = all_targets & self._tracked
        read = places & self._tracked - targets
        if targets & self._read or read & self._written:
            raise UndeclaredError(SWAPPED)
        self._written |= targets
        self._read |= read


def asking(module: str) -> FrameType | None:
    """What has called a function of torch that this module sees; None if that is a function of ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in (module, __name__):
        frame = frame.f_back
    first = frame
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        frame = frame.f_back
    ours = frame is not None and frame.f_globals.get("__name__", "").startswith("torchrelay.")
    return None if ours else first
