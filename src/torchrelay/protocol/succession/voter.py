"""Voter: what an agent has noted and promised. It must be on its disk before its answer leaves."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.succession.succession import CopyId, Succession, VoterId


class Ballot(Struct, frozen=True):
    """What one voter has said so far.

    promised   the highest lease that it has heard of: what comes from a lower one is not noted any more
    promised_to  whose lease that is
    noted      the newest succession that it has noted
    settled    whether it knows that this one is settled
    """

    promised: int = 0
    promised_to: CopyId | None = None
    noted: Succession | None = None
    settled: bool = False


def note(ballot: Ballot, succession: Succession, *, settled: bool = False) -> tuple[Ballot, bool]:
    """A head proposes a succession, or says that it is `settled`. Whether it is noted now."""
    lease, head = succession.lease, succession.head.copy
    if lease < ballot.promised or (lease == ballot.promised and ballot.promised_to not in (None, head)):
        return ballot, False
    known = ballot.noted
    if known is not None and succession.order < known.order:
        return ballot, False
    knows = settled or (ballot.settled and known is not None and known.order == succession.order)
    return Ballot(promised=lease, promised_to=head, noted=succession, settled=knows), True


def promise(ballot: Ballot, lease: int, copy: CopyId) -> tuple[Ballot, bool]:
    """A candidate asks for a promise: nothing of a lower lease, and of this one only what this candidate says."""
    if lease < ballot.promised or (lease == ballot.promised and ballot.promised_to != copy):
        return ballot, False
    if ballot.noted is not None and ballot.noted.lease >= lease:
        return ballot, False  # it is head already
    return msgspec.structs.replace(ballot, promised=lease, promised_to=copy), True


def is_bound_elsewhere(ballot: Ballot, lease: int, copy: CopyId) -> bool:
    """Whether it can never note anything of this lease, as said by this copy's orchestrator, any more."""
    return ballot.promised > lease or (ballot.promised == lease and ballot.promised_to not in (None, copy))


def voter_of(node: NodeId, memory: str) -> VoterId:
    """The voter that an agent is. `memory`: another one when it has lost what it had promised."""
    return VoterId(f"{node}/{memory}")


def node_of(voter: VoterId) -> NodeId:
    return NodeId(voter.rpartition("/")[0])
