"""Door: a process of the orchestrator that does not act, its copy of the journal, and the agents that wait at it.

An heir's, or the head's own after it was started again. Agents that have lost the head come to it and wait; when they
are a majority of the voters, it stands for head. `place`, `known`, `settled` and `stood` must be on its disk before
anything that follows from them leaves; who waits is forgotten with the process.

    waits      no majority of the voters is here
    asks       it stands: each voter that is here is asked for its promise, again and again
    elected    it proposes its first succession (`head.take_office`); when that is settled, it acts
    excluded   a newer succession goes without its copy: it ends
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from torchrelay.protocol.succession import candidate
from torchrelay.protocol.succession.candidate import Candidacy, Verdict, Waiting
from torchrelay.protocol.succession.succession import Place, Succession, VoterId, is_majority
from torchrelay.protocol.succession.voter import Ballot, is_bound_elsewhere


class Door(Struct, frozen=True, kw_only=True):
    """What it knows, and who is here.

    place      its copy of the journal
    known      the newest succession that it has heard of, and whether that is `settled`
    stood      the highest lease that it has stood for: it takes no part of a lower one
    heard      the highest lease that it has heard of
    here       the voters that wait
    candidacy  what it has heard since it stands; None: it does not
    refused    somebody has promised otherwise: it must stand again
    """

    place: Place
    known: Succession
    settled: bool = False
    stood: int = 0
    heard: int = 0
    here: frozenset[VoterId] = frozenset()
    candidacy: Candidacy | None = None
    refused: bool = False


def learn(door: Door, succession: Succession, *, settled: bool) -> Door:
    """It hears of a succession: from the head that it copies, or from a voter."""
    if succession.order < door.known.order:
        return door
    knows = settled or (door.settled and succession.order == door.known.order)
    return msgspec.structs.replace(door, known=succession, settled=knows, heard=max(door.heard, succession.lease))


def come(door: Door, voter: VoterId, ballot: Ballot) -> Door:
    """An agent that has lost the head is here, and says what it has noted and promised."""
    door = msgspec.structs.replace(door, here=door.here | {voter}, heard=max(door.heard, ballot.promised))
    return door if ballot.noted is None else learn(door, ballot.noted, settled=ballot.settled)


def go(door: Door, voter: VoterId) -> Door:
    """It waits here no longer. What it has promised holds."""
    return msgspec.structs.replace(door, here=door.here - {voter})


def takes_parts(door: Door, lease: int) -> bool:
    """Whether the journal of a head with this lease is still copied here."""
    return lease > door.stood


def may_stand(door: Door) -> bool:
    """Whether it is to ask for a lease now: for the first time, or anew as its last one can come to nothing.

    What it knows may never be settled; then those decide who were voters before. Where there are no voters, only the
    head itself acts again.
    """
    if door.candidacy is not None and not door.refused:
        return False
    groups = [group for group in ((door.known.voters,) if door.settled else door.known.groups) if group]
    if not groups:
        return door.known.head.copy == door.place.copy
    return any(is_majority(door.here, group) for group in groups)


def stand(door: Door) -> Door:
    """It asks for a lease that is higher than all that it has heard of."""
    heard = max(door.heard, door.stood)
    candidacy = candidate.stand(door.place, door.known, settled=door.settled, heard=heard)
    return msgspec.structs.replace(door, candidacy=candidacy, stood=candidacy.lease, refused=False)


def to_ask(door: Door) -> tuple[VoterId, ...]:
    """Who is here and has not promised yet."""
    promises = None if door.candidacy is None else door.candidacy.promises
    return () if promises is None else tuple(sorted(voter for voter in door.here if voter not in promises))


def hear_answer(door: Door, voter: VoterId, ballot: Ballot, *, lease: int, granted: bool) -> Door:
    """A voter answers what it was asked for `lease`."""
    door = msgspec.structs.replace(door, heard=max(door.heard, ballot.promised))
    if door.candidacy is None or door.candidacy.lease != lease:
        return door
    candidacy = candidate.hear_answer(door.candidacy, voter, ballot, granted=granted)
    refused = is_bound_elsewhere(ballot, lease, door.place.copy)
    return msgspec.structs.replace(door, candidacy=candidacy, refused=door.refused or refused)


def judge(door: Door) -> Verdict:
    """What has come of its candidacy so far. Once somebody has refused, nothing comes of it but another one."""
    return Waiting() if door.candidacy is None or door.refused else candidate.judge(door.candidacy)
