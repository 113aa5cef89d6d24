"""What a script sees of torchrelay: `Run`, with or without the launcher behind it. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Sized(Protocol):
    """Has a length: loaders mostly do."""

    def __len__(self) -> int: ...


class Run(Protocol):
    """A training run, as `torchrelay.join()` returns it.

    Under `torchrelay run` its steps and sections are committed by all ranks or by none, and survive the loss of a
    rank. Otherwise it passes everything through.
    """

    @property
    def rank(self) -> int:
        """This worker's rank; stays the same whoever holds it."""

    @property
    def committed(self) -> int:
        """How many steps are committed. A successor knows it too: use it instead of a counter of your own."""

    def step(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate the function that makes one optimizer update, micro-batches included.

        After a fault it is called again with the same arguments, with everything put back: so it must not change its
        arguments, and what it does outside of the objects given to join() may happen twice. All communication comes
        before the first `optimizer.step()`. It returns numbers, tensors, or lists and dicts of them.

            @run.step
            def train_step(batch):
                optimizer.zero_grad()
                loss = model(batch).mean()
                loss.backward()
                optimizer.step()
                return loss.detach()
        """

    def section(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function that communicates between steps: evaluation, saving, averages for a log.

        It is committed as a whole, and after a fault called again as a whole.

            accuracy = run.section(evaluate, model, held_out)
        """

    def epochs(self, count: int) -> Iterable[int]:
        """`range(count)`, for the loop over epochs. A successor enters it at the epoch of the others."""

    def steps(self, count: int) -> Iterable[int]:
        """`range(count)`, for a loop over steps that takes its data elsewhere."""

    def batches(self, loader: Any, micro_batches: int = 1) -> Iterable[Any]:
        """The items of a DataLoader or sequence. A successor enters it in the middle, at the same item.

        With `micro_batches` above 1 it yields lists of so many items (the last may be shorter), for one update each.
        What moves batches to a device ahead of time belongs around the loader, not around this: a successor begins
        with the item that is yielded last.
        """

    def once(self, name: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Like `torchrelay.once`."""
