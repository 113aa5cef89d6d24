"""Data sets that keep the rows which they have made: a replacement makes them again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.support.loaders import START, Life, same
from torchrelay.worker.state import random_state

SIZE = 22


class Remembering(Dataset[torch.Tensor]):
    """One that keeps its rows when it has made them, and flags of those that it has."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.cache: Any = [None] * SIZE if kind == "list" else torch.zeros(SIZE, 300)  # too large to be carried
        self.have = torch.zeros(SIZE, dtype=torch.bool)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self.have[index]:
            self.cache[index] = torch.full((300,), float(index))
            self.have[index] = self.kind != "list"
        found: torch.Tensor = self.cache[index]
        return found


@pytest.mark.parametrize("kind", ["list", "flags"])
def test_a_cache_that_a_replacement_does_not_have_is_filled_again(kind: str) -> None:
    """The flags are small enough to be carried; without the rows they would tell of zeros."""
    random_state.restore(START)
    before = Life(lambda: DataLoader(Remembering(kind), batch_size=4), 1).run()
    for step in before.lives:
        after = Life(lambda: DataLoader(Remembering(kind), batch_size=4), 1, before.lives[step]).run()
        assert same(after.items, before.items[step - 1 :]), f"entered after step {step}"
