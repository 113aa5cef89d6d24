"""Reserve: memory for what a trained state has and a newly built one has not, taken before the state arrives.

An optimizer makes its state in its first step, so the target of a move has none: two thirds of Adam's bytes would land
in memory that the kernel has yet to find, page by page, while all ranks stand still. So a rank that trains tells what
its optimizers keep, and the target takes as much, and touches it, while the others train on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from msgspec import Struct
from torch.optim import Optimizer

from torchrelay.worker.hardware.niceness import no_pace
from torchrelay.worker.parallel.shards import local
from torchrelay.worker.tensors import memory
from torchrelay.worker.tensors.tree import Leaf

MAX_PIECES = 1 << 16  # more small tensors than that are no matter of memory
SLICE = 1 << 20  # bytes touched at once
LEAST = 1 << 14  # bytes; smaller pieces come out of memory that the process has anyway


class Piece(Struct, array_like=True, frozen=True):
    """What a tensor in the CPU's memory needs: dtype by its name, strides in elements."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def pieces_of(optimizers: Iterable[Optimizer]) -> list[Piece]:
    """What these optimizers keep of each parameter. From any thread, while they step."""
    found = []
    for optimizer in optimizers:
        for values in list(optimizer.state.values()):
            for value in list(values.values()) if isinstance(values, dict) else []:
                value = local(value) if isinstance(value, torch.Tensor) else value
                if isinstance(value, torch.Tensor) and value.device.type == "cpu" and memory.size(value) >= LEAST:
                    name = str(value.dtype).removeprefix("torch.")
                    found.append(Piece(name, tuple(value.shape), memory.strides(value)))
    return found[:MAX_PIECES]


class Reserve:
    """Tensors to be had for the asking."""

    def __init__(self, wanted: Iterable[Piece] = (), pace: Callable[[], None] = no_pace) -> None:
        """Takes the memory and touches it. `pace` is called after each slice of it."""
        self._free: dict[Piece, list[torch.Tensor]] = {}
        for piece in wanted:
            dtype = getattr(torch, piece.dtype, None)
            if isinstance(dtype, torch.dtype):
                tensor = torch.empty_strided(piece.shape, piece.strides, dtype=dtype)
                _touch(tensor, pace)
                self._free.setdefault(piece, []).append(tensor)

    def take(self, leaf: Leaf) -> torch.Tensor | None:
        """A tensor for this leaf, of unknown values; None if there is none left."""
        if leaf.device != "cpu":
            return None
        free = self._free.get(Piece(str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape), tuple(leaf.strides)))
        return free.pop() if free else None


def _touch(tensor: torch.Tensor, pace: Callable[[], None]) -> None:
    """Make the kernel find the memory of this tensor."""
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    for part in torch.split(whole, SLICE):
        part.zero_()
        pace()
