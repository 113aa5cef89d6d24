"""Trace: faults that somebody has had, read from a CSV file, to be described or replayed.

    start,end,node,cause
    3.8955,27.5,node-17,GPU
    2026-03-01T12:00:00,2026-03-02T08:00:00,node-4,NIC

Times are hours since the beginning, from 0 on, or dates (ISO 8601); `end` may be empty where the repair was not over.
`cause` is free text; `path`, `process` and `switch` mean what they mean in `faults`, anything else is a node's. Columns
may be in any order.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from torchrelay.forecast.inputs.faults import Cause, Fault

COLUMNS = ("start", "end", "node", "cause")


class BadTrace(ValueError):
    """A trace that cannot be used: which file, which line, what is wrong."""

    def __init__(self, path: Path, line: int, message: str) -> None:
        super().__init__(f"{path}, line {line}: {message}" if line else f"{path}: {message}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One fault of one node; hours since the first start. `end_h` is infinite where the repair was not over."""

    start_h: float
    end_h: float
    node: str
    cause: str
    line: int


@dataclass(frozen=True)
class Trace:
    """A trace: entries by start, what it covers, and the nodes it names (there may be more that never failed)."""

    entries: tuple[Entry, ...]
    span_h: float
    nodes: tuple[str, ...]


def read_trace(path: Path) -> Trace:
    """Read and check a trace. Raises `BadTrace`."""
    rows = rows_of(path)
    if not rows:
        raise BadTrace(path, 0, f"is empty; its first line is to be: {','.join(COLUMNS)}")
    heads = [head.strip() for head in rows[0]]
    check_heads(path, heads)
    found = [
        entry_of(path, number, dict(zip(heads, row, strict=True))) for number, row in checked(path, rows, len(heads))
    ]
    if not found:
        raise BadTrace(path, 0, "has no fault in it: nothing to describe or replay")
    return trace_of(path, found)


def rows_of(path: Path) -> list[list[str]]:
    """The cells. Raises `BadTrace` if it is no CSV file."""
    remedy = f"give a CSV with the columns {','.join(COLUMNS)}"
    try:
        text = path.read_bytes().decode("utf-8-sig")
        if "\0" in text:
            raise BadTrace(path, 0, f"is no text file: {remedy}")
        return list(csv.reader(io.StringIO(text, newline="")))
    except OSError as error:
        raise BadTrace(path, 0, error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise BadTrace(path, 0, f"is no text file: {remedy}") from error
    except csv.Error as error:
        raise BadTrace(path, 0, f"is no CSV file ({error}): {remedy}") from error


def check_heads(path: Path, heads: list[str]) -> None:
    """Whether the first line names each column once. Raises `BadTrace`."""
    unknown = [head for head in heads if head not in COLUMNS]
    missing = [name for name in COLUMNS if name not in heads]
    if len(heads) == 1 and re.search(r"[;\t|]", heads[0]):  # as spreadsheets write it where 1,5 is a number
        raise BadTrace(path, 1, f"{heads[0]!r} is one column: commas must be between them: {','.join(COLUMNS)}")
    if unknown or missing or len(heads) != len(COLUMNS):
        what = (
            f"unknown column {unknown[0]!r}"
            if unknown
            else f"no column {missing[0]!r}"
            if missing
            else "a column twice"
        )
        raise BadTrace(path, 1, f"{what}; columns are: {', '.join(COLUMNS)}")


def checked(path: Path, rows: list[list[str]], width: int) -> Iterator[tuple[int, list[str]]]:
    """The rows after the first, with their numbers; empty ones are left out."""
    for number, row in enumerate(rows[1:], 2):
        if any(cell.strip() for cell in row):
            if len(row) != width:
                raise BadTrace(path, number, f"has {len(row)} cells, the first line has {width}")
            yield number, row


def entry_of(path: Path, line: int, row: dict[str, str]) -> Entry:
    """One row; times still on their own scale."""
    node = row["node"].strip()
    if not node:
        raise BadTrace(path, line, "names no node")
    start = time_of(path, line, "start", row["start"])
    end = math.inf if not row["end"].strip() else time_of(path, line, "end", row["end"])
    if end < start:
        raise BadTrace(path, line, f"the repair of {node} ends ({row['end']}) before the fault begins ({row['start']})")
    return Entry(start, end, node, row["cause"].strip(), line)


def time_of(path: Path, line: int, column: str, text: str) -> float:
    """A time in hours: a number, or a date (hours since 1970)."""
    try:
        hours = float(text)
    except ValueError:
        hours = math.nan
        try:
            date = datetime.fromisoformat(text.strip())
            hours = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() / 3600
        except (ValueError, OverflowError):
            pass
    if not math.isfinite(hours):
        raise BadTrace(path, line, f"{column} {text!r} is no time: give hours (3.25), or a date (2026-03-01T12:00:00)")
    if hours < 0:
        raise BadTrace(
            path,
            line,
            f"{column} {text!r} lies before the beginning, from which hours are counted: give "
            "hours from 0 on, or dates from 1970 on",
        )
    return hours


def trace_of(path: Path, found: list[Entry]) -> Trace:
    """Check what rows say together, and count from the first start."""
    dated = [entry for entry in found if entry.start_h > 200_000]
    if dated and len(dated) != len(found):
        other = next(entry for entry in found if entry.start_h <= 200_000)
        raise BadTrace(path, other.line, f"counts hours, and line {dated[0].line} has a date: one kind of time, please")
    last: dict[str, Entry] = {}
    ordered = sorted(found, key=lambda entry: (entry.start_h, entry.line))
    for entry in ordered:
        before = last.get(entry.node)
        if before is not None and entry.start_h < before.end_h:
            raise BadTrace(
                path, entry.line, f"{entry.node} fails while the repair that began in line {before.line} is not over"
            )
        last[entry.node] = entry
    # A trace in hours has its own beginning, before its first fault.
    first = ordered[0].start_h if dated else 0.0
    entries = tuple(Entry(one.start_h - first, one.end_h - first, one.node, one.cause, one.line) for one in ordered)
    known = [end for one in entries for end in (one.start_h, one.end_h) if math.isfinite(end)]
    if max(known) == 0:
        raise BadTrace(
            path, ordered[0].line, "this and all other faults begin and end in one moment: there is no rate in it"
        )
    return Trace(entries, max(known), tuple(sorted({one.node for one in entries})))


def replay(trace: Trace, nodes: int, source: Path) -> Iterator[Fault]:
    """The faults of a trace, for a cluster of so many nodes; nodes get numbers in the order of their names.

    Raises `BadTrace` if the trace names more nodes than there are.
    """
    if len(trace.nodes) > nodes:
        raise BadTrace(
            source,
            0,
            f"names {len(trace.nodes)} nodes, and the cluster has {nodes} with its spares: "
            "give more GPUs (--gpus) or spares, or a part of the trace",
        )
    numbers = {name: number for number, name in enumerate(trace.nodes)}
    for one in trace.entries:
        cause = Cause(one.cause.lower()) if one.cause.lower() in tuple(Cause) else Cause.NODE
        yield Fault(one.start_h, numbers[one.node], cause, one.end_h - one.start_h)
