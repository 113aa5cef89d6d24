"""All ranks know that all have come, from what each has heard of some; on real lanes, each rank in a thread."""

from __future__ import annotations

import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Point, Rank, WorkerId
from torchrelay.protocol.messages.orders import Reconfigure
from torchrelay.wire.trust import trust
from torchrelay.worker.peers.lanes import ALIVE_S, Ends, Lanes, Parted, limit_waits, watch_over
from torchrelay.worker.peers.rounds import GATE, Rounds, partners
from torchrelay.worker.process_groups import groups
from torchrelay.worker.transfer.request import STALL_S
from torchrelay.worker.transfer.tls import Tls, TlsSocket
from torchrelay.worker.transfer.transfer import StateServer

DEADLINE_S = 30.0


class Circle:
    """Ranks in one process, each with its thread."""

    def __init__(self, world: int, *, encrypts: bool) -> None:
        self.world, self.store, self.secret = world, HashStore(), trust.new_secret()
        tls = [Tls() if encrypts else None for _ in range(world)]
        self.servers = [StateServer(self.secret, tls=one) for one in tls]
        self.lanes = [Lanes(one) for one in tls]
        self.rounds = [Rounds() for _ in range(world)]
        self.ends: dict[int, Ends] = {}
        for server, lanes in zip(self.servers, self.lanes, strict=True):
            server.adopt = lanes.adopt
        self.pool = ThreadPoolExecutor(world)

    def everybody(self, do: Callable[[int], Any]) -> list[Any]:
        return [future.result(DEADLINE_S) for future in [self.pool.submit(do, rank) for rank in range(self.world)]]

    def connect(self, generation: int = 1) -> None:
        self.everybody(lambda rank: self.connect_one(rank, generation))

    def connect_one(self, rank: int, generation: int, timeout_s: float = DEADLINE_S) -> None:
        order = Reconfigure(
            node=NodeId("n"),
            worker=WorkerId("w"),
            job=JobId("j"),
            generation=Generation(generation),
            rank=Rank(rank),
            store="",
        )
        wanted = {GATE: partners(Rank(rank), self.world)}
        ends, _ = self.lanes[rank].meet(self.servers[rank].address, self.secret, order, self.store, wanted, timeout_s)
        self.ends[rank] = ends[GATE]
        self.rounds[rank].connect(Rank(rank), self.world, ends[GATE])
        limit_waits(ends[GATE], DEADLINE_S)

    def enter(self, points: dict[int, Point] | None = None, lacking: frozenset[int] = frozenset()) -> list[bool | None]:
        told = points or {}
        return self.everybody(lambda rank: self.rounds[rank].exchange(told.get(rank, Point(5)), rank in lacking))

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
        made[-1].connect()
        return made[-1]

    yield one
    for each in made:
        each.close()


WORLDS = [1, 2, 3, 4, 5, 7, 8]


@pytest.mark.parametrize("world", [*WORLDS, 100, 4096])
def test_everybody_has_heard_from_everybody_in_the_end(world: int) -> None:
    rounds = len(partners(Rank(0), world)[0])
    assert rounds == (world - 1).bit_length()
    heard = {rank: {rank} for rank in range(min(world, 100))}
    if world <= 100:
        for at in range(rounds):
            before = {rank: set(known) for rank, known in heard.items()}
            for rank in range(world):
                to, by = (each[at] for each in partners(Rank(rank), world))
                heard[rank] |= before[by]
                assert partners(to, world)[1][at] == rank, "who is told hears whom it is told by"
        assert all(known == set(range(world)) for known in heard.values())


@pytest.mark.parametrize("world", WORLDS)
class TestAll:
    def test_pass_when_all_have_come(self, world: int, make: Callable[[int], Circle]) -> None:
        ring = make(world)
        for _ in range(3):
            assert ring.enter() == [True] * world

    def test_know_that_one_lacks_its_snapshot(self, world: int, make: Callable[[int], Circle]) -> None:
        ring = make(world)
        for lacking in range(world):
            assert ring.enter(lacking=frozenset({lacking})) == [False] * world
        assert ring.enter() == [True] * world

    def test_know_that_one_is_elsewhere(self, world: int, make: Callable[[int], Circle]) -> None:
        ring = make(world)
        for elsewhere in range(world if world > 1 else 0):
            for other in (Point(4), Point(6), Point(5, 1)):
                assert ring.enter({elsewhere: other}) == [None] * world


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_nobody_passes_before_the_last_has_come(world: int, make: Callable[[int], Circle]) -> None:
    ring = make(world)
    for last in range(world):
        others = [rank for rank in range(world) if rank != last]
        waiting = [ring.pool.submit(ring.rounds[rank].exchange, Point(1), False) for rank in others]
        done, _ = wait(waiting, 0.05, return_when=FIRST_COMPLETED)
        assert not done, "that nothing happens can only be seen by looking for a while"
        assert ring.rounds[last].exchange(Point(1), False) is True
        assert [future.result(DEADLINE_S) for future in waiting] == [True] * (world - 1)


def test_who_waits_is_cut_from_another_thread(make: Callable[[int], Circle]) -> None:
    ring = make(4)
    waiting = [ring.pool.submit(ring.rounds[rank].exchange, Point(1), False) for rank in (0, 1, 2)]
    assert not any(future.done() for future in waiting)
    for rank, future in enumerate(waiting):
        ring.lanes[rank].cut()
        with pytest.raises(Parted):
            future.result(DEADLINE_S)


def test_who_waits_for_one_that_ends_fails_at_once(make: Callable[[int], Circle]) -> None:
    ring = make(4)
    waiting = ring.pool.submit(ring.rounds[0].exchange, Point(1), False)
    ring.lanes[3].close()
    with pytest.raises(Parted, match="rank 3 is not heard in the gate"):
        waiting.result(DEADLINE_S)


def test_a_new_generation_has_lanes_of_its_own(make: Callable[[int], Circle]) -> None:
    ring = make(4)
    waiting = [ring.pool.submit(ring.rounds[rank].exchange, Point(1), False) for rank in (0, 1, 2)]
    for lanes in ring.lanes:
        lanes.cut()
    for future in waiting:
        with pytest.raises(Parted):
            future.result(DEADLINE_S)
    ring.connect(2)
    assert ring.enter() == [True] * 4


def test_a_rank_that_does_not_come_fails_the_reconfigure_in_time(make: Callable[[int], Circle]) -> None:
    ring = make(2)
    ring.store.set(f"{trust.keys_of(ring.secret, 2)}/lanes/1", ring.servers[1].address)  # told before it was lost
    with pytest.raises(groups.ReconfigureError, match="rank 1 did not come"):
        ring.connect_one(0, 2, timeout_s=2.0)


def test_who_is_cut_while_it_reaches_out_for_one_that_is_stopped_does_not_wait_for_it(
    make: Callable[[int], Circle],
) -> None:
    ring = make(2)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        ring.store.set(f"{trust.keys_of(ring.secret, 2)}/lanes/1", f"127.0.0.1:{stopped.getsockname()[1]}")
        reaching = ring.pool.submit(ring.connect_one, 0, 2)
        connection, _ = stopped.accept()
        with connection:
            ring.lanes[0].cut()
            with pytest.raises(groups.ReconfigureError, match="is not reached"):
                reaching.result(STALL_S / 2)


def test_who_waits_for_too_long_says_for_whom(make: Callable[[int], Circle]) -> None:
    ring = make(3)
    limit_waits(ring.ends[0], 0.05)
    with pytest.raises(Parted, match="rank 2 is not heard in the gate: nothing has moved"):
        ring.rounds[0].exchange(Point(1), False)


def test_the_other_machine_is_looked_after_while_nothing_is_said(make: Callable[[int], Circle]) -> None:
    ends = make(4).ends[0]
    for short in (False, True):
        watch_over(ends, short=short)
        for lane in ends.lanes():
            told = partial(lane.getsockopt, socket.IPPROTO_TCP)
            silence = told(socket.TCP_KEEPIDLE) + told(socket.TCP_KEEPINTVL) * told(socket.TCP_KEEPCNT)
            assert lane.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert silence == ALIVE_S
            assert told(socket.TCP_USER_TIMEOUT) == 1000 * ALIVE_S * short, "a record may wait until it is read"


def test_an_exception_of_the_scripts_own_stays_what_it_is_and_leaves_nobody_in_between(
    make: Callable[[int], Circle],
) -> None:
    def handler(*_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "the script's")

    ring = make(2)
    main = threading.get_ident()

    def when_it_waits() -> None:
        lane = ring.ends[1].by[Rank(0)]
        below = lane._socket if isinstance(lane, TlsSocket) else lane
        below.recv(1, socket.MSG_PEEK)  # it has told us, and hears nothing
        signal.pthread_kill(main, signal.SIGUSR2)

    known = signal.signal(signal.SIGUSR2, handler)
    try:
        interrupting = ring.pool.submit(when_it_waits)
        with pytest.raises(FileNotFoundError, match="the script's"):
            ring.rounds[0].exchange(Point(5), False)
        interrupting.result(DEADLINE_S)
    finally:
        signal.signal(signal.SIGUSR2, known)
    assert ring.rounds[1].exchange(Point(5), False) is True, "it had been told"
    with pytest.raises(Parted):
        ring.rounds[1].exchange(Point(6), False)
    with pytest.raises(Parted):
        ring.rounds[0].exchange(Point(5), False)


def test_rounds_without_lanes_let_nobody_pass() -> None:
    with pytest.raises(Parted, match="not connected"):
        Rounds().exchange(Point(1), False)
    with pytest.raises(ValueError, match="rank 1 of 4 has 0 lanes"):
        Rounds().connect(Rank(1), 4, Ends())
