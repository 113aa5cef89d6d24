"""Absent: what stands on a replacement in a place whose value it does not have, until the script puts one there.

A step that keeps something for the next one, too large or of a kind that is not carried, has it on the lost rank alone.
Whether the next step reads it nobody can tell beforehand: most of it is for people, or is written before it is read.
So a thing is put there that goes when another one comes, and that refuses to be used. Only what tells nothing of its
value is let pass: `is None`, `id`, and to be put elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from torchrelay.errors import RefusedError, UnprovedError

_OURS = str(Path(__file__).parents[2])
_refused: list[UnprovedError] = []
_lost: set[str] = set()  # paths of what an update has changed, or may have


def check() -> None:
    """Raises the `UnprovedError` that the script has caught, if it has."""
    if _refused:
        raise _refused[0]


def is_absent(value: Any) -> bool:
    """Whether this stands for something else; to be asked instead of `isinstance`."""
    return type(value) is Absent


def refusal(path: str) -> UnprovedError:
    """Also for what has no place here."""
    if path in _lost:
        return UnprovedError(
            f"{path} changes after optimizer.step(), and a rank was lost between that and the return of its step. What "
            "it had there is not known: it was not seen to be alike on all ranks. Change it before optimizer.step(), "
            "or after the step has returned"
        )
    return UnprovedError(
        f"{path} was kept from one step for the next, and the worker that takes over this rank does not have it: it is "
        "too large to be carried, or not made of numbers, texts and small tensors. Keep it in a buffer of a module, or "
        "give it to protect(state=...)"
    )


def nowhere(path: str, *, is_function: bool) -> str:
    """Of something that a replacement does not have. `is_function`: or an object, which stands there."""
    if is_function:
        return (
            f"{path} is another function, class or module than at the start, and the worker that takes over cannot "
            "have it: it has no name by which it is found, or holds more than numbers and texts. "
            "Write it as a function of a module (no lambda), or choose by a number: a flag, an epoch"
        )
    return (
        f"{path} has changed in the course of the training, and there is nothing of this name or kind in the worker "
        "that takes over: let every rank build the same objects before its first loop or call"
    )


def note_lost(paths: Iterable[str]) -> None:
    """These are refused for that reason."""
    _lost.update(paths)


def in_place(path: str) -> UnprovedError:
    """What a call that is made again would find is not what it found before."""
    return UnprovedError(
        f"{path} is changed where it lies by a step, and is not made of numbers, texts and small tensors: a step that "
        "a fault has cut short cannot be made again. Put a new one in its place, or give it to protect(state=...)"
    )


def not_ready(path: str) -> UnprovedError:
    """What a replacement has there is not what its predecessor had."""
    return UnprovedError(
        f"{path} is an object of a library that changed in the first steps, and the worker that takes over this rank "
        "has another one after its first step: it was made ready with what only that step had. Make it ready before "
        "protect(), or give it to protect(state=...) if it has state_dict() and load_state_dict()"
    )


def refuse(path: str, why: UnprovedError | None = None) -> UnprovedError:
    """The same, or for another reason; the script is told of it later on if it catches it."""
    _refused.append(refusal(path) if why is None else why)
    return _refused[-1]


def is_ours(frame: FrameType) -> bool:
    """Whether it is our own looking round, which is no use of what is found."""
    return frame.f_code.co_filename.startswith(_OURS)


def _read(value: Absent, depth: int = 2) -> NoReturn:
    """The script uses it. Our own looking round is no use of it."""
    caller = sys._getframe(depth)
    if is_ours(caller):
        raise AttributeError(value.path)
    raise refuse(value.path)


class Absent:
    """Stands for a value that is not here."""

    __slots__ = ("__weakref__", "path")

    def __init__(self, path: str) -> None:
        object.__setattr__(self, "path", path)

    @property
    def __class__(self) -> type:
        if is_ours(sys._getframe(1)):
            return Absent
        _read(self)

    @__class__.setter
    def __class__(self, _: type) -> None:
        _read(self)

    def __getattr__(self, _: str) -> NoReturn:
        _read(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        waiting = [*args, *(kwargs or {}).values()]
        while waiting:
            one = waiting.pop()
            if type(one) is Absent:
                _read(one)
            waiting += one if type(one) in (list, tuple) else one.values() if type(one) is dict else ()
        raise refusal("a value")


def _reading(name: str) -> Callable[..., NoReturn]:
    def read(self: Absent, *_: Any, **__: Any) -> NoReturn:
        _read(self)

    read.__name__ = name
    return read


_BINARY = [
    "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift", "and", "xor",
    "or",
]  # fmt: skip
_USES = [
    "abs", "bool", "bytes", "call", "contains", "copy", "deepcopy", "delattr", "delitem", "dir", "enter", "eq", "exit",
    "float", "format", "ge", "getitem", "getstate", "gt", "hash", "index", "int", "invert", "iter", "le", "len", "lt",
    "ne", "neg", "next", "pos", "reduce_ex", "repr", "reversed", "round", "setattr", "setitem", "str", "array",
    *_BINARY, *(f"r{name}" for name in _BINARY), *(f"i{name}" for name in _BINARY if name != "divmod"),
]  # fmt: skip
for _name in _USES:
    setattr(Absent, f"__{_name}__", _reading(f"__{_name}__"))


# ---------------------------------------------------------------- what cannot be carried, and has no place either

LARGE, ITERATOR = "large", "an iterator"  # and changes where it lies; and is gone on with
OBJECTS = "objects"  # come up in a container, and are not made of values
LIBRARY = "an object of a library"  # that changes inside
GROWS = "a row"  # of what cannot be carried, that steps add to
COPY = "a copy of a model, a schedule or a scaler"
OUTSIDE = (
    "{} changes in the course of the training, and protect() was not given it: a worker that takes over a rank would "
    "not have it"
)
OUTSIDE_REMEDY = "pass it in protect(state={...}): a module, an object with state_dict(), tensors in a dict that stays"
LACKING = {
    ITERATOR: (
        "{} is an iterator that is gone on with in the course of the training: where it is cannot be carried, and a "
        "worker that takes over this rank would begin it anew. Take what you need by the number of the step"
    ),
    COPY: f"{OUTSIDE}. {OUTSIDE_REMEDY[0].upper()}{OUTSIDE_REMEDY[1:].replace('{...}', '{{...}}')}",
    LIBRARY: (
        "{} is an object of a library, and changes in the course of the training: what is in it cannot be carried to a "
        "worker that takes over, or put back for a step that is made again. Give it to protect(state=...) if it has "
        "state_dict() and load_state_dict(), or keep what results depend on in tensors, numbers or your own classes"
    ),
    OBJECTS: (
        "{} come up in the course of the training, and are not made of numbers, texts and small tensors: they cannot "
        "be carried to a worker that takes over. Make them before the first step, or keep what is counted in "
        "protect(state=...)"
    ),
    GROWS: (
        "{} grows in the course of the training, by what is not carried to a worker that takes over: arrays, tensors "
        "on a device, objects, or too many. Append numbers (loss.item()), or give it to protect(state=...)"
    ),
    LARGE: (
        "{} changes in the course of the training, and is too large to be carried, or to be put back for a step that "
        "is made again. Keep it in a buffer of a module, or give it to protect(state=...)"
    ),
}


def say(path: str, what: str) -> str:
    """To people, once. Returns `what`."""
    print(f"torchrelay: {LACKING[what].format(path)}. A fault ends the job from now on", file=sys.stderr, flush=True)
    return what


def order_too_large(path: str, size: int, most: int) -> RefusedError:
    """Of what the order of the data is drawn from. `size`, `most`: bytes that it has, and that are carried."""
    return RefusedError(
        f"{path} changes while data is read, and has some {size:,} bytes; at most {most:,} are carried to a "
        "replacement, which would read the data in another order",
        "draw a new order at the beginning of each epoch, from a generator that is seeded with the epoch "
        "(set_epoch), rather than to shuffle the last one again",
    )


def too_large(path: str, size: int, most: int) -> str:
    """Of what changes, and is not carried. `size`, `most`: bytes that it has, and that are carried."""
    return (
        f"{path} changes in the course of the training, and has some {size:,} bytes; at most {most:,} are carried. "
        "If results depend on it, keep it in a buffer, or in state=...; changed in place, a fault ends the job"
    )


def too_much(paths: Iterable[str], size: int, most: int) -> str:
    """The same, of several."""
    return (
        f"{', '.join(paths)} and others change in the course of the training and have {size:,} bytes; at most "
        f"{most:,} are carried to a replacement"
    )


def steps_on(path: str) -> RefusedError:
    """Of an iterator of the script's own."""
    return RefusedError(
        f"{path} is an iterator that is gone on with from step to step: where it is cannot be carried to a "
        "replacement, or put back for a step that is made again",
        "take what you need of it by the number of the step, or count with itertools.count()",
    )


def epochs_on(path: str) -> RefusedError:
    """Of one that is made once."""
    return RefusedError(
        f"{path} is an iterator that is gone on with from one epoch to the next: where it is cannot be carried to a "
        "replacement",
        "make it anew in __iter__, from a generator of random numbers or from the epoch",
    )


def refuse_lacking(lacking: dict[str, str], *, when: Collection[str] = LACKING) -> None:
    """By path, what it is that cannot be carried. Raises `UnprovedError` if there is one of these."""
    found = {path: what for path, what in lacking.items() if what in when}
    if found:
        name = min(found)
        raise UnprovedError(LACKING[found[name]].format(name))
