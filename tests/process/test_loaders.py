"""Loaders are entered in the middle: a replacement gets the items that the lost worker would have got, to the bit."""

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
    get_worker_info,
)

from tests.support.loaders import SIZE, START, Noisy, check, loader, sampled, some_places
from torchrelay.worker.data.loaders import source_of
from torchrelay.worker.state import random_state

WITH_WORKERS: dict[str, Callable[[], Any]] = {
    "two workers": loader(shuffle=True, num_workers=2),
    "persistent workers": loader(num_workers=2, persistent_workers=True, prefetch_factor=3),
    "distributed, two workers": sampled(lambda: DistributedSampler(Noisy(), 2, 1, seed=3), num_workers=2),
    "no batches, one worker": lambda: DataLoader(Noisy(), batch_size=None, shuffle=True, num_workers=1),
}


@pytest.mark.parametrize("name", WITH_WORKERS)
def test_loader_workers_make_the_same_items_from_every_place(name: str) -> None:
    check(WITH_WORKERS[name], 1, some_places)


# ---------------------------------------------------------------- loader workers


def test_epochs_differ_even_if_nothing_is_drawn_in_between() -> None:
    loader = DataLoader(Noisy(), batch_size=SIZE, num_workers=1, persistent_workers=True)
    source = source_of(loader)
    epochs = []
    for _ in range(2):
        random_state.restore(START)
        epochs += list(source.begin(source.mark()))
    assert not torch.equal(epochs[0], epochs[1])


@pytest.mark.parametrize("own", [False, True], ids=["global", "own"])
def test_a_later_epoch_of_persistent_workers_is_entered_though_their_seed_was_drawn_in_the_first(own: bool) -> None:
    def make() -> Any:
        generator = torch.Generator().manual_seed(4) if own else None
        settings: Any = {"shuffle": True, "num_workers": 1, "persistent_workers": True, "generator": generator}
        return source_of(DataLoader(Noisy(), batch_size=SIZE, **settings))

    random_state.restore(START)
    source = make()
    list(source.begin(source.mark()))
    mark = source.mark()
    expected = list(source.begin(mark))
    for skip in (0, 2):
        torch.rand(3)
        assert all(map(torch.equal, make().enter(mark, skip), expected[skip:]))


def test_items_differ_from_one_another_and_do_not_depend_on_how_many_workers_there_are() -> None:
    made = []
    for workers in (1, 2):
        random_state.restore(START)
        source = source_of(DataLoader(Zeros(), batch_size=2, num_workers=workers))
        made.append(torch.cat(list(source.begin(source.mark()))))
    assert torch.equal(made[0], made[1])
    assert len(set(made[0].tolist())) == len(made[0])


class Zeros(Dataset[float]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return random.random()


def test_a_script_that_seeds_torch_alone_is_repeatable() -> None:
    made = []
    for seed in (1, 2):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(5)
        loader = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=1)
        source = source_of(loader)
        epochs = [torch.cat(list(source.begin(source.mark()))) for _ in range(2)]
        assert not torch.equal(*epochs)
        made.append(torch.cat(epochs))
    assert torch.equal(*made)


def test_a_script_that_seeds_its_loaders_generator_alone_is_repeatable() -> None:
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        loader = DataLoader(Noisy(), batch_size=4, num_workers=1, generator=torch.Generator().manual_seed(5))
        source = source_of(loader)
        made.append(torch.cat(list(source.begin(source.mark()))))
    assert torch.equal(*made)


class Told(Dataset[int]):
    """Tells what worker_init_fn has done to it, as scripts have it."""

    own = -1

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return self.own


def set_up(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.own = 100 + worker  # type: ignore[attr-defined]


def test_the_scripts_worker_init_fn_sees_its_own_dataset() -> None:
    source = source_of(DataLoader(Told(), batch_size=1, num_workers=2, worker_init_fn=set_up))
    assert [int(item) for item in source.begin(source.mark())] == [100, 101]
