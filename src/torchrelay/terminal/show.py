"""Show: tables, JSON, and watching, for all verbs that list something."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import msgspec

WATCH_S = 1.0
# Long spans, in ms: up to where, rounded to what, how many of those make the unit before it, and their names.
LONG = ((3_599_500, 1_000, 60, "min", "s"), (86_370_000, 60_000, 60, "h", "min"), (math.inf, 3_600_000, 24, "d", "h"))
_HOME_AND_CLEAR = "\x1b[H\x1b[J"


class Output(StrEnum):
    """How a list is printed."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"  # one object a line


def show_json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as they need to be; numbers to the right; None is a dash."""
    cells = [["-" if value is None else str(value) for value in row] for row in rows]
    lines = [list(heads), *cells]
    widths = [max(len(line[place]) for line in lines) for place in range(len(heads))]
    right = [all(is_number(row[place]) for row in rows) and bool(rows) for place in range(len(heads))]
    aligned = (
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        )
        for line in lines
    )
    return "\n".join(line.rstrip() for line in aligned)


def clip(text: str, width: int = 60) -> str:
    """At most so many characters, for tables; `explain` has the whole."""
    return text if len(text) <= width else f"{text[: width - 3]}..."


def is_number(value: object) -> bool:
    return value is None or isinstance(value, int | float)


def milliseconds(value: float | None) -> str:
    """A span for people: 0.4 ms, 35 ms, 1.24 s, 3 min 5 s, 4 h 54 min, 5 d 3 h."""
    if value is None:
        return "-"
    if value < 1_000:
        return f"{value:.1f} ms" if value < 10 else f"{value:.0f} ms"
    if value < 59_995:  # from here on it would be rounded to 60.00 s
        return f"{value / 1_000:.2f} s"
    _, least, many, unit, below = next(one for one in LONG if value < one[0])
    larger, smaller = divmod(round(value / least), many)
    return " ".join(f"{count} {name}" for count, name in ((larger, unit), (smaller, below)) if count)


def show(page: Callable[[], str], *, watch: bool) -> None:
    """Print a page once, or anew every second until Ctrl-C."""
    if not watch:
        print(page())
        return
    try:
        while True:
            text = page()
            print(f"{_HOME_AND_CLEAR}{text}" if sys.stdout.isatty() else f"{text}\n", flush=True)
            time.sleep(WATCH_S)
    except KeyboardInterrupt:
        print()


def remark(note: str) -> None:
    """Say on stderr what is not part of the answer."""
    if note:
        print(f"torchrelay: {note}", file=sys.stderr)
