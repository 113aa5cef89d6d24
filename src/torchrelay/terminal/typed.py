"""Typed: the words of a command as they were typed, where a value may begin with a minus."""

from __future__ import annotations

import re
from collections.abc import Sequence

NEGATIVE = re.compile(r"-(\d|\.\d|inf\b|nan\b)")


def joined(words: Sequence[str]) -> list[str]:
    """With `--mttf -5h` as `--mttf=-5h`: argparse takes -5h for a flag, and would say only that a value is missing."""
    found: list[str] = []
    for word in words:
        if NEGATIVE.match(word) and found and re.fullmatch(r"--[a-z][a-z-]*", found[-1]):
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found
