"""Voter: what an agent has noted and promised. It must be on its disk before its answer leaves."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from torchrelay.protocol.succession.succession import CopyId, Succession


class Ballot(Struct, frozen=True):
    """What one voter has said so far.

    promised     the highest lease that it has heard of: what comes from a lower one is not noted any more
    promised_to  whose lease that is
    noted        the newest succession that it has noted
    earlier      those of its chain that it had noted before
    """

    promised: int = 0
    promised_to: CopyId | None = None
    noted: Succession | None = None
    earlier: tuple[tuple[int, int], ...] = ()

    def has_noted(self, order: tuple[int, int]) -> bool:
        """Whether it has noted this one: newest, or of its chain."""
        return order in self.earlier or (self.noted is not None and self.noted.order == order)


def note(ballot: Ballot, succession: Succession) -> tuple[Ballot, bool]:
    """A head proposes a succession, or says that it is settled. Whether it is noted now."""
    lease, head, known = succession.lease, succession.head.copy, ballot.noted
    if lease < ballot.promised or (lease == ballot.promised and ballot.promised_to != head):
        return ballot, False
    if known is not None and succession.order <= known.order and known.base is None:
        return ballot, succession.order == known.order  # a proposal that comes late does not make it less settled
    if known is not None and succession.order < known.order:
        return ballot, False
    earlier = tuple(each.order for each in succession.chain[1:] if ballot.has_noted(each.order))
    return Ballot(promised=lease, promised_to=head, noted=succession, earlier=earlier), True


def promise(ballot: Ballot, lease: int, copy: CopyId) -> tuple[Ballot, bool]:
    """A candidate asks for a promise: nothing of a lower lease, and of this one only what this candidate says."""
    if lease < ballot.promised or (lease == ballot.promised and ballot.promised_to != copy):
        return ballot, False
    if ballot.noted is not None and ballot.noted.lease >= lease:
        return ballot, False  # it is head already
    return msgspec.structs.replace(ballot, promised=lease, promised_to=copy), True


def in_short(ballot: Ballot) -> Ballot:
    """As a head is told of it: it knows what it has said, and thousands need not repeat that."""
    if ballot.noted is None:
        return ballot
    return msgspec.structs.replace(ballot, noted=msgspec.structs.replace(ballot.noted, voters=(), base=None))
