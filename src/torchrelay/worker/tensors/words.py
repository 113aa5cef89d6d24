"""Words: values that are told by a word, by a few numbers, or by the number or text that they are.

A path, a fraction, a range, the dtype to compute in; and objects of a script's own classes of numbers and texts, such
as `class Metres(float)`. A script puts another one in the place of the last. No code of the script makes it again.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import pathlib
import uuid
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch

WORD, PARTS, BASE = "word", "parts", "base"
HOW = (WORD, PARTS, BASE)
BY_WORD = (
    pathlib.PurePath, decimal.Decimal, fractions.Fraction, uuid.UUID, torch.device, np.dtype,
    torch.dtype, torch.layout, torch.memory_format,
)  # fmt: skip
_NAMED_BY_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_BY_PARTS: dict[type, Callable[[Any], list[Any] | None]] = {
    range: lambda value: [value.start, value.stop, value.step],
    slice: lambda value: [value.start, value.stop, value.step],
    torch.Size: lambda value: [list(value)],
    datetime.date: lambda value: [value.year, value.month, value.day],
    datetime.timedelta: lambda value: [value.days, value.seconds, value.microseconds],
    datetime.datetime: lambda value: None if value.tzinfo else [*value.timetuple()[:6], value.microsecond],
}
_BASES = (int, float, complex, str, bytes)


def how_told(kind: type) -> str:
    """One of `HOW`; empty for all other classes."""
    if issubclass(kind, BY_WORD):
        return WORD
    if kind in _BY_PARTS:
        return PARTS
    is_own = issubclass(kind, _BASES) and kind not in _BASES and kind is not bool and not issubclass(kind, np.generic)
    return BASE if is_own else ""


def tell(value: Any, how: str) -> Any:
    """What it takes to make it again, as a text, a number, or a list of such; None if there is more to it."""
    if how == PARTS:
        return _BY_PARTS[type(value)](value)
    if how == BASE:
        base = next(each for each in _BASES if isinstance(value, each))
        held = getattr(value, "__dict__", None)
        return None if held else base(*cast(Any, base).__getnewargs__(value))
    if isinstance(value, np.dtype):
        return None if value.hasobject or value.fields else value.str
    return str(value)


def make(kind: Any, how: str, told: Any) -> Any:
    """The value again."""
    if how == PARTS:
        return kind(*told)
    if how == BASE:
        base: Any = next(each for each in _BASES if issubclass(kind, each))
        return base.__new__(kind, told)
    if issubclass(kind, np.dtype):
        return np.dtype(told)
    return getattr(torch, told.removeprefix("torch.")) if issubclass(kind, _NAMED_BY_TORCH) else kind(told)
