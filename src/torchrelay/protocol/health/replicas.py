"""Replicas: which of the ranks that hold the same part of the state hold other bits than the rest."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from torchrelay.protocol.messages.ids import Rank
from torchrelay.protocol.model.roster import Seat

DETECTOR = "comparison of replicas"
AT_THE_END = (
    "when the script ended. Ranks have changed hands before, and a worker that took one over has gone another way. "
    "Don't use what was saved since. The usual cause is a decision made between two calls from what the script has "
    "read there: make it in a step or section, and return it"
)


@dataclass(frozen=True)
class Verdict:
    """Who differs from most of its replicas; and who from others, where there is no majority."""

    differing: tuple[int, ...]
    doubtful: tuple[int, ...]


def judge(told: Iterable[tuple[int, str, str]]) -> Verdict:
    """From what each rank holds: its number, the name of its shard, and a sum over it."""
    shards: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    for rank, shard, held in told:
        shards[shard].append((rank, held))
    differing: list[int] = []
    doubtful: list[int] = []
    for replicas in shards.values():
        (most, count), *others = Counter(held for _, held in replicas).most_common()
        if others and 2 * count > len(replicas):
            differing += [rank for rank, held in replicas if held != most]
        elif others:
            doubtful += [rank for rank, _ in replicas]
    return Verdict(tuple(sorted(differing)), tuple(sorted(doubtful)))


def differing_at_the_end(seats: Iterable[tuple[Rank, Seat]]) -> str:
    """All scripts have ended: in what way replicas differ, in words; empty if they do not, as far as they have told.

    What a script has changed itself after its last step is not told, nor what nobody had to compare.
    """
    verdict = judge((rank, f"{seat.shard} at {seat.ended_at}", seat.held) for rank, seat in seats if seat.held)
    named = verdict.doubtful or verdict.differing
    if not named:
        return ""
    who = f"rank{'s' * (len(named) > 1)} {', '.join(map(str, named))}"
    how = "hold different parameters" if verdict.doubtful else "holds other parameters than most of its replicas"
    return f"{who} {how} {AT_THE_END}"
