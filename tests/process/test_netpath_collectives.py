"""Collectives over a pretended network, with any number of ranks: each a thread, and a network that takes its time.

A message is read from the memory of who sends as late as possible, and written as soon as there is room for it:
whoever changes what has not got through yet, or looks at what has not come, is found out.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchrelay.netpath.collectives import collectives, rings
from torchrelay.netpath.transport import direct
from torchrelay.netpath.transport.mesh import Mesh
from torchrelay.netpath.transport.reduction import reduction

DEADLINE_S = 20.0
UNTIL = float("inf")


class Network:
    """All messages between the ranks. One step brings one of those that may come, drawn by seed."""

    def __init__(self, seed: int, most: int) -> None:
        self.draw = random.Random(seed)
        self.most = most  # messages under way in a stream
        self.turn = threading.Condition()
        self.sent: dict[tuple[int, int], deque[Message]] = {}
        self.wanted: dict[tuple[int, int], deque[Message]] = {}
        self.waited: list[Message] = []  # for each rank that waits
        self.ranks = 0  # that have not come back

    def post(self, kind: dict[tuple[int, int], deque[Message]], way: tuple[int, int], memory: torch.Tensor) -> Message:
        message = Message(memory)
        kind.setdefault(way, deque()).append(message)
        return message

    def wait(self, message: Message) -> None:
        """Let the network go on until this message has got through. The turn is held."""
        self.waited.append(message)
        try:
            while not message.done:
                if not self.step():
                    if len(self.waited) == self.ranks and not any(waited.done for waited in self.waited):
                        raise AssertionError("all ranks wait, and nothing is on its way")
                    assert self.turn.wait(DEADLINE_S), "nobody comes"
        finally:
            self.waited.remove(message)

    def step(self) -> bool:
        ready = [way for way, sent in self.sent.items() if sent and self.wanted.get(way)]
        if not ready:
            return False
        way = self.draw.choice(ready)
        sent, wanted = self.sent[way].popleft(), self.wanted[way].popleft()
        assert sent.memory.nbytes == wanted.memory.nbytes
        wanted.memory.view(torch.uint8).copy_(sent.memory.view(torch.uint8))
        sent.done = wanted.done = True
        self.turn.notify_all()
        return True


class Message:
    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.done = False


class FakeStream:
    """As `mesh.Stream`."""

    def __init__(self, network: Network, way: tuple[int, int], *, sends: bool) -> None:
        self.network, self.way, self.sends = network, way, sends
        self.under_way: deque[Message] = deque()
        self.posted = 0

    def post(self, memory: torch.Tensor, _until: float) -> None:
        with self.network.turn:
            while self.sends and self.under_way and self.under_way[0].done:
                self.under_way.popleft()
            while len(self.under_way) >= self.network.most:
                self._finish_oldest()
            kind = self.network.sent if self.sends else self.network.wanted
            self.under_way.append(self.network.post(kind, self.way, memory))
            self.posted += 1
            self.network.turn.notify_all()

    def _finish_oldest(self) -> None:
        self.network.wait(self.under_way[0])
        self.under_way.popleft()

    def finish_oldest(self, _until: float) -> None:
        with self.network.turn:
            self._finish_oldest()

    def finish(self, _until: float, first: int | None = None) -> None:
        with self.network.turn:
            while len(self.under_way) > (0 if first is None else self.posted - first):
                self._finish_oldest()


class FakeMesh:
    """As `mesh.Mesh`, for collectives."""

    def __init__(self, network: Network, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._out = {peer: FakeStream(network, (rank, peer), sends=True) for peer in range(size)}
        self._in = {peer: FakeStream(network, (peer, rank), sends=False) for peer in range(size)}

    def to(self, peer: int, _until: float) -> FakeStream:
        assert peer != self.rank
        return self._out[peer]

    def of(self, peer: int, _until: float) -> FakeStream:
        assert peer != self.rank
        return self._in[peer]


def on_all(size: int, seed: int, do: Callable[[Mesh], Any], most: int = 64) -> list[Any]:
    """What each rank gets. Raises what a rank raises."""
    network = Network(seed, most)
    network.ranks = size
    found: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = do(cast("Mesh", FakeMesh(network, rank, size)))
        except BaseException as error:  # noqa: BLE001  the top of this thread: the test gets it
            errors.append(error)
        finally:
            with network.turn:
                network.ranks -= 1
                network.turn.notify_all()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank has not come back"
    return found


# ---------------------------------------------------------------- what is tried

SIZES = st.integers(1, 9)
SEEDS = st.integers(0, 1 << 30)
LENGTHS = st.integers(0, 70)
# So that few elements go in many segments, and fewer messages may be under way than there are.
SCALED = [
    (rings, "SEGMENT", 32), (rings, "MOST_SEGMENTS", 4), (rings, "AHEAD", 2), (direct, "PIECE", 64),
    (direct, "MOST_PIECES", 4), (direct, "MOST_RANKS", 3), (collectives, "SMALL", 64),
]  # fmt: skip
MOST = 5


@pytest.fixture(scope="module", autouse=True)
def scaled() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in SCALED:
            patch.setattr(module, name, value)
        yield


def values(rank: int, elements: int, salt: int = 0) -> torch.Tensor:
    return torch.arange(elements, dtype=torch.int64) * (rank + 3) + 1000 * salt + rank


def total(size: int, elements: int, salt: int = 0) -> torch.Tensor:
    return sum((values(rank, elements, salt) for rank in range(size)), torch.zeros(elements, dtype=torch.int64))


@settings(max_examples=60, deadline=None)
@given(SIZES, SEEDS, LENGTHS, st.integers(1, 3))
def test_all_reduce(size: int, seed: int, elements: int, times: int) -> None:
    combined = reduction(dist.ReduceOp.SUM, torch.int64, size)

    def do(mesh: Mesh) -> list[torch.Tensor]:
        found = [values(mesh.rank, elements, salt) for salt in range(times)]
        for one in found:
            collectives.all_reduce(mesh, one, combined, UNTIL)
        return found

    for found in on_all(size, seed, do, MOST):
        for salt, one in enumerate(found):
            assert torch.equal(one, total(size, elements, salt))


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 9), SEEDS, SEEDS, st.integers(1, 70))
def test_bits_are_the_same_on_all_ranks_at_any_time(size: int, seed: int, other: int, elements: int) -> None:
    combined = reduction(dist.ReduceOp.AVG, torch.float32, size)

    def do(mesh: Mesh) -> bytes:
        mine = torch.rand(elements, generator=torch.Generator().manual_seed(mesh.rank)).exp()
        collectives.all_reduce(mesh, mine, combined, UNTIL)
        return mine.numpy().tobytes()

    assert len({*on_all(size, seed, do, MOST), *on_all(size, other, do, MOST)}) == 1


@settings(max_examples=60, deadline=None)
@example(4, 0, [70] * 9)
@given(SIZES, SEEDS, st.lists(LENGTHS, min_size=9, max_size=9))
def test_reduce_scatter_of_blocks_of_any_size(size: int, seed: int, lengths: list[int]) -> None:
    combined = reduction(dist.ReduceOp.SUM, torch.int64, size)

    def do(mesh: Mesh) -> torch.Tensor:
        blocks = [values(mesh.rank, lengths[block], block) for block in range(size)]
        result = torch.zeros(lengths[mesh.rank], dtype=torch.int64)
        collectives.reduce_scatter(mesh, blocks, result, combined, UNTIL)
        assert all(torch.equal(one, values(mesh.rank, lengths[block], block)) for block, one in enumerate(blocks))
        return result

    for rank, result in enumerate(on_all(size, seed, do, MOST)):
        assert torch.equal(result, total(size, lengths[rank], rank))


@settings(max_examples=60, deadline=None)
@given(SIZES, SEEDS, st.lists(LENGTHS, min_size=9, max_size=9))
def test_all_gather_of_blocks_of_any_size(size: int, seed: int, lengths: list[int]) -> None:
    def do(mesh: Mesh) -> list[torch.Tensor]:
        blocks = [torch.zeros(lengths[rank], dtype=torch.int64) for rank in range(size)]
        collectives.all_gather(mesh, values(mesh.rank, lengths[mesh.rank]), blocks, UNTIL)
        return blocks

    for blocks in on_all(size, seed, do, MOST):
        assert all(torch.equal(block, values(rank, lengths[rank])) for rank, block in enumerate(blocks))


@settings(max_examples=60, deadline=None)
@given(SIZES, SEEDS, LENGTHS, st.integers(0, 8))
def test_broadcast_and_reduce(size: int, seed: int, elements: int, root: int) -> None:
    root %= size
    combined = reduction(dist.ReduceOp.SUM, torch.int64, size)

    def do(mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
        brought, reduced = values(mesh.rank, elements), values(mesh.rank, elements)
        collectives.broadcast(mesh, brought, root, UNTIL)
        collectives.reduce(mesh, reduced, root, combined, UNTIL)
        return brought, reduced

    for rank, (brought, reduced) in enumerate(on_all(size, seed, do, MOST)):
        assert torch.equal(brought, values(root, elements))
        assert torch.equal(reduced, total(size, elements) if rank == root else values(rank, elements))


@settings(max_examples=40, deadline=None)
@given(SIZES, SEEDS, st.lists(st.integers(0, 40), min_size=81, max_size=81), st.integers(0, 8))
def test_parts_for_each(size: int, seed: int, lengths: list[int], root: int) -> None:
    """All to all, gather and scatter."""
    root %= size

    def length(rank: int, peer: int) -> int:
        return lengths[9 * rank + peer]

    def do(mesh: Mesh) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        me = mesh.rank
        into = [torch.zeros(length(peer, me), dtype=torch.int64) for peer in range(size)]
        collectives.all_to_all(mesh, [values(me, length(me, peer), peer) for peer in range(size)], into, UNTIL)
        gathered = [torch.zeros(lengths[peer], dtype=torch.int64) for peer in range(size)]
        collectives.gather(mesh, values(me, lengths[me]), gathered, root, UNTIL)
        mine = torch.zeros(lengths[me], dtype=torch.int64)
        collectives.scatter(mesh, [values(me, lengths[peer], peer) for peer in range(size)], mine, root, UNTIL)
        return into, gathered, mine

    for rank, (into, gathered, mine) in enumerate(on_all(size, seed, do, MOST)):
        assert all(torch.equal(one, values(peer, length(peer, rank), rank)) for peer, one in enumerate(into))
        if rank == root:
            assert all(torch.equal(one, values(peer, lengths[peer])) for peer, one in enumerate(gathered))
        assert torch.equal(mine, values(root, lengths[rank], rank))


@settings(max_examples=40, deadline=None)
@given(SIZES, SEEDS, st.integers(0, 8))
def test_nobody_leaves_a_barrier_before_all_have_come(size: int, seed: int, late: int) -> None:
    late %= size
    left: list[int] = []

    def do(mesh: Mesh) -> list[int]:
        if mesh.rank == late:
            seen = list(left)
            direct.barrier(mesh, UNTIL)
            return seen
        direct.barrier(mesh, UNTIL)
        left.append(mesh.rank)
        return []

    assert on_all(size, seed, do, MOST)[late] == []
