"""Loaders that can be entered in the middle: at item n, with the same item n that the lost worker had.

    what is iterated                          how its item n is found again
    DataLoader, samples made in this process  the sampler draws the same indices from the same random state; those of
                                              earlier items are passed over without fetching
    DataLoader with loader workers            the same; random numbers in the workers are a function of the epoch and
                                              the item's number (docs/decisions/0003-loader-workers.md)
    DataLoader of a dataset with state_dict   its state just before the item
    anything with state_dict                  the same
    what iterates in its own way              it is gone through again from the same random state (`Walked`)
    range, list, any sequence                 by index

What cannot be found again is refused with the reason: generators, and iterable datasets without state_dict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Protocol

import msgspec
import torch
from msgspec import Struct
from torch.utils.data import DataLoader, IterableDataset

from torchrelay.errors import RefusedError
from torchrelay.worker.data import loader_workers
from torchrelay.worker.hidden_state.hidden import Hidden, OfLoader
from torchrelay.worker.parallel import prepared
from torchrelay.worker.state import random_state
from torchrelay.worker.tensors import values


def iterates_by_itself(loader: Any) -> bool:
    """Whether its class has an `__iter__` in Python, other than what collections give to each sequence."""
    own = getattr(type(loader), "__iter__", None)
    return isinstance(own, FunctionType) and own.__module__ not in ("_collections_abc", "torch.utils.data.dataloader")


class Walked:
    """Entered by passing over all items before."""

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


REMEDY = (
    "iterate over a DataLoader with a map-style dataset, over a sequence, or over something with state_dict() and "
    "load_state_dict()"
)
# Items at which a sampler is watched for draws from the global generators: the first, and one of so many.
WATCHED = 4
WATCH_EVERY = 16


class Source(Protocol):
    """Something that yields items, and can be entered at any of them."""

    moves: bool  # its mark is taken before every item; else once, at the beginning
    hidden: OfLoader | None  # what its objects keep in attributes

    def mark(self) -> bytes:
        """What it takes to find the items that follow again."""

    def begin(self, mark: bytes) -> Iterator[Any]:
        """From the first item on; `mark` was taken just before."""

    def enter(self, mark: bytes, skip: int) -> Iterator[Any]:
        """From where `mark` was taken, without the first `skip` items. May leave any random state behind."""


class Mark(Struct, array_like=True):
    """Where the items of a loader come from."""

    rng: bytes = b""
    generators: list[bytes] = []
    nth: int = 0  # how often the loader was begun
    state: bytes = b""
    hidden: bytes = b""


_decode_mark = msgspec.msgpack.Decoder(Mark).decode


def source_of(loader: Any, hidden: Hidden | None = None) -> Source:
    """The source for what a script iterates over. Raises `RefusedError`, with the remedy, if it could not be entered.

    `hidden`: of this rank.
    """
    hidden = Hidden() if hidden is None else hidden
    kind = f"{type(loader).__module__}.{type(loader).__qualname__}"
    if (base := prepared.base_of(loader)) is not None:
        return prepared.Prepared(loader, source_of(base, hidden))
    if _has_state(loader):
        return WithState(loader, loader)
    if isinstance(loader, DataLoader):
        return _of_data_loader(loader, hidden)
    if isinstance(loader, (Mapping, IterableDataset)):
        raise RefusedError(f"a {kind} cannot be entered in the middle", REMEDY)
    if iterates_by_itself(loader) and hasattr(loader, "__len__"):
        plain = _Drawing(hidden.of(loader))
        return Walked(loader, plain.mark, plain.go_back, plain.hidden)
    if isinstance(loader, Sequence | torch.Tensor) or (hasattr(loader, "__getitem__") and hasattr(loader, "__len__")):
        return Indexed(loader, hidden.of(loader))
    raise RefusedError(f"a {kind} cannot be entered in the middle: nothing tells where it is", REMEDY)


def _of_data_loader(loader: DataLoader[Any], hidden: Hidden) -> Source:
    if isinstance(loader.dataset, IterableDataset):
        name = type(loader.dataset).__qualname__
        if not _has_state(loader.dataset):
            raise RefusedError(
                f"the iterable dataset {name} does not tell where it is",
                "give it state_dict() and load_state_dict(), or use a map-style dataset",
            )
        if loader.num_workers:
            raise RefusedError(
                f"{loader.num_workers} loader workers read the iterable dataset {name}: their places are not known",
                "use num_workers=0, or a loader with state_dict() such as torchdata's StatefulDataLoader",
            )
        return WithState(loader, loader.dataset)
    if type(loader).__iter__ is not DataLoader.__iter__:
        plain = InProcess(loader, hidden.of(loader))
        return Walked(loader, plain.mark, plain.go_back, plain.hidden)
    if loader.num_workers:
        return ByWorkers(loader, hidden.of(loader))
    return InProcess(loader, hidden.of(loader))


def _has_state(thing: Any) -> bool:
    found = (getattr(thing, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(thing, type) and all(map(callable, found))


# ---------------------------------------------------------------- sequences, and what has a state


class Indexed:
    """A sequence, or a dataset by itself."""

    moves = False

    def __init__(self, items: Any, hidden: OfLoader | None = None) -> None:
        self._items = items
        self.hidden = hidden
        # A range does not draw, but what follows it may: windows of a text by chance, in a loop of run.steps().

    def mark(self) -> bytes:
        return b"" if self.hidden is None else self.hidden.mark()

    def begin(self, mark: bytes) -> Iterator[Any]:
        del mark
        return self._from(0)

    def enter(self, mark: bytes, skip: int) -> Iterator[Any]:
        if self.hidden is not None:
            self.hidden.put(mark)
        return self._from(skip)

    def _from(self, skip: int) -> Iterator[Any]:
        for at in range(skip, len(self._items)):
            yield self._items[at]


class _Drawing:
    """What draws from the global generators, and keeps something in attributes."""

    def __init__(self, hidden: OfLoader | None) -> None:
        self.hidden = hidden

    def mark(self) -> bytes:
        moved = b"" if self.hidden is None else self.hidden.mark()
        return msgspec.msgpack.encode(Mark(random_state.capture(), hidden=moved))

    def go_back(self, mark: bytes) -> None:
        found = _decode_mark(mark)
        random_state.restore(found.rng)
        if self.hidden is not None:
            self.hidden.put(found.hidden)


class WithState:
    """A loader that is entered by a state: its own, or its dataset's."""

    moves = True
    hidden: OfLoader | None = None

    def __init__(self, loader: Any, holder: Any) -> None:
        self._loader = loader
        self._holder = holder

    def mark(self) -> bytes:
        name = type(self._holder).__qualname__
        try:
            state = values.encode(self._holder.state_dict(), f"state_dict() of {name}")
        except TypeError as error:
            raise RefusedError(
                str(error), "let state_dict() return numbers, strings, tensors, lists and dicts"
            ) from error
        return msgspec.msgpack.encode(Mark(state=state))

    def begin(self, mark: bytes) -> Iterator[Any]:
        del mark
        return iter(self._loader)

    def enter(self, mark: bytes, skip: int) -> Iterator[Any]:
        self._holder.load_state_dict(values.decode(_decode_mark(mark).state))
        items: Iterator[Any] = iter(self._loader)
        for _ in range(skip):
            next(items)
        return items


# ---------------------------------------------------------------- DataLoaders of map-style datasets


class _OfMapStyle:
    """What the two kinds of DataLoader have in common: the random state from which their sampler draws."""

    moves = False

    def __init__(self, loader: DataLoader[Any], hidden: OfLoader | None = None) -> None:
        self._loader = loader
        self.hidden = hidden
        self._generators = _generators_of(loader)

    def mark(self) -> bytes:
        moved = b"" if self.hidden is None else self.hidden.mark()
        states = [generator.get_state().numpy().tobytes() for generator in self._generators]
        nth = loader_workers.begun.get(self._loader, 0)
        return msgspec.msgpack.encode(Mark(random_state.capture(), states, nth, hidden=moved))

    def go_back(self, mark: bytes) -> Mark:
        """Put all generators that the sampler draws from where they were when the mark was taken."""
        found = _decode_mark(mark)
        random_state.restore(found.rng)
        # A sampler that makes its generator in its first epoch has none yet in a replacement, and makes it then.
        for generator, state in zip(self._generators, found.generators, strict=False):
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        if self.hidden is not None:
            self.hidden.put(found.hidden)
        return found


class InProcess(_OfMapStyle):
    """A DataLoader without loader workers: samples are made in this process, when they are asked for."""

    def begin(self, mark: bytes) -> Iterator[Any]:
        del mark
        return self._open(0)

    def enter(self, mark: bytes, skip: int) -> Iterator[Any]:
        self.go_back(mark)
        return self._open(skip)

    def _open(self, skip: int) -> Iterator[Any]:
        items: Any = iter(self._loader)
        indices = watched(items._sampler_iter)
        for _ in range(skip):
            next(indices)
        items._sampler_iter = indices
        items._num_yielded = skip
        found: Iterator[Any] = items
        return found


class ByWorkers(_OfMapStyle):
    """A DataLoader with loader workers."""

    def __init__(self, loader: DataLoader[Any], hidden: OfLoader | None = None) -> None:
        super().__init__(loader, hidden)
        if not getattr(loader, "in_order", True):
            raise RefusedError("a DataLoader with in_order=False yields in no fixed order", "leave in_order=True")

    def begin(self, mark: bytes) -> Iterator[Any]:
        return self._open(_decode_mark(mark), 0)

    def enter(self, mark: bytes, skip: int) -> Iterator[Any]:
        found = self.go_back(mark)
        if found.nth and self._loader.persistent_workers:
            loader_workers.start(self._loader, watched)  # they were there when that epoch began
            self.go_back(mark)
        loader_workers.begun[self._loader] = found.nth
        return self._open(found, skip)

    def _open(self, mark: Mark, skip: int) -> Iterator[Any]:
        loader_workers.begun[self._loader] = mark.nth + 1
        # What PyTorch draws its own seeds of loader workers from, and no more: a script need not seed the others.
        drawn_from = mark.generators[0] if self._loader.generator is not None else random_state.of_torch(mark.rng)
        return loader_workers.iterate(self._loader, drawn_from + mark.nth.to_bytes(8, "little"), skip, watched)


def _generators_of(loader: DataLoader[Any]) -> list[torch.Generator]:
    """The generators of the script from which a loader and its samplers draw; each once."""
    found: dict[int, torch.Generator] = {}
    waiting: list[Any] = [loader, loader.sampler, loader.batch_sampler]
    while waiting:
        holder = waiting.pop(0)
        if holder is None:
            continue
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            found.setdefault(id(generator), generator)
        inner = getattr(holder, "sampler", None)
        if holder is not loader and inner is not None and inner is not holder:
            waiting.append(inner)
    return list(found.values())


def watched(indices: Iterator[Any]) -> Iterator[Any]:
    """The same indices. Raises `RefusedError` if they are drawn from the global generators one after the other.

    A sampler may draw before its first index: that is repeated from the same random state. If it drew again later, a
    replacement, who passes over the indices without training in between, would get others.
    """
    for at in _count():
        look = 0 < at < WATCHED or (at and at % WATCH_EVERY == 0)
        before = random_state.capture() if look else b""
        try:
            index = next(indices)
        except StopIteration:
            return
        if look and random_state.capture() != before:
            raise RefusedError(
                "the sampler draws from the global random generator while it is iterated",
                "give it a torch.Generator of its own",
            )
        yield index


def _count() -> Iterator[int]:
    at = 0
    while True:
        yield at
        at += 1
