"""Probe: what a call changes before its gate, found out by digests at its entry and at its gate.

Looked at is all that no `Mark` puts back by itself: parameters, optimizer state, buffers, and the script's extras.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from torchrelay.worker.state.parts import ContainerPart, GeneratorPart, ModulePart, OptimizerPart, Part, StatefulPart
from torchrelay.worker.state.saved import SavedPart
from torchrelay.worker.state.state import State
from torchrelay.worker.tensors import memory, tree
from torchrelay.worker.tensors.digest import Digest


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
