"""Returned: plain values of the state as they were when the last call returned.

A script may go on with them before its next call: step a schedule, log a learning rate, save. A replacement makes that
again, from the state of a rank that has done it already. So each rank remembers, at the return of each call, what is
changed there without a trace: learning rates, schedules, scales, modes of modules, what objects and containers hold. It
costs a few microseconds: copies are shallow, as in `marks`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from torchrelay.worker.parallel.shards import version
from torchrelay.worker.retry.marks import Entries, Fields, Flags, HyperParameters, Mark, Scale, Schedule
from torchrelay.worker.state.parts import ContainerPart, ModulePart, OptimizerPart, Part, StatefulPart
from torchrelay.worker.state.state import State
from torchrelay.worker.tensors import values

_Told = ContainerPart | ModulePart | OptimizerPart | StatefulPart
LIMIT = 256 << 10  # bytes of one part's values; what is larger comes with the state


class Returned:
    """Of one rank."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._marks = list(_marks(state))
        self._tensors = state.given_besides()
        self._versions: list[int] = []
        self.mark()

    def mark(self) -> None:
        """A call returns: remember the values as they are now. In the path of every step."""
        for mark in self._marks:
            mark.mark()
        if self._tensors:
            self._versions = [version(tensor) for _, tensor in self._tensors]

    def encoded(self) -> bytes:
        """The values as of the last mark. By the main thread, while it stands at a safepoint."""
        now = list(_marks(self._state))
        for mark in now:
            mark.mark()
        for mark in self._marks:
            mark.rewind()
        counted = zip(self._tensors, self._versions, strict=True)
        moved = sorted({path for (path, tensor), before in counted if version(tensor) != before})
        try:
            return _encode(self._state, moved)
        finally:
            for mark in now:
                mark.rewind()


def take(state: State, data: bytes, only: Collection[str] | None = None) -> frozenset[str]:
    """On a replacement: take another rank's values, or `only` of these parts. Raises `ValueError` if they are none.

    Returns the parts whose tensors have moved since on that rank: it has them as they became after the return only.
    """
    arrived, moved = values.decode(data)
    for part in state.flat():
        if isinstance(part, _Told) and part.path in arrived and (only is None or part.path in only):
            part.take_values(arrived[part.path])
    return frozenset(moved)


def now(state: State) -> bytes:
    """The values as they are now."""
    return _encode(state, [])


def told_of(data: bytes) -> Collection[str]:
    """The parts of which values are told."""
    return frozenset(values.decode(data)[0])


def _encode(state: State, moved: list[str]) -> bytes:
    """What cannot be told by itself, or is large, is left out: it comes with the state."""
    told: dict[str, Any] = {}
    for part in state.flat():
        if isinstance(part, _Told):
            found = part.told_values()
            try:
                size = len(values.encode(found, part.path))
            except TypeError:
                continue
            if size <= LIMIT:
                told[part.path] = found
    return values.encode((told, moved), "values")


def _marks(state: State) -> Iterator[Mark]:
    for part in state.flat():
        mark = _mark_of(part)
        if mark is not None:
            yield mark


def _mark_of(part: Part) -> Mark | None:
    if isinstance(part, OptimizerPart):
        return HyperParameters(part.optimizer)
    if isinstance(part, ModulePart):
        return Flags(part.module)
    if isinstance(part, ContainerPart):
        return Entries(part.value)
    if not isinstance(part, StatefulPart):
        return None
    if isinstance(part.value, LRScheduler):
        return Schedule(part.value)
    if isinstance(part.value, GradScaler):
        return Scale(part.value)
    return Fields(part.value) if isinstance(getattr(part.value, "__dict__", None), Mapping) else None
