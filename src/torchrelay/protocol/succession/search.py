"""Search: where an agent looks for the head when it has lost it.

At the head first, which may be back in a moment; then at each heir's door, in the order of the succession that it has
noted; then at the head again, round and round. Who is not there is passed over at once, but for the head in the first
round. The head may be the only one that can act again, so it is waited for as long as any heir from then on.

What an agent has noted may be older than what is settled, and it may come to nothing. So it looks, too, where the head
has begun to copy its journal to, and at the heirs of the succession before, as long as nobody has said that the newest
one is settled. Agents that are never at one door together would go round for ever: in each round they wait for longer,
and each for a time of its own.

A node is lost after 6 s of silence: who has lost the head for 2 s only must be back by then. So the first round is
short, and an heir that hears the head say that it acts sends those back who come, unless they are a majority.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.succession.succession import Place, Succession

SILENT_MS = 2_500  # a head that says nothing for so long is lost
HEAD_MS = 2_000  # how long it is looked for where it was, at first
DOOR_MS = 1_200  # how long an agent waits at an heir's door in the first round, on average
LONGEST_MS = 20_000  # ... and in any
BRIEF_MS = 500  # ... and where it hears that the head is there: longer than it takes to stand


class Search(Struct, frozen=True):
    """`turn`: how many places it has left. `until_ms`: how long it stays at this one."""

    until_ms: int
    turn: int = 0


def begin(now_ms: int) -> Search:
    """The head is lost."""
    return Search(now_ms + HEAD_MS)


def remember(known: Iterable[Place], noted: Succession, *, settled: bool) -> tuple[Place, ...]:
    """Where to look after a succession was noted: at those that were known before, too, unless it is settled."""
    return gather(noted.copies, () if settled else known)


def gather(first: Iterable[Place], more: Iterable[Place]) -> tuple[Place, ...]:
    """All of them, one of each node."""
    found: dict[NodeId, Place] = {}
    for place in (*first, *more):
        found.setdefault(place.node, place)
    return tuple(found.values())


def place_of(search: Search, places: Sequence[Place]) -> Place:
    """Where it looks now."""
    return places[search.turn % len(places)]


def passes_over(search: Search) -> bool:
    """Whether it turns to the next place at once if nobody is there."""
    return search.turn > 0


def is_over(search: Search, now_ms: int) -> bool:
    """Whether it has looked there for long enough."""
    return now_ms >= search.until_ms


def send_back(search: Search, places: Sequence[Place], now_ms: int) -> Search:
    """An heir hears the head, which is the first of the places now: after a moment it is looked for there."""
    last = search.turn - search.turn % len(places) + len(places) - 1
    return Search(min(search.until_ms, now_ms + BRIEF_MS), last)


def go_on(search: Search, places: Sequence[Place], now_ms: int, chance: float) -> Search:
    """Turn to the next place. `chance`: from 0 to 1, another one each time."""
    turn = search.turn + 1
    most_ms = min(DOOR_MS << min(turn // len(places), 8), LONGEST_MS)
    return Search(now_ms + round(most_ms * (0.5 + chance)), turn)
