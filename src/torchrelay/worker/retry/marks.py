"""Marks: small things that a step changes before its gate, copied at its entry and put back if it is redone.

Each class remembers one kind of thing: `mark` is in the path of every step and must be cheap, `rewind` is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchrelay.worker.state.parts import Part
from torchrelay.worker.tensors import tree
from torchrelay.worker.tensors.landing import Landing

_FIELD = "training"
_trains = attrgetter(_FIELD)


class Mark(Protocol):
    """Something that can be remembered and put back."""

    def mark(self) -> None:
        """Remember it as it is now."""

    def rewind(self) -> None:
        """Put it back as it was at the last mark; may be done twice."""


class Tensors:
    """Tensors, copied into memory that is there already."""

    def __init__(self, live: Sequence[torch.Tensor]) -> None:
        self._live = [tensor.detach() for tensor in live]
        self._copies = [torch.empty_like(tensor) for tensor in self._live]

    def mark(self) -> None:
        if self._live:
            torch._foreach_copy_(self._copies, self._live)

    def rewind(self) -> None:
        if self._live:
            torch._foreach_copy_(self._live, self._copies)


class HyperParameters:
    """An optimizer's groups without their parameters: scripts set the learning rate inside a step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups: list[dict[str, Any]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []

    def mark(self) -> None:
        self._groups = [group.copy() for group in self._optimizer.param_groups]
        # A learning rate may be a tensor, which is changed in place.
        self._tensors = [
            (value, value.detach().clone())
            for group in self._groups
            for value in group.values()
            if isinstance(value, torch.Tensor)
        ]

    def rewind(self) -> None:
        del self._optimizer.param_groups[len(self._groups) :]  # a group may have been added
        for group, before in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.clear()
            group.update(before)
        for live, before_tensor in self._tensors:
            live.detach().copy_(before_tensor)


class Modes:
    """Whether modules train or evaluate: an evaluation that was cut short leaves them in its mode."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = [inner for module in modules for inner in module.modules()]
        self._before: list[bool] = []
        # A model has hundreds of modules. Asked in every step, and several times as fast where it stands in their dict.
        fields = [vars(module) for module in self._modules]
        plain = all(_FIELD in each for each in fields)
        self._look = partial(map, itemgetter(_FIELD), fields) if plain else partial(map, _trains, self._modules)

    def mark(self) -> None:
        self._before = list(self._look())

    def rewind(self) -> None:
        for module, training in zip(self._modules, self._before, strict=True):
            module.training = training


class Schedule:
    """An LR scheduler and those inside it: a step that skips its update may have moved them before its gate."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self._schedulers = _nested(scheduler)
        self._before: list[dict[str, Any]] = []

    def mark(self) -> None:
        # Shallow is enough: schedulers replace their lists and never change them in place.
        self._before = [vars(scheduler).copy() for scheduler in self._schedulers]

    def rewind(self) -> None:
        for scheduler, before in zip(self._schedulers, self._before, strict=True):
            vars(scheduler).clear()
            vars(scheduler).update(before)


def _nested(scheduler: LRScheduler) -> list[LRScheduler]:
    inner = getattr(scheduler, "_schedulers", ())
    return [scheduler, *(deeper for one in inner for deeper in _nested(one))]


class Scale:
    """A GradScaler: its scale moves at the end of a step, which is before the gate if the update is skipped."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self._before: dict[str, Any] = {}
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []

    def mark(self) -> None:
        self._before = vars(self._scaler).copy()
        self._tensors = [
            (value, value.clone())
            for value in (self._before.get("_scale"), self._before.get("_growth_tracker"))
            if value is not None
        ]

    def rewind(self) -> None:
        vars(self._scaler).update(self._before)
        for live, before in self._tensors:
            live.copy_(before)
        # What it has noted of this step's optimizers (unscaled, found_inf); empty at the entry of a step.
        if hasattr(self._scaler, "_per_optimizer_states"):
            self._scaler._per_optimizer_states.clear()


class Fields:
    """What an object of the script holds. Shallow: what is changed in place within it is not put back."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._before: dict[str, Any] = {}

    def mark(self) -> None:
        self._before = vars(self._value).copy()

    def rewind(self) -> None:
        vars(self._value).clear()
        vars(self._value).update(self._before)


class Entries:
    """What a dict, list, deque or set of the script holds; shallow, too."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._before = value.copy()

    def mark(self) -> None:
        self._before = self._value.copy()

    def rewind(self) -> None:
        self._value.clear()
        if isinstance(self._value, (dict, set)):
            self._value.update(self._before)
        else:
            self._value.extend(self._before)


class Draws:
    """A generator of the script: the forward pass draws from it."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._before = generator.get_state()

    def mark(self) -> None:
        self._before = self._generator.get_state()

    def rewind(self) -> None:
        self._generator.set_state(self._before)


class Copied:
    """A whole part of the state, by the same way that a replacement takes it."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._tree = b""
        self._copies: list[torch.Tensor] = []

    def mark(self) -> None:
        self._tree, tensors = tree.encode(self._part.give(), self._part.path)
        fits = len(tensors) == len(self._copies) and all(map(_alike, tensors, self._copies))
        if not fits:
            self._copies = [torch.empty_like(tensor) for tensor in tensors]
        if tensors:
            torch._foreach_copy_(self._copies, tensors)

    def rewind(self) -> None:
        landing = Landing()
        self._part.take(tree.decode(self._tree), landing)
        places = landing.tensors()
        if places:
            torch._foreach_copy_(places, self._copies)
        landing.finish()
        self._part.settle()


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
