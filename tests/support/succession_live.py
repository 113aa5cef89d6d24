"""Whether somebody can become head, when faults cease in any state of the small world of successions."""

from __future__ import annotations

from itertools import combinations

from tests.support.succession_world import Copy, Part, State, Violation, World
from torchrelay.protocol.succession import candidate as standing
from torchrelay.protocol.succession import head as heads
from torchrelay.protocol.succession import voter as voting
from torchrelay.protocol.succession.candidate import Elected, Excluded
from torchrelay.protocol.succession.succession import Succession, VoterId, is_majority
from torchrelay.protocol.succession.voter import Ballot

Ballots = dict[VoterId, Ballot]


class Live:
    """Looks at states; what it has found out of equal parts of states it remembers."""

    def __init__(self) -> None:
        self._bases: dict[tuple[tuple[int, ...], int, tuple[VoterId, ...]], Succession | None] = {}
        self._settled: dict[tuple[tuple[int, ...], int], Succession] = {}

    def __call__(self, world: World, state: State) -> None:
        """With all voters, each copy that counts can become head; with just a majority, one of all copies can.

        And nobody can, with any of these, who does not follow what is settled.
        """
        settled = self.settled(world, state)
        copies = dict(zip(state.copies, map(world.copy.things.__getitem__, state.copies), strict=True))
        for some in (world.voters, *majorities(world, state)):
            bases = {number: self.base(world, state, number, some) for number in copies}
            if all(base is None for base in bases.values()):
                raise Violation(f"nobody can become head, although all copies and {some} are there")
            for number, base in bases.items():
                if base is not None and base.order < settled.order:
                    raise Violation(f"{copies[number].place.copy} could become head, and passes over what is settled")
        for number, copy in copies.items():
            if settled.has_copy(copy.place.copy) and knows_whom_to_ask(copy, settled):
                if self.base(world, state, number, world.voters) is None:
                    raise Violation(f"{copy.place.copy} cannot become head, although all voters are there")
                if not effects(world, state) <= copy.parts:
                    raise Violation(f"{copy.place.copy} could become head, and lacks what has left")

    def settled(self, world: World, state: State) -> Succession:
        """The newest that is settled, as the world knows."""
        key = (state.voters, state.told)
        if key not in self._settled:
            told = sorted(world.told.things[state.told], key=lambda each: (each.order, each.base is None), reverse=True)
            named = world.named(state)
            self._settled[key] = next(
                each
                for each in told
                if all(
                    is_majority({name for name, voter in named if each.order in voter.noted}, g) for g in each.groups
                )
            )
        return self._settled[key]

    def base(self, world: World, state: State, number: int, voters: tuple[VoterId, ...]) -> Succession | None:
        """What a copy goes on from as a head, if it and these voters are there, and nothing else disturbs."""
        key = (state.voters, number, voters)
        if key not in self._bases:
            ballots = {name: voter.ballot for name, voter in world.named(state) if name in voters}
            self._bases[key] = become_head(world.copy.things[number], ballots, heard=world.leases)
        return self._bases[key]


def knows_whom_to_ask(copy: Copy, settled: Succession) -> bool:
    """An heir of a head that was alone does not, until it has heard of the first voters."""
    return copy.known is not None and (copy.known.voters != () or copy.place == settled.head)


def effects(world: World, state: State) -> set[Part]:
    """The newest part of each lease that has left."""
    offices = enumerate(map(world.lease.things.__getitem__, state.leases), 1)
    return {(lease, office.left) for lease, office in offices if office is not None and office.left}


def majorities(world: World, state: State) -> list[tuple[VoterId, ...]]:
    """All groups of voters, as small as can be, that are a majority wherever they are asked."""
    known = [copy.known for copy in map(world.copy.things.__getitem__, state.copies) if copy.known is not None]
    groups = {group for each in (*known, *world.told.things[state.told]) for group in each.groups}
    found: list[tuple[VoterId, ...]] = []
    for count in range(len(world.voters) + 1):
        for some in combinations(world.voters, count):
            if all(is_majority(some, group) for group in groups) and not any(set(less) < set(some) for less in found):
                found.append(some)
    return found


def become_head(copy: Copy, ballots: Ballots, *, heard: int) -> Succession | None:
    """Nothing is lost, and nobody else asks."""
    if copy.known is None:
        return None
    candidacy = standing.stand(copy.place, copy.known, heard=heard)
    answered: set[VoterId] = set()
    while waiting := sorted(standing.asked(candidacy) & ballots.keys() - answered):
        for name in waiting:
            if isinstance(standing.judge(candidacy), Excluded):
                return None  # it asks nobody else
            ballots[name], granted = voting.promise(ballots[name], candidacy.lease, copy.place.copy)
            candidacy = standing.hear_answer(candidacy, name, ballots[name], granted=granted)
            answered.add(name)
    verdict = standing.judge(candidacy)
    if not isinstance(verdict, Elected):
        return None
    head = heads.take_office(copy.place, candidacy.lease, verdict.base)
    for name, ballot in ballots.items():
        if voting.note(ballot, head.newest)[1]:
            head = heads.hear_noted(head, name, head.newest.order)
    return verdict.base if head.acts else None
