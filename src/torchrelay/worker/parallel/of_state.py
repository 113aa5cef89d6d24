"""What comes with the state, whatever variable names it: memory of tensors, and objects that protect() was given.

What is trained, and is neither that nor the result of something, a script moves by hand, such as a multiplier of
Lagrange: `with torch.no_grad(): weight += rate * weight.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from torchrelay.worker.parallel import shards

MAX_FREE = 4096  # tensors of which it is kept whether they are the script's own


def leave_to_state(places: Callable[[], tuple[Collection[int], Collection[int]]]) -> None:
    """What lies in this memory, and the objects with these ids, come with the state, whatever variable names them."""
    global _of_state, _places
    _of_state, _places = places, ()
    _free.clear()


def _nothing() -> tuple[Collection[int], Collection[int]]:
    return (), ()


_of_state: Callable[[], tuple[Collection[int], Collection[int]]] = _nothing


def is_of_state(value: Any) -> bool:
    places, ids = _of_state()
    return _lies_in(value, places) if isinstance(value, torch.Tensor) else id(value) in ids


_free: dict[tuple[int, int], bool] = {}  # by the id of a tensor, and where it lies
_places: Collection[int] = ()  # of the state, when it was last asked for


def is_free(tensor: torch.Tensor) -> bool:
    """Whether it is trained, and neither the result of something nor of the state: a script moves it by hand."""
    global _places
    if not tensor.requires_grad or not tensor.is_leaf or not (tensor.layout == torch.strided and not tensor.is_nested):
        return False
    place = _place(tensor)
    if place is None:
        return False
    found = _free.get((id(tensor), place))
    if found is None:
        if place not in _places:
            _places, _ = _of_state()
        if len(_free) > MAX_FREE:
            _free.clear()
        found = _free[id(tensor), place] = place not in _places
    return found


def is_told(path: str, roots: Iterable[tuple[str, Any]]) -> bool:
    """Whether an object's own state_dict() tells of this attribute: then a replica has it. `roots`: with names."""
    name = path.rpartition(".")[2].strip("_")
    for root, thing in roots:
        if path.startswith(f"{root}.") and not isinstance(thing, (torch.nn.Module, torch.optim.Optimizer)):
            return any(str(key).strip("_") == name for key in thing.state_dict())
    return False


def _lies_in(tensor: torch.Tensor, places: Collection[int]) -> bool:
    return tensor.requires_grad or _place(tensor) in places


def _place(tensor: torch.Tensor) -> int | None:
    """Where it lies, of a DTensor its own shard; None for what has no memory of its own."""
    try:
        return int(shards.local(tensor).untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return None


def is_all_of_state(tensors: list[torch.Tensor]) -> bool:
    """Whether each of them comes with it."""
    places, _ = _of_state()
    return all(_lies_in(each, places) for each in tensors)
