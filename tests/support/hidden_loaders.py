"""What tests of hidden loaders share."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

SIZE = 22


class Plain(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.values = torch.arange(SIZE, dtype=torch.float64)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values[index]


class Own(Sampler[int]):
    """A sampler that keeps what its order comes from."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.times = 0
        self.order = list(range(SIZE))
        makers: dict[str, Callable[[], Any]] = {
            "numpy": lambda: np.random.default_rng(5),
            "mt19937": lambda: np.random.Generator(np.random.MT19937(5)),
            "legacy": lambda: np.random.RandomState(5),
            "python": lambda: random.Random(5),
            "torch": lambda: torch.Generator().manual_seed(5),
            "one by one": lambda: random.Random(5),
        }
        self.rng: Any = makers.get(kind, lambda: None)()

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        if self.kind == "one by one":
            for _ in range(SIZE):
                yield self.rng.randrange(SIZE)
            return
        if self.kind in ("numpy", "mt19937", "legacy"):
            yield from self.rng.permutation(SIZE).tolist()
        elif self.kind == "python":
            yield from self.rng.sample(range(SIZE), SIZE)
        elif self.kind == "torch":
            yield from torch.randperm(SIZE, generator=self.rng).tolist()
        elif self.kind == "in place":
            random.Random(3).shuffle(self.order)
            yield from list(self.order)
        else:
            self.times += 1
            yield from torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.times)).tolist()


def sampled(kind: str, **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(Plain(), batch_size=4, sampler=Own(kind), **options)


class Drawing(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(1)

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + self.rng.random()
