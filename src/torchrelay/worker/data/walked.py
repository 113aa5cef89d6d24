"""Walked: a loader that iterates in its own way and has no state. It is entered by going through it again.

Its own `__iter__` is what is used, as plain Python would, though it may have `__getitem__` as well. From the same
random state it gives the same items; what it keeps of its own is looked at (`hidden`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from torchrelay.worker.hidden_state.hidden import OfLoader


def iterates_by_itself(loader: Any) -> bool:
    """Whether its class has an `__iter__` in Python, other than what collections give to each sequence."""
    own = getattr(type(loader), "__iter__", None)
    return isinstance(own, FunctionType) and own.__module__ not in ("_collections_abc", "torch.utils.data.dataloader")


class Walked:
    """Entered by passing over all items before."""

    draws = True
    moves = False

    def __init__(
        self, loader: Any, mark: Callable[[], bytes], go_back: Callable[[bytes], object], hidden: OfLoader | None
    ) -> None:
        """`mark`, `go_back`: for the random states from which it draws, and what it keeps (`hidden`)."""
        self._loader = loader
        self.hidden = hidden
        self.mark = mark
        self._go_back = go_back

    def begin(self, mark: bytes) -> Iterator[Any]:
        del mark
        return iter(self._loader)

    def enter(self, mark: bytes, skip: int) -> Iterator[Any]:
        self._go_back(mark)
        items: Iterator[Any] = iter(self._loader)
        for _ in range(skip):
            next(items, None)
        return items
