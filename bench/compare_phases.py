"""Phases: where the time of each recovery went, by what the processes have written down. Pure.

For systems that start again, by the marks of their workers; the last worker counts. For TorchFT, by its steps: it
stands until timeouts are over, goes on with fewer, and is whole again. For torchrelay, its own ledger tells.
"""

from __future__ import annotations

import statistics
from typing import Any

from compare_figures import Seen, first_together_ns, incidents, pause_s, until_ns, usual_s, went_on
from compare_schedule import What

# By mark: what the time up to it was for.
OF_MARKS = {
    "started": "notice, and end the others",
    "called": "notice, abort, and meet",
    "imported": "start and import",
    "connected": "connect",
    "loaded": "load the checkpoint",
}
FIRST, AGAIN = "first step", "steps done again"
STAND, FEWER = "stand until timeouts are over", "train with fewer"
Phases = dict[str, float]


def marked(seen: Seen, at: int) -> Phases | None:
    """Of a fault after which all start again: seconds by phase; None without marks after it, or if it was the end."""
    if not went_on(seen, at):
        return None
    fault, until = seen.struck[at], until_ns(seen, at)
    found, before = Phases(), fault.at_ns
    known = {mark.name for marks in seen.marks.values() for mark in marks}
    names = [name for name in OF_MARKS if name in known]
    if "called" in names:  # whoever was kept is called again, and is not started
        names = [name for name in names if name not in ("started", "imported")]
    for name in names:
        stamps = [
            mark.at_ns
            for marks in seen.marks.values()
            for mark in marks
            if mark.name == name and fault.at_ns < mark.at_ns < until
        ]
        if not stamps:
            return None
        found[OF_MARKS[name]] = max(0, max(stamps) - before) / 1e9
        before = max(before, *stamps)
    firsts = [
        next((row.at_ns for row in rows if row.committed and row.at_ns > before), None) for rows in seen.lines.values()
    ]
    made = [first for first in firsts if first is not None]
    if not made:
        return None
    first = max(made)
    found[FIRST] = (first - before) / 1e9
    new = (row.at_ns for row in seen.lines[0] if row.committed and row.at_ns > first and row.step > fault.step)
    return found | {AGAIN: (next(new, first) - first) / 1e9}


def by_steps(seen: Seen, at: int) -> Phases | None:
    """Of a fault after which the others go on: how long they stand, and how long they are fewer."""
    fault = seen.struck[at]
    pause, whole = pause_s(seen, at, usual_s(seen, 0.0)), first_together_ns(seen, at)
    if pause is None:
        return None
    end_s = pause if whole is None else (whole - fault.at_ns) / 1e9
    return {STAND: pause, FEWER: max(0.0, end_s - pause)}


def told(lines: list[dict[str, Any]]) -> Phases | None:
    """What torchrelay's ledger has of one fault, in seconds: summed, if it made several incidents."""
    found = Phases()
    for line in lines:
        for name, ms in line["phases"].items():
            found[name] = found.get(name, 0.0) + ms / 1000
    return found if lines else None


def phases(seen: Seen, what: What = What.KILL) -> list[Phases]:
    """Of each fault of this kind."""
    if seen.ledger is not None:
        of_each = [told(lines) for lines in incidents(seen)]
        each = [found for found, fault in zip(of_each, seen.struck, strict=True) if fault.what is what]
    else:
        restarts = any(mark.name == "loaded" for marks in seen.marks.values() for mark in marks)
        each = [(marked if restarts else by_steps)(seen, at) for at, one in enumerate(seen.struck) if one.what is what]
    return [one for one in each if one is not None]


def medians(each: list[Phases]) -> Phases:
    """By phase, in the order in which they come. They need not add up to the median of the whole."""
    names = dict.fromkeys(name for one in each for name in one)
    return {name: statistics.median(one.get(name, 0.0) for one in each) for name in names}


def longest(each: list[Phases]) -> Phases:
    names = dict.fromkeys(name for one in each for name in one)
    return {name: max(one.get(name, 0.0) for one in each) for name in names}
