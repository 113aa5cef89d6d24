"""Marks: small things that a step changes before its gate, copied at its entry and put back if it is redone.

What else a call changes before its gate is found out by digests at its entry and at its gate (`Probe`).

Each class remembers one kind of thing: `mark` is in the path of every step and must be cheap, `rewind` is not.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, Protocol

import numpy as np
import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchrelay.worker.state.parts import ContainerPart, GeneratorPart, ModulePart, OptimizerPart, Part, StatefulPart
from torchrelay.worker.state.saved import SavedPart
from torchrelay.worker.state.state import State
from torchrelay.worker.tensors import memory, tree
from torchrelay.worker.tensors.digest import Digest
from torchrelay.worker.tensors.landing import Landing

DEPTH = 3  # containers within one another
_FIELD = "training"
_trains = attrgetter(_FIELD)
_trained = attrgetter("requires_grad")


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
        self.optimizer = optimizer
        self.groups: list[dict[str, Any]] = []
        self._within: list[tuple[Any, Any]] = []

    def mark(self) -> None:
        self.groups = [group.copy() for group in self.optimizer.param_groups]
        # A learning rate may be a tensor, which is changed in place; and a script keeps here what it likes.
        held = (value for group in self.groups for name, value in group.items() if name != "params")
        self._within = _all_within(held)

    def rewind(self) -> None:
        del self.optimizer.param_groups[len(self.groups) :]  # a group may have been added
        for group, before in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.clear()
            group.update(before)
        for value, copied in self._within:
            _refill(value, copied)


class Modes:
    """Whether modules train or evaluate: an evaluation that was cut short leaves them in its mode."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = [inner for module in modules for inner in module.modules()]
        self.before: list[bool] = []
        # A model has hundreds of modules. Asked in every step, and several times as fast where it stands in their dict.
        fields = [vars(module) for module in self._modules]
        plain = all(_FIELD in each for each in fields)
        self._look = partial(map, itemgetter(_FIELD), fields) if plain else partial(map, _trains, self._modules)

    def mark(self) -> None:
        self.before = list(self._look())

    def rewind(self) -> None:
        for module, training in zip(self._modules, self.before, strict=True):
            module.training = training


class Flags:
    """Whether modules train or evaluate, and which parameters are frozen."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.modes = Modes([module])
        self._parameters = list(module.parameters())
        self.trained: list[bool] = []

    def mark(self) -> None:
        self.modes.mark()
        self.trained = list(map(_trained, self._parameters))

    def rewind(self) -> None:
        self.modes.rewind()
        for parameter, trained in zip(self._parameters, self.trained, strict=True):
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)


class Schedule:
    """An LR scheduler and those inside it: a step that skips its update may have moved them before its gate."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self.schedulers = _nested(scheduler)
        self._within: list[tuple[Any, Any]] = []
        self.before: list[dict[str, Any]] = []

    def mark(self) -> None:
        self.before = [vars(scheduler).copy() for scheduler in self.schedulers]
        # torch's own schedulers replace their lists; a script's, and what is hung on one, may change them in place.
        self._within = _all_within(value for fields in self.before for value in fields.values())

    def rewind(self) -> None:
        for scheduler, before in zip(self.schedulers, self.before, strict=True):
            vars(scheduler).clear()
            vars(scheduler).update(before)
        for value, copied in self._within:
            _refill(value, copied)


def _nested(scheduler: LRScheduler) -> list[LRScheduler]:
    inner = getattr(scheduler, "_schedulers", ())
    return [scheduler, *(deeper for one in inner for deeper in _nested(one))]


class Scale:
    """A GradScaler: its scale moves at the end of a step, which is before the gate if the update is skipped."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self._before: dict[str, Any] = {}
        self._within: list[tuple[Any, Any]] = []

    def mark(self) -> None:
        self._before = vars(self._scaler).copy()
        self._within = _all_within(self._before.values())

    def rewind(self) -> None:
        vars(self._scaler).update(self._before)
        for value, copied in self._within:
            _refill(value, copied)
        # What it has noted of this step's optimizers (unscaled, found_inf); empty at the entry of a step.
        if hasattr(self._scaler, "_per_optimizer_states"):
            self._scaler._per_optimizer_states.clear()


class Fields:
    """What an object of the script holds. Shallow: what is changed in place within it is not put back."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.before: dict[str, Any] = {}

    def mark(self) -> None:
        self.before = vars(self.value).copy()

    def rewind(self) -> None:
        vars(self.value).clear()
        vars(self.value).update(self.before)


class Entries:
    """What a dict, list, deque or set of the script holds; shallow, too."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.before = value.copy()

    def mark(self) -> None:
        self.before = self.value.copy()

    def rewind(self) -> None:
        self.value.clear()
        if isinstance(self.value, (dict, set)):
            self.value.update(self.before)
        else:
            self.value.extend(self.before)


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


# ---------------------------------------------------------------- what changes where it lies

_CONTAINERS = (list, dict, deque, set)
_CHANGEABLE = (*_CONTAINERS, torch.Tensor, np.ndarray)
_MOST = 4096  # entries of a container, and numbers in an array


def _all_within(values: Iterable[Any]) -> list[tuple[Any, Any]]:
    changeable = [value for value in values if _is_changeable(value)]
    with torch._C.DisableTorchFunctionSubclass():
        found = itertools.chain.from_iterable(map(_within, changeable))
        return list(itertools.islice(found, _MOST))


def _within(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """What may change where it lies, the outer before the inner, with a copy."""
    if type(value) in _CONTAINERS and len(value) <= _MOST and depth < DEPTH:
        yield value, value.copy()
        for entry in [each for each in (value.values() if type(value) is dict else value) if _is_changeable(each)]:
            yield from _within(entry, depth + 1)
    elif isinstance(value, torch.Tensor) and (not depth or value.numel() <= _MOST):
        if not value.requires_grad and not torch._debug_has_internal_overlap(value):
            yield value, value.detach().clone()
    elif type(value) is np.ndarray and value.size <= _MOST and value.flags.writeable:
        yield value, value.copy()


def _is_changeable(value: Any) -> bool:
    """Whether it may change where it lies."""
    return isinstance(value, _CHANGEABLE)


def _refill(value: Any, copied: Any) -> None:
    if isinstance(value, torch.Tensor):
        value.detach().copy_(copied)
    elif isinstance(value, np.ndarray):
        value[...] = copied
    else:
        value.clear()
        (value.update if isinstance(value, (dict, set)) else value.extend)(copied)


# ---------------------------------------------------------------- what else changes

# Looked at is all that no `Mark` puts back by itself: parameters, optimizer state, buffers, and the script's extras.


class Probe:
    """The things to look at, by the names they have in messages."""

    def __init__(self, state: State) -> None:
        self.parts = {part.path: part for part in state.flat() if not _has_a_mark(part)}
        self.buffers = state.private.buffers()

    @property
    def names(self) -> list[str]:
        """All that can be looked at."""
        return [*self.parts, *self.buffers]

    def look(self, names: Iterable[str]) -> dict[str, str]:
        """A digest of each of these now."""
        found = {}
        for name in names:
            if name in self.parts:
                found[name] = _digest(self.parts[name])
            else:
                digest = Digest()
                digest.add_tensor(self.buffers[name])
                found[name] = digest.text()
        return found

    def small(self, limit: int) -> list[str]:
        """Those of at most so many bytes, and all that only the script's own functions can tell."""
        parts = [path for path, part in self.parts.items() if isinstance(part, SavedPart) or _looked(part) <= limit]
        return parts + [name for name, buffer in self.buffers.items() if memory.size(buffer) <= limit]

    def size(self) -> int:
        """Bytes that are looked at."""
        return sum(map(_looked, self.parts.values())) + sum(map(memory.size, self.buffers.values()))

    def copyable(self, limit: int) -> list[Part]:
        """The parts that may be copied: those below `limit` bytes whose way back is known to be harmless."""
        # Optimizer state changes in the update only, and the script's own load() may do more than to load.
        harmless = (part for part in self.parts.values() if not isinstance(part, (OptimizerPart, SavedPart)))
        return [part for part in harmless if _size(part) <= limit]


def _has_a_mark(part: Part) -> bool:
    """Whether the part is always remembered at an entry, because steps change it as a rule."""
    if isinstance(part, GeneratorPart):
        return True
    return isinstance(part, StatefulPart) and isinstance(part.value, (LRScheduler, GradScaler))


def _digest(part: Part) -> str:
    digest = Digest()
    data, tensors = tree.encode(_looked_at(part), part.path, canonical=True)
    digest.add(data)
    for tensor in tensors:
        digest.add_tensor(tensor)
    return digest.text()


def _looked_at(part: Part) -> Any:
    """The tree of a part without what is looked at elsewhere, or put back in any case."""
    if isinstance(part, ModulePart):
        given = part.give()
        parameters = {
            name: tensor for name, tensor in given["tensors"].items() if isinstance(tensor, torch.nn.Parameter)
        }
        return [parameters, given["extra"]]
    if isinstance(part, OptimizerPart):
        return part.give()["state"]
    if isinstance(part, ContainerPart):
        return part.give()["plain"]
    return part.give()


def _looked(part: Part) -> int:
    return sum(map(memory.size, tree.encode(_looked_at(part), part.path)[1]))


def _size(part: Part) -> int:
    data, tensors = tree.encode(part.give(), part.path)
    return len(data) + sum(memory.size(tensor) for tensor in tensors)
