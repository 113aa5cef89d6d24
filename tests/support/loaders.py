"""What tests of loaders share."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
)

from torchrelay.worker.data import holdings
from torchrelay.worker.data.cursor import Cursor, decode_record
from torchrelay.worker.data.loaders import Source, source_of
from torchrelay.worker.data.loops import Loop
from torchrelay.worker.hidden_state.hidden import Hidden
from torchrelay.worker.state import random_state

SIZE = 22
EPOCHS = 3


class Noisy(Dataset[torch.Tensor]):
    """Samples with augmentation from all three random generators."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + 0.1 * torch.rand(2, dtype=torch.float64) + 0.1 * random.random() + 0.1 * np.random.rand()


def loader(**options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(Noisy(), batch_size=4, **options)


def sampled(make: Callable[[], Any], **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(Noisy(), batch_size=4, sampler=make(), **options)


class Life:
    """A script that trains on a loader for some epochs, and draws random numbers while it trains."""

    def __init__(self, make: Callable[[], Any], group: int, left: tuple[bytes, bytes] | None = None) -> None:
        self.left = left
        self.cursor = Cursor(decode_record(left[0]) if left is not None else None)
        self.items: list[Any] = []  # of the steps this life made
        self.lives: dict[int, tuple[bytes, bytes]] = {}  # step -> what a replacement is given
        self.loader = make()
        self.hidden = Hidden()
        self.group = group

    def loop(self, kind: str, source: Source, group: int = 1) -> Loop[Any]:
        return Loop(
            self.cursor,
            kind,
            source,
            group=None if group == 1 else group,
            length=lambda: 0,
            inside_call=lambda: False,
            arrive=lambda: None,
            holds=holdings.of(self.loader) if kind == "batches" else None,
        )

    def run(self) -> Life:
        for epoch in self.loop("epochs", source_of(range(EPOCHS))):
            if isinstance(getattr(self.loader, "sampler", None), DistributedSampler):
                self.loader.sampler.set_epoch(epoch)
            last = None
            for item in self.loop("batches", source_of(self.loader, self.hidden), self.group):
                last = item
                self.step(item)
            assert last is not None, "variables of a loop that is over are there"
        return self

    def step(self, item: Any) -> None:
        if self.cursor.replaying:
            self.cursor.replay_call("step")
            if not self.cursor.replaying and self.left is not None:
                random_state.restore(self.left[1])
                self.items.append(item)  # of the point itself: the script holds it, too
        else:
            torch.rand(3), random.random(), np.random.rand()
            self.items.append(item)
            point = self.cursor.point.after_step()
            self.cursor.begin_call("step", point).result = b""
            self.cursor.point = point
            self.lives[point.step] = (self.cursor.record(), random_state.capture())
        torch.rand(1)  # the script's own code between steps


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return bool(a.dtype == b.dtype and torch.equal(a, b))
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def check(make: Callable[[], Any], group: int, steps: Callable[[int], list[int]]) -> None:
    random_state.restore(START)
    before = Life(make, group).run()
    for step in steps(len(before.lives)):
        torch.manual_seed(step), random.seed(step), np.random.seed(step)
        after = Life(make, group, before.lives[step]).run()
        assert same(after.items, before.items[step - 1 :]), f"entered after step {step}"
        assert after.lives == {at: left for at, left in before.lives.items() if at > step}


def some_places(count: int) -> list[int]:
    """The first, some in the middle, those at the safepoints of epochs, the last."""
    return sorted({1, 2, count // 3, count // 3 + 1, count // 2, count})


def every_place(count: int) -> list[int]:
    return list(range(1, count + 1))


Places = Callable[[int], list[int]]
PLACES = [pytest.param(some_places, id="some"), pytest.param(every_place, id="every", marks=pytest.mark.soak)]

np.random.seed(0)  # numpy.random is imported when it is first used
START = random_state.capture()
