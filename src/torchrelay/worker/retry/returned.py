"""Returned: plain values of the state as they were when the last call returned.

A script may go on with them before its next call: step a schedule, log a learning rate, save. A replacement makes that
again, from the state of a rank that has done it already. So each rank remembers, at the return of each call, what is
changed there without a trace: learning rates, schedules, scales, modes of modules, what objects and containers hold. It
costs a few microseconds: copies are shallow, as in `marks`.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from torchrelay.worker.parallel import shards
from torchrelay.worker.parallel.shards import version
from torchrelay.worker.retry import plain
from torchrelay.worker.retry.marks import Entries, Fields, Flags, HyperParameters, Mark, Scale, Schedule
from torchrelay.worker.state import random_state
from torchrelay.worker.state.parts import ContainerPart, ModulePart, OptimizerPart, Part, StatefulPart
from torchrelay.worker.state.state import State
from torchrelay.worker.tensors import arguments, memory, sums, tree, values

_Told = ContainerPart | ModulePart | OptimizerPart | StatefulPart
LIMIT = 256 << 10  # bytes of one part's values; what is larger comes with the state
OFTEN = 5  # a section in every so many calls is too many for looking at the state in each
WHOLE = 16 << 10  # bytes of a tensor that is looked at as a whole
SAVED = "save()"
PIECE = 64  # elements
PEEK = 8
_place = struct.Struct("=qq")
_encode_place = msgspec.msgpack.encode
_decode_place = msgspec.msgpack.Decoder(tuple[bytes, bytes]).decode


class Entered(NamedTuple):
    """What is remembered of the entry of a section."""

    before: bytes  # values as they were when the call before it returned
    moved: bool  # the script has changed them since
    tensors: bytes  # see `signature`


class Returned:
    """Of one rank."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._calls = self._sections = 0
        self._watch()
        self._tensors = state.given_besides()
        self._some = _some(self._tensors)
        self._versions: list[int] = []
        self._bound = state.private.module_buffers.bound()  # another list when a buffer has given way to another one
        self._small: dict[str, torch.Tensor] = {}  # copies of small tensors in state=
        self._at_entry: list[int] | None = None  # the same at the entry of the call under way
        self._peeks: dict[str, bytes] = {}
        self._anew = False  # an object in state= puts other tensors in the place of its own
        self.mark()

    def _watch(self) -> None:
        """With save() and load() optimizers may be known by their step only."""
        self._known = self._state.known
        self._at_return = _marks(self._state)
        self._marks = [mark for mark in self._at_return.values() if mark is not None]
        self.at_head = plain.watched(_marks(self._state))

    def mark(self) -> None:
        """A call returns: remember the values as they are now. In the path of every step."""
        self._calls += 1
        self._at_entry = None
        if self._known != self._state.known:
            self._watch()
        self._drawn = random_state.look()
        self._moving = self._state.private.hidden.now()
        for mark in self._marks:
            mark.mark()
        bound = self._state.private.module_buffers.bound()
        if self._anew or bound is not self._bound:
            self._bound = bound
            self._tensors = self._state.given_besides()
            self._some = _some(self._tensors)
        self._small = {path: tensor.clone() for path, tensor in _small(self._state)} if self._tensors else {}
        if self._tensors:
            self._versions = [version(tensor) for _, tensor in self._tensors]
            self._peeks = {path: _peek(some) for path, some in self._some.items()}

    def encoded(self) -> bytes:
        """The values as of the last mark. By the main thread, while it stands at a safepoint."""
        now = [mark for mark in _marks(self._state).values() if mark is not None]
        for mark in now:
            mark.mark()
        for mark in self._marks:
            mark.rewind()
        # A call that was cut has been undone: it has left what was there, by writing to it.
        versions = self._at_entry or [version(tensor) for _, tensor in self._tensors]
        counted = zip(self._tensors, self._versions, versions, strict=True)
        written = {path for (path, _), before, later in counted if later != before}
        written |= {path for path, some in self._some.items() if _peek(some) != self._peeks[path]}
        before = {(path, memory.place(tensor)) for path, tensor in self._tensors}
        now_there = {(path, memory.place(tensor)) for path, tensor in self._state.given_besides()}
        others = {path for path, _ in before ^ now_there}
        self._anew = self._anew or bool(others)
        moved = sorted(written | others)
        past = {path: self._small[path] for path in moved if path in self._small}
        try:
            return _encode(self._state, [path for path in moved if path not in past], past)
        finally:
            for mark in now:
                mark.rewind()

    def since(self) -> tuple[bytes, bytes]:
        """The random state as of the last mark, and what a script may read without a trace, as of then."""
        return random_state.pack(self._drawn), _encode_place((plain.tell(self._at_return), self._moving))

    def place(self) -> bytes:
        """The same as of now, without the random state: see `plain` and `hidden`. In the path of every step."""
        for mark in self.at_head.values():
            if mark is not None:
                mark.mark()
        return _encode_place((plain.tell(self.at_head), self._state.private.hidden.now()))

    def enter(self, *, section: bool) -> Entered | None:
        """At the entry of a call; None for a step, and where what is told would cost too much, or cannot be told."""
        if self._tensors:
            self._at_entry = [version(tensor) for _, tensor in self._tensors]
        if not section:
            return None
        self._sections += 1
        often = self._sections > OFTEN and self._sections * OFTEN > self._calls
        if often or self._state.saves:
            return None
        before = self.encoded()
        return Entered(before, before != now(self._state), signature(self._state))

    def is_still(self, entered: Entered) -> bool:
        """At the gate of that section: whether it has left all tensors of the state as they were."""
        return signature(self._state) == entered.tensors


def take(state: State, data: bytes, only: Collection[str] | None = None) -> frozenset[str]:
    """On a replacement: take another rank's values, or `only` of these parts. Raises `ValueError` if they are none.

    Returns the parts whose tensors have moved since on that rank: it has them as they became after the return only.
    """
    arrived, moved, past = values.decode(data)
    for path, tensor in _small(state):
        if path in past and path not in state.private.own.paths and (only is None or path in only):
            with torch.no_grad():
                tensor.copy_(past[path])
    if state.saves:
        plain.put(_marks(state), arrived[SAVED])
    for part in state.flat():
        own = part.path in state.private.own.paths
        if isinstance(part, _Told) and part.path in arrived and not own and (only is None or part.path in only):
            part.take_values(arrived[part.path])
    return frozenset(moved)


def parted(place: bytes) -> tuple[bytes, bytes]:
    """What `Returned.place` has told: for `plain`, and for `hidden`. Raises `ValueError` for other bytes."""
    try:
        return _decode_place(place) if place else (b"", b"")
    except msgspec.DecodeError as error:
        raise ValueError(f"{len(place)} bytes that tell of no place: {error}") from error


def now(state: State, *, tensors: bool = False) -> bytes:
    """The values as they are now; `tensors`: also small ones in state=."""
    return _encode(state, [], dict(_small(state)) if tensors else {})


def told_of(data: bytes) -> Collection[str]:
    """The parts of which values are told."""
    told, _, past = values.decode(data)
    return frozenset((*told, *past))


def signature(state: State) -> bytes:
    """Tells whether tensors of the state have changed: small ones are looked at as a whole.

    Of large ones: where they lie, how often they were written to, and on the CPU three pieces, as what is written by
    way of `.data` is not counted.
    """
    digest = xxhash.xxh3_64()
    away = []
    for tensor in {id(each): each for each in _tensors(state)}.values():
        part = shards.local(tensor).detach()
        whole = part.numel() * part.element_size() <= WHOLE
        if not whole:
            digest.update(_place.pack(version(tensor), part.data_ptr()))
        if part.is_cpu:
            digest.update(arguments.digest(part if whole else _pieces(part)))
        elif whole:
            away.append(part)
    digest.update(repr(sums.of(away)).encode())
    return digest.digest()


def _tensors(state: State) -> Iterator[torch.Tensor]:
    yield from (each for each in state.objects() if isinstance(each, torch.Tensor))
    for optimizer in state.optimizers():
        for kept in optimizer.state.values():
            yield from (each for each in kept.values() if isinstance(each, torch.Tensor))
    yield from (tensor for _, tensor in state.given_besides())
    for part in state.flat():
        if isinstance(part, (ContainerPart, StatefulPart)):
            yield from tree.encode(part.give(), part.path)[1]


def _some(tensors: list[tuple[str, torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
    """A few tensors of each part: what changes an average changes all of them."""
    found: dict[str, list[torch.Tensor]] = {}
    for path, tensor in tensors:
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if plain and tensor.is_cpu and tensor.layout == torch.strided and tensor.is_contiguous() and tensor.numel():
            found.setdefault(path, []).append(tensor)
    return {path: [each[0], each[len(each) // 2], each[-1]] for path, each in found.items()}


def _peek(tensors: list[torch.Tensor]) -> bytes:
    """Some of their values: writing by way of `.data` is not counted."""
    return b"".join(arguments.digest(each.detach().view(-1)[:PEEK]) for each in tensors)


def _pieces(tensor: torch.Tensor) -> torch.Tensor:
    count, middle = tensor.numel(), tensor.numel() // 2
    behind = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    flat = tensor.as_strided((count,), (1,)) if behind >= count else tensor.flatten()
    return torch.cat([flat[:PIECE], flat[middle : middle + PIECE], flat[-PIECE:]])


def _small(state: State) -> Iterator[tuple[str, torch.Tensor]]:
    """Small tensors that stand in state= by themselves, by the paths of their parts."""
    for part in state.flat():
        held = part.held() if part.path.startswith("state[") else None
        if type(held) is torch.Tensor and held.is_cpu and held.layout == torch.strided and held.nbytes <= WHOLE:
            yield part.path, held


def _encode(state: State, moved: list[str], past: Mapping[str, torch.Tensor]) -> bytes:
    """What cannot be told by itself, or is large, is left out: it comes with the state.

    `past`: parts that have moved since, as they were.
    """
    told: dict[str, Any] = {}
    if state.saves:
        marks = _marks(state)
        for mark in filter(None, marks.values()):
            mark.mark()
        told[SAVED] = plain.tell(marks)
    for part in state.flat():
        if isinstance(part, _Told):
            found = part.told_values()
            try:
                size = len(values.encode(found, part.path))
            except TypeError:
                continue
            if size <= LIMIT:
                told[part.path] = found
    return values.encode((told, moved, dict(past)), "values")


def _marks(state: State) -> dict[str, Mark | None]:
    """By the paths of the parts that have plain values; None: a part whose values have no mark."""
    if state.saves:  # what else there is, the script's own functions know
        optimizers = {f"optimizer {at}": HyperParameters(one) for at, one in enumerate(state.optimizers())}
        schedules = {f"schedule {at}": Schedule(one) for at, one in enumerate(state.schedules)}
        return {**optimizers, **schedules, SAVED: None}
    return {part.path: _mark_of(part) for part in state.flat() if isinstance(part, _Told)}


def _mark_of(part: Part) -> Mark | None:
    if isinstance(part, OptimizerPart):
        return HyperParameters(part.optimizer)
    if isinstance(part, ModulePart):
        return Flags(part.module)
    if isinstance(part, ContainerPart):
        return Entries(part.value)
    if not isinstance(part, StatefulPart):
        return None
    if isinstance(part.value, LRScheduler):
        return Schedule(part.value)
    if isinstance(part.value, GradScaler):
        return Scale(part.value)
    return Fields(part.value) if isinstance(getattr(part.value, "__dict__", None), Mapping) else None
