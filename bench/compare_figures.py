"""Figures of `compare`, made of what the ranks of a system have written down. Pure."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import Counter
from datetime import datetime
from itertools import pairwise
from typing import Any

from msgspec import Struct

from compare_schedule import What

SKIP = 10  # steps at the beginning that nothing is judged by
BLUR_NS = 500_000_000  # an incident may be dated so long before its fault: two clocks, read one after the other


class Line(Struct, frozen=True, array_like=True):
    """One try of a step by one rank (see `rivals/task.Log`). Times in ns; `batch` -1: it gave nothing to the update."""

    step: int
    at_ns: int
    cpu_ns: int
    batch: int
    together: int
    pid: int
    committed: int


class Mark(Struct, frozen=True, array_like=True):
    """What a process had behind it before its first step: started, imported, called, connected, loaded."""

    name: str
    at_ns: int
    pid: int


class Struck(Struct, frozen=True, kw_only=True):
    """A fault that was made: to whom, when (ns of the monotonic clock), and how far training was."""

    what: What
    ranks: tuple[int, ...]
    at_ns: int
    step: int


class Seen(Struct, frozen=True, kw_only=True):
    """All that was seen of one system. `reason`: why it did not come to the end; empty if it did.

    `ledger` is None for a system that keeps none; `wall_ns`: the clock by which it is dated, less the monotonic one.
    """

    ranks: int
    steps: int
    early: int
    lines: dict[int, list[Line]]
    marks: dict[int, list[Mark]]
    struck: list[Struck]
    missed: int = 0  # faults that found nobody before the end
    spawned_ns: int = 0
    reason: str = ""
    ledger: list[dict[str, Any]] | None = None
    wall_ns: int = 0
    cpu_a_step_s: float | None = None
    digests: list[str] = []
    early_digests: list[str] = []


class Plain(Struct, frozen=True, kw_only=True):
    """Plain PyTorch without faults: what the others are measured by. Seconds; `digest` after the last step."""

    jct_s: float
    step_s: float
    cpu_a_step_s: float
    digest: str
    early_digest: str


class Figures(Struct, frozen=True, kw_only=True):
    """What it comes to. Times in seconds, from the first step of the last rank; None: it never came to that."""

    jct_s: float | None  # until the last step of the last rank
    jct_samples_s: float | None  # until as many samples are in the model as in the undisturbed run
    ettr: float | None  # what these samples take undisturbed under plain PyTorch, over what they took
    start_s: float
    faults: int  # that were made, and took effect
    idle_faults: int  # a rank was asked to leave, and did not
    lost_steps: int  # done again, or refused
    repeated_steps: int
    refused_steps: int
    skipped_samples_share: float | None  # of the samples that are planned: those that are in the model never
    once_share: float | None  # exactly once
    unplanned_pause_p50_s: float | None
    unplanned_pause_max_s: float | None
    planned_pause_p50_s: float | None
    hang_pause_s: float | None
    whole_again_p50_s: float | None  # from a fault until all ranks have done a step together
    step_s: float
    step_time_ratio: float
    cpu_time_ratio: float | None
    bit_equal: bool | None
    bit_equal_early: bool | None  # before the first fault: if not, this system sums in another order


def begin_ns(seen: Seen) -> int:
    """When the last rank had done its first step."""
    return max((rows[0].at_ns for rows in seen.lines.values() if rows), default=seen.spawned_ns)


def end_ns(seen: Seen) -> int | None:
    """When the last rank had done the last step; None if none has."""
    found = [row.at_ns for rows in seen.lines.values() for row in rows if row.step == seen.steps and row.committed]
    return max(found, default=None)


def kept(seen: Seen) -> dict[int, tuple[int, set[int]]]:
    """By step: when it was done, and the batches that went into the model; of steps done again, the last time.

    A rank that was killed may not have written down its last step. If all took part in it, its batch is in the model.
    """
    last = {(rank, row.step): row for rank, rows in seen.lines.items() for row in rows if row.committed}
    by_step: dict[int, list[Line]] = {}
    for row in last.values():
        by_step.setdefault(row.step, []).append(row)
    found: dict[int, tuple[int, set[int]]] = {}
    for step, rows in by_step.items():
        batches = {row.batch for row in rows if row.batch >= 0}
        if len(batches) == len(rows) and all(row.together == seen.ranks for row in rows):
            batches |= {batch // seen.ranks * seen.ranks + at for batch in batches for at in range(seen.ranks)}
        found[step] = (max(row.at_ns for row in rows), batches)
    return found


def samples_end_ns(seen: Seen) -> int | None:
    """When as many batches were in the model as the undisturbed run has; None if never."""
    done = 0
    for at, batches in sorted(kept(seen).values(), key=lambda one: one[0]):
        done += len(batches)
        if done >= seen.steps * seen.ranks:
            return at
    return None


def once_and_never(seen: Seen) -> tuple[float, float]:
    """The shares of the planned batches that are in the model exactly once, and never."""
    counts = Counter(batch for _, batches in kept(seen).values() for batch in batches)
    planned = seen.steps * seen.ranks
    once = sum(counts[batch] == 1 for batch in range(planned))
    return once / planned, sum(batch not in counts for batch in range(planned)) / planned


def repeated(seen: Seen) -> int:
    """Steps that were done more than once, by rank 0, who is never hit."""
    return sum(times - 1 for times in Counter(row.step for row in seen.lines[0] if row.committed).values())


def steady_s(seen: Seen) -> float:
    """The median step before the first fault, over all ranks; nan if there was none."""
    until = seen.struck[0].step if seen.struck else seen.steps
    spans = [
        (after.at_ns - before.at_ns) / 1e9
        for rows in seen.lines.values()
        for before, after in pairwise(rows)
        if SKIP < after.step <= until and after.step == before.step + 1 and after.together == seen.ranks
    ]
    return statistics.median(spans) if spans else float("nan")


def usual_s(seen: Seen, otherwise: float) -> float:
    """A usual step of this system; if none was seen, another one. What is not known must not make a pause nothing."""
    found = steady_s(seen)
    return otherwise if math.isnan(found) else found


def until_ns(seen: Seen, at: int) -> int:
    """The end of what is put down to this fault: the next one, or the end."""
    later = [one.at_ns for one in seen.struck]
    later = later[at + 1 : at + 2]
    return later[0] if later else max(rows[-1].at_ns for rows in seen.lines.values() if rows)


def gaps_ns(seen: Seen, at: int, rank: int) -> list[tuple[int, int]]:
    """How long a rank stood between its steps, of that what lies between this fault and the next; and until when.

    The next fault comes in the middle of a step: what is stood for it is not put down to this one, too.
    """
    begin, until = seen.struck[at].at_ns, until_ns(seen, at)
    stamps = [row.at_ns for row in seen.lines[rank] if row.committed]
    return [
        (min(after, until) - max(before, begin), after)
        for before, after in pairwise(stamps)
        if after > begin and before < until
    ]


def went_on(seen: Seen, at: int) -> bool:
    """Whether training went on after a fault. It did not if the system ended early, within a few steps of its last one.

    What was under way when it was hit may still be done: a step or two are no proof. Steps done again count.
    """
    if not seen.reason or at + 1 < len(seen.struck) or end_ns(seen) is not None:
        return True
    hit_ns = seen.struck[at].at_ns
    return any(sum(row.committed and row.at_ns > hit_ns for row in rows) >= SKIP for rows in seen.lines.values())


def pause_s(seen: Seen, at: int, step_s: float) -> float | None:
    """How long the survivors of a fault stood: the longest time without a step of any of them, less a usual step.

    What was under way may still have been done: only the part after the fault counts. None if they never went on. Who
    was hit or left is not asked, though it may have gone on at once in another place.
    """
    if not went_on(seen, at):
        return None
    hit = seen.struck[at].ranks
    found = [stood for rank in seen.lines if rank not in hit for stood, _ in gaps_ns(seen, at, rank)]
    return max(0.0, max(found) / 1e9 - step_s) if found else None


def first_together_ns(seen: Seen, at: int) -> int | None:
    """When, after the pause of a fault, all ranks had done a step together; None if not before the next fault."""
    gaps = gaps_ns(seen, at, 0)
    if not gaps or not went_on(seen, at):
        return None
    stood = max(gaps)[1]
    together = (
        row.at_ns for row in seen.lines[0] if row.committed and row.at_ns >= stood and row.together == seen.ranks
    )
    return next(together, None)


def incidents(seen: Seen) -> list[list[dict[str, Any]]]:
    """The incidents of a system's own ledger by the fault that was the last before them; none for want of a ledger."""
    begun = [fault.at_ns - BLUR_NS for fault in seen.struck]
    found: list[list[dict[str, Any]]] = [[] for _ in begun]
    for line in seen.ledger or ():
        at = datetime.fromisoformat(line["at"]).timestamp() * 1e9 - seen.wall_ns
        if place := bisect_right(begun, at):
            found[place - 1].append(line)
    return found


def is_idle(seen: Seen, at: int) -> bool:
    """Whether a rank was asked to leave, and by the system's own ledger nothing came of it."""
    return seen.ledger is not None and seen.struck[at].what is What.LEAVE and not incidents(seen)[at]


def bits_equal(digests: list[str], ranks: int, digest: str) -> bool | None:
    """Whether all ranks came to this digest; None if none differs, but not all have one."""
    if not set(digests) <= {digest}:
        return False
    return True if len(digests) == ranks else None


def progress(seen: Seen) -> list[tuple[float, int]]:
    """Seconds from the first step, and the step that rank 0 had behind it: it falls where steps are done again."""
    begin = begin_ns(seen)
    return [((row.at_ns - begin) / 1e9, row.step) for row in seen.lines[0] if row.committed]


def goodput(seen: Seen, step_s: float, window_s: float) -> list[tuple[float, float]]:
    """Per window: its middle in seconds, and new batches in the model over what plain PyTorch does in that time."""
    begin, done = begin_ns(seen), list[float]()
    for at, batches in kept(seen).values():
        done += [(at - begin) / 1e9] * len(batches)
    done.sort()
    found, left = [], 0.0
    while done and left < done[-1]:
        count = bisect_right(done, left + window_s) - bisect_right(done, left)
        found.append((left + window_s / 2, count / seen.ranks * step_s / window_s))
        left += window_s
    return found


def plain_of(seen: Seen) -> Plain:
    """Raises ValueError if plain PyTorch did not come to the end: then there is nothing to measure by."""
    end = end_ns(seen)
    whole = {len(found) for found in (seen.digests, seen.early_digests)} == {seen.ranks}
    alike = len(set(seen.digests)) == len(set(seen.early_digests)) == 1
    if end is None or seen.reason or not (whole and alike):
        raise ValueError(f"plain PyTorch without faults did not come to one result: {seen.reason or seen.digests}")
    return Plain(
        jct_s=(end - begin_ns(seen)) / 1e9,
        step_s=steady_s(seen),
        cpu_a_step_s=seen.cpu_a_step_s or float("nan"),
        digest=seen.digests[0],
        early_digest=seen.early_digests[0],
    )


def mean_of(first: Plain, again: Plain) -> Plain:
    """Of both undisturbed runs: the machine may have become slower or faster meanwhile."""
    return Plain(
        jct_s=(first.jct_s + again.jct_s) / 2,
        step_s=(first.step_s + again.step_s) / 2,
        cpu_a_step_s=(first.cpu_a_step_s + again.cpu_a_step_s) / 2,
        digest=first.digest,
        early_digest=first.early_digest,
    )


def median_of(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def figures(seen: Seen, plain: Plain) -> Figures:
    """All figures of a system."""
    begin, step = begin_ns(seen), steady_s(seen)
    # Who was ended, or gave up, has not done the job, whatever its fastest rank had behind it.
    end = None if seen.reason else end_ns(seen)
    samples = None if seen.reason else samples_end_ns(seen)
    usual = usual_s(seen, plain.step_s)
    idle = [at for at in range(len(seen.struck)) if is_idle(seen, at)]
    whole = once_and_never(seen) if end is not None else (None, None)
    pauses: dict[What, list[float]] = {what: [] for what in What}
    again = []
    for at, fault in enumerate(seen.struck):
        if at in idle:
            continue
        if (pause := pause_s(seen, at, usual)) is not None:
            pauses[fault.what].append(pause)
        if (together := first_together_ns(seen, at)) is not None:
            again.append((together - fault.at_ns) / 1e9)
    unplanned = [*pauses[What.KILL], *pauses[What.NODE], *pauses[What.STOP]]
    repeats, refused = repeated(seen), sum(not row.committed for row in seen.lines[0])
    samples_s = None if samples is None else (samples - begin) / 1e9
    cpu = seen.cpu_a_step_s
    return Figures(
        jct_s=None if end is None else (end - begin) / 1e9,
        jct_samples_s=samples_s,
        ettr=None if samples_s is None else plain.jct_s / samples_s,
        start_s=(begin - seen.spawned_ns) / 1e9,
        faults=len(seen.struck) - len(idle),
        idle_faults=len(idle),
        lost_steps=repeats + refused,
        repeated_steps=repeats,
        refused_steps=refused,
        once_share=whole[0],
        skipped_samples_share=whole[1],
        unplanned_pause_p50_s=median_of(unplanned),
        unplanned_pause_max_s=max(unplanned, default=None),
        planned_pause_p50_s=median_of(pauses[What.LEAVE]),
        hang_pause_s=max(pauses[What.STOP], default=None),
        whole_again_p50_s=median_of(again),
        step_s=step,
        step_time_ratio=step / plain.step_s,
        cpu_time_ratio=None if cpu is None else cpu / plain.cpu_a_step_s,
        bit_equal=bits_equal(seen.digests, seen.ranks, plain.digest),
        bit_equal_early=bits_equal(seen.early_digests, seen.ranks, plain.early_digest),
    )
