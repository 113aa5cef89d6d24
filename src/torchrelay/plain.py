"""Without the launcher: the same script runs as before. Nothing is tracked, nothing is committed, no torch needed."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class PlainRun:
    """A run that passes everything through."""

    def __init__(self) -> None:
        self.global_step = 0

    @property
    def rank(self) -> int:
        return int(os.environ.get("RANK", "0"))

    def step(self, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def counted(*args: P.args, **kwargs: P.kwargs) -> R:
            result = function(*args, **kwargs)
            self.global_step += 1
            return result

        return counted

    def atomic(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    def epochs(self, count: int) -> Iterable[int]:
        return range(count)

    def steps(self, count: int) -> Iterable[int]:
        return range(count)

    def batches(self, loader: Any, micro_batches: int = 1) -> Iterable[Any]:
        check_micro_batches(micro_batches)
        return loader if micro_batches == 1 else Groups(loader, micro_batches)

    def once(self, name: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return once(name, function, *args, **kwargs)


def once(name: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Nothing was done before: do it."""
    del name
    return function(*args, **kwargs)


def check_micro_batches(count: int) -> None:
    if count < 1:
        raise ValueError(f"micro_batches is {count}: it must be at least 1")


class Groups:
    """A loader's items in lists of `size`; the last may be shorter."""

    def __init__(self, loader: Iterable[Any], size: int) -> None:
        self._loader = loader
        self._size = size

    def __iter__(self) -> Iterator[list[Any]]:
        group: list[Any] = []
        for item in self._loader:
            group.append(item)
            if len(group) == self._size:
                yield group
                group = []
        if group:
            yield group

    def __len__(self) -> int:
        return -(-len(self._loader) // self._size)  # type: ignore[arg-type]  # if the loader has a length, so have we
