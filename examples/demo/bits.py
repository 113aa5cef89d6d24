"""Bits: what the ranks of a run wrote down, and whether two runs wrote down the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

Digests = dict[tuple[int, str], set[str]]


@dataclass(frozen=True, slots=True)
class Trace:
    """One run, as its ranks wrote it down.

    digests     (rank, point) -> digests of everything that training goes on from, at the entry of each step or section
    losses      (rank, step) -> losses as `float.hex`
    at          (rank, step) -> when it was first written, seconds since the epoch
    parameters  rank -> digests of the final parameters
    """

    digests: Digests = field(default_factory=dict)
    losses: dict[tuple[int, int], set[str]] = field(default_factory=dict)
    at: dict[tuple[int, int], float] = field(default_factory=dict)
    parameters: dict[int, set[str]] = field(default_factory=dict)


def lines(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rank and the content of each line of `folder/rank-<r>.jsonl`. Raises `ValueError` for a torn line."""
    for path in sorted(folder.glob("rank-*.jsonl")):
        rank = int(path.stem.removeprefix("rank-"))
        for line in path.read_text().splitlines():
            yield rank, json.loads(line)


def read(digests: Path, losses: Path) -> Trace:
    """Read what a run left in these folders. A step done again adds a line; the bits must be the same."""
    trace = Trace()
    for rank, line in lines(digests):
        trace.digests.setdefault((rank, line["point"]), set()).add(line["digest"])
    for rank, line in lines(losses):
        if "parameters" in line:
            trace.parameters.setdefault(rank, set()).add(line["parameters"])
        else:
            trace.losses.setdefault((rank, line["step"]), set()).add(line["loss"])
            trace.at.setdefault((rank, line["step"]), line["at"])
    return trace


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was compared, and where it differed (at most a few lines of it are for people)."""

    digests: int
    losses: int
    parameters: int
    differences: tuple[str, ...]

    @property
    def bit_equal(self) -> bool:
        """Equal everywhere, and there was something of each kind to compare."""
        return not self.differences and min(self.digests, self.losses, self.parameters) > 0


def compare(undisturbed: Trace, disturbed: Trace) -> Comparison:
    """Compare two runs at every point on every rank."""
    told = [
        *differences("state", undisturbed.digests, disturbed.digests),
        *differences("loss", undisturbed.losses, disturbed.losses),
        *differences("final parameters", undisturbed.parameters, disturbed.parameters),
    ]
    counts = len(undisturbed.digests), len(undisturbed.losses), len(undisturbed.parameters)
    return Comparison(*counts, tuple(told))


def differences(what: str, undisturbed: dict[Any, set[str]], disturbed: dict[Any, set[str]]) -> Iterator[str]:
    """Where they differ, in words; a place that only one of them knows differs too."""
    for key in sorted(undisturbed.keys() | disturbed.keys()):
        before, after = undisturbed.get(key, set()), disturbed.get(key, set())
        where = f"rank {key[0]} at {key[1]}" if isinstance(key, tuple) else f"rank {key}"
        if len(before) > 1:
            yield f"{what}: {where} is not repeatable even without faults"
        elif before != after:
            yield f"{what}: {where} " + ("differs" if before and after else "is known to one run only")


def pause_after(trace: Trace, struck: float, until: float, step_s: float) -> float | None:
    """The longest that a rank went without committing after a strike, less one undisturbed step, in seconds.

    `until`: when it was over. Steps may be committed between the strike and the pause: the one that is in its gate, and
    more where the strike itself takes a while.
    """
    longest: dict[int, float] = {}
    for rank in {rank for rank, _ in trace.at}:
        times = sorted(at for (who, _), at in trace.at.items() if who == rank)
        steps = [(earlier, later) for earlier, later in pairwise(times) if earlier < until and later > struck]
        longest[rank] = max((later - max(earlier, struck) for earlier, later in steps), default=0.0)
    if not longest or 0.0 in longest.values():
        return None
    return max(0.0, max(longest.values()) - step_s)


def step_seconds(trace: Trace) -> float:
    """The median time of a step, in seconds, as rank 0 saw it; 0 if there were none."""
    times = sorted(at for (rank, _), at in trace.at.items() if rank == 0)
    spans = sorted(later - earlier for earlier, later in pairwise(times))
    return spans[len(spans) // 2] if spans else 0.0
