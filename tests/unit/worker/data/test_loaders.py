"""Loaders are entered in the middle: a replacement gets the items that the lost worker would have got, to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.support.loaders import PLACES, SIZE, Life, Noisy, Places, check, loader, same, sampled
from torchrelay.errors import RefusedError, UndeclaredError, UnprovedError
from torchrelay.worker.data import loader_workers
from torchrelay.worker.data.cursor import Cursor
from torchrelay.worker.data.loaders import source_of
from torchrelay.worker.data.loops import Loop


class Stream(IterableDataset[torch.Tensor]):
    """An endless source, cut into epochs, that tells where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.at += 1
            yield torch.full((2,), float(self.at), dtype=torch.float64) + torch.rand(2, dtype=torch.float64)
            if self.at % SIZE == 0:
                return

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "history": torch.arange(self.at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["history"].tolist() == list(range(state["at"]))
        self.at = state["at"]


class OwnState:
    """A loader with a state of its own, as torchdata's StatefulDataLoader has."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[float]:
        while self.at < 9:
            self.at += 1
            yield self.at + random.random()
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Shards(Sampler[int]):
    """A sampler of the script, with an order of its own, that also draws from the global generators first."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(SIZE))
        random.shuffle(order)
        yield from order

    def __len__(self) -> int:
        return SIZE


class OwnWay(DataLoader[Any]):
    """A loader that iterates in its own way."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for item in super().__iter__():
            yield [item, torch.rand(1)]


class OwnOrder:
    """What has items by number, and iterates over them in another order."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> int:
        return index

    def __iter__(self) -> Iterator[int]:
        for index in torch.randperm(9).tolist():
            yield 10 * index + random.randrange(10)


def with_generator() -> Any:
    return DataLoader(Noisy(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5))


def sampler_with_generator() -> Any:
    own = torch.Generator().manual_seed(5)
    return RandomSampler(range(SIZE), replacement=True, num_samples=100, generator=own)


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": loader(),
    "drop last": loader(shuffle=True, drop_last=True),
    "shuffled": loader(shuffle=True),
    "own generator": with_generator,
    "replacement": sampled(lambda: RandomSampler(range(SIZE), replacement=True, num_samples=70)),
    "replacement, own generator": sampled(sampler_with_generator),
    "weighted": sampled(lambda: WeightedRandomSampler([1.0 + n for n in range(SIZE)], SIZE)),
    "subset": sampled(lambda: SubsetRandomSampler(range(3, 20))),
    "distributed": sampled(lambda: DistributedSampler(Noisy(), 2, 1, seed=3)),
    "own sampler": sampled(Shards),
    "own batches": lambda: DataLoader(
        Noisy(), batch_sampler=BatchSampler(SequentialSampler(range(SIZE)), 5, drop_last=False)
    ),
    "no batches": lambda: DataLoader(Noisy(), batch_size=None, shuffle=True),
    "dataset": Noisy,
    "list": lambda: [f"item {n}" for n in range(7)],
    "range": lambda: range(3, 30, 4),
    "tensor": lambda: torch.arange(6.0).reshape(3, 2),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "own state": OwnState,
    "own way": lambda: OwnWay(Noisy(), batch_size=4, shuffle=True),
    "own order": OwnOrder,
}

np.random.seed(0)  # numpy.random is imported when it is first used


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("group", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LOADERS)
def test_a_replacement_gets_the_same_items(name: str, group: int, places: Places) -> None:
    check(LOADERS[name], group, places)


def test_the_seed_of_an_item_reaches_all_generators() -> None:
    loader_workers.seed(7)
    first = torch.rand(1).item(), random.random(), np.random.rand()
    loader_workers.seed(8)
    second = torch.rand(1).item(), random.random(), np.random.rand()
    assert all(one != other for one, other in zip(first, second, strict=True))


# ---------------------------------------------------------------- what is refused


class Greedy(Sampler[int]):
    """Draws each index from the global generator, when it is asked for it."""

    def __init__(self, quiet: int) -> None:
        self.quiet = quiet

    def __iter__(self) -> Iterator[int]:
        for at in range(100):
            yield 0 if at < self.quiet else random.randrange(SIZE)

    def __len__(self) -> int:
        return 100


class Silent(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(3)


def test_the_way_of_its_own_is_what_is_used() -> None:
    torch.manual_seed(3)
    random.seed(3)
    expected = list(OwnOrder())
    torch.manual_seed(3)
    random.seed(3)
    source = source_of(OwnOrder())
    assert list(source.begin(source.mark())) == expected


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: (n for n in range(3)), "nothing tells where it is"),
        (lambda: {1: 2}, "cannot be entered"),
        (lambda: Silent(), "cannot be entered"),
        (lambda: DataLoader(Silent()), "does not tell where it is"),
        (lambda: DataLoader(Stream(), num_workers=1), "loader workers"),
        (lambda: DataLoader(Noisy(), num_workers=1, in_order=False), "no fixed order"),
    ],
)
def test_what_could_not_be_entered_is_refused(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        source_of(make())


@pytest.mark.parametrize("quiet", [1, 40])
def test_a_sampler_that_keeps_drawing_is_refused(quiet: int) -> None:
    source = source_of(DataLoader(Noisy(), batch_size=1, sampler=Greedy(quiet)))
    with pytest.raises(RefusedError, match=r"torch\.Generator of its own"):
        list(source.begin(source.mark()))


class Numbers:
    """A sequence of which nothing else tells how much there is."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def test_a_shorter_loader_is_found_out() -> None:
    life = Life(lambda: Numbers(3), 1).run()
    with pytest.raises(Exception, match=r"item 3 .* is not there"):
        Life(lambda: Numbers(2), 1, life.lives[3]).run()


def test_a_list_that_has_other_items_is_found_out() -> None:
    life = Life(lambda: [1, 2, 3], 1).run()
    with pytest.raises(UnprovedError, match=r"data of a builtins\.list is not what it was"):
        Life(lambda: [1, 2, 4], 1, life.lives[1]).run()


def test_a_loop_inside_a_call_has_no_place_of_its_own() -> None:
    cursor = Cursor()
    before = cursor.record()
    loop: Loop[int] = Loop(
        cursor,
        "batches",
        source_of([1, 2, 3]),
        group=None,
        length=lambda: 3,
        inside_call=lambda: True,
        arrive=lambda: None,
    )
    assert list(loop) == [1, 2, 3]
    assert cursor.record() == before


def test_a_loop_tells_its_length() -> None:
    loop: Loop[int] = Loop(
        Cursor(),
        "batches",
        source_of(range(7)),
        group=3,
        length=lambda: 7,
        inside_call=lambda: False,
        arrive=lambda: None,
    )
    assert len(loop) == len(list(loop)) == 3


class Forgetful(OwnState):
    """Its state does not tell all: which epoch it is in decides about the items, too."""

    epoch = 0

    def __iter__(self) -> Iterator[float]:
        for item in super().__iter__():
            yield round(item) + 100.0 * self.epoch
        self.epoch += 1


def test_a_loader_whose_state_leads_to_other_items_is_not_gone_on_with() -> None:
    before = Life(Forgetful, 1).run()
    assert same(Life(Forgetful, 1, before.lives[4]).run().items, before.items[3:])
    with pytest.raises(UndeclaredError, match="gives another item 3 there"):
        Life(Forgetful, 1, before.lives[12]).run()
