"""Door: a process of the orchestrator that does not act, its copy of the journal, and the voters that wait at it.

An heir's, or the head's own after it was started again. Agents that have lost the head come to it and wait. When a
majority of the voters is here, it asks them for a lease; elected, it lets them note that it is head, and acts then.

What it asks for must be on its disk before anybody hears of it, so that it never asks for the same lease twice.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.succession import candidate
from torchrelay.protocol.succession.candidate import Candidacy, Elected, Excluded
from torchrelay.protocol.succession.head import Head, hear_noted, take_office
from torchrelay.protocol.succession.succession import Place, Succession, VoterId, is_majority
from torchrelay.protocol.succession.voter import Ballot


class Door(Struct, frozen=True, kw_only=True):
    """What it knows, and who is here.

    place      its copy of the journal
    known      the newest succession that it knows of, from the head or from voters
    under      the lease under which its copy was written
    here       the voters that wait
    heard      the highest lease that anybody has promised, or that it has asked for
    candidacy  what it has heard since it stands; None: it does not, or in vain
    head       what it is since it was elected
    excluded   the succession that goes without its copy: it cannot become head any more
    former     the node of the head whose place it has taken; None: it was head itself
    """

    place: Place
    known: Succession
    under: int = 0
    here: frozenset[VoterId] = frozenset()
    heard: int = 0
    candidacy: Candidacy | None = None
    head: Head | None = None
    excluded: Succession | None = None
    former: NodeId | None = None

    @property
    def acts(self) -> bool:
        """Whether it is head, and voters have noted that."""
        return self.head is not None and self.head.acts


def come(door: Door, voter: VoterId) -> Door:
    """An agent that has lost the head waits here."""
    return msgspec.structs.replace(door, here=door.here | {voter})


def go(door: Door, voter: VoterId) -> Door:
    """It waits here no longer. What it has promised holds."""
    return msgspec.structs.replace(door, here=door.here - {voter})


def learn(door: Door, known: Succession) -> Door:
    """The head whose journal it copies has proposed this, or settled it."""
    newest = known if known.order >= door.known.order else door.known
    return msgspec.structs.replace(door, known=newest, under=known.lease)


def gives_way_to(door: Door, lease: int) -> bool:
    """Whether who acts with this lease has taken the place that it waits for."""
    return lease > (door.under if door.head is None else door.head.newest.lease)


def may_stand(door: Door) -> bool:
    """Whether it is to ask for a lease now, for the first time or anew as nothing has come of it so far.

    What it knows of may never be settled: then those decide who were voters before. Where there are none, only the head
    itself acts again.
    """
    if door.head is not None or door.excluded is not None:
        return False
    groups = [group for group in door.known.electorates if group]
    if not groups:
        return door.known.head.copy == door.place.copy
    return any(is_majority(door.here, group) for group in groups)


def stand(door: Door) -> Door:
    """It asks for a lease that is higher than all that it has heard of."""
    candidacy = candidate.stand(door.place, door.known, heard=door.heard)
    heard = max(door.heard, candidacy.lease)
    return judge(msgspec.structs.replace(door, candidacy=candidacy, heard=heard))


def hear_vote(door: Door, voter: VoterId, ballot: Ballot, *, granted: bool) -> Door:
    """A voter says what it has noted and promised by now, and whether that is what it was asked for last."""
    door = msgspec.structs.replace(door, heard=max(door.heard, ballot.promised))
    if door.head is not None:
        return hear_whether_noted(door, door.head, voter, ballot)
    door = learn_from(door, ballot)
    if door.candidacy is None:
        return door
    candidacy = candidate.hear_answer(door.candidacy, voter, ballot, granted=granted)
    return judge(msgspec.structs.replace(door, candidacy=candidacy))


def learn_from(door: Door, ballot: Ballot) -> Door:
    """Voters may have noted what its copy has not: the head was lost before that had come here.

    What was noted without voters tells nothing: so it is with answers to a head, see `voter.in_short`.
    """
    noted, known = ballot.noted, door.known
    if noted is None or not any(each.voters for each in noted.chain):
        return door
    settled = noted.order == known.order and noted.base is None and known.base is not None
    return msgspec.structs.replace(door, known=noted) if noted.order > known.order or settled else door


def hear_whether_noted(door: Door, head: Head, voter: VoterId, ballot: Ballot) -> Door:
    """It is elected, and a voter has noted that, or has promised a higher lease to another one."""
    if head.proposed is None:
        return door
    if ballot.noted is not None and ballot.noted.order == head.proposed.order:
        return msgspec.structs.replace(door, head=hear_noted(head, voter, head.proposed.order))
    if ballot.promised > head.proposed.lease:
        # It stands again under another lease. With this one it could propose something else as its first succession.
        return msgspec.structs.replace(door, head=None, candidacy=None)
    return door


def judge(door: Door) -> Door:
    """What has come of its candidacy so far."""
    assert door.candidacy is not None, "it stands"
    match candidate.judge(door.candidacy):
        case Elected(base):
            head = take_office(door.place, door.candidacy.lease, base)
            former = base.head.node if base.head.copy != door.place.copy else None
            return msgspec.structs.replace(door, head=head, former=former, known=head.newest)
        case Excluded(by):
            return msgspec.structs.replace(door, excluded=by)
        case _:
            return door
