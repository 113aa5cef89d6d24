"""Told: how a value that is kept in a place is told, copied, and put there again."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections import deque
from typing import Any

import numpy as np
import torch

from torchrelay.errors import RefusedError
from torchrelay.worker.hidden_state import generators, graph, made
from torchrelay.worker.hidden_state.graph import MISSING, Leaf
from torchrelay.worker.hidden_state.made import Filled
from torchrelay.worker.hidden_state.signatures import LARGEST, same, signature
from torchrelay.worker.tensors import values

_COUNT = "itertools.count"
_REPLACED = "torchrelay replaced"
SAME = "torchrelay same"  # as the tensor at another path
_ENTRIES, _BUFFER = "torchrelay entries", "torchrelay buffer"


def recall(remembered: list[tuple[Leaf, Any, Any]]) -> None:
    """Put back what `moving.Moving.remember` has told."""
    for leaf, told, reference in remembered:
        restored = bring_back(leaf, reference)
        live = leaf.read()
        if type(told) is not list:
            if live is not told:
                leaf.put(told)
        elif len(told) == 2 or not same(signature(live), signature(told[0])):
            take(leaf, told, in_place=restored)


def reference(value: Any) -> Any:
    """What finds this very tensor again as long as there is one; None for anything else."""
    return weakref.ref(value) if type(value) in (torch.Tensor, np.ndarray) else None


def bring_back(leaf: Leaf, to: Any) -> bool:
    """Let the tensor that was there before be there again; returns whether it is: it may be nowhere any more."""
    before = None if to is None else to()
    return before is not None and (leaf.read() is before or leaf.put(before))


def copied(value: Any) -> Any:
    if graph.is_generator(value):
        return [generators.kind_of(value), generators.state_of(value)]
    if type(value) is itertools.count:
        return [_COUNT, generators.place_of_count(value)]
    if type(value) is torch.Tensor:
        return [value.clone()]
    if type(value) in graph.BUFFERS:
        return [_BUFFER, bytes(value)]
    copied = type(value) in graph.CONTAINERS or type(value) in made.DICTS
    return [copy.deepcopy(value)] if copied else value


def tell(path: str, value: Any, *, replaced: bool = False) -> bytes:
    """`replaced`: it is not the tensor that was there at first, and a replacement must not write into that one."""
    if replaced:
        return values.encode([_REPLACED, value], path)
    generator = graph.is_generator(value)
    if type(value) is itertools.count:
        return values.encode([_COUNT, generators.place_of_count(value)], path)
    if type(value) is Filled:
        return values.encode([_ENTRIES, value.tell()], path)
    if type(value) in graph.BUFFERS:
        return values.encode([_BUFFER, bytes(value)], path)
    try:
        found = made.tell(value, LARGEST) if made.is_made(value) else value
        return values.encode([generators.kind_of(value), generators.state_of(value)] if generator else [found], path)
    except TypeError as error:
        raise RefusedError(
            str(error), "keep numbers, texts, tensors, and lists or dicts of them in attributes"
        ) from error


def _take_kind(leaf: Leaf, live: Any, kind: Any, told: Any) -> bool:
    if kind == _ENTRIES:
        return type(live) is Filled and live.fill(told)
    if kind == _BUFFER:
        return type(live) in graph.BUFFERS and _refill(live, told)
    if kind == _COUNT:
        return type(live) is itertools.count and generators.count_on(leaf, live, *told)
    if not graph.is_generator(live) or generators.kind_of(live) != kind:
        return False
    generators.put_state(live, told)
    return True


def _refill(buffer: Any, told: bytes) -> bool:
    del buffer[:]
    (buffer.extend if type(buffer) is bytearray else buffer.frombytes)(told)
    return True


def take(leaf: Leaf, told: Any, *, in_place: bool | None = None) -> bool:
    """Give the leaf this value; returns whether that is possible.

    `in_place`: whether the tensor that is there is the one of which it was told, and is written to. Any other may be
    known elsewhere as something else: a row of a table. None: it is if the tensor of the start was never replaced.
    """
    replaced = type(told) is list and len(told) == 2 and told[0] == _REPLACED
    told = told[1:] if replaced else told
    is_tensor = type(told) is list and len(told) == 1 and isinstance(told[0], (torch.Tensor, np.ndarray))
    if is_tensor and (replaced if in_place is None else not in_place) and leaf.put(told[0]):
        return True
    live = leaf.read()
    if type(told) is list and len(told) == 2:
        return _take_kind(leaf, live, *told)
    value = told[0] if type(told) is list else told
    if isinstance(value, torch.Tensor) and type(live) is torch.Tensor and live.shape == value.shape:
        with torch.no_grad():
            live.copy_(value)
        return True
    if isinstance(value, np.ndarray) and type(live) is np.ndarray and live.shape == value.shape:
        np.copyto(live, value)
        return True
    if made.is_told(value):
        value = made.make(value, live)
        return value is not MISSING and (value is live or leaf.put(value))
    if type(live) is type(value) and type(value) in made.DICTS:
        live.clear()
        for key, entry in value.items():
            live[key] = entry
        return True
    if type(live) is type(value) and type(value) in (list, dict, set, deque):
        # In place: it may be known elsewhere, too.
        live.clear()
        (live.extend if type(value) in (list, deque) else live.update)(value)
        return True
    return leaf.put(value)
