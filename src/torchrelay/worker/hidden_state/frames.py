"""Frames: which entries a container has of which some are told, so that a replacement has those places, too.

A list may have grown since the start, and an attribute that was None may hold a tuple of tensors, as the hidden state
of an LSTM. What is put into such a place is told by itself; but a long row of small tensors, such as losses, as one.
"""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from torchrelay.worker.hidden_state.leaves import Leaf, Within
from torchrelay.worker.hidden_state.made import PLAIN, WIDTH
from torchrelay.worker.tensors import values
from torchrelay.worker.tensors.entries import entries_of, items_of, keys_of

FRAME = " holds"  # ends the path of what is told here
LONGEST = 1024  # tensors of a row that are told as one
_entry = re.compile(r"(.+)\[(\d+|'[^']*')\]$")
_KEYS = frozenset({str, int})
_KINDS: dict[str, type] = {kind.__name__: kind for kind in (list, tuple, deque, dict)}


def of_entries(leaves: Iterable[Leaf]) -> tuple[dict[str, list[Any]], dict[str, Leaf]]:
    """By the path of each container that has one of these, its class and its keys; and the rest of its small entries.

    An entry may have come since the last look at all of them.
    """
    found: dict[str, list[Any]] = {}
    more: dict[str, Leaf] = {}
    for leaf in leaves:
        within = type(leaf.name) is Within
        container = leaf.whole().read() if within else leaf.holder
        end = f"[{(leaf.name.at if within else leaf.name)!r}]"
        path = leaf.path.removesuffix(end)
        if path + FRAME in found or type(container) not in _KINDS.values() or not leaf.path.endswith(end):
            continue
        keys = keys_of(container) if type(container) is dict else list(range(len(container)))
        if len(keys) > WIDTH and (row := _stacked(container)) is not None:
            found[path + FRAME] = [*_kind_of(container), len(keys), values.encode(row, path)]
        elif len(keys) <= WIDTH and _KEYS.issuperset(map(type, keys)):
            found[path + FRAME] = [*_kind_of(container), keys, b""]
            more.update((each.path, each) for each in _row(path, leaf, container))
    return found, more


def is_told(row: Any) -> bool:
    """Whether all entries of a row are."""
    values = entries_of(row)
    few = len(values) <= WIDTH and all(type(one) in PLAIN or (_is_tensor(one) and _is_small(one)) for one in values)
    return few or _stacked(row) is not None


def _is_tensor(value: Any) -> bool:
    return type(value) is torch.Tensor


def _kind_of(container: Any) -> tuple[str, int | None]:
    return type(container).__name__, getattr(container, "maxlen", None)


def _row(path: str, one: Leaf, container: Any) -> Iterator[Leaf]:
    row = items_of(container) if type(container) is dict else enumerate(entries_of(container))
    for at, value in row:
        if type(value) in PLAIN or (_is_tensor(value) and _is_small(value)):
            within = type(one.name) is Within
            yield Leaf(f"{path}[{at!r}]", one.holder, Within(one.name.name, at) if within else at, value)


def _stacked(container: Any) -> torch.Tensor | None:
    """All entries as one tensor, if they are small tensors of one kind."""
    row = entries_of(container)
    first = row[0]
    alike = len(row) <= LONGEST and all(
        type(each) is torch.Tensor and _is_small(each) and (each.shape, each.dtype) == (first.shape, first.dtype)
        for each in row
    )
    return torch.stack(row) if alike and first.numel() <= WIDTH else None


def _is_small(value: torch.Tensor) -> bool:
    plain = not value.requires_grad and value.layout == torch.strided and not value.is_inference()
    return plain and value.is_cpu and value.numel() <= LONGEST


def entry(path: str, find: Callable[[str], Leaf | None]) -> Leaf | None:
    """The entry of a container that is a value as a whole, or has just been put there."""
    match = _entry.match(path)
    above = find(match[1]) if match is not None else None
    if match is None or above is None:
        return None
    container, key = above.read(), ast.literal_eval(match[2])
    if type(container) not in _KINDS.values() or key not in _entries(container):
        return None
    if isinstance(container, (tuple, deque)):
        return Leaf(path, above.holder, Within(above.name, key), container[key])
    return Leaf(path, container, key, container[key])


def make(entries: list[Any], find: Callable[[str], Leaf | None]) -> list[Any]:
    """Make the places in containers, as `find` finds these; returns the entries that are to be put there."""
    told = {path: value for path, value, *_ in entries}
    places = {path.removesuffix(FRAME) for path in told}
    rows = []
    for path in sorted((path for path in told if path.endswith(FRAME)), key=len):  # outer ones first
        leaf = find(path.removesuffix(FRAME))
        if leaf is not None and told[path][3]:
            _fill(leaf, told[path], list(values.decode(told[path][3]).unbind()))
            rows.append(leaf.path + "[")
        elif leaf is not None:
            _put(leaf, told[path], places)
    return [one for one in entries if not one[0].endswith(FRAME) and not one[0].startswith(tuple(rows))]


def _put(leaf: Leaf, told: Any, paths: Collection[str]) -> None:
    """Make the places there if all that are missing are among the `paths` that are told; else leave all as it is."""
    kind, path, keys = _KINDS[told[0]], leaf.path.removesuffix(FRAME), told[2]
    live = leaf.read()
    there = _entries(live) if type(live) is kind else {}
    if list(there) == keys or not all(key in there or f"{path}[{key!r}]" in paths for key in keys):
        return
    # Something is put in each of these places at once.
    wanted = {key: there.get(key, object()) for key in keys}
    if type(live) is dict and kind is dict:
        live.clear()
        live.update(wanted)
    elif kind is dict:
        leaf.put(wanted)
    else:
        _fill(leaf, told, list(wanted.values()))


def _fill(leaf: Leaf, told: Any, row: list[Any]) -> None:
    live, kind = leaf.read(), _KINDS[told[0]]
    if type(live) is kind and isinstance(live, (list, deque)):
        live.clear()
        live.extend(row)
    else:
        leaf.put(deque(row, told[1]) if kind is deque else kind(row))


def _entries(container: Any) -> dict[Any, Any]:
    return dict(container) if type(container) is dict else dict(enumerate(container))
