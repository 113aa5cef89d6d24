"""Succession: whose orchestrator acts, which nodes may take its place, and which nodes decide that.

    head      where the orchestrator acts
    heirs     where all of the journal lies that anybody has seen an effect of: one of them may become head
    voters    agents; what a majority of them has noted cannot be passed over

The journal is copied to the heirs, and nothing that depends on a part of it leaves the head before all heirs have that
part. So an event costs as much with ten thousand nodes as with three. Only what is in this file needs a majority: to do
without an heir that is lost, to rely on a new one, and to become head.

Each orchestrator that acts has a *lease* of its own, and numbers its successions within it (`version`). A succession
names the one that it follows, its *base*. It is *settled* when a majority of its voters have noted it, and a majority
of the voters of its base; if nobody could tell whether the base was settled, the base's own base counts as well, and so
on. A head proposes the next one when the last is settled, not earlier. One that is settled is told without its base.

What must always be true, whatever is lost, late, repeated, or split from the others:

1. Under one lease one orchestrator acts.
2. Who has become head has all of the journal that any effect was seen of.
3. When somebody has become head, nothing leaves a head with a lower lease any more, except for what all of its heirs
   had, and so the new head has as well.

It holds as long as nobody forgets. What a voter notes or promises, and what a head proposes, is on a disk before
anybody else hears of it. From its first proposal on, the copy of a head takes in nothing that is written under a lower
lease. A voter or a copy that may have forgotten goes by another name.

This is primary and backups with a reconfiguration by majorities: Lamport, Malkhi and Zhou, "Vertical Paxos and
Primary-Backup Replication" (2009).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cached_property
from typing import NewType

import msgspec
from msgspec import Struct

from torchrelay.protocol.messages.ids import NodeId

# One memory of an agent: one that has lost what it had promised is another voter, and no succession names it yet.
VoterId = NewType("VoterId", str)
# One copy of the journal. A copy that may have lost its end (a power cut) goes by another name from then on.
CopyId = NewType("CopyId", str)


class Place(Struct, frozen=True):
    """A copy of the journal, where it lies, and where its orchestrator is reached, if it acts or may act."""

    node: NodeId
    copy: CopyId
    url: str = ""


class Succession(Struct, frozen=True, kw_only=True, dict=True):
    """See above. `base`: what it follows; none: it is known to be settled."""

    lease: int
    version: int
    head: Place
    heirs: tuple[Place, ...] = ()
    voters: tuple[VoterId, ...] = ()
    base: Succession | None = None

    @property
    def order(self) -> tuple[int, int]:
        """Successions are known by this, and newer ones have a higher one."""
        return self.lease, self.version

    @property
    def chain(self) -> tuple[Succession, ...]:
        """It and its base, and so on: one of them is in force."""
        return (self,) if self.base is None else (self, *self.base.chain)

    @property
    def groups(self) -> tuple[tuple[VoterId, ...], ...]:
        """Of each of these a majority must note it."""
        return tuple(dict.fromkeys(each.voters for each in self.chain))

    @cached_property
    def electorates(self) -> tuple[frozenset[VoterId], ...]:
        """The same as sets, made once: with thousands of voters each vote would take that long otherwise."""
        return tuple(frozenset(group) for group in self.groups)

    def has_copy(self, copy: CopyId) -> bool:
        """Whether this copy has all of the journal that counts, if this succession is in force."""
        return any(place.copy == copy for place in (self.head, *self.heirs))


def as_settled(succession: Succession) -> Succession:
    """The same, known to be settled: what it follows is of no account any more."""
    return msgspec.structs.replace(succession, base=None)


def others_in(known: Succession, own: CopyId) -> list[Place]:
    """Whoever may have become head, as far as this succession tells."""
    found = {place.copy: place for each in known.chain for place in (each.head, *each.heirs)}
    return [place for copy, place in found.items() if copy != own and place.url]


def is_majority(some: Collection[VoterId], voters: Iterable[VoterId]) -> bool:
    """Whether so many have noted it that any other majority has one of them. Of nobody, nobody is one."""
    among = frozenset(voters)
    return not among or 2 * len(among.intersection(some)) > len(among)


def may_be_majority(refused: Collection[VoterId], voters: Iterable[VoterId]) -> bool:
    """Whether it can still become a majority, although these will never be part of it."""
    among = frozenset(voters)
    return not among or 2 * len(among.difference(refused)) > len(among)
