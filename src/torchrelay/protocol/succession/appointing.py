"""Appointing: which heirs and voters a head wants, by what it knows of its nodes.

Voters are the agents of all nodes that live. Two other nodes are heirs: those that are stay so as long as their copies
are whole, then come others that have all of the journal. With fewer than three nodes nobody could decide anything
without the head: then there are neither.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.succession.head import Head, propose
from torchrelay.protocol.succession.succession import CopyId, Place, VoterId
from torchrelay.protocol.succession.voter import node_of

HEIRS = 2
FEWEST_VOTERS = 3


def choose_voters(head: Head, living: Collection[NodeId], attached: Mapping[NodeId, VoterId]) -> tuple[VoterId, ...]:
    """Of each node that lives the agent that is attached, or else the one that was a voter before."""
    known = {node_of(voter): voter for voter in head.settled.voters}
    found = {**{node: voter for node, voter in known.items() if node in living}, **attached}
    return tuple(sorted(found.values())) if len(found) >= FEWEST_VOTERS else ()


def want(
    head: Head, *, living: Collection[NodeId], attached: Mapping[NodeId, VoterId], whole: Collection[Place]
) -> Head:
    """What is to be proposed, if anything.

    living     nodes that are not lost
    attached   nodes whose agents are here, and which voters these are
    whole      copies that have all of the journal, and take all that is written
    """
    voters = choose_voters(head, living, attached)
    intact = {place.copy for place in whole}
    kept = [place for place in head.settled.heirs if place.copy in intact]
    taken = {place.node for place in (*kept, head.settled.head)}
    fresh = sorted((place for place in whole if place.node not in taken), key=lambda place: place.node)
    heirs = tuple([*kept, *fresh][:HEIRS]) if voters else ()
    return propose(head, heirs, voters)


def to_appoint(
    head: Head, *, attached: Mapping[NodeId, VoterId], copying: Mapping[CopyId, Place]
) -> tuple[NodeId, ...]:
    """Nodes that are to get a copy of the journal. `copying`: those that have one, or are getting it."""
    if len(head.settled.voters) < FEWEST_VOTERS:
        return ()
    taken = {place.node for place in (head.settled.head, *head.needed, *copying.values())}
    free = sorted(node for node in attached if node not in taken)
    return tuple(free[: max(0, HEIRS - len(copying))])
