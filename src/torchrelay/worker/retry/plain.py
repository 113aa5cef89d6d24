"""Plain: values of the state that a script reads without a trace, such as learning rates, as of one moment of a turn.

A record holds them for the head of each turn of a loop, and for the return of each call that another one follows in
the same turn: between these a replacement's script runs before it comes to its place, and may read them. That is in
the path of every step, so only what is copied and encoded in microseconds is told: numbers and texts. `put` returns
whether that is all there is; what is told of the last return is always whole, see `returned`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchrelay.worker.retry.marks import Entries, Fields, Flags, HyperParameters, Mark, Schedule

MOST = 256  # entries of a container that is told
_SCALARS = frozenset((int, float, bool, str, type(None)))
_SEQUENCES = frozenset((list, tuple))

Told = Any  # lists, and dicts by texts, of scalars
_encode = msgspec.msgpack.encode
_decoder = msgspec.msgpack.Decoder(tuple[bool, dict[str, Any]])


def watched(marks: Mapping[str, Mark | None]) -> dict[str, Mark | None]:
    """Those of which something can be told; None for the others."""
    return {path: mark if type(mark) in _TELL else None for path, mark in marks.items()}


def tell(marks: Mapping[str, Mark | None]) -> bytes:
    """What these marks remember, by the paths of their parts; None: a part that has no mark."""
    found = {path: _tell(mark) for path, mark in marks.items()}
    told = {path: one for path, one in found.items() if one is not None}
    try:
        return _encode((len(told) == len(found), told))
    except OverflowError:  # a number that is too long for it
        return b""


def put(marks: Mapping[str, Mark | None], data: bytes) -> bool:
    """On a replacement: make it so. Returns whether these are all values. Raises `ValueError` for other bytes."""
    if not data:
        return False
    try:
        whole, told = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"{len(data)} bytes that are no plain values: {error}") from error
    for path, one in told.items():
        mark = marks.get(path)
        if mark is not None:
            _PUT[type(mark)](mark, one)
    return whole


def _tell(mark: Mark | None) -> Told | None:
    """None for what is not told."""
    tell_one = _TELL.get(type(mark))
    return None if tell_one is None else tell_one(mark)


# ---------------------------------------------------------------- of each kind


def _tell_groups(mark: HyperParameters) -> Told | None:
    told = [{key: value for key, value in group.items() if key != "params"} for group in mark.groups]
    return told if all(map(_is_flat, told)) else None


def _put_groups(mark: HyperParameters, told: Told) -> None:
    for group, there in zip(mark.optimizer.param_groups, told, strict=False):
        group.update(_like(group, there))


def _tell_flags(mark: Flags) -> Told:
    return [bytes(mark.modes.before), bytes(mark.trained)]


def _put_flags(mark: Flags, told: Told) -> None:
    mark.mark()
    if (len(mark.modes.before), len(mark.trained)) == (len(told[0]), len(told[1])):
        mark.modes.before[:], mark.trained[:] = map(bool, told[0]), map(bool, told[1])
        mark.rewind()


def _tell_schedule(mark: Schedule) -> Told | None:
    told = []
    for before in mark.before:
        flat = {key: value for key, value in before.items() if _is_scalar_or_few(value)}
        if not all(key in flat or _is_fixed(value) for key, value in before.items()):
            return None
        told.append(flat)
    return told


def _put_schedule(mark: Schedule, told: Told) -> None:
    for scheduler, there in zip(mark.schedulers, told, strict=False):
        vars(scheduler).update(_like(vars(scheduler), there))


def _is_fixed(value: Any) -> bool:
    """What a schedule holds and does not change: functions, its optimizer, milestones, phases, schedules inside it."""
    if type(value) in _SEQUENCES:
        return all(each is None or _is_fixed(each) for each in value)
    return callable(value) or isinstance(value, (Optimizer, LRScheduler, Counter)) or _is_phase(value)


def _is_phase(value: Any) -> bool:
    """Of `OneCycleLR`: from which step to which, and between which learning rates."""
    return type(value) is dict and "end_step" in value


def _tell_entries(mark: Entries) -> Told | None:
    value = mark.before
    if isinstance(value, dict):
        return value if _is_flat(value) else None
    return list(value) if len(value) <= MOST and all(type(each) in _SCALARS for each in value) else None


def _put_entries(mark: Entries, told: Told) -> None:
    live = mark.value
    if isinstance(live, dict):
        told = _like(live, told)
    live.clear()
    if isinstance(live, (dict, set)):
        live.update(told)
    else:
        live.extend(told)


def _tell_fields(mark: Fields) -> Told | None:
    return mark.before if _is_flat(mark.before) else None


def _put_fields(mark: Fields, told: Told) -> None:
    fields = vars(mark.value)
    there = _like(fields, told)
    for name in [name for name in fields if name not in there]:
        del fields[name]
    fields.update(there)


_TELL: Mapping[type, Callable[[Any], Told | None]] = {
    HyperParameters: _tell_groups, Flags: _tell_flags, Schedule: _tell_schedule, Entries: _tell_entries,
    Fields: _tell_fields,
}  # fmt: skip
_PUT: Mapping[type, Callable[[Any, Told], None]] = {
    HyperParameters: _put_groups, Flags: _put_flags, Schedule: _put_schedule, Entries: _put_entries,
    Fields: _put_fields,
}  # fmt: skip


def _is_flat(value: Mapping[Any, Any]) -> bool:
    """A dict by texts, of few scalars and short sequences of such."""
    return len(value) <= MOST and all(type(key) is str and _is_scalar_or_few(each) for key, each in value.items())


def _is_scalar_or_few(value: Any) -> bool:
    if type(value) in _SEQUENCES:
        return len(value) <= MOST and all(type(each) in _SCALARS for each in value)
    return type(value) in _SCALARS


def _like(live: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """What was told, with tuples where there are tuples here: a message has none."""
    return {key: tuple(value) if _is_tuple(live.get(key), value) else value for key, value in told.items()}


def _is_tuple(live: Any, told: Any) -> bool:
    return isinstance(live, tuple) and isinstance(told, Sequence) and not isinstance(told, str)
