"""One seeded run: nodes, a network that loses, repeats, delays and splits, faults; and then faults cease.

While faults go on, nothing wrong may happen. When they have ceased, somebody must become head and let something leave,
if enough voters and copies are there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from torchrelay.protocol.succession import copying as copies
from torchrelay.protocol.succession import head as heads
from torchrelay.protocol.succession import voter as voting
from torchrelay.protocol.succession.head import Head
from torchrelay.protocol.succession.succession import Succession, VoterId
from torchrelay.simulation.succession.judge import Judge, Violation
from torchrelay.simulation.succession.node import Node, node_of
from torchrelay.simulation.succession.words import DUTIES, Disk, Duties, Word

MOST_WORDS = 40  # under way at a time: of more than that, some are lost


@dataclass
class Result:
    """What became of a seed."""

    seed: int
    violation: str = ""
    coverage: Counter[str] = field(default_factory=Counter)
    story: list[str] = field(default_factory=list)


class World:
    """Everything is drawn from `chance`: how much goes wrong as well."""

    def __init__(self, seed: int, *, duties: Duties = DUTIES, story: bool = False) -> None:
        self.chance = Random(seed)
        self.duties = duties
        self.judge = Judge()
        self.coverage: Counter[str] = Counter()
        self.story: list[str] = []
        self._story = story
        self.words: list[tuple[int, int, Word]] = []
        self.sides: tuple[int, ...] = ()
        self.healed = False
        draw = self.chance.random
        self.loses, self.repeats, self.faults = 0.15 * draw(), 0.2 * draw(), 0.005 + 0.05 * draw() ** 3
        self.forgets = draw() < 0.3  # in most runs no disk loses anything
        self.nodes = [Node(number, self) for number in range(self.chance.choice((5, 5, 6, 7)))]
        self.found()

    def found(self) -> None:
        """A run begins: a head alone, or one whose heirs are there already."""
        first = self.nodes[0]
        settled = heads.first(first.disk.place, 1).settled
        count = self.chance.choice((0, 1, 2))
        if count:
            heirs = self.nodes[1 : 1 + count]
            for number, node in enumerate(heirs, 1):
                node.disk = Disk(node.place(1, number), (1, number), {}, None)
            voters = tuple(node.voter for node in self.nodes[: self.chance.choice((3, 3, 5))])
            places = tuple(node.disk.place for node in heirs)
            settled = Succession(lease=1, version=1, head=first.disk.place, heirs=places, voters=voters)
            for node in self.nodes:
                if node.voter in voters:
                    node.ballot, _ = voting.note(node.ballot, settled)
                    self.judge.note(node.voter, settled.order)
        first.lead(Head(settled=settled))
        for node in self.nodes:
            if settled.has_copy(node.disk.place.copy):
                node.disk.known = settled
        for node in self.nodes[1 : 1 + count]:
            first.adopt(node)

    # ---------------------------------------------------------------- what nodes are given

    def send(self, source: int, target: int, word: Word) -> None:
        if len(self.words) < MOST_WORDS or self.healed:
            self.words.append((source, target, word))
        else:
            self.words[self.chance.randrange(MOST_WORDS)] = (source, target, word)

    def say(self, what: str) -> None:
        if self._story:
            self.story.append(what)

    def reach(self, what: str) -> None:
        self.coverage[what] += 1

    def count_heads(self) -> None:
        """How many copies have led the run, one after the other."""
        owners = {office.owner for office in self.judge.offices.values() if office.acted}
        if len(owners) > 1:
            self.reach(f"{len(owners)} copies have led")

    def voters(self) -> list[VoterId]:
        return [node.voter for node in self.nodes]

    # ---------------------------------------------------------------- what happens

    def run(self, steps: int) -> None:
        for _ in range(steps):
            drawn = self.chance.random()
            if drawn < self.faults:
                self.strike()
            elif drawn > 0.99 and self.sides:
                self.split()
            elif drawn < 0.3 or not self.words:
                leading = [node for node in self.nodes if node.head is not None and node.up]
                node = self.chance.choice(leading if leading and self.chance.random() < 0.6 else self.nodes)
                if node.up:
                    self.live(node)
                elif not node.away and self.chance.random() < 0.5:
                    node.up = True
            else:
                for _ in range(min(3, len(self.words))):
                    self.deliver(int(self.chance.random() * len(self.words)))

    def deliver(self, index: int) -> None:
        source, target, word = self.words[index]
        apart = bool(self.sides) and self.sides[source] != self.sides[target]
        drawn = self.chance.random()
        if apart and drawn > 0.1:
            return  # it waits
        if apart or drawn > self.repeats:
            self.words[index] = self.words[-1]
            self.words.pop()
        if not apart and self.nodes[target].up and not self.repeats < drawn < self.repeats + self.loses:
            self.nodes[target].hear(source, word)

    def live(self, node: Node) -> None:
        """What a node does by itself."""
        drawn = self.chance.random()
        if node.head is not None:
            if drawn < 0.4 and node.head.acts:
                self.change(node)
            elif drawn < 0.41:
                node.stand()
        elif drawn < (0.003 if node.excluded or not self.is_silent(node) else 0.05):
            node.stand()
        node.tick()

    def is_silent(self, node: Node) -> bool:
        """Whether it hears from no head."""
        heads = (each for each in self.nodes if each.up and each.head is not None and each.head.acts)
        return all(self.sides and self.sides[each.number] != self.sides[node.number] for each in heads)

    def change(self, node: Node) -> None:
        """A head changes its heirs or voters, or begins to copy its journal to somebody."""
        chance, head = self.chance, node.head
        assert head is not None
        if chance.random() < (0.7 if len(node.copied) < 3 else 0.1):
            target = chance.choice(self.nodes)
            there = {node_of(place.copy) for place in head.settled.heirs}
            if target.up and target is not node and (target.number not in there or chance.random() < 0.1):
                node.begin_copy(target)
            return
        heirs, voters = list(head.settled.heirs), head.settled.voters
        ready = [base.place for copy, base in node.copied.items() if copy in node.copying.held]
        ready = [place for place in ready if place not in heirs]
        if node.copying.held and chance.random() < 0.1:
            self.reach("copy forgotten")
            node.copying = copies.forget(node.copying, chance.choice(list(node.copying.held)))
        if heirs and chance.random() < (0.3 if len(heirs) < 2 else 0.7):
            heirs.pop(chance.randrange(len(heirs)))
        if ready and chance.random() < 0.8:
            heirs.append(chance.choice(ready))
        if chance.random() < 0.3 or not voters:
            voters = tuple(sorted(chance.sample(self.voters(), chance.choice((1, 3, 3, 3, 5)))))
        if not heirs and chance.random() < 0.1:
            voters = ()
        node.propose(tuple(heirs), voters)
        if chance.random() < 0.05:
            self.crash(node)

    def strike(self) -> None:
        """A fault."""
        chance = self.chance
        node = chance.choice(self.nodes)
        drawn = chance.random()
        if drawn < 0.3:
            self.split()
        elif drawn < 0.45:
            self.crash(chance.choice([each for each in self.nodes if each.head is not None] or self.nodes))
        elif drawn < 0.6:
            begin = [each for each in self.nodes if each.candidacy is not None or (each.head and not each.head.acts)]
            self.crash(chance.choice(begin or self.nodes))
        elif drawn < 0.85 or not self.forgets:
            for each in self.nodes:
                each.up = True
        elif drawn < 0.93:
            self.forget(node)
        else:
            self.cut(node)

    def split(self) -> None:
        """The network falls into halves, or comes together."""
        if self.sides and self.chance.random() < 0.6:
            self.sides = ()
            self.reach("healed")
            return
        self.sides = tuple(self.chance.choice((0, 1)) for _ in self.nodes)
        self.reach("split")
        self.say(f"split: {self.sides}")

    def crash(self, node: Node) -> None:
        self.say(f"node {node.number} crashes")
        self.reach("crash of a head" if node.head is not None else "crash")
        if node.head is not None and node.head.proposed is not None:
            self.reach("crash amid a proposal")
        away = node.head is not None and self.chance.random() < 0.6
        node.start_again()
        node.up, node.away = not away and self.chance.random() < 0.4, away

    def forget(self, node: Node) -> None:
        """A voter loses its memory."""
        self.reach("memory lost")
        self.say(f"voter {node.voter} loses its memory")
        node.ballot = voting.Ballot()
        if self.duties.keeps_promises:
            node.voter = VoterId(f"{node.number}.{int(node.voter.partition('.')[2]) + 1}")

    def cut(self, node: Node) -> None:
        """A power cut: the last parts of the copy may not have been on the disk."""
        self.reach("copy cut")
        self.say(f"copy {node.disk.place.copy} loses its end")
        disk = node.disk
        node.start_again()
        lease = disk.source[0]
        have = dict(disk.have)
        have[lease] = max(0, have.get(lease, 0) - 2)
        if self.duties.keeps_copies:
            disk = Disk(node.place(lease, -self.coverage["copy cut"]), disk.source, have)
        else:
            disk.have = have
        node.disk = disk

    # ---------------------------------------------------------------- when faults cease

    def heal(self) -> None:
        """All that is not lost for good is there, nothing is lost or late: somebody acts, if that can be asked for."""
        self.sides, self.healed = (), True
        if self.chance.random() < 0.5:
            self.heal_alone()
            return
        gone = {node.number for node in self.nodes if not node.up} if self.chance.random() < 0.7 else set()
        for node in self.nodes:
            node.up = node.number not in gone
        self.quiet()
        if any(self.goes_on(node) for node in self.nodes):
            self.reach("goes on")
            return
        wanted = self.wanted()
        for node in self.nodes:
            if node.up:
                node.start_again()
                node.heard = max(each.ballot.promised for each in self.nodes)
                node.stand()
                self.quiet()
                if self.goes_on(node):
                    self.reach("goes on with another")
                    return
        if wanted:
            raise Violation(f"nobody becomes head, although {wanted}")
        self.reach("too few are left")

    def heal_alone(self) -> None:
        """All voters are there, and of the copies that count just one: it becomes head."""
        for node in self.nodes:
            node.start_again()
            node.up = True
        if self.chance.random() < 0.5:
            self.words.clear()
        self.quiet()
        settled, voters, there = self.asked_for()
        able = [node for node in self.nodes if self.knows(node, settled)]
        if not able or voters != there:
            self.reach("too few are left")
            return
        node = self.chance.choice([node for node in able if node.disk.place != settled.head] or able)
        node.heard = max(each.ballot.promised for each in self.nodes)
        node.stand()
        self.quiet()
        if not self.goes_on(node):
            raise Violation(f"{node.disk.place.copy} does not become head, although all voters are there")
        self.reach("goes on alone")

    def quiet(self) -> None:
        """Everything that was said arrives."""
        for _ in range(3):
            for node in self.nodes:
                if node.up:
                    node.tick()
            while self.words:
                source, target, word = self.words.pop(0)
                if self.nodes[target].up:
                    self.nodes[target].hear(source, word)

    def goes_on(self, node: Node) -> bool:
        """Whether it acts, and what it writes now leaves it."""
        if not node.up or node.head is None or not node.head.acts:
            return False
        lease = node.head.newest.lease
        for _ in range(3):  # an open proposal, then that of no heirs
            if node.head.proposed is None:
                node.propose((), node.head.settled.voters)
            node.write(None)
            self.quiet()
            if node.head is None:
                return False
        return self.judge.offices[lease].left == len(node.written)

    def open(self) -> list[Succession]:
        """What is settled, and all that may yet be, or seem so: heads may have proposed what nobody has heard of."""
        settled, *newer = self.judge.open()
        proposed = [node.disk.known for node in self.nodes if node.disk.known is not None]
        return [settled, *newer, *(each for each in proposed if each.order > settled.order)]

    def asked_for(self) -> tuple[Succession, set[VoterId], set[VoterId]]:
        """What is settled, all voters who can matter, and those of them who are there with their memory."""
        settled, *newer = self.open()
        voters = {voter for each in (settled, *newer) for group in each.groups for voter in group}
        return settled, voters, {voter for voter in voters if self.is_there(voter)}

    def is_there(self, voter: VoterId) -> bool:
        node = self.nodes[node_of(voter)]
        return node.up and node.voter == voter

    def knows(self, node: Node, settled: Succession) -> bool:
        """Whether it has a copy that counts, and can find out: it knows voters who are there, or has proposed it.

        An heir of a head that was alone knows of no voters, until it has the part with the first proposal.
        """
        known, copy = node.disk.known, node.disk.place.copy
        if known is None or not node.up or not settled.has_copy(copy):
            return False
        voters = [voter for group in known.groups for voter in group]
        return copy == settled.head.copy or (voters != [] and all(map(self.is_there, voters)))

    def wanted(self) -> str:
        """Why somebody must become head; empty if that cannot be asked for."""
        settled, voters, there = self.asked_for()
        if voters == there and any(self.knows(node, settled) for node in self.nodes):
            return f"all voters are there, and a copy of {settled.order}"
        copies = {node.disk.place.copy for node in self.nodes if node.up and node.disk.known is not None}
        opened = self.open()
        enough = all(2 * len(there & set(group)) > len(set(group)) for each in opened for group in each.groups if group)
        if enough and all(place.copy in copies for each in opened for place in (each.head, *each.heirs)):
            return "a majority of the voters and all copies are there"
        return ""


def run_seed(seed: int, *, duties: Duties = DUTIES, story: bool = False) -> Result:
    """One schedule, always the same for the same seed."""
    world = World(seed, duties=duties, story=story)
    result = Result(seed, coverage=world.coverage, story=world.story)
    try:
        world.run(world.chance.randrange(100, 1_000))
        world.heal()
        world.count_heads()
    except Violation as violation:
        result.violation = str(violation)
    return result
