"""Landing: where the tensors of an arriving state are put. In place in what the script has built, wherever it fits.

The script holds references to its parameters and so do DDP and the optimizer; and a second copy would need the memory
twice. So bytes go straight into the live tensor, and a new one is made only where there is none yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from torchrelay.errors import StateMismatchError
from torchrelay.worker.parallel import shards
from torchrelay.worker.tensors import memory
from torchrelay.worker.tensors.reserve import Reserve
from torchrelay.worker.tensors.tree import ArrayLeaf, Leaf, ShardLeaf, array_bytes


class Landing:
    """The places of one arriving state. Used once: made from a decoded tree, filled by the transfer, then finished."""

    def __init__(
        self,
        kept: frozenset[memory.Place] = frozenset(),
        reserve: Reserve | None = None,
        meshes: Mapping[str, Any] | None = None,
    ) -> None:
        """`kept`: live tensors that hold values of their own and must stay as they are; their bytes go nowhere.

        `reserve`: where new tensors come from, as long as it has any. `meshes`: on which new DTensors are made, by
        `shards.name_of`.
        """
        self._meshes = meshes or {}
        self._kept = kept
        self._reserve = reserve or Reserve()
        self._places: dict[int, torch.Tensor] = {}
        self._owners: dict[memory.Place, int] = {}  # which index a live tensor was given to
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # (to, from), when all bytes are here
        self._live: dict[int, torch.Tensor] = {}  # the script's own tensors, by index

    def tensors(self) -> list[torch.Tensor]:
        """One tensor for each that was sent, in their order. Raises `ValueError` if the tree left one out."""
        if set(self._places) != set(range(len(self._places))):
            raise ValueError("the state's tensors are not numbered without gaps")
        return [self._places[index] for index in range(len(self._places))]

    def finish(self) -> None:
        """All bytes are here: fill the live tensors that could not be given a place of their own."""
        for to, origin in self._copies:
            to.detach().copy_(origin)
        self._copies.clear()

    def exactly(self, leaf: Any, live: torch.Tensor, path: str) -> None:
        """Land in this live tensor and in no other. Raises `StateMismatchError`, naming it, if the bytes do not fit."""
        given = live
        leaf, live = _parts(leaf, live, path)
        if not isinstance(leaf, Leaf):
            raise StateMismatchError(f"{path} is a tensor here and a {type(leaf).__name__} in the state that arrives")
        why = _unlike(leaf, live)
        if why is not None:
            raise StateMismatchError(f"{path} {why}: all ranks must build the same model and optimizer")
        self._live.setdefault(leaf.index, given)
        if self._take_kept(leaf, live):
            return
        place = memory.place(live)
        taken = self._places.get(leaf.index)
        if taken is not None and memory.place(taken) != place:
            raise StateMismatchError(f"{path} shares its memory with another tensor on the source, but not here")
        if place is not None and self._owners.setdefault(place, leaf.index) != leaf.index:
            raise StateMismatchError(f"{path} shares its memory with another tensor here, but not on the source")
        self._places[leaf.index] = live.detach()

    def live(self, leaf: Any) -> torch.Tensor | None:
        """The script's own tensor in which this leaf was told to land exactly; None if there was none."""
        index = leaf.leaf.index if isinstance(leaf, ShardLeaf) else leaf.index
        return self._live.get(index)

    def anyhow(self, node: Any, live: Any, path: str) -> Any:
        """The tree `node` with a tensor for each leaf: those of `live`, at the same position, where they fit."""
        if isinstance(node, Leaf):
            return self._tensor(node, live, path)
        if isinstance(node, ShardLeaf):
            return self._shard(node, live, path)
        if isinstance(node, ArrayLeaf):
            return self._array(node, live)
        if isinstance(node, dict):
            named = live if isinstance(live, dict) else {}
            for key, value in node.items():
                node[key] = self.anyhow(value, named.get(key), f"{path}[{key!r}]")
            return node
        if not isinstance(node, (list, tuple, deque)):
            return node
        there = live if isinstance(live, (list, tuple, deque)) and len(live) == len(node) else (None,) * len(node)
        pairs = zip(node, there, strict=True)
        filled = [self.anyhow(value, old, f"{path}[{at}]") for at, (value, old) in enumerate(pairs)]
        if isinstance(node, deque):
            return deque(filled, node.maxlen)
        return type(node)(filled)

    def _tensor(self, leaf: Leaf, live: Any, path: str) -> torch.Tensor:
        old = live if isinstance(live, torch.Tensor) and memory.refusal(live) is None else None
        fits = old is not None and _unlike(leaf, old) is None
        if fits and old is not None and self._take_kept(leaf, old):
            return old
        place = memory.place(old) if fits and old is not None else None
        taken = self._places.get(leaf.index)
        if taken is not None:
            if not fits or old is None or memory.place(taken) == place:
                return taken
            self._copies.append((old, taken))
            return old
        if fits and old is not None and (place is None or self._owners.setdefault(place, leaf.index) == leaf.index):
            self._places[leaf.index] = old.detach()
            return old
        fresh = self._reserve.take(leaf)
        self._places[leaf.index] = fresh = _allocate(leaf, path) if fresh is None else fresh
        return fresh

    def _shard(self, node: ShardLeaf, live: Any, path: str) -> torch.Tensor:
        fits = shards.is_shard(live) and shards.describe(live) == node.described
        part = self._tensor(node.leaf, shards.local(live) if fits else None, path)
        if fits and part is shards.local(live):
            kept: torch.Tensor = live
            return kept
        mesh = self._meshes.get(node.described.mesh)
        if mesh is None:
            raise StateMismatchError(
                f"{path} is spread over the mesh ({node.described.mesh}), which this rank has not made"
            )
        try:
            return shards.of_local(part, node.described, mesh)
        except ValueError as error:
            raise StateMismatchError(f"{path} is another rank's: {error}") from error

    def _take_kept(self, leaf: Leaf, live: torch.Tensor) -> bool:
        """Whether this live tensor keeps its value; its bytes then land in a tensor that is dropped."""
        if memory.place(live) not in self._kept:
            return False
        self._places.setdefault(leaf.index, _allocate(leaf, "kept"))
        return True

    def _array(self, leaf: ArrayLeaf, live: Any) -> np.ndarray[Any, Any]:
        array = live if array_fits(leaf, live) else np.empty(leaf.shape, np.dtype(leaf.dtype))
        self._places[leaf.index] = array_bytes(array)
        return array


def array_fits(leaf: ArrayLeaf, live: Any) -> bool:
    """Whether the bytes can land in this array."""
    if type(live) is not np.ndarray or not live.flags.writeable or not live.flags.c_contiguous:
        return False
    return bool(live.dtype.str == leaf.dtype and live.shape == leaf.shape)


def _parts(leaf: Any, live: torch.Tensor, path: str) -> tuple[Any, torch.Tensor]:
    """Of a DTensor its local part, and what belongs there. Raises `StateMismatchError` if placements differ."""
    if not shards.is_shard(live):
        return leaf, live
    if not isinstance(leaf, ShardLeaf):
        raise StateMismatchError(f"{path} is a DTensor here and a {type(leaf).__name__} in the state that arrives")
    here = shards.describe(live)
    if here != leaf.described:
        raise StateMismatchError(f"{path} is spread over ranks as {here} here and as {leaf.described} on the source")
    return leaf.leaf, shards.local(live)


def _unlike(leaf: Leaf, live: torch.Tensor) -> str | None:
    """In what the live tensor differs from the one that arrives; None if its bytes can land there."""
    if live.dtype != leaf.dtype or tuple(live.shape) != leaf.shape:
        sent = f"{list(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
        return f"is {list(live.shape)} {str(live.dtype).removeprefix('torch.')} here and {sent} on the source"
    if live.device.type != leaf.device:
        return f"is on {live.device.type} here and on {leaf.device} on the source"
    if live.numel() and memory.strides(live) != leaf.strides:
        return f"has strides {list(live.stride())} here and {list(leaf.strides)} on the source (memory format)"
    return None


def _allocate(leaf: Leaf, path: str) -> torch.Tensor:
    """A new tensor for this leaf. Raises `StateMismatchError` if there is no such device here."""
    # Where a stride was left open (one element, it means nothing), that of a contiguous tensor is taken.
    steps, step = list(leaf.strides), 1
    for at in reversed(range(len(leaf.shape))):
        if leaf.shape[at] <= 1:
            steps[at] = step
        step *= max(1, leaf.shape[at])
    try:
        return torch.empty_strided(leaf.shape, steps, dtype=leaf.dtype, device=leaf.device)
    except (RuntimeError, AssertionError) as error:
        raise StateMismatchError(f"{path} cannot be made on {leaf.device!r} here: {error}") from error
