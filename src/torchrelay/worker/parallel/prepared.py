"""Prepared: what Accelerate and Lightning Fabric make of loaders and optimizers, looked through to what is inside.

    Accelerate   DataLoaderShard: at the beginning of an epoch ranks agree on a generator, and the sampler is told the
                 epoch; items go to the device. Their agreement is a section here, so that it is recorded and repeated
    Fabric       the same without the agreement

They are known by their shape, as they are no dependency of ours. What hands items from rank to rank, or has a state
that is ahead of the items, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from torchrelay.errors import RefusedError

OWN_LOADER = "or give run.batches() a DataLoader of your own, with a DistributedSampler"
_DEEP = 8


class Inner(Struct, array_like=True):
    """Where the items of a prepared loader come from."""

    turn: int
    generator: bytes
    mark: bytes


def optimizer_inside(optimizer: Any) -> Any:
    """The optimizer whose groups and state a wrapper shows as its own; itself if it is none.

    A wrapper with a state beside (Lookahead) is an optimizer by its own right.
    """
    for _ in range(_DEEP):
        inner = vars(optimizer).get("optimizer", vars(optimizer).get("_optimizer"))
        if not isinstance(inner, Optimizer) or inner is optimizer:
            return optimizer
        if optimizer.param_groups is not inner.param_groups or optimizer.state is not inner.state:
            return optimizer
        optimizer = inner
    return optimizer


def base_of(loader: Any) -> DataLoader[Any] | None:
    """The loader inside a prepared one; None if it is not prepared. Raises `RefusedError` if it cannot be entered."""
    held = getattr(loader, "__dict__", {})
    base = held.get("base_dataloader", held.get("_dataloader"))
    if not isinstance(base, DataLoader):
        return None
    names = {kind.__name__ for kind in type(loader).__mro__}
    if "DataLoaderDispatcher" in names:
        raise RefusedError(
            "a DataLoaderDispatcher lets rank 0 read for all and send them their items, between the steps",
            f"use DataLoaderConfiguration(dispatch_batches=False), {OWN_LOADER}",
        )
    if held.get("use_stateful_dataloader"):
        raise RefusedError(
            "a loader that Accelerate has prepared with use_stateful_dataloader has a state that is ahead of its items",
            f"leave use_stateful_dataloader out: run.batches() finds the place by itself; {OWN_LOADER}",
        )
    if held.get("skip_batches"):
        raise RefusedError(
            f"a {type(loader).__name__} skips its first {held['skip_batches']} items in each epoch",
            "take skip_first_batches() out: run.batches() finds the place by itself",
        )
    sampler = getattr(base.batch_sampler, "sampler", None)
    if sampler is not None and hasattr(sampler, "initial_seed") and getattr(sampler, "generator", sampler) is None:
        # As it would do itself in its first epoch, and seed it with each: a replacement has to have the same objects.
        sampler.generator = torch.Generator()
    return base


class Prepared:
    """A loader as a library has prepared it, entered by way of the one inside."""

    def __init__(self, loader: Any, inside: Any) -> None:
        """`inside`: the source for its base."""
        self._loader = loader
        self._inside = inside
        self.moves, self.hidden = inside.moves, inside.hidden
        self._accelerate = "base_dataloader" in vars(loader)
        self._turn = "iteration" if self._accelerate else "_num_iter_calls"
        self._running = False
        self._known: dict[str, Any] = type(loader).__iter__.__globals__  # of the library
        self._generator: torch.Generator | None = vars(loader).get("synchronized_generator")

    # ------------------------------------------------------------ before an epoch

    def agreement(self) -> Callable[[], torch.Tensor | None] | None:
        """What all ranks are to do together before an epoch, if anything; its result is for `agree`."""
        kinds = getattr(self._loader, "rng_types", None)
        if not self._accelerate or not kinds or (self._generator is None and set(map(str, kinds)) <= {"generator"}):
            return None
        synchronise = self._known["synchronize_rng_states"]

        def agree_on_generators() -> torch.Tensor | None:
            synchronise(kinds, self._generator)
            return None if self._generator is None else self._generator.get_state()

        return agree_on_generators

    def agree(self, state: torch.Tensor | None) -> None:
        """Take what was agreed on."""
        if self._generator is not None and state is not None:
            self._generator.set_state(state)

    # ------------------------------------------------------------ a source

    def mark(self) -> bytes:
        if not self._running:
            self._start(getattr(self._loader, self._turn))  # what it tells its sampler belongs to the mark
        turn = getattr(self._loader, self._turn) - (not self._accelerate)
        generator = b"" if self._generator is None else self._generator.get_state().numpy().tobytes()
        return msgspec.msgpack.encode(Inner(turn, generator, self._inside.mark()))

    def begin(self, mark: bytes) -> Iterator[Any]:
        found = msgspec.msgpack.decode(mark, type=Inner)
        return self._items(self._inside.begin(found.mark), 0)

    def enter(self, mark: bytes, skip: int) -> Iterator[Any]:
        found = msgspec.msgpack.decode(mark, type=Inner)
        if self._generator is not None:
            self._generator.set_state(torch.frombuffer(bytearray(found.generator), dtype=torch.uint8))
        self._start(found.turn)
        return self._items(self._inside.enter(found.mark, skip), skip)

    def _start(self, turn: int) -> None:
        if self._accelerate:
            self._loader.begin()
            self._loader.set_epoch(turn)
        else:
            self._known["_set_sampler_epoch"](self._loader._dataloader, turn)
            setattr(self._loader, self._turn, turn + 1)
        self._running = True

    def _items(self, items: Iterator[Any], count: int) -> Iterator[Any]:
        last = self._length()
        try:
            for item in items:
                count += 1
                if self._accelerate and count == last:
                    self._loader.end_of_dataloader = True  # what gathers metrics asks for it
                yield self._placed(item)
            if self._accelerate:
                setattr(self._loader, self._turn, getattr(self._loader, self._turn) + 1)
        finally:
            self._running = False
            if self._accelerate:
                self._loader.end()

    def _length(self) -> int:
        try:
            return len(self._loader)
        except TypeError:
            return -1

    def _placed(self, item: Any) -> Any:
        device = getattr(self._loader, "device", None)
        if device is None:
            return item
        if self._accelerate:
            return self._known["send_to_device"](item, device, non_blocking=self._loader._non_blocking)
        return self._known["move_data_to_device"](item, device)
