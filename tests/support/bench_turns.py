"""What tests of bench turns share."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from compare_figures import Line, Seen, Struck
from compare_schedule import What
from turns_figures import Job, Spent, Turn, job_of

RANKS, PLAN = 4, (1, 100, 200, 300)
S = 1_000_000_000


NAMES = ("plain", "plain-again", "torchrelay-spares", "torchrelay-shrink")


def spent(name: str, spans: list[float], waiting_s: float, cpu_s: float) -> list[Spent]:
    """Each of the others uses so much in each turn."""
    return [Spent(took_s=span, cpu_s={each: cpu_s if each == name else waiting_s for each in NAMES}) for span in spans]


def job(
    name: str,
    spans: list[float],
    *,
    struck: tuple[int, ...] = (),
    digest: str = "d",
    rest_s: float = 5.0,
    waiting_s: float = 0.0,
    cpu_s: float = 9.0,
) -> Job:
    """A job whose turns take so long, with others' turns between them."""
    lines: dict[int, list[Line]] = {rank: [Line(1, S, 0, rank, RANKS, 1, 1)] for rank in range(RANKS)}
    begins, now = [], S
    for (first, last), span in zip(pairwise(PLAN), spans, strict=True):
        now += round(rest_s * S)
        begins += [Turn(first, now - 1000 * rank) for rank in range(RANKS)]
        for step in range(first, last):
            now += round(span * S / (last - first))
            for rank in range(RANKS):
                lines[rank].append(Line(step + 1, now - 1000 * rank, 0, step * RANKS + rank, RANKS, 1, 1))
    hit = [
        Struck(what=What.KILL, ranks=(2,), at_ns=next(row.at_ns for row in lines[0] if row.step == step), step=step)
        for step in struck
    ]
    seen = Seen(ranks=RANKS, steps=PLAN[-1], early=100, lines=lines, marks={}, struck=hit, digests=[digest] * RANKS)
    return job_of(name, name, seen, begins, PLAN, spent(name, spans, waiting_s, cpu_s), 2)


def jobs(**ours: Any) -> list[Job]:
    return [job("plain", [5.0, 5.0, 5.0]), job("plain-again", [5.2, 5.2, 5.2]), job("torchrelay-spares", **ours)]
