"""Replicas: how a simulated worker compares what it holds with theirs; `comparing` is the real thing."""

from __future__ import annotations

from msgspec import structs

from torchrelay.protocol.messages.events import ReplicasDiffer
from torchrelay.protocol.messages.ids import Rank, WorkerPhase
from torchrelay.protocol.rules.differing import judge
from torchrelay.simulation.model import script as sc
from torchrelay.simulation.model.life import Main
from torchrelay.simulation.ports import Trainee


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
        found = judge(list(zip(training.world.script.shards, map(str, held), strict=True)))
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
                worker=training.process.id, job=training.process.job, rank=training.rank,
                generation=training.resumed, point=training.committed, ranks=tuple(map(Rank, error.ranks)),
                evidence="replicas differ",
            )  # fmt: skip
            training.standing_news = event
            training.process.say(event)

    def say_again(self) -> None:
        """A halt was heard, or would have been: who waits as replicas differ says so in its generation."""
        training, news = self._training, self._training.standing_news
        if isinstance(news, ReplicasDiffer):
            training.standing_news = structs.replace(news, generation=training.resumed)
            training.process.say(training.standing_news)
