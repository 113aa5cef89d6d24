"""Reading the times of steps that the workload wrote."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path


def read_times(folder: Path) -> dict[int, list[tuple[int, int, int]]]:
    """By rank: (step, time in ns, CPU time in ns) of each line, in the order written; torn last lines are left out."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        rows = []
        for line in path.read_text().splitlines():
            if line.endswith("]"):
                step, at, cpu = json.loads(line)
                rows.append((step, at, cpu))
        found[int(path.stem.split("-")[1])] = rows
    return found


def step_time_s(times: dict[int, list[tuple[int, int, int]]], *, skip: int = 5) -> float:
    """The median time of a step over all ranks, in seconds, without the first ones."""
    spans = [
        (after[1] - before[1]) / 1e9
        for rows in times.values()
        for before, after in zip(rows[skip:], rows[skip + 1 :], strict=False)
        if after[0] == before[0] + 1
    ]
    return statistics.median(spans)


def wait_for(what: str, fact: Callable[[], bool], deadline_s: float) -> None:
    """Wait for a fact; a TimeoutError says which one did not come."""
    until = time.monotonic() + deadline_s
    while not fact():
        if time.monotonic() > until:
            raise TimeoutError(f"{what} did not happen within {deadline_s:g} s")
        time.sleep(0.05)  # what is measured comes from files; looking often would take a core from the workers
