"""Buddies hold the private records of the last two points of their wards, whatever becomes of those."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.support.buddies import (
    DEADLINE_S,
    Circle,
    circle,
    make,  # noqa: F401  a fixture
)
from torchrelay.protocol.messages.ids import Point, Rank
from torchrelay.wire.trust import trust
from torchrelay.worker.peers import buddies
from torchrelay.worker.peers.lanes import Parted
from torchrelay.worker.process_groups import groups


@pytest.mark.parametrize("copies", [1, 2])
def test_the_last_two_points_are_kept(make: Callable[[int], Circle], copies: int) -> None:
    ring = make(3)
    ring.share(None, copies=copies)
    assert ring.kept(1, 0) == (), "nothing was committed"
    for step in (1, 2, 3):
        ring.gate(step)
    for rank in range(3):
        for ward in circle(rank, 3, copies)[1]:
            assert [record.point for record in ring.kept(rank, ward)] == [Point(2), Point(3)]
            assert ring.all[rank].kept(ward, Point(3)) == b"%d at 3" % ward
            assert ring.all[rank].kept(ward, Point(1)) == b""


@pytest.mark.parametrize("size", [buddies.ROOM - 50, buddies.ROOM, 200_000, 4 << 20])
def test_large_records_arrive_whole(make: Callable[[int], Circle], size: int) -> None:
    ring = make(2)
    ring.share(Point(4))
    ring.gate(5, size)
    ring.gate(6)
    assert ring.all[0].kept(Rank(1), Point(5)) == b"1 at 5" + bytes(size)
    assert ring.all[1].kept(Rank(0), Point(6)) == b"0 at 6"


def test_who_reads_while_records_come_reads_a_whole_one_or_none(make: Callable[[int], Circle]) -> None:
    ring = make(2)
    ring.share(Point(4))
    ring.gate(5)
    over, keeper = threading.Event(), ring.all[0]

    def said(rank: int, step: int) -> bytes:
        return b"%d at %d" % (rank, step) + bytes([step % 256]) * 8000

    def read() -> int:
        found = 0
        while not over.is_set():
            for point in keeper._copies[Rank(1)].points():
                data = keeper.kept(Rank(1), point)
                assert point.step <= 5 or data in (b"", said(1, point.step))
                found += bool(data)
        return found

    def gate(rank: int, step: int) -> None:
        ring.all[rank].at_gate(Point(step), (said(rank, step),))

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        for step in range(6, 300):
            ring.everybody(partial(gate, step=step))
        over.set()
        assert reader.result(DEADLINE_S) > 10


def test_a_call_that_is_redone_takes_its_records_place(make: Callable[[int], Circle]) -> None:
    ring = make(2)
    ring.share(None)
    ring.gate(4)
    ring.gate(5)  # never committed
    ring.share(Point(4))
    assert [record.data for record in ring.kept(0, 1)] == [b"1 shares 4"]
    ring.gate(5)
    assert [record.data for record in ring.kept(0, 1)] == [b"1 shares 4", b"1 at 5"]


def test_new_buddies_have_the_record_before_anybody_goes_on(make: Callable[[int], Circle]) -> None:
    ring = make(3)
    ring.share(None)
    ring.gate(7)
    ring.share(Point(7), turn=2)
    for rank in range(3):
        new, former = (rank - 2) % 3, (rank - 1) % 3
        assert ring.all[rank].kept(Rank(new), Point(7)) == b"%d shares 7" % new
        assert ring.all[rank].kept(Rank(former), Point(7)) == b"%d at 7" % former, "until the next gate"
    ring.gate(8)
    assert ring.kept(0, 2) == ()
    assert [record.point for record in ring.kept(0, 1)] == [Point(7), Point(8)]


def test_a_ward_that_does_not_come_fails_the_reconfigure_in_time(make: Callable[[int], Circle]) -> None:
    ring = make(2)
    ring.store.set(f"{trust.keys_of(ring.secret, 1)}/lanes/1", ring.servers[1].address)  # told before it was lost
    with pytest.raises(groups.ReconfigureError, match="rank 1 did not come"):
        ring.share_one(0, 1, Point(3), 1, 1, timeout_s=2.0)
    assert not ring.all[0].active


def test_who_waits_is_cut_from_another_thread(make: Callable[[int], Circle]) -> None:
    ring = make(2)
    ring.share(Point(1))
    waiting = ring.pool.submit(ring.all[0].at_gate, Point(2), (b"mine",))
    cutting = threading.Timer(0.05, ring.lanes[0].cut)
    cutting.start()
    with pytest.raises(Parted):
        waiting.result(DEADLINE_S)
    cutting.join()

    def go_on() -> None:
        for step in (2, 3):
            ring.all[1].at_gate(Point(step), (b"",))

    with pytest.raises(Parted):  # the other one may have our record, but there is no next one
        go_on()


def test_what_ends_an_exchange_in_the_middle_is_no_record_of_the_next_one(
    make: Callable[[int], Circle], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    ring = make(2)
    ring.share(Point(1))
    with monkeypatch.context() as patched:
        patched.setattr(buddies.Buddies, "_take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ring.all[0].at_gate(Point(2), (b"told",))
    ring.all[1].at_gate(Point(2), (b"",))
    with pytest.raises(Parted):
        ring.all[1].at_gate(Point(3), (b"",))
    with pytest.raises(Parted):
        ring.all[0].at_gate(Point(2), (b"",))


def test_who_does_not_know_the_secret_brings_no_records(make: Callable[[int], Circle]) -> None:
    ring = make(2)
    ring.secret = trust.new_secret()
    ring.store.set(f"{trust.keys_of(ring.secret, 1)}/lanes/1", ring.servers[1].address)
    with pytest.raises(groups.ReconfigureError, match="not reached"):
        ring.share_one(0, 1, Point(3), 1, 1, timeout_s=0.3)
    assert ring.lanes[1]._came == {}
