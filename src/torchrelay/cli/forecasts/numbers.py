"""Numbers: those of forecasts as they are typed; errors quote what was said."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from torchrelay.economics.formulas.rates import Unreasonable

TIMES = {"h": "hours", "min": "minutes", "s": "seconds", "days": "days"}


def typed(flag: str, words: Sequence[str]) -> str | None:
    """The value of a flag as it was typed; None if it was not given. Given twice, the last one counts."""
    found = None
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, sign, value = word.partition("=")
        if name == flag:
            found = value if sign else after
    return found


def blame_flag(error: Unreasonable, flag: str, words: Sequence[str]) -> str:
    """What cannot be: the flag, its value as it was typed, and what that must be."""
    text = typed(flag, words)
    if not error.why:  # it names flags itself
        return str(error)
    if text is not None:
        return f"{flag} {text or repr(text)}: {error.why}"
    return f"{flag} {error.value} (the default): {error.why}" if error.value else str(error)


# ---------------------------------------------------------------- numbers, as argparse wants them


def whole_number(text: str) -> int:
    """Raises `argparse.ArgumentTypeError`."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None


def amount_in(unit: str) -> Callable[[str], float]:
    """Reads a number of this unit; that raises `argparse.ArgumentTypeError`."""

    def read(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            how = f": give {TIMES[unit]}, as in 1.5" if unit in TIMES else ""
            raise argparse.ArgumentTypeError(f"{text!r} is no number{how}") from None

    return read
