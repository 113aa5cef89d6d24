"""Whether somebody can become head, when faults cease in any state of the small world of successions."""

from __future__ import annotations

from itertools import combinations

from tests.support.succession_world import Copy, State, Violation, World
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
        self._leads: dict[tuple[tuple[int, ...], int, tuple[VoterId, ...]], bool] = {}
        self._settled: dict[tuple[tuple[int, ...], int], Succession] = {}

    def __call__(self, world: World, state: State) -> None:
        """With all voters, each copy that counts can become head; with just a majority, one of all copies can."""
        settled = self.settled(world, state)
        copies = dict(zip(state.copies, map(world.copy.things.__getitem__, state.copies), strict=True))
        for number, copy in copies.items():
            if settled.has_copy(copy.place.copy) and knows_whom_to_ask(copy, settled):
                if not self.leads(world, state, number, world.voters):
                    raise Violation(f"{copy.place.copy} cannot become head, although all voters are there")
                lacking = {(lease, world.lease_of(state, lease).left) for lease in with_effects(world, state)}
                if not lacking <= copy.parts | {(lease, 0) for lease in range(1, world.leases + 1)}:
                    raise Violation(f"{copy.place.copy} could become head, and lacks what has left")
        for some in majorities(world, state):
            if not any(self.leads(world, state, number, some) for number in copies):
                raise Violation(f"nobody can become head, although all copies and {some} are there")

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

    def leads(self, world: World, state: State, number: int, voters: tuple[VoterId, ...]) -> bool:
        """Whether a copy becomes head, if it and these voters are there, and nothing else disturbs."""
        key = (state.voters, number, voters)
        if key not in self._leads:
            ballots = {name: voter.ballot for name, voter in world.named(state) if name in voters}
            self._leads[key] = becomes_head(world.copy.things[number], ballots, heard=world.leases)
        return self._leads[key]


def knows_whom_to_ask(copy: Copy, settled: Succession) -> bool:
    """An heir of a head that was alone does not, until it has heard of the first voters."""
    return copy.known is not None and (copy.known.voters != () or copy.place == settled.head)


def with_effects(world: World, state: State) -> list[int]:
    return [lease for lease in range(1, world.leases + 1) if world.lease.things[state.leases[lease - 1]] is not None]


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


def becomes_head(copy: Copy, ballots: Ballots, *, heard: int) -> bool:
    """Nothing is lost, and nobody else asks."""
    if copy.known is None:
        return False
    candidacy = standing.stand(copy.place, copy.known, heard=heard)
    answered: set[VoterId] = set()
    while waiting := sorted(standing.asked(candidacy) & ballots.keys() - answered):
        for name in waiting:
            if isinstance(standing.judge(candidacy), Excluded):
                return False  # it asks nobody else
            ballots[name], granted = voting.promise(ballots[name], candidacy.lease, copy.place.copy)
            candidacy = standing.hear_answer(candidacy, name, ballots[name], granted=granted)
            answered.add(name)
    verdict = standing.judge(candidacy)
    if not isinstance(verdict, Elected):
        return False
    head = heads.take_office(copy.place, candidacy.lease, verdict.base)
    for name, ballot in ballots.items():
        if voting.note(ballot, head.newest)[1]:
            head = heads.hear_noted(head, name, head.newest.order)
    return head.acts
