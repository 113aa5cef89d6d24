"""Wiring: the collectives of one generation, and how replicas compare by them what they hold.

A collective is of all ranks or of a group, and blocks until every one of these has entered.

A collective that all have entered completes, but its result reaches each rank at a moment of its own: a fault in
between leaves some with it and some without. Whose connections are cut blocks the others, until they see an error
(some do, after a while) or are interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import structs

from torchrelay.protocol.messages.events import ReplicasDiffer
from torchrelay.protocol.messages.ids import Generation, Rank, WorkerPhase
from torchrelay.protocol.recovery.replicas import judge_replicas
from torchrelay.simulation.model import script as sc
from torchrelay.simulation.model.life import Main
from torchrelay.simulation.ports import Kind, Members, Trainee, Watched, Worker


class Broken(ConnectionError):
    """A collective, or connecting, has failed."""


@dataclass
class Round:
    """One collective."""

    kind: Kind
    values: dict[Rank, int] = field(default_factory=dict)
    waiting: dict[Rank, int] = field(default_factory=dict)  # whose main thread is blocked in it, under which ticket
    complete: bool = False
    results: tuple[int, ...] = ()  # what each of its ranks gave, when it is complete


class Wiring:
    """The connections of one generation, made through one store."""

    def __init__(self, world: Watched, generation: Generation, store: str) -> None:
        self.world = world
        self.generation = generation
        self.store = store
        self.members: dict[Rank, Worker] = {}
        self.connected = False
        self.rounds: dict[Members, list[Round]] = {}
        self.cut: set[Rank] = set()  # whose connections are closed
        self.felt: set[Rank] = set()  # who has seen an error, and sees one in each collective from then on
        self._arriving: dict[Rank, int] = {}

    # ------------------------------------------------------------ connecting

    def arrive(self, rank: Rank, process: Worker) -> None:
        """A rank asks to be connected. Its main thread, under its present ticket, waits for the others."""
        before = self.members.get(rank)
        if before is not None and before is not process:
            self.world.checker.fail(f"rank {rank} is held by {before.id} and {process.id} in {self.generation}")
        self.members[rank] = process
        self._arriving[rank] = process.ticket + 1
        if len(self.members) < self.world.script.ranks or self.cut or not self._hosted():
            return
        self.connected = True
        for member, ticket in sorted(self._arriving.items()):
            delay = self.world.chance.randint(1, 8)
            self.world.after(delay, self._connect, member, ticket)

    def _hosted(self) -> bool:
        """Whether the store is there: its host is a member, and told to host it."""
        return any(member.store == self.store for member in self.members.values())

    def _connect(self, rank: Rank, ticket: int) -> None:
        member = self.members[rank]
        if rank in self.felt or (self.cut and self.world.chance.random() < 0.5):
            member.fail(ticket, Broken("connection refused"))
        else:
            member.wake(ticket, None)

    # ------------------------------------------------------------ collectives

    def enter(self, process: Worker, rank: Rank, kind: Kind, value: int, members: Members) -> None:
        """A rank enters its next collective among these ranks, and blocks in it."""
        number = process.begun.get(members, 0)
        process.begun[members] = number + 1
        rounds = self.rounds.setdefault(members, [])
        if number == len(rounds):
            rounds.append(Round(kind))
        now = rounds[number]
        if now.kind != kind:
            self.world.checker.fail(f"{process.id} enters {kind} while others are in {now.kind}")
        now.values[rank] = value
        now.waiting[rank] = process.ticket + 1
        if rank in self.felt:
            self.world.after(1, process.fail, process.ticket + 1, Broken("connection reset by peer"))
        if len(now.values) == len(members) and not self.cut:
            now.complete = True
            for each, ticket in sorted(now.waiting.items()):
                delay = self.world.chance.choice((0, 1, 2, 12))
                self.world.after(delay, self._deliver, each, ticket, results(now, members))

    def _deliver(self, rank: Rank, ticket: int, result: tuple[int, ...]) -> None:
        """The result reaches a rank, unless a connection was cut before and the bytes were lost with it."""
        if rank in self.cut or rank in self.felt or (self.cut and self.world.chance.random() < 0.5):
            return
        self.members[rank].wake(ticket, result)

    # ------------------------------------------------------------ breaking

    def shut(self, rank: Rank) -> None:
        """A rank's connections are closed: by its end, or by its control thread. Peers may see it, or not."""
        if rank in self.cut:
            return
        self.cut.add(rank)
        for other in sorted(self.members):
            if other != rank and other not in self.cut and self.world.chance.random() < self.world.plan.resets:
                self.world.after(self.world.chance.randint(1, 40), self.feel, other)
        self._fail_blocked(rank, "shut down")

    def feel(self, rank: Rank) -> None:
        """A rank sees that a peer's connection is gone: now if it is blocked, else in its next collective."""
        if rank not in self.cut and rank not in self.felt:
            self.felt.add(rank)
            self._fail_blocked(rank, "connection reset by peer")

    def _fail_blocked(self, rank: Rank, why: str) -> None:
        member = self.members.get(rank)
        if member is None:
            return
        if member.ticket == self._arriving.get(rank):
            self.world.after(0, member.fail, member.ticket, Broken(why))
        for members, each in ((members, each) for members, rounds in self.rounds.items() for each in rounds[-2:]):
            if member.ticket != each.waiting.get(rank):
                continue
            if each.complete and self.world.chance.random() < 0.5:
                # The result was on its way and wins: a gate that completes after the report.
                self.world.after(0, member.wake, member.ticket, results(each, members))
            else:
                self.world.after(0, member.fail, member.ticket, Broken(why))


def results(of: Round, members: Members) -> tuple[int, ...]:
    """What each of its ranks gave to a collective that is complete."""
    if not of.results:
        of.results = tuple(of.values[each] for each in members)
    return of.results


# ---------------------------------------------------------------- how replicas compare

# `comparing` is the real thing.


class Differing(Exception):
    """Replicas differ; `ranks` from most of theirs."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__(ranks)
        self.ranks = ranks


class Replicas:
    """Those of one worker, and its own state."""

    def __init__(self, training: Trainee) -> None:
        self._training = training
        self.will_flip = False
        self.flipped = False

    def flip(self) -> None:
        """A bit flips, if a fault says so, and if enough others hold the same to tell who is right."""
        training = self._training
        checker, calls = training.world.checker, training.world.script.calls
        # In a step, as only steps compare: what a section has been given is in it for ever.
        step = calls[training.base + training.index] is WorkerPhase.COMPUTING
        if self.will_flip and step and checker.holders(training.rank) > 2:
            self.will_flip, self.flipped = False, True
            training.world.tell(f"** a bit flips in {training.process.id} (rank {training.rank})")
            checker.flipped(training.process.id)
            training.state = sc.RankState(training.state.model ^ 1, training.state.random)

    def compare(self) -> Main[None]:
        """Before the gate: nobody goes on if replicas differ."""
        training = self._training
        held = yield from training.collective(("compare", training.pending), training.state.digest())
        shards = training.world.script.shards
        found = judge_replicas((rank, shards[rank], str(one)) for rank, one in enumerate(held))
        if found.doubtful:
            training.world.checker.doubted()
        if found.differing or found.doubtful:
            raise Differing(() if found.doubtful else found.differing)

    def say(self, error: Differing) -> None:
        """The lowest rank that is not at fault tells of it."""
        training = self._training
        lowest = next(rank for rank in range(training.world.script.ranks) if rank not in error.ranks)
        if training.rank == lowest and not training.interrupted:
            assert training.committed is not None, "who compares holds state"
            event = ReplicasDiffer(
                worker=training.process.id,
                job=training.process.job,
                rank=training.rank,
                generation=training.resumed,
                point=training.committed,
                ranks=tuple(map(Rank, error.ranks)),
                evidence="replicas differ",
            )
            training.standing_news = event
            training.process.say(event)

    def say_again(self) -> None:
        """A halt was heard, or would have been: who waits as replicas differ says so in its generation."""
        training, news = self._training, self._training.standing_news
        if isinstance(news, ReplicasDiffer):
            training.standing_news = structs.replace(news, generation=training.resumed)
            training.process.say(training.standing_news)
