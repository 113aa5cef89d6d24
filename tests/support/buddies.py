"""What tests of buddies share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore

from torchrelay.protocol.messages.events import PrivateRecord
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Point, Rank, WorkerId
from torchrelay.protocol.messages.orders import Reconfigure
from torchrelay.wire.trust import trust
from torchrelay.worker.peers.buddies import RECORDS, Buddies
from torchrelay.worker.peers.lanes import Lanes, limit_waits
from torchrelay.worker.transfer.tls import Tls
from torchrelay.worker.transfer.transfer import StateServer

DEADLINE_S = 30.0


def circle(rank: int, world: int, copies: int, turn: int = 1) -> tuple[tuple[Rank, ...], tuple[Rank, ...]]:
    """Buddies and wards: the ranks that follow, and those before, `turn` further in each generation."""
    after = tuple(Rank((rank + turn + at) % world) for at in range(copies))
    before = tuple(Rank((rank - turn - at) % world) for at in range(copies))
    return after, before


# ---------------------------------------------------------------- in one process


class Circle:
    """Ranks in one process, each with its thread."""

    def __init__(self, world: int, *, encrypts: bool = False) -> None:
        self.world = world
        self.generation = 0
        self.store = HashStore()
        secret = trust.new_secret()
        tls = [Tls() if encrypts else None for _ in range(world)]
        self.servers = [StateServer(secret, tls=one) for one in tls]
        self.all = [Buddies() for _ in range(world)]
        self.lanes = [Lanes(one) for one in tls]
        for server, lanes in zip(self.servers, self.lanes, strict=True):
            server.adopt = lanes.adopt
        self.secret = secret
        self.pool = ThreadPoolExecutor(world)

    def everybody(self, do: Callable[[int], object]) -> list[object]:
        return [future.result(DEADLINE_S) for future in [self.pool.submit(do, rank) for rank in range(self.world)]]

    def share(self, point: Point | None, *, turn: int = 1, copies: int = 1, timeout_s: float = DEADLINE_S) -> None:
        self.generation += 1
        generation = self.generation
        self.everybody(lambda rank: self.share_one(rank, generation, point, turn, copies, timeout_s))

    def share_one(
        self, rank: int, generation: int, point: Point | None, turn: int, copies: int, timeout_s: float
    ) -> None:
        after, before = circle(rank, self.world, copies, turn)
        order = Reconfigure(
            node=NodeId("n"),
            worker=WorkerId("w"),
            job=JobId("j"),
            generation=Generation(generation),
            rank=Rank(rank),
            store="",
            buddies=after,
            wards=before,
        )
        record = b"" if point is None else b"%d shares %d" % (rank, point.step)
        wanted = {RECORDS: (after, before)}
        ends, addresses = self.lanes[rank].meet(
            self.servers[rank].address, self.secret, order, self.store, wanted, timeout_s
        )
        self.all[rank].share(ends[RECORDS], [addresses[buddy] for buddy in after], point, record)
        limit_waits(ends[RECORDS], DEADLINE_S)

    def gate(self, step: int, size: int = 0) -> None:
        self.everybody(lambda rank: self.all[rank].at_gate(Point(step), (b"%d at " % rank, b"%d" % step, bytes(size))))

    def kept(self, rank: int, ward: int) -> tuple[PrivateRecord, ...]:
        copies = self.all[rank]._copies.get(Rank(ward))
        return tuple(PrivateRecord(point, copies.of(point)) for point in copies.points()) if copies else ()

    def close(self) -> None:
        for one in self.lanes:
            one.cut()
            one.close()
        for server in self.servers:
            server.close()
        self.pool.shutdown()


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Circle]]:
    made: list[Circle] = []

    def one(world: int) -> Circle:
        made.append(Circle(world, encrypts=request.param))
        return made[-1]

    yield one
    for each in made:
        each.close()
