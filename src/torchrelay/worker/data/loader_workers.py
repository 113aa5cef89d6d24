"""Loader workers whose random numbers depend on the epoch and the item, not on what the worker did before.

In plain PyTorch each loader worker has one stream of random numbers for the epoch, so item n could only be made again
by making all items before it. Here every item is made with generators that are seeded for it, so that a replacement can
begin at any item. docs/decisions/0003-loader-workers.md says what that changes.
"""

from __future__ import annotations

import copy
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import xxhash
from torch.utils.data import DataLoader
from torch.utils.data._utils import fetch

from torchrelay.worker.hidden_state import generators, graph

# How often each loader was begun: with persistent workers and a sampler that draws nothing, nothing else would tell
# one epoch from the next.
begun: weakref.WeakKeyDictionary[DataLoader[Any], int] = weakref.WeakKeyDictionary()
_seeded: weakref.WeakKeyDictionary[DataLoader[Any], DataLoader[Any]] = weakref.WeakKeyDictionary()

_64_BITS = (1 << 64) - 1
Watch = Callable[[Iterator[Any]], Iterator[Any]]


class Numbered:
    """What a loader worker is told to fetch, and the seed for it."""

    __slots__ = ("index", "seed")

    def __init__(self, index: Any, seed: int) -> None:
        self.index = index
        self.seed = seed

    def __reduce__(self) -> tuple[type[Numbered], tuple[Any, int]]:
        return Numbered, (self.index, self.seed)


class Numbering:
    """Stands in for a sampler: the same indices, each with its seed, from item `skip` on."""

    def __init__(self, sampler: Any, watch: Watch) -> None:
        self._sampler = sampler
        self._watch = watch
        self.epoch = b""
        self.skip = 0
        self.stop = False  # no items at all

    def __iter__(self) -> Iterator[Numbered]:
        if self.stop:
            return
        skip, epoch = self.skip, self.epoch
        for at, index in enumerate(self._watch(iter(self._sampler))):
            if at >= skip:
                yield Numbered(index, xxhash.xxh3_64_intdigest(at.to_bytes(8, "little") + epoch))

    def __len__(self) -> int:
        return len(self._sampler)


class SeedEachItem:
    """A loader worker's first act: from here on it seeds its generators for each item that it fetches."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        if self._then is not None:
            self._then(worker)
        if not isinstance(fetch._MapDatasetFetcher.fetch, _SeededFetch):
            seeded = _SeededFetch(fetch._MapDatasetFetcher.fetch)
            fetch._MapDatasetFetcher.fetch = seeded  # type: ignore[method-assign, assignment]


class _SeededFetch:
    """In place of the fetcher's method, in a loader worker only."""

    def __init__(self, fetch_plainly: Callable[[Any, Any], Any]) -> None:
        self._fetch_plainly = fetch_plainly
        self._own: tuple[Any, list[Any]] = None, []  # generators that the dataset and its kin keep

    def __get__(self, fetcher: Any, _: type) -> Callable[[Any], Any]:
        return lambda numbered: self._fetch(fetcher, numbered)

    def _fetch(self, fetcher: Any, numbered: Any) -> Any:
        if not isinstance(numbered, Numbered):
            return self._fetch_plainly(fetcher, numbered)
        seed(numbered.seed)
        if self._own[0] is not fetcher:
            self._own = fetcher, _generators_of(fetcher)
        for at, generator in enumerate(self._own[1]):
            generators.reseed(generator, (numbered.seed + 1 + at) & _64_BITS)
        return self._fetch_plainly(fetcher, numbered.index)


def _generators_of(fetcher: Any) -> list[Any]:
    """The script's own generators from which items may be made: nothing tells which of them draws."""
    walk = graph.Walk([("dataset", fetcher.dataset), ("collate_fn", fetcher.collate_fn)])
    return [leaf.value for leaf in walk.leaves.values() if graph.is_generator(leaf.value)]


def seed(number: int) -> None:
    """Seed the global generators of this process with 64 bits."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed([number & 0xFFFFFFFF, number >> 32])


def iterate(loader: DataLoader[Any], epoch: bytes, skip: int, watch: Watch) -> Iterator[Any]:
    """Begin an epoch of `loader` at item `skip`; `epoch` is what makes it another one than the last."""
    stand_in, numbering = _stand_in(loader, watch)
    numbering.epoch, numbering.skip = xxhash.xxh3_128_digest(epoch), skip
    items: Any = iter(stand_in)
    items._num_yielded = skip
    return iter(items)


def start(loader: DataLoader[Any], watch: Watch) -> None:
    """Start persistent loader workers, if they are not there, for no item. That draws the seed of all epochs."""
    stand_in, numbering = _stand_in(loader, watch)
    if stand_in._iterator is None:
        numbering.stop = True
        iter(stand_in)
        numbering.stop = False


def _sampler_name(loader: DataLoader[Any]) -> str:
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def _stand_in(loader: DataLoader[Any], watch: Watch) -> tuple[DataLoader[Any], Numbering]:
    """The same loader with numbered indices, and these. It owns the persistent workers, if there are any."""
    name = _sampler_name(loader)
    if (known := _seeded.get(loader)) is not None:
        return known, vars(known)[name]
    stand_in = _seeded[loader] = copy.copy(loader)
    # By its __dict__: torch forbids to set these, as it could not know what depends on them.
    vars(stand_in)[name] = Numbering(vars(loader)[name], watch)
    vars(stand_in)["worker_init_fn"] = SeedEachItem(loader.worker_init_fn)
    return stand_in, vars(stand_in)[name]
