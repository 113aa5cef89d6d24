"""A simulated node: its voter, its copy of the journal, and the orchestrator that may act on it."""

from __future__ import annotations

from random import Random
from typing import Protocol

from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.succession import candidate as candidates
from torchrelay.protocol.succession import copying as copies
from torchrelay.protocol.succession import head as heads
from torchrelay.protocol.succession import voter as voting
from torchrelay.protocol.succession.candidate import Candidacy, Elected, Excluded
from torchrelay.protocol.succession.copying import Copying
from torchrelay.protocol.succession.head import Head
from torchrelay.protocol.succession.succession import CopyId, Place, Succession, VoterId
from torchrelay.protocol.succession.voter import Ballot
from torchrelay.simulation.succession.judge import Judge
from torchrelay.simulation.succession.words import (
    Answer,
    Ask,
    Base,
    Disk,
    Duties,
    Held,
    Note,
    Noted,
    Part,
    Word,
)


class Surroundings(Protocol):
    """What a node is given."""

    chance: Random
    duties: Duties
    judge: Judge

    def send(self, source: int, target: int, word: Word) -> None: ...

    def say(self, what: str) -> None: ...

    def reach(self, what: str) -> None: ...


def node_of(name: str) -> int:
    """The node of a voter or a copy, by its name."""
    return int(name.partition(".")[0])


class Node:
    """What is on its disk stays when its processes end; what is in `candidacy` and `head` does not."""

    def __init__(self, number: int, around: Surroundings) -> None:
        self.number = number
        self.around = around
        self.up, self.away = True, False
        self.voter = VoterId(f"{number}.0")
        self.ballot = Ballot()
        self.disk = Disk(self.place(0, 0))
        self.candidacy: Candidacy | None = None
        self.excluded = False
        self.start_again()

    def start_again(self) -> None:
        """Its processes end, and begin anew."""
        self.candidacy = None
        self.heard = 0
        self.head: Head | None = None
        self.copying = Copying()
        self.written: list[Succession | None] = []
        self.copied: dict[CopyId, Base] = {}
        self.noted_by: set[VoterId] = set()

    def place(self, lease: int, number: int) -> Place:
        """A name for a copy on this node that no other has."""
        return Place(node=NodeId(str(self.number)), copy=CopyId(f"{self.number}.{lease}.{number}"))

    # ---------------------------------------------------------------- to become head

    def lead(self, head: Head) -> None:
        """It takes office."""
        disk, lease = self.disk, head.newest.lease
        self.start_again()
        self.head = head
        judge = self.around.judge
        judge.elect(lease, disk.place.copy, disk.have)
        judge.tell(head.newest)
        if self.around.duties.keeps_proposals or head.acts:
            disk.known = head.newest
        if self.around.duties.bars:
            disk.source = (lease, 0)
        self.around.reach("elected")
        if head.acts:
            self.act()

    def act(self) -> None:
        assert self.head is not None
        self.around.judge.act(self.head.newest.lease)
        self.around.reach("acts")
        self.around.say(f"{self.disk.place.copy} acts under lease {self.head.newest.lease}")
        self.disk.known = self.head.settled
        self.let_leave()

    def stand(self) -> None:
        """It asks for a lease. A head that does so is none any more: it was started again."""
        disk = self.disk
        if disk.known is None:
            return
        heard = self.heard if self.candidacy is None else max(self.candidacy.lease, self.candidacy.heard)
        self.start_again()
        self.candidacy = candidates.stand(disk.place, disk.known, heard=heard)
        self.around.reach("stands")
        self.around.say(f"{disk.place.copy} asks for lease {self.candidacy.lease}")
        self.ask()

    def ask(self) -> None:
        """Whose promise it needs, and has not."""
        assert self.candidacy is not None
        lease, copy = self.candidacy.lease, self.candidacy.place.copy
        for voter in sorted(candidates.asked(self.candidacy) - self.candidacy.promises.keys()):
            self.around.send(self.number, node_of(voter), Ask(voter, lease, copy))
        self.judge()

    def judge(self) -> None:
        candidacy = self.candidacy
        if candidacy is None:
            return
        verdict = candidates.judge(candidacy)
        if isinstance(verdict, Elected):
            self.around.say(f"{candidacy.place.copy} is elected and follows {verdict.base.order}")
            self.around.reach("follows what is settled" if verdict.base.base is None else "follows what may be settled")
            self.lead(heads.take_office(candidacy.place, candidacy.lease, verdict.base))
        elif isinstance(verdict, Excluded):
            self.around.reach("excluded")
            self.excluded, self.candidacy = True, None

    def hear_answer(self, word: Answer) -> None:
        if self.candidacy is None or word.copy != self.candidacy.place.copy:
            return
        before = len(candidates.asked(self.candidacy))
        self.candidacy = candidates.hear_answer(self.candidacy, word.voter, word.ballot, granted=word.granted)
        if len(candidates.asked(self.candidacy)) > before:
            self.ask()
        else:
            self.judge()

    # ---------------------------------------------------------------- as a head

    def tick(self) -> None:
        """A head says again what was not answered, and writes; a candidate asks again."""
        if self.candidacy is not None:
            self.ask()
        if self.head is None:
            return
        self.tell()
        self.copy()
        if self.head.acts and self.around.chance.random() < 0.5:
            self.write(None)

    def tell(self) -> None:
        """Voters hear what they are to note; or, now and then, that it is settled."""
        head = self.head
        assert head is not None
        if head.proposed is None:
            if self.around.chance.random() < 0.3:
                self.around.reach("told that it is settled")
                for voter in head.settled.voters:
                    self.around.send(self.number, node_of(voter), Note(voter, head.settled))
            return
        for voter in sorted({voter for group in head.proposed.groups for voter in group} - self.noted_by):
            self.around.send(self.number, node_of(voter), Note(voter, head.proposed))

    def copy(self) -> None:
        """Each copy gets what it lacks."""
        for copy, base in self.copied.items():
            held = self.copying.held.get(copy)
            if held is None:
                self.around.send(self.number, node_of(copy), base)
            elif held < len(self.written):
                part = Part(base.lease, copy, held + 1, self.written[held])
                self.around.send(self.number, node_of(copy), part)

    def begin_copy(self, target: Node) -> None:
        assert self.head is not None
        lease = self.head.newest.lease
        number = 1 + max((base.number for base in self.copied.values()), default=0)
        base = Base(
            lease, target.place(lease, number), number, self.around.judge.offices[lease].have, self.head.settled
        )
        self.copied[base.place.copy] = base

    def adopt(self, heir: Node) -> None:
        """This node has a copy from the beginning."""
        lease, number = heir.disk.source
        assert self.head is not None
        self.copied[heir.disk.place.copy] = Base(lease, heir.disk.place, number, {}, self.head.settled)

    def write(self, item: Succession | None) -> None:
        assert self.head is not None
        lease = self.head.newest.lease
        self.written.append(item)
        self.disk.have[lease] = len(self.written)
        self.copying = copies.write(self.copying)
        self.let_leave()

    def let_leave(self) -> None:
        assert self.head is not None
        self.copying = copies.let_leave(self.copying, self.head)
        if self.around.judge.leave(self.head.newest.lease, self.copying.left):
            self.around.reach("left")

    def propose(self, heirs: tuple[Place, ...], voters: tuple[VoterId, ...]) -> None:
        assert self.head is not None
        if self.around.duties.waits and not copies.may_be_heirs(self.copying, heirs):
            return
        after = heads.propose(self.head, heirs, voters)
        if after is self.head:
            return
        self.around.say(f"{self.disk.place.copy} proposes {after.newest.order}: {[p.copy for p in heirs]} {voters}")
        self.around.reach("voters change" if voters != self.head.settled.voters else "heirs change")
        self.head = after
        self.noted_by = set()
        if self.around.duties.keeps_proposals:
            self.disk.known = after.newest
        self.around.judge.tell(after.newest)
        self.write(after.newest)
        self.tell()

    def hear_noted(self, word: Noted) -> None:
        if self.head is None or self.head.proposed is None:
            return
        acted = self.head.acts
        if word.order == self.head.proposed.order:
            self.noted_by.add(word.voter)
        self.head = heads.hear_noted(self.head, word.voter, word.order)
        if self.head.proposed is None:
            self.around.reach("settled")
            self.disk.known = self.head.settled
            if acted:
                self.let_leave()
            else:
                self.act()

    def hear_held(self, word: Held) -> None:
        if self.head is not None and word.lease == self.head.newest.lease and word.copy in self.copied:
            self.copying = copies.hear_held(self.copying, word.copy, word.part)
            self.let_leave()

    # ---------------------------------------------------------------- as a voter, and as an heir

    def hear_note(self, source: int, word: Note) -> None:
        if word.voter == self.voter:
            self.ballot, noted = voting.note(self.ballot, word.succession)
            if noted:
                self.around.judge.note(self.voter, word.succession.order)
                self.around.send(self.number, source, Noted(self.voter, word.succession.order))

    def hear_ask(self, source: int, word: Ask) -> None:
        if word.voter == self.voter:
            self.ballot, granted = voting.promise(self.ballot, word.lease, word.copy)
            self.around.send(self.number, source, Answer(self.voter, word.copy, self.ballot, granted))

    def hear_base(self, source: int, word: Base) -> None:
        disk = self.disk
        if word.place != disk.place:
            if (word.lease, word.number) <= disk.source or self.head is not None:
                return
            self.around.reach("copied")
            self.disk = Disk(word.place, (word.lease, word.number), dict(word.have), word.known)
            self.excluded, self.candidacy = False, None
        self.around.send(self.number, source, Held(word.lease, word.place.copy, self.disk.have.get(word.lease, 0)))

    def hear_part(self, source: int, word: Part) -> None:
        disk = self.disk
        if word.copy != disk.place.copy or word.lease != disk.source[0] or (self.head and self.around.duties.bars):
            return
        if word.number == disk.have.get(word.lease, 0) + 1:
            disk.have[word.lease] = word.number
            if word.item is not None and (disk.known is None or word.item.order > disk.known.order):
                disk.known = word.item
        self.around.send(self.number, source, Held(word.lease, word.copy, disk.have.get(word.lease, 0)))

    def hear(self, source: int, word: Word) -> None:
        match word:
            case Note():
                self.hear_note(source, word)
            case Noted():
                self.hear_noted(word)
            case Ask():
                self.hear_ask(source, word)
            case Answer():
                self.hear_answer(word)
            case Base():
                self.hear_base(source, word)
            case Part():
                self.hear_part(source, word)
            case Held():
                self.hear_held(word)
