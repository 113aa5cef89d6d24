"""Buddies hold the private records of the last two points of their wards, whatever becomes of those."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import pytest
from torch._C._distributed_c10d import HashStore

from tests.stage import JOB, NODE, Actor, Stage
from tests.test_run import digests, script, undisturbed
from torchrelay.protocol.messages.events import Event, PrivateRecord, RecordKept, WorkerReady, WorkerReconfigured
from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Point, Rank, WorkerId
from torchrelay.protocol.messages.orders import Recall, Reconfigure, Replay, WorkerOrder
from torchrelay.protocol.model.incident import Resolution
from torchrelay.protocol.model.job import JobPhase
from torchrelay.wire.files.page import Page
from torchrelay.wire.messages.codec import encode
from torchrelay.wire.trust import trust
from torchrelay.worker.peers import buddies
from torchrelay.worker.peers.buddies import RECORDS, Buddies
from torchrelay.worker.peers.lanes import Lanes, Parted, limit
from torchrelay.worker.process_groups import groups
from torchrelay.worker.state.record import decode_private
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

    def __init__(self, world: int) -> None:
        self.world = world
        self.generation = 0
        self.store = HashStore()
        secret = trust.new_secret()
        self.servers = [StateServer(secret) for _ in range(world)]
        self.all = [Buddies() for _ in range(world)]
        self.lanes = [Lanes() for _ in range(world)]
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
            node=NodeId("n"), worker=WorkerId("w"), job=JobId("j"), generation=Generation(generation), rank=Rank(rank),
            store="", buddies=after, wards=before,
        )  # fmt: skip
        record = b"" if point is None else b"%d shares %d" % (rank, point.step)
        wanted = {RECORDS: (after, before)}
        ends, addresses = self.lanes[rank].meet(
            self.servers[rank].address, self.secret, order, self.store, wanted, timeout_s
        )
        self.all[rank].share(ends[RECORDS], [addresses[buddy] for buddy in after], point, record)
        limit(ends[RECORDS], DEADLINE_S)

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


@pytest.fixture
def make() -> Iterator[Callable[[int], Circle]]:
    made: list[Circle] = []

    def one(world: int) -> Circle:
        made.append(Circle(world))
        return made[-1]

    yield one
    for each in made:
        each.close()


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


# ---------------------------------------------------------------- real workers


class BuddyStage(Stage):
    """A stage whose ranks are each other's buddies, as if each were on a node of its own."""

    copies = 1

    def _pass_on(self, order: WorkerOrder, again: bool) -> None:
        if isinstance(order, Reconfigure):
            world = self.job.spec.world_size
            turn = 1 if order.generation % 2 else world - self.copies
            after, before = circle(order.rank, world, self.copies, turn)
            order = msgspec.structs.replace(order, buddies=after, wards=before)
        super()._pass_on(order, again)

    def take(self, event: Event) -> None:
        if isinstance(event, RecordKept):
            self.events.append(event)  # nobody of the core has asked
        else:
            super().take(event)

    def recall(self, rank: int, ward: int, point: Point) -> bytes:
        """What a rank keeps of another."""
        actor = self.actor(rank)
        before = len(self.of(RecordKept))
        generation = self.job.generation
        order = Recall(
            node=NODE, worker=actor.worker, job=JOB, generation=generation, rank=Rank(rank), ward=Rank(ward),
            point=point,
        )  # fmt: skip
        self._tell(actor, encode(order))
        self.until(lambda: len(self.of(RecordKept)) > before, "an answer")
        answer = self.of(RecordKept)[-1]
        assert (answer.rank, answer.ward, answer.point, answer.generation) == (rank, ward, point, generation)
        return answer.private

    def records(self, actor: Actor) -> dict[Point, bytes]:
        """What a worker's page holds."""
        page = Page(actor.page)
        try:
            return {record.point: record.data for record in page.records()}
        finally:
            page.close()


Staged = Callable[..., BuddyStage]
slow = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def staged(tmp_path: Path) -> Iterator[Staged]:
    stages: list[BuddyStage] = []

    def make(*argv: str, world: int = 3, copies: int = 2, spares: int = 1) -> BuddyStage:
        stage = BuddyStage(
            tmp_path / f"stage-{len(stages)}", [*argv, "--marks", str(tmp_path)], world=world, spares=spares
        )
        stage.copies = copies
        stages.append(stage)
        return stage

    yield make
    for stage in stages:
        stage.close()


def same_gate(kept: bytes, page: bytes) -> None:
    """A buddy has what was in the page at the gate; the page may have the call's return behind it."""
    assert kept
    assert page.startswith(kept)
    mine, theirs = decode_private(kept), decode_private(page)
    assert (mine.rng, mine.place) == (theirs.rng, theirs.place)


@pytest.mark.jobs
class TestReal:
    pytestmark = slow

    @pytest.mark.parametrize("way", ["dict", "wide"])
    def test_a_lost_ranks_records_are_with_its_buddies(self, way: str, staged: Staged, tmp_path: Path) -> None:
        stage = staged(script("targets"), way)
        stage.until(lambda: stage.step() >= 3, "training")
        stage.hold = lambda order: isinstance(order, Reconfigure | Recall)
        lost = stage.actor(1)
        stage.kill(1)
        stage.until(
            lambda: {event.rank for event in stage.of(WorkerReady) if event.generation == 2} == {0, 1, 2}, "all stand"
        )
        (point,) = {event.point for event in stage.of(WorkerReady) if event.generation == 2}
        assert point is not None
        for buddy in (0, 2):
            same_gate(stage.recall(buddy, 1, point), stage.records(lost)[point])
            assert stage.recall(buddy, 1, Point(point.step + 7)) == b""
        same_gate(stage.recall(0, 2, point), stage.records(stage.actor(2))[point])
        stage.hold = lambda _: False
        stage.until(lambda: stage.job.phase is JobPhase.RUNNING, "recovered")
        (tmp_path / "enough").touch()
        assert stage.end() == 0, stage.all_logs()

    def test_after_a_reconfigure_the_new_buddies_have_it_before_anybody_goes_on(
        self, staged: Staged, tmp_path: Path
    ) -> None:
        stage = staged(script("targets"), "dict", copies=1)
        stage.until(lambda: stage.step() >= 3, "training")
        stage.hold = lambda order: type(order).__name__ == "Resume" and order.generation > 1  # type: ignore[attr-defined]
        stage.kill(1)
        stage.until(
            lambda: {e.rank for e in stage.of(WorkerReconfigured) if e.generation == 2} == {0, 1, 2}, "connected"
        )
        told = next(order for order in stage.orders if isinstance(order, Replay))
        for ward in range(3):
            before, now = (ward + 1) % 3, (ward + 2) % 3  # the former buddy, and the one of this generation
            kept = stage.recall(now, ward, told.point)
            assert kept == stage.records(stage.actor(ward))[told.point]
            if ward == 1:  # the replacement's page holds what it was brought to
                inherited, left = decode_private(kept), decode_private(told.private)
                assert (inherited.rng, inherited.place) == (left.rng, left.place)
            if before != 1:
                same_gate(stage.recall(before, ward, told.point), kept)
        stage.hold = lambda _: False
        stage.until(lambda: stage.job.phase is JobPhase.RUNNING, "recovered")
        (tmp_path / "enough").touch()
        assert stage.end() == 0, stage.all_logs()

    @pytest.mark.parametrize("phase", ["forward", "gate", "update", "between"])
    def test_a_rank_that_dies_while_others_wait_for_its_record_is_replaced(
        self, phase: str, staged: Staged, tmp_path: Path
    ) -> None:
        stage = staged(script("features"), "plain", "--die", f"1:4:{phase}", world=2, copies=1)
        assert stage.end() == 0, stage.all_logs()
        assert (tmp_path / f"died 4:{phase}").exists()
        assert [incident.resolution for incident in stage.job.incidents] == [Resolution.CLEAN]
        assert digests(stage) == undisturbed("plain")

    def test_two_that_die_one_after_the_other_are_replaced(self, staged: Staged) -> None:
        stage = staged(script("features"), "plain", "--die", "1:4:gate,0:5:between", world=2, copies=1, spares=2)
        assert stage.end() == 0, stage.all_logs()
        assert [incident.resolution for incident in stage.job.incidents] == [Resolution.CLEAN] * 2
        assert digests(stage) == undisturbed("plain")
