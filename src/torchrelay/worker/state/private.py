"""Private state: what is a rank's own and no replica has, so it is kept at every gate and outlives the process.

Generators that the script gives to protect(), and buffers that may differ between ranks: DDP lets each rank update
BatchNorm's running statistics from its own samples, and takes rank 0's at the next forward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec
import torch
from msgspec import Struct

from torchrelay.errors import RefusedError, StateMismatchError, UnprovedError
from torchrelay.wire.files.page import MAX_RECORD, PageFull
from torchrelay.worker.hidden_state.hidden import Hidden
from torchrelay.worker.parallel.shards import local
from torchrelay.worker.state.buffers import Buffers
from torchrelay.worker.state.lent import Lent, Returns, parted, unproved, without
from torchrelay.worker.state.parts import (
    ArrayPart,
    ContainerPart,
    GeneratorPart,
    Part,
    StatefulPart,
    TensorPart,
)
from torchrelay.worker.tensors import memory, values

# Bytes of buffers that a record may hold: it shares a slot of the worker's page with the random state and the cursor.
LIMIT = 768 << 10


class PrivateState(Struct, frozen=True):
    """What a private record holds."""

    generators: dict[str, bytes]
    names: list[str]  # of the buffers
    buffers: list[bytes]
    hidden: bytes = b""  # see `hidden`
    own: dict[str, bytes] = {}  # see `own`
    lacking: list[str] = []  # what is this rank's own, and has no room here
    own_buffers: list[str] = []  # buffers that are written between steps, otherwise on each rank
    returns: dict[str, bytes] = {}  # see `lent`


class Private:
    """The private part of a rank's state.

    Which buffers are private is not known at first: those of plain BatchNorm are, and until `Redo` has seen a few
    steps, all that fit. Then it calls `settle` with those that change in a step.
    """

    def __init__(
        self,
        modules: Sequence[tuple[str, torch.nn.Module]],
        generators: Sequence[GeneratorPart],
        hidden: Hidden | None = None,
        parts: Callable[[], Iterable[Part]] = tuple,
    ) -> None:
        """`parts`: of the state: of those that are each rank's own, see `own`."""
        self.own = Own(parts)
        self._own_buffers: set[str] = set()
        self.module_buffers = Buffers(modules)
        self._all = self.module_buffers.now
        self.rebound: set[str] = set()  # names of buffers that gave way to others
        self._certain = _batch_norm_buffers(modules)
        self._shared = _same_everywhere(modules)
        self._generators = list(generators)
        self.hidden = Hidden() if hidden is None else hidden
        self._returns = Returns()
        self._loaded = False
        self._plain = False  # neither generators nor buffers are private
        self._moving: dict[bool, set[str]] = {}  # by whether it was seen in sections
        first = [name for name in self._all if name not in self._shared]
        fits = sum(memory.size(self._all[name]) for name in first) <= LIMIT
        self._choose(first if fits else self._certain)

    @property
    def empty(self) -> bool:
        """Whether nothing is private: asked twice in every call."""
        return self._plain and self.hidden.empty and not self.own.paths

    def settle(self, moving: Iterable[str], *, sections: bool) -> None:
        """These buffers have been seen to change in steps, or in sections.

        Raises `RefusedError` if they are too large to be kept at every gate.
        """
        self._moving[sections] = set(moving)
        # Sections may be over with their probes first, and know nothing of what steps change.
        unknown = set() if False in self._moving else set(self._names)
        known = set().union(*self._moving.values(), self._certain, self._own_buffers)
        self._choose((known | unknown) - self._shared)

    def unknown(self, moving: Collection[str]) -> set[str]:
        """Buffers of which it is not known yet whether they are private. `moving`: seen to change before a gate."""
        known = False in self._moving or self._loaded
        return set() if known else set(self._names) - self._certain - set(moving)

    def share(self, names: Collection[str]) -> None:
        """These are not private: they change with the update alone, on all ranks alike."""
        if names:
            self._choose(set(self._names) - set(names))

    def record(self) -> bytes:
        """The private state now: for the gate. Empty if there is none; at most `LIMIT` bytes, and the generators."""
        if self.empty:
            return b""
        generators = {part.path: part.generator.get_state().numpy().tobytes() for part in self._generators}
        self.refresh()
        buffers = [b"".join(memory.outgoing(buffer)) for buffer in self._private]
        own = self.own.told()
        rest = sorted(self.own.lacking), sorted(self._own_buffers)
        told = PrivateState(
            generators, self._names, buffers, self.hidden.record(), own, *rest, returns=self._returns.history
        )
        return msgspec.msgpack.encode(told)

    def load(self, data: bytes) -> None:
        """Take the private state of this rank's last holder; `State.receive` then leaves it alone.

        Raises `StateMismatchError` if it is not of what this script has built.
        """
        if not data:
            self.hidden.load(b"")
            return
        try:
            record = msgspec.msgpack.decode(data, type=PrivateState)
        except msgspec.DecodeError as error:
            raise StateMismatchError(f"the private state that arrives is none: {error}") from error
        by_path = {part.path: part for part in self._generators}
        if set(by_path) != set(record.generators) or not set(record.names) <= set(self._all):
            raise StateMismatchError("the private state that arrives has other generators or buffers than this script")
        for path, state in record.generators.items():
            by_path[path].generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
            by_path[path].kept = True
        self.refresh()
        for name, kept in zip(record.names, record.buffers, strict=True):
            _fill(name, self._all[name], kept)
        self._own_buffers |= set(record.own_buffers)
        self._choose(record.names)
        self.own.take(record.own, record.lacking)
        self.hidden.load(record.hidden)
        self._returns = Returns(record.returns)
        self._loaded = True

    def note_return(self) -> None:
        """The call has returned: what its update has changed is told to whoever takes over a rank that has not."""
        self.hidden.look_return()
        if self.hidden.late_paths:
            self._returns.note(parted(self.hidden.late))

    def lend(self) -> Lent:
        """What updates change, as it was when the last call had returned."""
        return Lent(self.hidden.late, self._returns.history)

    def borrow(self, lent: Sequence[Lent]) -> None:
        """The record that was loaded is of a gate: go on to the return of its call, as these ranks have.

        Raises `UndeclaredError`.
        """
        if not lent:
            return
        paths = {*self.hidden.late_paths, *parted(lent[0].values)}
        lost = unproved(self._returns.history, lent, paths)
        self.hidden.borrow(without(lent[0].values, lost), lost)
        if self.hidden.late_paths:
            self._returns.note(parted(self.hidden.late))

    def kept(self) -> frozenset[memory.Place]:
        """The buffers that hold this rank's own values, which a replica's must not replace."""
        if not self._loaded:
            return frozenset()
        self.refresh()
        found = (memory.place(buffer) for buffer in self._private)
        return frozenset(place for place in found if place is not None)

    def keep_own(self, names: Collection[str], *, early: bool) -> None:
        """Replicas hold other values in these parts and buffers. Raises `RefusedError` for what cannot be kept."""
        self.own.keep(names, early=early)
        buffers = set(names).intersection(self._all)
        size = sum(memory.size(self._all[name]) for name in buffers.union(self._names))
        if size > LIMIT and not early:  # a job is not ended for what no fault may ever ask for
            self.own.lack(buffers, LIMIT)
            return
        self._own_buffers |= buffers
        self._choose({*self._names, *self._own_buffers})

    def compared(self) -> dict[str, torch.Tensor]:
        """Buffers that are taken to be alike on all ranks."""
        own = {*self._names, *self.own.lacking}
        self.refresh()
        return {name: buffer for name, buffer in self._all.items() if name not in own}

    def hold(self) -> Callable[[], None]:
        """What puts this rank's own values back where another rank's are about to arrive."""
        if not self._loaded:
            return lambda: None
        self.refresh()
        copies = [(buffer, buffer.clone()) for buffer in self._private]
        own = self.own.told()

        def put_back() -> None:
            for buffer, value in copies:
                buffer.copy_(value)
            self.own.take(own)

        return put_back

    def buffers(self) -> dict[str, torch.Tensor]:
        """All buffers of the modules, by name; shared ones once."""
        self.refresh()
        return dict(self._all)

    def refresh(self) -> None:
        """See which buffers stand in the modules now."""
        if self._all and (others := self.module_buffers.refresh()):
            self.rebound |= others
            self._private = [self._all[name] for name in self._names]

    def _choose(self, names: Iterable[str]) -> None:
        chosen = set(names)
        self._names = [name for name in self._all if name in chosen]
        self._private = [self._all[name] for name in self._names]
        self._plain = not self._names and not self._generators
        size = sum(memory.size(buffer) for buffer in self._private)
        if size > LIMIT:
            raise RefusedError(
                f"buffers of {size:,} bytes ({', '.join(self._names[:3])}, ...) change in every step and may differ "
                f"between ranks; at most {LIMIT:,} are kept",
                "convert BatchNorm with torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
            )


def _fill(name: str, buffer: torch.Tensor, values: bytes) -> None:
    if memory.size(buffer) != len(values):
        raise StateMismatchError(f"{name} has {memory.size(buffer)} bytes here and {len(values)} in the private state")
    at = 0
    for view, filled in memory.incoming(buffer):
        view[:] = values[at : at + len(view)]
        at += len(view)
        if filled is not None:
            filled()


def _batch_norm_buffers(modules: Sequence[tuple[str, torch.nn.Module]]) -> set[str]:
    plain = torch.nn.modules.batchnorm._BatchNorm
    return {
        name
        for name, module in _submodule_buffers(modules)
        if isinstance(module, plain) and not isinstance(module, torch.nn.SyncBatchNorm)
    }


def _same_everywhere(modules: Sequence[tuple[str, torch.nn.Module]]) -> set[str]:
    """Buffers that move, but alike on all ranks."""
    return {name for name, module in _submodule_buffers(modules) if isinstance(module, torch.nn.SyncBatchNorm)}


def _submodule_buffers(modules: Sequence[tuple[str, torch.nn.Module]]) -> list[tuple[str, torch.nn.Module]]:
    found = []
    for path, module in modules:
        for inner, submodule in module.named_modules():
            names = (name for name, _ in submodule.named_buffers(recurse=False))
            found += [(".".join(filter(None, (path, inner, name))), submodule) for name in names]
    return found


def too_large(error: PageFull) -> RefusedError:
    """What to say of a record that has no room."""
    return RefusedError(
        f"a rank's private state is too large: {error}",
        f"return less from steps and sections: all of one item's results, and BatchNorm's buffers, fit {MAX_RECORD:,} "
        "bytes",
    )


# ---------------------------------------------------------------- parts of state= that are each rank's own

# Such as a meter of the local loss. Replicas tell one another in the first steps, and later now and then, what they
# hold. What differs is carried in the rank's private record from then on, as no replica has it. What has no room there
# is refused in the first steps; later it is said, and a replacement is refused.

EACH = 16 << 10  # bytes of one part
TOO_LARGE = (
    "{} is each rank's own, and has more than {:,} bytes, or what cannot be told: no other rank has it when this one "
    "is lost",
    "keep in it what is alike on all ranks, such as reduced values; make it smaller; or keep it in a variable",
)

Carried = ContainerPart | StatefulPart | TensorPart | ArrayPart


class Own:
    """Of one rank."""

    def __init__(self, parts: Callable[[], Iterable[Part]] = tuple) -> None:
        """`parts`: of the state, containers opened."""
        self._parts = parts
        self._kept: dict[str, Carried] = {}
        self.lacking: set[str] = set()

    @property
    def paths(self) -> set[str]:
        """Of the parts that are each rank's own."""
        return {*self._kept, *self.lacking}

    def keep(self, paths: Iterable[str], *, early: bool) -> None:
        """These are. Raises `RefusedError` if one cannot be carried, and it is `early`."""
        for path, part in self._found(set(paths) - self.paths).items():
            if _told(part) is not None:
                self._kept[path] = part
                continue
            if early:
                raise RefusedError(TOO_LARGE[0].format(path, EACH), TOO_LARGE[1])
            self.lack({path}, EACH)

    def lack(self, paths: Iterable[str], limit: int) -> None:
        """These are, and have no room in `limit` bytes: a replacement will be refused."""
        for path in paths:
            self.lacking.add(path)
            what, remedy = TOO_LARGE
            print(f"torchrelay: {what.format(path, limit)}; {remedy}", file=sys.stderr, flush=True)

    def told(self) -> dict[str, bytes]:
        """The values now. What has become too large is lacking from now on."""
        found = {path: _told(part) for path, part in self._kept.items()}
        for path in [path for path, data in found.items() if data is None]:
            del self._kept[path]
            self.lack({path}, EACH)
        return {path: data for path, data in found.items() if data is not None}

    def take(self, told: dict[str, bytes], lacking: Iterable[str] = ()) -> None:
        """On a replacement: what its predecessor has told. Raises `UnprovedError` if something is lacking."""
        for path in lacking:
            raise UnprovedError(f"{TOO_LARGE[0].format(path, EACH)}. {TOO_LARGE[1].capitalize()}")
        for path, part in self._found(told).items():
            self._kept[path] = part
            _put(part, values.decode(told[path]))

    def _found(self, paths: Iterable[str]) -> dict[str, Carried]:
        wanted = set(paths)
        return {part.path: part for part in self._parts() if part.path in wanted and isinstance(part, Carried)}


def _told(part: Carried) -> bytes | None:
    """None if it cannot be carried."""
    told: Any
    if isinstance(part, TensorPart):
        told = local(part.tensor).detach()
    else:
        told = part.array if isinstance(part, ArrayPart) else part.told_values()
    if isinstance(told, torch.Tensor) and memory.size(told) > EACH:
        return None
    try:
        data = values.encode(told, part.path)
    except (TypeError, ValueError, RuntimeError):
        return None
    return data if len(data) <= EACH else None


def _put(part: Carried, told: object) -> None:
    if isinstance(part, TensorPart):
        assert isinstance(told, torch.Tensor), "of a tensor a tensor is told"
        with torch.no_grad():
            local(part.tensor).copy_(told)
    elif isinstance(part, ArrayPart):
        part.array[...] = told
    else:
        part.take_values(told)
