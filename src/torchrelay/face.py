"""What a script sees of torchrelay: `Run` and `Options`, with or without the launcher behind it. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Sized(Protocol):
    """Has a length: loaders mostly do."""

    def __len__(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Options:
    """Optional settings that few scripts need: `torchrelay.protect(options=...)`.

    shard       name of the part of the state that this rank holds: ranks with equal names are replicas. None: derived
                from DTensors, device meshes and DDP groups; give it where these do not show it
    rehearse    whether the target of a planned move tries the steps beforehand, up to their commit gate, on made-up
                tensors and on a model without trained weights. Side effects of a step happen there, too. None: only
                steps that are called with tensors and flags alone; True: all steps; False: none
    snapshot_every   steps between two snapshots of each rank's state, kept in the memory of its own node and of another
                one. If a shard without a replica is lost, at most this many steps are repeated. None: 10 if there is
                such a shard (and no `save=`), else no snapshots; 0: none. "auto": chosen from their measured cost and
                from how often such jobs fail; at most ten minutes of work are repeated
    snapshot_buddies   other nodes that get a copy of each snapshot, 1 or 2. With 2 any two nodes may be lost at once,
                for half as much memory again, and twice the traffic
    compare_every    steps between two comparisons of what replicas hold, which find flipped bits; a rank that differs
                from the majority is replaced. None: 100; 0: never
    """

    shard: str | None = None
    rehearse: bool | None = None
    snapshot_every: int | Literal["auto"] | None = None
    snapshot_buddies: int = 1
    compare_every: int | None = None


class Run(Protocol):
    """A training run, as `torchrelay.protect()` returns it.

    Under `torchrelay run` its steps and atomic sections are committed by all ranks or by none, and survive the loss of
    a rank. Without the launcher it passes everything through.
    """

    @property
    def rank(self) -> int:
        """This worker's rank. A replacement has the rank that it took over."""

    @property
    def global_step(self) -> int:
        """Steps committed in this job; 0 after a resume from your own checkpoint. Use it instead of a counter.

        Inside a step it does not count that step, before its update or after.
        """

    def step(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate the function that makes one optimizer update, micro-batches included.

        After a fault it is called again with the same arguments and with all state put back. So it must not change its
        arguments, and its side effects outside of what `protect()` was given may happen twice. All communication
        comes before the first `optimizer.step()`. It returns numbers, tensors, or lists and dicts of them.

            @run.step
            def train_step(batch):
                optimizer.zero_grad()
                loss = model(batch).mean()
                loss.backward()
                optimizer.step()
                return loss.detach()
        """

    def atomic(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function that communicates between steps: evaluation, saving, averages for a log.

        It is committed as a whole, and repeated as a whole after a fault.

            accuracy = run.atomic(evaluate, model, held_out)
        """

    def epochs(self, count: int) -> Iterable[int]:
        """`range(count)`, for the loop over epochs. A replacement enters it at the epoch of the job."""

    def steps(self, count: int) -> Iterable[int]:
        """`range(count)`, for a loop over steps that takes its data elsewhere."""

    def batches(self, loader: Any, micro_batches: int = 1) -> Iterable[Any]:
        """The items of a DataLoader or sequence. A replacement enters it in the middle, at the same item.

        With `micro_batches` above 1 it yields lists of that many items for one update each; the last list may be
        shorter. Prefetching to a device belongs around the loader, not around this: a replacement begins with the item
        that was yielded last.
        """

    def once(self, name: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """See `torchrelay.once`."""
