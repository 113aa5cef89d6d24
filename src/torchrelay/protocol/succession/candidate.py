"""Candidate: an heir, or a head whose process was started again, asks the voters for a lease.

Its copy of the journal counts if the newest succession that may be settled names it. To know which one that is, it
needs the promises of a majority of the voters of that one, and, as long as nobody knows that it is settled, of the
voters before it as well. What a minority has noted and a majority has promised to note no more will never be settled,
and is passed over.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from torchrelay.protocol.succession.succession import (
    Place,
    Succession,
    VoterId,
    is_majority,
    may_be_majority,
)
from torchrelay.protocol.succession.voter import Ballot


class Waiting(Struct, frozen=True):
    """Too few have answered."""


class Elected(Struct, frozen=True):
    """It has the lease, and goes on from this succession. `settled`: whether that one is known to be."""

    base: Succession
    settled: bool


class Excluded(Struct, frozen=True):
    """A newer succession goes without this copy of the journal: it cannot become head any more."""

    by: Succession


Verdict = Waiting | Elected | Excluded


class Candidacy(Struct, frozen=True, kw_only=True):
    """What a candidate has heard.

    place      itself
    lease      what it asks for
    known      the newest succession that it knew before
    settled    whether it knew that to be settled
    promises   what each voter had noted when it promised
    heard      the highest lease that anybody has promised to somebody
    """

    place: Place
    lease: int
    known: Succession
    settled: bool = False
    promises: dict[VoterId, Ballot] = {}
    heard: int = 0


def stand(place: Place, known: Succession, *, settled: bool, heard: int = 0) -> Candidacy:
    """Ask for a lease that is higher than all that were heard of."""
    lease = max(known.lease, heard) + 1
    return Candidacy(place=place, lease=lease, known=known, settled=settled, heard=max(known.lease, heard))


def hear_answer(candidacy: Candidacy, voter: VoterId, ballot: Ballot, *, granted: bool) -> Candidacy:
    """A voter has promised, or not. `ballot`: what it has noted and promised now."""
    heard = max(candidacy.heard, ballot.promised)
    if not granted or ballot.promised != candidacy.lease or ballot.promised_to != candidacy.place.copy:
        return msgspec.structs.replace(candidacy, heard=heard)
    return msgspec.structs.replace(candidacy, promises={**candidacy.promises, voter: ballot}, heard=heard)


def judge(candidacy: Candidacy) -> Verdict:
    """What has come of it so far."""
    promised = candidacy.promises
    for succession in seen_by(candidacy):
        settled = is_known_settled(candidacy, succession)
        if not settled and not may_be_settled(candidacy, succession):
            continue
        if not succession.has_copy(candidacy.place.copy):
            return Excluded(succession) if settled else Waiting()
        groups = (succession.voters,) if settled else succession.groups
        enough = all(is_majority(promised, group) for group in groups)
        return Elected(succession, settled) if enough else Waiting()
    return Waiting()


def seen_by(candidacy: Candidacy) -> list[Succession]:
    """All successions that anybody told of, newest first."""
    found = {candidacy.known.order: candidacy.known}
    for ballot in candidacy.promises.values():
        if ballot.noted is not None:
            found[ballot.noted.order] = ballot.noted
    return [found[order] for order in sorted(found, reverse=True)]


def is_known_settled(candidacy: Candidacy, succession: Succession) -> bool:
    """Whether somebody knew it, or it must be, as its head has proposed the next one."""
    if candidacy.settled and candidacy.known.order == succession.order:
        return True
    return any(
        (ballot.settled and ballot.noted is not None and ballot.noted.order == succession.order)
        or (ballot.noted is not None and follows(ballot.noted, succession))
        for ballot in candidacy.promises.values()
    ) or follows(candidacy.known, succession)


def follows(later: Succession, earlier: Succession) -> bool:
    """Whether the same head has proposed one after the other."""
    return later.lease == earlier.lease and later.version > earlier.version


def may_be_settled(candidacy: Candidacy, succession: Succession) -> bool:
    """Whether a majority may have noted it, as far as those who have promised tell."""
    without = {
        voter
        for voter, ballot in candidacy.promises.items()
        if ballot.noted is None or ballot.noted.order < succession.order
    }
    return all(may_be_majority(without, group) for group in succession.groups)
