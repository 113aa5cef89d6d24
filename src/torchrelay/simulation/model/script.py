"""Script: the training run of a simulated job, as data that can be computed twice and compared.

State is a chain of numbers: every call folds what all ranks contributed into the state of each shard, and each rank
draws from a random chain of its own. Whoever misses a batch, uses one twice, keeps the wrong random state or applies
half a step ends up with another number, for ever. `undisturbed` computes the same chain without any processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

from torchrelay.protocol.messages.ids import Rank, WorkerPhase


@dataclass(frozen=True)
class ScriptError:
    """An error of the script itself: it strikes whoever computes this call as this rank (None: as any rank)."""

    call: int
    rank: int | None


@dataclass(frozen=True)
class Script:
    """What every rank runs. Calls are steps (COMPUTING) and sections (SECTION)."""

    calls: tuple[WorkerPhase, ...]
    shards: tuple[str, ...]  # of each rank; equal names are replicas
    saves: frozenset[int] = frozenset()  # after these calls the script writes its own checkpoint
    undeclared: frozenset[int] = frozenset()  # before these calls the ranks communicate outside any section
    error: ScriptError | None = None
    refused: bool = False  # torchrelay refuses it at protect()

    @property
    def ranks(self) -> int:
        return len(self.shards)

    @property
    def everybody(self) -> tuple[Rank, ...]:
        return first_ranks(self.ranks)

    def groups(self, rank: Rank) -> tuple[tuple[Rank, ...], ...]:
        """With two shards on more ranks: with whom this rank shares a copy, and who holds what it holds."""
        if self.ranks == 2 or len(set(self.shards)) != 2:
            return ()
        pair = tuple(each for each in self.everybody if each // 2 == rank // 2)
        return pair, tuple(each for each in self.everybody if self.shards[each] == self.shards[rank])


@lru_cache
def first_ranks(count: int) -> tuple[Rank, ...]:
    return tuple(map(Rank, range(count)))


@dataclass(frozen=True, slots=True)
class RankState:
    """What a rank carries: the state of its shard, which its replicas share, and its own random state."""

    model: int
    random: int

    def digest(self) -> int:
        return hash((self.model, 9))


def first_state(script: Script, rank: int) -> RankState:
    """What a rank has when the script begins without a checkpoint."""
    shard = sorted(set(script.shards)).index(script.shards[rank])
    return RankState(hash((shard, 1)), hash((rank, 2)))


def batch_of(call: int, rank: int) -> int:
    """The batch that a rank uses in a call."""
    return call * 1000 + rank


def drawn(state: RankState) -> RankState:
    """After the random numbers that a call draws (dropout)."""
    return RankState(state.model, hash((state.random, 3)))


def contribution(state: RankState, batch: int) -> int:
    """What a rank gives to the reduction of a call."""
    return hash((state.model, state.random, batch))


def updated(state: RankState, contributions: tuple[int, ...]) -> RankState:
    """After the update, which every rank of a shard applies in the same way."""
    return RankState(hash((state.model, contributions)), state.random)


def between(state: RankState) -> RankState:
    """After the code between two calls: it draws the next batch's augmentation and moves the learning rate."""
    return RankState(hash((state.model, 5)), hash((state.random, 6)))


@dataclass(frozen=True, slots=True)
class History:
    """The undisturbed run: the state of every rank before and after each call."""

    entered: tuple[tuple[RankState, ...], ...]  # [call][rank]; one more than there are calls: the end
    left: tuple[tuple[RankState, ...], ...]  # [call][rank]


@cache
def undisturbed(ranks: int, shards: tuple[str, ...], calls: int) -> History:
    """Compute the run without faults."""
    script = Script((WorkerPhase.COMPUTING,) * calls, shards)
    states = tuple(first_state(script, rank) for rank in range(ranks))
    entered, left = [], []
    for call in range(calls):
        states = tuple(between(state) for state in states)
        entered.append(states)
        computed = tuple(drawn(state) for state in states)
        given = tuple(contribution(state, batch_of(call, rank)) for rank, state in enumerate(computed))
        states = tuple(updated(state, given) for state in computed)
        left.append(states)
    entered.append(tuple(between(state) for state in states))
    return History(tuple(entered), tuple(left))
