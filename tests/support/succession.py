"""What tests of the succession share: a head with two heirs, voters, and how they answer."""

from __future__ import annotations

from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.succession.candidate import Candidacy, Elected, hear_answer, judge
from torchrelay.protocol.succession.head import Head, hear_noted, take_office
from torchrelay.protocol.succession.succession import CopyId, Place, Succession, VoterId
from torchrelay.protocol.succession.voter import Ballot, note, promise

A, B, C, D, E, F = map(VoterId, "abcdef")
ABC = (A, B, C)


def place(name: str) -> Place:
    return Place(node=NodeId(name), copy=CopyId(name), url=f"http://{name}")


H, X, Y, Z = map(place, "hxyz")
# A head with two heirs, and all know it.
SETTLED = Succession(lease=1, version=4, head=H, heirs=(X, Y), voters=ABC)


class Voters:
    """Voters and what they remember."""

    def __init__(self, *know: VoterId, settled: Succession | None = None) -> None:
        self.ballots = dict.fromkeys(know, Ballot() if settled is None else note(Ballot(), settled)[0])

    def note(self, succession: Succession, *names: VoterId) -> list[VoterId]:
        """These hear of it; returns those that note it."""
        noted = []
        for name in names:
            self.ballots[name], now = note(self.ballots.get(name, Ballot()), succession)
            noted += [name] if now else []
        return noted

    def answer(self, candidacy: Candidacy, *names: VoterId) -> Candidacy:
        """These are asked, and their answers are heard."""
        for name in names:
            ballot = self.ballots.get(name, Ballot())
            self.ballots[name], granted = promise(ballot, candidacy.lease, candidacy.place.copy)
            candidacy = hear_answer(candidacy, name, self.ballots[name], granted=granted)
        return candidacy

    def settle(self, head: Head, *names: VoterId) -> Head:
        """These hear what a head proposes, and it hears from those that note it."""
        for name in self.note(head.newest, *names):
            head = hear_noted(head, name, head.newest.order)
        return head


def three(settled: Succession = SETTLED) -> Voters:
    """Three voters that know the same."""
    return Voters(*ABC, settled=settled)


def base_of(candidacy: Candidacy) -> Succession:
    """What the candidate goes on from, as it is elected."""
    verdict = judge(candidacy)
    assert isinstance(verdict, Elected), verdict
    return verdict.base


def elected(candidacy: Candidacy) -> Head:
    """The head that the candidate becomes."""
    return take_office(candidacy.place, candidacy.lease, base_of(candidacy))


def acting(settled: Succession = SETTLED) -> Head:
    return Head(settled=settled)
