"""Buddies: who keeps a copy of whose private record, so that it outlives its node.

Each rank has up to two. Nodes that hold ranks form a ring, in the order of their names. A third of it lies between a
node and its first buddy, and between that one and the second: nodes that are numbered one after another, as those of a
rack are, may all be lost at once.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchrelay.protocol.messages.ids import NodeId, Rank
from torchrelay.protocol.model.roster import natural_key

COPIES = 2


def circle(places: Mapping[Rank, NodeId]) -> dict[Rank, tuple[Rank, ...]]:
    """The buddies of each rank, from the node that each is on; none if all are on one node."""
    on: dict[NodeId, list[Rank]] = {}
    for rank in sorted(places):
        on.setdefault(places[rank], []).append(rank)
    ring = sorted(on, key=natural_key)
    found: dict[Rank, tuple[Rank, ...]] = {}
    stride = max(1, len(ring) // (COPIES + 1))
    for at, node in enumerate(ring):
        following = [ring[(at + step * stride) % len(ring)] for step in range(1, min(COPIES, len(ring) - 1) + 1)]
        for number, rank in enumerate(on[node]):
            found[rank] = tuple(on[other][number % len(on[other])] for other in following)
    return found


def wards_of(buddies: Mapping[Rank, tuple[Rank, ...]]) -> dict[Rank, tuple[Rank, ...]]:
    """Of whom each rank keeps copies; nothing of a rank that keeps none."""
    found: dict[Rank, list[Rank]] = {}
    for ward in sorted(buddies):
        for keeper in buddies[ward]:
            found.setdefault(keeper, []).append(ward)
    return {keeper: tuple(wards) for keeper, wards in found.items()}
