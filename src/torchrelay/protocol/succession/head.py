"""Head: the orchestrator that acts, and what it has proposed to the voters."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from torchrelay.protocol.succession.succession import Place, Succession, VoterId, as_settled, is_majority


class Head(Struct, frozen=True, kw_only=True):
    """What a head knows of its own succession.

    settled    the one in force
    proposed   the next one, as long as it is not settled
    noted      the voters that have noted that one
    """

    settled: Succession
    proposed: Succession | None = None
    noted: frozenset[VoterId] = frozenset()

    @property
    def acts(self) -> bool:
        """Whether it may do anything: a succession of its own lease is settled."""
        lease = self.settled.lease if self.proposed is None else self.proposed.lease
        return self.settled.lease == lease

    @property
    def newest(self) -> Succession:
        """What voters are to note."""
        return self.settled if self.proposed is None else self.proposed

    @property
    def needed(self) -> tuple[Place, ...]:
        """The heirs that must have what anything depends on before it leaves.

        Those of a proposal count from its beginning: it may be settled, and its head be the last to hear of that.
        """
        more = () if self.proposed is None else self.proposed.heirs
        known = {place.copy for place in self.settled.heirs}
        return (*self.settled.heirs, *(place for place in more if place.copy not in known))


def first(place: Place, lease: int) -> Head:
    """The first orchestrator of a run: nobody else can act, and no voter is asked."""
    return Head(settled=Succession(lease=lease, version=0, head=place))


def take_office(place: Place, lease: int, base: Succession) -> Head:
    """A candidate that was elected: it acts when the voters have noted that.

    Other heirs may have more of the journal than it, or less: they are heirs again when they have its copy.
    """
    proposed = Succession(lease=lease, version=1, head=place, voters=base.voters, base=base)
    return count(Head(settled=base, proposed=proposed))


def propose(head: Head, heirs: tuple[Place, ...], voters: tuple[VoterId, ...]) -> Head:
    """Change heirs or voters. An open proposal is finished first; a proposal of what is so is none.

    New heirs have all that has left: see `copying.may_be_heirs`.
    """
    assert voters or not heirs, "heirs need voters: without any, each of them could become head at once"
    now = head.settled
    if head.proposed is not None or (heirs, voters) == (now.heirs, now.voters):
        return head
    following = Succession(
        lease=now.lease, version=now.version + 1, head=now.head, heirs=heirs, voters=voters, base=now
    )
    return msgspec.structs.replace(head, proposed=following)


def hear_noted(head: Head, voter: VoterId, order: tuple[int, int]) -> Head:
    """A voter has noted a succession."""
    if head.proposed is None or head.proposed.order != order:
        return head
    return count(msgspec.structs.replace(head, noted=head.noted | {voter}))


def count(head: Head) -> Head:
    """Whether enough voters have noted what it proposes: it is settled then."""
    enough = all(is_majority(head.noted, group) for group in head.newest.electorates)
    return Head(settled=as_settled(head.newest)) if enough else head
