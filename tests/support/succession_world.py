"""A small world of successions, to be walked through completely: voters, copies of the journal, and all they may do.

All that was ever said may be heard at any time, in any order, as often as one likes, or never. So a process that is
lost is one that does nothing any more, and one that stands as a candidate may be a head that was started again.
What has been said is not kept in lists of messages: what a voter answers is kept with the voter, and so on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from dataclasses import field as made_by
from itertools import combinations, pairwise
from typing import Any, Generic, NamedTuple, TypeVar

from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.succession import candidate as standing
from torchrelay.protocol.succession import copying as copies
from torchrelay.protocol.succession import head as heads
from torchrelay.protocol.succession import voter as voting
from torchrelay.protocol.succession.candidate import Elected
from torchrelay.protocol.succession.copying import Copying
from torchrelay.protocol.succession.head import Head
from torchrelay.protocol.succession.succession import CopyId, Place, Succession, VoterId
from torchrelay.protocol.succession.voter import Ballot

Order = tuple[int, int]
Part = tuple[int, int]  # the lease under which it was written, and its number
A, B, C, D = map(VoterId, "abcd")
H, X, Y, Z = (Place(node=NodeId(name), copy=CopyId(name)) for name in "hxyz")


class Violation(AssertionError):
    """Something that must never be."""


class Voter(NamedTuple):
    """A voter's memory, and what it has answered so far."""

    ballot: Ballot = Ballot()
    promises: frozenset[tuple[int, CopyId, Ballot]] = frozenset()
    noted: frozenset[Order] = frozenset()


class Copy(NamedTuple):
    """A copy of the journal, and the process that has it.

    source  the lease under which it is written
    holds   how many parts of that lease it has
    before  the parts of earlier leases that it has; None: nobody has begun to copy to it
    asked   the lease that it has asked for last
    head    if it is one: what it has proposed, and how far it knows other copies to be
    """

    place: Place
    source: int = 0
    holds: int = 0
    before: frozenset[Part] | None = None
    known: Succession | None = None
    asked: int = 0
    head: tuple[Head, tuple[tuple[CopyId, int], ...]] | None = None

    @property
    def parts(self) -> frozenset[Part]:
        return (self.before or frozenset()) | {(self.source, part) for part in range(1, self.holds + 1)}


class Lease(NamedTuple):
    """What was done under it: who has it, what it began with, what it has written, how much of that left."""

    owner: CopyId
    before: frozenset[Part]
    written: tuple[Succession | None, ...] = ()
    left: int = 0
    acted: bool = False


Thing = TypeVar("Thing", bound=Hashable)


class Numbers(Generic[Thing]):
    """A number for each different thing: states are compared a million times, and numbers are compared fast."""

    def __init__(self) -> None:
        self.things: list[Thing] = []
        self._numbers: dict[Thing, int] = {}

    def of(self, thing: Thing) -> int:
        number = self._numbers.setdefault(thing, len(self.things))
        if number == len(self.things):
            self.things.append(thing)
        return number


class State(NamedTuple):
    """All of the world; voters, copies, leases and what was said by their numbers."""

    voters: tuple[int, ...]
    copies: tuple[int, ...]
    leases: tuple[int, ...]
    told: int
    wanted: int


Change = tuple[tuple[Place, ...], tuple[VoterId, ...]]


@dataclass
class World:
    """How large it is, and what happens in it.

    alike     groups of voters that could be exchanged for one another in all that may happen
    changes   what heads may propose
    leases    the highest
    parts     how many parts a head writes beside its proposals
    versions  how many of them it proposes
    standing  who becomes a candidate; nobody is named: all
    """

    voters: tuple[VoterId, ...] = (A, B, C)
    places: tuple[Place, ...] = (H, X)
    alike: tuple[tuple[VoterId, ...], ...] = ((A, B, C),)
    changes: tuple[Change, ...] = (((), (A, B, C)),)
    leases: int = 3
    parts: int = 1
    versions: int = 2
    standing: tuple[Place, ...] = ()
    tells_settled: bool = True
    # Whether a head waits until new heirs have what has left: a test lets it not wait, to see that it must.
    waits: bool = True

    voter: Numbers[Voter] = made_by(default_factory=Numbers)
    copy: Numbers[Copy] = made_by(default_factory=Numbers)
    lease: Numbers[Lease | None] = made_by(default_factory=Numbers)
    told: Numbers[frozenset[Succession]] = made_by(default_factory=Numbers)
    wanted: Numbers[frozenset[tuple[int, CopyId]]] = made_by(default_factory=Numbers)
    request: Numbers[Succession | tuple[int, CopyId]] = made_by(default_factory=Numbers)
    answers: dict[tuple[int, int], int] = made_by(default_factory=dict)

    def alone(self) -> State:
        """A run that has just begun: nobody but a head."""
        return self.begin(Head(settled=heads.first(H, 1).settled), ())

    def protected(self, *heirs: Place, voters: tuple[VoterId, ...] = (A, B, C)) -> State:
        """A head with heirs, and all know it."""
        settled = Succession(lease=1, version=1, head=H, heirs=heirs, voters=voters)
        return self.begin(Head(settled=settled), voters)

    def begin(self, head: Head, voters: tuple[VoterId, ...]) -> State:
        settled = head.settled
        ballot = voting.note(Ballot(), settled)[0]
        knows = Voter(ballot, noted=frozenset({settled.order}))
        made = [
            Copy(place, 1, 0, frozenset(), settled) if settled.has_copy(place.copy) else Copy(place)
            for place in self.places
        ]
        made[0] = made[0]._replace(head=(head, ()))
        first = Lease(H.copy, frozenset(), acted=True)
        return State(
            tuple(self.voter.of(knows if name in voters else Voter()) for name in self.voters),
            tuple(map(self.copy.of, made)),
            (self.lease.of(first), *(self.lease.of(None),) * (self.leases - 1)),
            self.told.of(frozenset({settled})),
            self.wanted.of(frozenset()),
        )

    # ---------------------------------------------------------------- what may happen

    def following(self, state: State) -> Iterator[State]:
        """All states that one happening makes of this one."""
        for index in range(len(state.copies)):
            for happening in (self.stand, self.be_elected, self.hear_noted, self.write, self.propose):
                yield from happening(state, index)
            for copied in (self.take_in, self.hear_held, self.begin_copy):
                yield from copied(state, index)
        yield from self.voters_hear(state)

    def put(self, state: State, index: int, copy: Copy, **others: Any) -> State:
        copies = list(state.copies)
        copies[index] = self.copy.of(copy)
        return state._replace(copies=tuple(copies), **others)

    def put_lease(self, state: State, lease: int, value: Lease) -> tuple[int, ...]:
        numbers = list(state.leases)
        numbers[lease - 1] = self.lease.of(value)
        return tuple(numbers)

    def lease_of(self, state: State, lease: int) -> Lease:
        found = self.lease.things[state.leases[lease - 1]]
        assert found is not None
        return found

    def stand(self, state: State, index: int) -> Iterator[State]:
        """An heir becomes a candidate, or a head or candidate that was started again."""
        copy = self.copy.things[state.copies[index]]
        if copy.known is None or (self.standing and copy.place not in self.standing):
            return
        for heard in range(copy.known.lease, self.leases):
            lease = standing.stand(copy.place, copy.known, heard=heard).lease
            if lease == copy.asked and copy.head is None:
                continue
            wanted = self.wanted.things[state.wanted] | {(lease, copy.place.copy)}
            yield self.put(state, index, copy._replace(asked=lease, head=None), wanted=self.wanted.of(wanted))

    def named(self, state: State) -> list[tuple[VoterId, Voter]]:
        return list(zip(self.voters, map(self.voter.things.__getitem__, state.voters), strict=True))

    def be_elected(self, state: State, index: int) -> Iterator[State]:
        """A candidate takes office by the answers of some of the voters."""
        copy = self.copy.things[state.copies[index]]
        if copy.asked == 0 or copy.head is not None:
            return
        assert copy.known is not None
        key = (copy.asked, copy.place.copy)
        answers = [(name, each[2]) for name, voter in self.named(state) for each in voter.promises if each[:2] == key]
        found = set()
        for count in range(len(answers) + 1):
            for some in combinations(answers, count):
                candidacy = standing.stand(copy.place, copy.known, heard=copy.asked - 1)
                for name, ballot in some:
                    candidacy = standing.hear_answer(candidacy, name, ballot, granted=True)
                verdict = standing.judge(candidacy)
                if isinstance(verdict, Elected) and verdict.base not in found:
                    found.add(verdict.base)
                    yield self.take_office(state, index, verdict.base)

    def take_office(self, state: State, index: int, base: Succession) -> State:
        copy = self.copy.things[state.copies[index]]
        if self.lease.things[state.leases[copy.asked - 1]] is not None:
            raise Violation(f"two are elected under lease {copy.asked}")
        head = heads.take_office(copy.place, copy.asked, base)
        made = Copy(copy.place, copy.asked, 0, copy.parts, head.newest, copy.asked, (head, ()))
        lease = Lease(copy.place.copy, copy.parts)
        told = self.told.of(self.told.things[state.told] | {head.newest})
        after = self.put(state, index, made, leases=self.put_lease(state, copy.asked, lease), told=told)
        return self.act(after, copy.asked) if head.acts else after

    def act(self, state: State, lease: int) -> State:
        """A head begins to act."""
        record = self.lease_of(state, lease)
        for earlier in range(1, lease):
            other = self.lease.things[state.leases[earlier - 1]]
            if other is not None and not {(earlier, part) for part in range(1, other.left + 1)} <= record.before:
                raise Violation(f"the head of lease {lease} lacks what has left under lease {earlier}")
        return state._replace(leases=self.put_lease(state, lease, record._replace(acted=True)))

    def hear_noted(self, state: State, index: int) -> Iterator[State]:
        """A head hears all answers of voters at once: to have heard only some of them makes it do nothing."""
        copy = self.copy.things[state.copies[index]]
        if copy.head is None or copy.head[0].proposed is None:
            return
        head, order = copy.head[0], copy.head[0].newest.order
        for name, voter in self.named(state):
            if order in voter.noted:
                head = heads.hear_noted(head, name, order)
        if head.proposed is not None:
            return
        acted = copy.head[0].acts
        told = self.told.things[state.told] | ({head.settled} if self.tells_settled else set())
        made = copy._replace(known=head.settled, head=(head, copy.head[1]))
        after = self.put(state, index, made, told=self.told.of(told))
        yield self.leave(after if acted else self.act(after, copy.source), index)

    def append(self, state: State, index: int, copy: Copy, part: Succession | None) -> State:
        record = self.lease_of(state, copy.source)
        record = record._replace(written=(*record.written, part))
        return self.put(
            state, index, copy._replace(holds=copy.holds + 1), leases=self.put_lease(state, copy.source, record)
        )

    def write(self, state: State, index: int) -> Iterator[State]:
        copy = self.copy.things[state.copies[index]]
        if copy.head is not None and copy.head[0].acts:
            written = self.lease_of(state, copy.source).written
            if written.count(None) < self.parts:
                yield self.leave(self.append(state, index, copy, None), index)

    def propose(self, state: State, index: int) -> Iterator[State]:
        copy = self.copy.things[state.copies[index]]
        if copy.head is None or not copy.head[0].acts:
            return
        head, heard = copy.head
        if head.settled.version > self.versions:
            return
        for heirs, voters in self.changes:
            if copy.place in heirs or (self.waits and not copies.may_be_heirs(self.copying(state, copy), heirs)):
                continue
            after = heads.propose(head, heirs, voters)
            if after is not head:
                told = self.told.of(self.told.things[state.told] | {after.newest})
                made = copy._replace(known=after.newest, head=(after, heard))
                yield self.append(state, index, made, after.newest)._replace(told=told)

    def copying(self, state: State, copy: Copy) -> Copying:
        assert copy.head is not None
        return Copying(written=copy.holds, held=dict(copy.head[1]), left=self.lease_of(state, copy.source).left)

    def take_in(self, state: State, index: int) -> Iterator[State]:
        """A copy gets the next part."""
        copy = self.copy.things[state.copies[index]]
        if copy.before is None or copy.head is not None:
            return
        written = self.lease_of(state, copy.source).written
        if copy.holds < len(written):
            told = written[copy.holds]
            known = (
                told if told is not None and copy.known is not None and told.order > copy.known.order else copy.known
            )
            yield self.put(state, index, copy._replace(holds=copy.holds + 1, known=known))

    def hear_held(self, state: State, index: int) -> Iterator[State]:
        """A head hears how far a copy is."""
        copy = self.copy.things[state.copies[index]]
        if copy.head is None:
            return
        for other in map(self.copy.things.__getitem__, state.copies):
            if other.source == copy.source and other.place != copy.place:
                held = copies.hear_held(self.copying(state, copy), other.place.copy, other.holds).held
                heard = tuple(sorted(held.items()))
                if heard != copy.head[1]:
                    yield self.leave(self.put(state, index, copy._replace(head=(copy.head[0], heard))), index)

    def leave(self, state: State, index: int) -> State:
        """All that may leave a head leaves it at once: who lacks a part that is still kept will not have it later."""
        copy = self.copy.things[state.copies[index]]
        assert copy.head is not None
        record = self.lease_of(state, copy.source)
        left = copies.let_leave(self.copying(state, copy), copy.head[0]).left
        if left <= record.left:
            return state
        for later in range(copy.source + 1, self.leases + 1):
            other = self.lease.things[state.leases[later - 1]]
            if other is not None and other.acted and (copy.source, left) not in other.before:
                raise Violation(f"part {left} leaves under lease {copy.source}, and the head of {later} lacks it")
        return state._replace(leases=self.put_lease(state, copy.source, record._replace(left=left)))

    def begin_copy(self, state: State, index: int) -> Iterator[State]:
        """A head begins to copy its journal to a place that has none."""
        copy = self.copy.things[state.copies[index]]
        if copy.before is not None:
            return
        for other in map(self.copy.things.__getitem__, state.copies):
            if other.head is not None and other.head[0].acts:
                known = other.head[0].settled
                yield self.put(state, index, Copy(copy.place, other.source, 0, other.before, known))

    def voters_hear(self, state: State) -> Iterator[State]:
        """A voter hears anything that anybody has said to voters."""
        requests: tuple[Succession | tuple[int, CopyId], ...] = (
            *self.told.things[state.told],
            *self.wanted.things[state.wanted],
        )
        numbers = [self.request.of(request) for request in requests]
        for index, voter in enumerate(state.voters):
            for number in numbers:
                after = self.answers.get((voter, number))
                if after is None:
                    heard = self.hear(self.voter.things[voter], self.request.things[number])
                    after = self.answers[voter, number] = self.voter.of(heard)
                if after != voter:
                    voters = list(state.voters)
                    voters[index] = after
                    yield state._replace(voters=tuple(voters))

    def hear(self, voter: Voter, request: Succession | tuple[int, CopyId]) -> Voter:
        if isinstance(request, Succession):
            ballot, noted = voting.note(voter.ballot, request)
            return voter._replace(ballot=ballot, noted=voter.noted | {request.order} if noted else voter.noted)
        ballot, granted = voting.promise(voter.ballot, *request)
        answers = voter.promises | ({(*request, ballot)} if granted else set())
        return voter._replace(ballot=ballot, promises=answers)

    # ---------------------------------------------------------------- all states

    def folded(self, state: State) -> State:
        """One state for all that differ only in the names of voters that are alike."""
        numbers = list(state.voters)
        for group in self.alike:
            places = [self.voters.index(name) for name in group]
            for place, number in zip(places, sorted(numbers[place] for place in places), strict=True):
                numbers[place] = number
        return state._replace(voters=tuple(numbers))


def explore(world: World, start: State, *, limit: int, look: Callable[[World, State], None]) -> int:
    """Walk through all states, the nearest first, up to so many; returns how many there were."""
    start = world.folded(start)
    came_from: dict[State, State | None] = {start: None}
    waiting = deque([start])
    while waiting:
        state = waiting.popleft()
        try:
            look(world, state)
            for after in map(world.folded, world.following(state)):
                if after not in came_from and len(came_from) < limit:
                    came_from[after] = state
                    waiting.append(after)
        except Violation as violation:
            raise Violation(f"{violation}\n{story(world, state, came_from)}") from violation
    return len(came_from)


def story(world: World, state: State, came_from: dict[State, State | None]) -> str:
    """How it came to this: what has changed in each step."""
    steps = [state]
    while (before := came_from[steps[-1]]) is not None:
        steps.append(before)
    steps.reverse()
    lines = [differences(world, before, after) for before, after in pairwise(steps)]
    return "\n".join(lines)


def differences(world: World, before: State, after: State) -> str:
    """What is another than it was."""
    told = [str(each) for each in world.told.things[after.told] - world.told.things[before.told]]
    told += [str(each) for each in world.wanted.things[after.wanted] - world.wanted.things[before.wanted]]
    for kind, numbers in (("voters", world.voter), ("copies", world.copy), ("leases", world.lease)):
        new = set(getattr(after, kind)) - set(getattr(before, kind))
        told += [f"{kind} {numbers.things[number]}" for number in new]
    return "; ".join(told)
