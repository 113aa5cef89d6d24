"""Figures of `turns`, made of what the ranks of each job have written down. Pure."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from compare_figures import Seen, bits_equal, once_and_never, pause_s, repeated, steady_s
from compare_results import SECOND_A_FAULT
from figures import upper_bound_of_median

SAMPLES = 2000


class Turn(Struct, frozen=True, array_like=True):
    """A rank begins its turn, having done so many steps before (see `rivals/task.Log`); ns of the monotonic clock."""

    step: int
    at_ns: int


def firsts(told: Sequence[Turn]) -> list[Turn]:
    """Of what one rank has told, the first of each turn: whoever takes the rank over right there tells it again."""
    found: dict[int, Turn] = {}
    for turn in told:
        found.setdefault(turn.step, turn)
    return list(found.values())


class Spent(Struct, frozen=True, kw_only=True):
    """What each job used in one turn of one of them, from before it began until it was seen to be over."""

    took_s: float
    cpu_s: dict[str, float]


class Job(Struct, frozen=True, kw_only=True):
    """One job: all that was seen of it, by its own clock (see `job_of`), and of each of its turns:

    took      seconds, less the share of the processors that the waiting jobs have used
    cpu       CPU seconds of all its processes
    others    of all processors, what each other job used meanwhile
    """

    name: str
    title: str
    seen: Seen
    took: list[float]
    cpu: list[float]
    others: list[dict[str, float]]

    @property
    def ours(self) -> bool:
        return self.name.startswith("torchrelay")


def job_of(
    name: str, title: str, seen: Seen, begins: Sequence[Turn], plan: Sequence[int], spent: Sequence[Spent], cores: int
) -> Job:
    """A job by a clock of its own, which stands while others have their turns.

    A turn lasts from the begin of the last rank to the last step of the last rank. Raises ValueError if a rank is
    missing at a begin or an end: then the sum is no job's time. What the waiting jobs use of the processors, of which
    there are too few, the job would have used itself.
    """
    spans = []
    for first, last in pairwise(plan):
        begun = [turn.at_ns for turn in begins if turn.step == first]
        ended = [row.at_ns for rows in seen.lines.values() for row in rows if row.step == last and row.committed]
        if len(begun) != seen.ranks or len(ended) < seen.ranks:
            raise ValueError(f"{len(begun)} ranks of {name} began after step {first}, {len(ended)} did step {last}")
        spans.append((max(begun), max(ended)))
    lines = {rank: [replace(row, at_ns=own_ns(row.at_ns, spans)) for row in rows] for rank, rows in seen.lines.items()}
    struck = [replace(fault, at_ns=own_ns(fault.at_ns, spans)) for fault in seen.struck]
    others = [
        {other: used / (turn.took_s * cores) for other, used in turn.cpu_s.items() if other != name} for turn in spent
    ]
    took = [(end - begin) / 1e9 * (1 - sum(used.values())) for (begin, end), used in zip(spans, others, strict=True)]
    return Job(
        name=name,
        title=title,
        seen=replace(seen, lines=lines, struck=struck),
        took=took,
        cpu=[turn.cpu_s[name] for turn in spent],
        others=others,
    )


def own_ns(at_ns: int, spans: Sequence[tuple[int, int]]) -> int:
    """How much of these spans was over by then."""
    return sum(min(at_ns, end) - begin for begin, end in spans if begin < at_ns)


def plain_of(jobs: Sequence[Job]) -> list[float]:
    """Turn by turn, the mean of the plain jobs."""
    return [statistics.mean(each) for each in zip(*(job.took for job in jobs if not job.ours), strict=True)]


def plain_cpu_of(jobs: Sequence[Job]) -> list[float]:
    """The same of their CPU time."""
    return [statistics.mean(each) for each in zip(*(job.cpu for job in jobs if not job.ours), strict=True)]


def waiting_of(jobs: Sequence[Job], name: str) -> float:
    """Of all processors, what this job used in a turn of another one, on average."""
    return statistics.mean(used[name] for job in jobs if job.name != name for used in job.others)


def calm(job: Job, plan: Sequence[int]) -> list[int]:
    """The turns in which it met no fault."""
    return [
        at
        for at, (first, last) in enumerate(pairwise(plan))
        if not any(first <= fault.step < last for fault in job.seen.struck)
    ]


def over_bound(took: Sequence[float], plain: Sequence[float], count: int) -> float:
    return sum(took) / (sum(plain) + SECOND_A_FAULT * count)


def interval(job: Job, plain: Sequence[float], plan: Sequence[int], seed: int = 1) -> tuple[float, float]:
    """The middle 95 % of `over_bound` when the calm turns are drawn anew, pairs of both jobs together."""
    dice, quiet = random.Random(seed), calm(job, plan)
    rest = [at for at in range(len(plain)) if at not in quiet]
    found = []
    for _ in range(SAMPLES):
        drawn = [*rest, *dice.choices(quiet, k=len(quiet))] if quiet else rest
        found.append(over_bound([job.took[at] for at in drawn], [plain[at] for at in drawn], len(job.seen.struck)))
    found.sort()
    return found[SAMPLES // 40], found[-SAMPLES // 40]


def figures_of(job: Job, jobs: Sequence[Job], plan: Sequence[int], digest: str) -> dict[str, object]:
    """One of torchrelay's jobs."""
    plain, plain_cpu = plain_of(jobs), plain_cpu_of(jobs)
    quiet, steps = calm(job, plan), [last - first for first, last in pairwise(plan)]
    ratios = [job.took[at] / plain[at] for at in quiet]
    longer = [1000 * (job.took[at] - plain[at]) / steps[at] for at in quiet]
    cpu_ratios = [job.cpu[at] / plain_cpu[at] for at in quiet[:-1]]  # after the last nobody is there
    step_s = steady_s(job.seen)
    pauses = [pause_s(job.seen, at, step_s) for at in range(len(job.seen.struck))]
    once, never = once_and_never(job.seen)
    low, high = interval(job, plain, plan)
    return {
        "jct_s": sum(job.took),
        "over_bound": over_bound(job.took, plain, len(job.seen.struck)),
        "over_bound_low": low,
        "over_bound_high": high,
        "step_ratio": statistics.median(ratios) if ratios else None,
        "step_longer_ms": statistics.median(longer) if longer else None,
        "step_ratio_bound": upper_bound_of_median(ratios) if ratios else None,
        "cpu_ratio": statistics.median(cpu_ratios) if cpu_ratios else None,
        "waiting_cpu": waiting_of(jobs, job.name),
        "stood_s": sum(pause or 0.0 for pause in pauses),
        "faults": len(job.seen.struck),
        "missed": job.seen.missed,
        "lost_steps": repeated(job.seen) + sum(not row.committed for row in job.seen.lines[0]),
        "once_share": once,
        "never_share": never,
        "bit_equal": bits_equal(job.seen.digests, job.seen.ranks, digest),
    }


def flat_of(jobs: Sequence[Job], plan: Sequence[int]) -> dict[str, object]:
    """All figures. Raises ValueError if the plain jobs did not come to one result."""
    plain, known = plain_of(jobs), [job for job in jobs if not job.ours]
    digests = {digest for job in known for digest in job.seen.digests}
    if len(digests) != 1:
        raise ValueError(f"plain PyTorch without faults came to {len(digests)} results")
    (digest,) = digests
    found: dict[str, object] = {
        "plain_jct_s": sum(plain),
        "plain_ratio": sum(known[1].took) / sum(known[0].took),
        "turns": len(plain),
        "plain_waiting_cpu": statistics.mean(waiting_of(jobs, job.name) for job in known),
    }
    for job in jobs:
        if job.ours:
            start = job.name.replace("-", "_")
            found |= {f"{start}_{name}": value for name, value in figures_of(job, jobs, plan, digest).items()}
    return found
