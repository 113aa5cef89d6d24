"""Candidate: an heir, or a head whose process was started again, asks the voters for a lease.

Its copy of the journal counts if the newest succession that may be settled names it. To know which one that is, it
needs the promises of a majority of its voters and, as long as nobody knows that it is settled, of those of its base.
What too few have noted, and too many have promised to note no more, will never be settled: it is passed over, and what
it follows is looked at in its place.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from torchrelay.protocol.succession.succession import (
    Place,
    Succession,
    VoterId,
    as_settled,
    is_majority,
    may_be_majority,
)
from torchrelay.protocol.succession.voter import Ballot


class Waiting(Struct, frozen=True):
    """Too few have answered."""


class Elected(Struct, frozen=True):
    """It has the lease, and goes on from this succession."""

    base: Succession


class Excluded(Struct, frozen=True):
    """A newer succession goes without this copy of the journal: it cannot become head any more."""

    by: Succession


Verdict = Waiting | Elected | Excluded


class Candidacy(Struct, frozen=True, kw_only=True):
    """What a candidate has heard.

    place      itself
    lease      what it asks for
    known      the newest succession that it knew before; that a head has proposed itself, settled or not
    heard      the highest lease that anybody has promised to somebody
    promises   what each voter had noted when it promised
    told       the successions that these had noted, each once: thousands of voters have noted the same
    noters     which of these voters have noted each, by its order
    """

    place: Place
    lease: int
    known: Succession
    heard: int
    promises: dict[VoterId, Ballot] = {}
    told: tuple[Succession, ...] = ()
    noters: dict[tuple[int, int], frozenset[VoterId]] = {}


def stand(place: Place, known: Succession, *, heard: int = 0) -> Candidacy:
    """Ask for a lease that is higher than all that were heard of. `heard`: from voters, and what it asked for."""
    heard = max(known.lease, heard)
    return Candidacy(place=place, lease=heard + 1, known=known, heard=heard)


def asked(candidacy: Candidacy) -> frozenset[VoterId]:
    """Whose promises it needs, as far as it knows: it hears of others from these."""
    return frozenset(voter for each in seen_by(candidacy) for group in each.electorates for voter in group)


def hear_answer(candidacy: Candidacy, voter: VoterId, ballot: Ballot, *, granted: bool) -> Candidacy:
    """A voter has promised, or not. `ballot`: what it has noted and promised now."""
    heard = max(candidacy.heard, ballot.promised)
    if not granted or ballot.promised != candidacy.lease or ballot.promised_to != candidacy.place.copy:
        return msgspec.structs.replace(candidacy, heard=heard)
    candidacy = msgspec.structs.replace(candidacy, heard=heard)
    before = candidacy.promises.get(voter)
    if before is None:
        return count(candidacy, voter, ballot)
    if before == ballot:
        return candidacy
    promises = {**candidacy.promises, voter: ballot}
    candidacy = msgspec.structs.replace(candidacy, promises={}, told=(), noters={})
    for each, said in promises.items():
        candidacy = count(candidacy, each, said)
    return candidacy


def count(candidacy: Candidacy, voter: VoterId, ballot: Ballot) -> Candidacy:
    """With one more promise. Of what many have noted one is kept: each has come with the names of all voters."""
    told, noters, noted = candidacy.told, candidacy.noters, ballot.noted
    if noted is not None:
        same = next((each for each in told if is_same(each, noted)), None)
        if same is None:
            told = (*told, noted)
        else:
            ballot = msgspec.structs.replace(ballot, noted=same)
        more = {order: noters.get(order, frozenset()) | {voter} for order in (noted.order, *ballot.earlier)}
        noters = {**noters, **more}
    promises = {**candidacy.promises, voter: ballot}
    return msgspec.structs.replace(candidacy, promises=promises, told=told, noters=noters)


def is_same(one: Succession, other: Succession) -> bool:
    """Whether both tell the same: one that is known to be settled tells more than as it was proposed."""
    return one.order == other.order and (one.base is None) == (other.base is None)


def judge(candidacy: Candidacy) -> Verdict:
    """What has come of it so far."""
    newest = max(seen_by(candidacy), key=lambda each: each.order)
    if not any(is_majority(candidacy.promises, group) for group in newest.electorates):
        return Waiting()  # whichever of its chain counts
    for succession in newest.chain:
        if is_known_settled(candidacy, succession):
            return judge_by(candidacy, as_settled(succession))
        if may_be_settled(candidacy, succession):
            return judge_by(candidacy, succession)
    raise AssertionError("the last of a chain is known to be settled")


def judge_by(candidacy: Candidacy, succession: Succession) -> Verdict:
    """What has come of it, if this is the newest that may be settled."""
    copy = candidacy.place.copy
    if () in succession.groups and succession.head.copy != copy:
        return Waiting()  # a head without voters asks nobody when it goes on: an heir must know that it will not
    if not all(is_majority(candidacy.promises, group) for group in succession.electorates):
        return Waiting()
    if succession.has_copy(copy):
        return Elected(succession)
    return Excluded(succession) if succession.base is None else Waiting()


def seen_by(candidacy: Candidacy) -> list[Succession]:
    """What it knew, and what voters have told of."""
    return [candidacy.known, *candidacy.told]


def is_known_settled(candidacy: Candidacy, succession: Succession) -> bool:
    """Whether somebody knows it, or all that is needed have noted it."""
    order = succession.order
    known = {each.order for seen in seen_by(candidacy) for each in seen.chain if each.base is None}
    noted = candidacy.noters.get(order, frozenset())
    return order in known or all(is_majority(noted, group) for group in succession.electorates)


def may_be_settled(candidacy: Candidacy, succession: Succession) -> bool:
    """Whether enough voters may have noted it, as far as those who have promised tell."""
    without = candidacy.promises.keys() - candidacy.noters.get(succession.order, frozenset())
    return all(may_be_majority(without, group) for group in succession.electorates)
