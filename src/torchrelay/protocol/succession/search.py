"""Search: where an agent looks for the head when it has lost it.

As long as nobody else is known to have its journal, that is where it was. Else it is tried there twice if its machine
is silent, or for a while if it answers that nobody is there: it may be started again. Then each heir is tried in turn
with it: whoever of them becomes head needs the agents there.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from torchrelay.protocol.succession.succession import Succession

# One that has ended is looked for where it was for so long: it is started again there, unless its machine is silent.
PATIENCE_MS = 6_000
SILENT_TRIES = 2
# How long a handshake may take: the longer the more agents come at once, by so much for each.
LEAST_MS, EACH_MS, MOST_MS = 1_000, 10, 5_000
DOOR_MS = 5_000  # how long to wait at the door of one that may become head


class Search(Struct, frozen=True):
    """Since the head was lost.

    away_since_ms  when it was first looked for; None: it is there
    silent         tries to which nothing came back
    tried          how many places were tried since nobody waits for it any more
    told           the newest succession that was told of at a door, or by a head that has given way: what was noted
                   last may be older
    """

    away_since_ms: int | None = None
    silent: int = 0
    tried: int = 0
    told: Succession | None = None


def hear_nothing(search: Search) -> Search:
    """Nothing came back: neither from it, nor from its machine."""
    return msgspec.structs.replace(search, silent=search.silent + 1)


def hear_known(search: Search, noted: Succession | None, known: Succession) -> Search:
    """Who waits at a door is told what is known there. If that is another head, it is looked for with patience."""
    if search.told is not None and known.order <= search.told.order:
        return search
    after = msgspec.structs.replace(search, told=known)
    if noted is None or home(after, noted) == home(search, noted):
        return after
    return msgspec.structs.replace(after, away_since_ms=None, silent=0)


def may_move(noted: Succession | None) -> bool:
    """Whether somebody else may become head, as far as the succession tells that was noted last."""
    return noted is not None and any(each.heirs for each in noted.chain)


def answer_ms(noted: Succession | None) -> int:
    """How long an orchestrator may take to answer."""
    if noted is None or not may_move(noted):
        return MOST_MS
    return min(MOST_MS, LEAST_MS + EACH_MS * len(noted.voters))


def look(search: Search, noted: Succession | None, now_ms: int) -> tuple[Search, str]:
    """Where to try now; empty: where it was given that the head is."""
    if noted is None or not noted.head.url:
        return search, ""
    if search.away_since_ms is None:
        search = msgspec.structs.replace(search, away_since_ms=now_ms)
    assert search.away_since_ms is not None, "it was set just now"
    if search.silent < SILENT_TRIES and now_ms - search.away_since_ms < PATIENCE_MS:
        return search, home(search, noted)
    others = others_than_head(search, noted)
    tried = search.tried + 1
    search = msgspec.structs.replace(search, tried=tried)
    if not others or tried % 2 == 0:  # it may be well again
        return search, home(search, noted)
    return search, others[tried // 2 % len(others)]


def home(search: Search, noted: Succession) -> str:
    """Where the head is by the newest that is known."""
    told = search.told
    return told.head.url if told is not None and told.head.url and told.order > noted.order else noted.head.url


def others_than_head(search: Search, noted: Succession) -> list[str]:
    """Where else somebody may be head, or become it: by the newest succession first.

    What was noted may never have been settled: then whoever was head or heir before is, or will be.
    """
    chain = noted.chain if search.told is None else (*search.told.chain, *noted.chain)
    newest = sorted(chain, key=lambda each: each.order, reverse=True)
    places = [place for each in newest for place in (*each.heirs, each.head)]
    return [url for url in dict.fromkeys(place.url for place in places) if url and url != home(search, noted)]


def door_ms(search: Search, noted: Succession | None, url: str, chance: float) -> int:
    """How long to wait at this door. `chance`: from 0 to 1, drawn anew each time.

    At first all come together. If nothing has come of that, they are at several doors, and would go round for ever
    without a majority at one. So each waits for a time of its own, and longest at the first of the heirs.
    """
    others = [] if noted is None else others_than_head(search, noted)
    rounds = search.tried // max(1, 2 * len(others))
    if not rounds:
        return DOOR_MS
    most_ms = 2 * DOOR_MS if others[:1] == [url] else DOOR_MS
    return round(most_ms * (0.5 + chance))
