"""The gate: an all-reduce that everybody has entered, a record that outlives, and a verdict if it is cut short."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from tests.support.position import FIRST, decide, reconfigure
from torchrelay.errors import RefusedError, StateMismatchError, StepInterrupted
from torchrelay.protocol.messages.events import CollectiveFailed, Event
from torchrelay.protocol.messages.ids import START, Generation, Point, WorkerPhase
from torchrelay.protocol.messages.orders import Verdict
from torchrelay.wire.files.page import Page
from torchrelay.worker.agreement import gate
from torchrelay.worker.agreement.gate import LACKS, Gate, Sum, how_many_lack
from torchrelay.worker.control.position import OrdersStayedAway, Position
from torchrelay.worker.peers.buddies import Buddies
from torchrelay.worker.peers.lanes import Parted
from torchrelay.worker.peers.snapshots import Snapshots
from torchrelay.worker.process_groups import groups

WORLD = 4


class Group:
    """All other ranks: does to the flag what their all-reduce would do, and whatever else a test wants meanwhile."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], None] = lambda: None
        self.others = 0  # added to the sum: they are elsewhere
        self.entered = 0

    def size(self) -> int:
        return WORLD

    def allreduce(self, flags: list[Any]) -> Group:
        self.entered += 1
        self._flag = flags[0]
        return self

    def wait(self) -> None:
        self.meanwhile()
        self._flag.mul_(WORLD).add_(self.others)


class Stand:
    """A gate with all that it touches."""

    def __init__(self, folder: Path) -> None:
        self.page = Page(folder / "page", create=True)
        self.position = Position(self.page)
        self.position.hear(reconfigure(1))
        self.position.begin_wiring(Generation(1))
        self.position.start(START)
        self.said: list[Event] = []
        self.group = Group()
        self.buddies = Buddies()
        session = SimpleNamespace(
            page=self.page,
            position=self.position,
            worker="w",
            job="j",
            rank=0,
            agent=SimpleNamespace(say=self.hear),
            identity=SimpleNamespace(known=True),
            welcome=SimpleNamespace(patience_s=0.2),
            buddies=self.buddies,
            snapshots=None,
        )
        self.gate = Gate(cast(Any, session), Sum(cast(Any, self.group), torch.device("cpu")))
        self.then: Callable[[], None] = lambda: None  # when the worker has told of a failure

    def hear(self, event: Event) -> None:
        self.said.append(event)
        self.then()

    def enter(self, point: Point = FIRST) -> bool | None:
        self.position.enter(WorkerPhase.COMPUTING, point)
        return self.gate.enter(point, f"record of {point}".encode())

    def interrupt(self, verdict: Verdict, point: Point) -> None:
        self.position.interrupt(Generation(2))
        self.position.hear(decide(2, verdict, point))


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    stand = Stand(tmp_path)
    yield stand
    stand.page.close()


def broken() -> None:
    raise RuntimeError("Connection closed by peer [127.0.0.1]:1")


def test_it_commits_when_everybody_has_entered(stand: Stand) -> None:
    for step in (1, 2, 3):
        stand.enter(Point(step))
    assert stand.position.committed == Point(3)
    assert stand.group.entered == 3
    assert stand.said == []


def test_the_record_is_kept_before_it_is_entered(stand: Stand) -> None:
    kept: list[Any] = []
    stand.group.meanwhile = lambda: kept.extend(stand.page.records())
    stand.enter()
    assert [(record.point, record.data) for record in kept] == [(Point(1), b"record of 1")]


def test_the_phase_is_gate_while_others_are_awaited(stand: Stand) -> None:
    phases: list[WorkerPhase] = []
    stand.group.meanwhile = lambda: phases.append(stand.page.status().phase)
    stand.enter()
    assert phases == [WorkerPhase.GATE]


def test_who_waits_for_a_snapshot_counts_as_who_waits_for_others(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    aside: list[int] = []
    seen: list[int] = []
    monkeypatch.setattr(groups, "count_aside", aside.append)
    sender = SimpleNamespace(finished=SimpleNamespace(wait=lambda: seen.append(sum(aside))))
    snapshots: Any = SimpleNamespace(_senders=[sender], _judge=lambda _: None, lacking=False, idle=False)
    snapshots.at_gate = lambda: Snapshots.at_gate(snapshots)
    stand.gate._snapshots = snapshots
    stand.enter()
    assert seen == [-1], "one more has begun, and not two"
    assert sum(aside) == 0, "the all-reduce counts itself"


@pytest.mark.parametrize(("backends", "gradients", "gpus", "found"), [
    ("cpu:gloo", {"cpu"}, False, "lanes"),
    ("cpu:gloo", {"cuda"}, True, "lanes"),
    ("cpu:torchrelay", {"cuda"}, True, "lanes"),
    ("cpu:gloo,cuda:gloo", {"cuda"}, True, "lanes"),
    ("cpu:gloo,cuda:nccl", {"cpu"}, True, "lanes"),
    ("cpu:gloo,cuda:nccl", {"cuda", "cpu"}, True, "cuda"),
    ("cpu:gloo,cuda:nccl", set(), True, "cuda"),
    ("cpu:gloo,cuda:nccl", set(), False, "lanes"),
    ("cuda:nccl", {"cuda"}, True, "cuda"),
    ("cuda:nccl", {"cpu"}, True, "cuda"),
])  # fmt: skip
def test_the_gate_comes_after_what_the_device_has_to_do(
    monkeypatch: pytest.MonkeyPatch, backends: str, gradients: set[str], gpus: bool, found: str
) -> None:
    class Config:
        def __repr__(self) -> str:
            return backends

    monkeypatch.setattr(c10d, "_get_default_group", lambda: "group")
    monkeypatch.setattr(c10d, "_world", SimpleNamespace(pg_backend_config={"group": Config()}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(gate, "Sum", lambda _, where: where.type)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    session: Any = SimpleNamespace(rounds="lanes")
    exchange: object = gate.exchange_of(session, gradients)
    assert exchange == found


class TestWhatIsDoneTogetherInTheGate:
    def go(self, stand: Stand, also: Callable[[], None]) -> None:
        stand.position.enter(WorkerPhase.COMPUTING, FIRST)
        stand.gate.enter(FIRST, b"record", also=also)

    def test_is_done_when_all_are_in_it_and_before_anybody_passes(self, stand: Stand) -> None:
        seen: list[object] = []
        self.go(stand, lambda: seen.extend((stand.group.entered, stand.position.phase, stand.position.committed)))
        assert seen == [1, WorkerPhase.GATE, START]
        assert stand.position.committed == FIRST

    def test_commits_nothing_if_it_finds_fault(self, stand: Stand) -> None:
        def differ() -> None:
            raise StateMismatchError("rank 1 holds other values")

        with pytest.raises(StateMismatchError):
            self.go(stand, differ)
        assert stand.position.committed == START

    def test_is_not_begun_while_others_are_at_another_call(self, stand: Stand) -> None:
        stand.group.others = 1
        with pytest.raises(RefusedError, match="different calls"):
            self.go(stand, broken)

    def test_can_be_cut_and_rolled_forward_as_the_gate_itself(self, stand: Stand) -> None:
        def cut() -> None:
            stand.interrupt(Verdict.ROLL_FORWARD, FIRST)
            broken()

        self.go(stand, cut)
        assert stand.position.committed == FIRST


def test_a_poisoned_attempt_does_not_enter(stand: Stand) -> None:
    stand.position.interrupt(Generation(2))
    for _ in range(2):
        with pytest.raises(StepInterrupted):
            stand.enter()
    assert stand.group.entered == 0


class TestAnInterruptInTheGate:
    def test_rolls_forward_by_order_although_the_collective_failed(self, stand: Stand) -> None:
        def cut() -> None:
            stand.interrupt(Verdict.ROLL_FORWARD, Point(1))
            broken()

        stand.group.meanwhile = cut
        stand.enter()
        assert stand.position.committed == Point(1)
        assert stand.said == []

    def test_is_redone_by_order_although_the_collective_completed(self, stand: Stand) -> None:
        stand.group.meanwhile = lambda: stand.interrupt(Verdict.REDO, START)
        with pytest.raises(StepInterrupted):
            stand.enter()
        assert stand.position.committed == START

    def test_waits_for_its_verdict_no_longer_than_its_patience(self, stand: Stand) -> None:
        stand.group.meanwhile = lambda: cast(None, stand.position.interrupt(Generation(2)))
        with pytest.raises(OrdersStayedAway):
            stand.enter()


class TestAFailureThatNobodyKnowsOf:
    def test_is_told_once_and_the_interrupt_awaited(self, stand: Stand) -> None:
        stand.group.meanwhile = broken
        stand.then = lambda: stand.interrupt(Verdict.REDO, START)
        with pytest.raises(StepInterrupted):
            stand.enter()
        (said,) = stand.said
        assert isinstance(said, CollectiveFailed)
        assert said.generation == 1
        assert "Connection closed by peer" in said.summary

    def test_ends_the_worker_if_nobody_cares(self, stand: Stand) -> None:
        stand.group.meanwhile = broken
        with pytest.raises(OrdersStayedAway):
            stand.enter()


@pytest.mark.parametrize("others", [1, -31, 31])
def test_ranks_at_different_calls_are_found_out(stand: Stand, others: int) -> None:
    stand.group.others = others
    with pytest.raises(RefusedError, match="different calls: this one commits 1"):
        stand.enter()
    assert stand.position.committed == START


def test_garbage_after_an_interrupt_is_no_difference(stand: Stand) -> None:
    def cut() -> None:
        stand.interrupt(Verdict.REDO, START)
        stand.group.others = 7

    stand.group.meanwhile = cut
    with pytest.raises(StepInterrupted):
        stand.enter()


@pytest.mark.parametrize("size", [1, 4, 100_000])
@pytest.mark.parametrize("mark", [1, 32, 1 << 16])
def test_how_many_lack_a_snapshot_is_told_from_the_sum_although_it_wraps_around(mark: int, size: int) -> None:
    for lacking in {0, 1, size // 2, size}:
        total = mark * size + LACKS * lacking
        held = (total + (1 << 31)) % (1 << 32) - (1 << 31)
        assert how_many_lack(held, mark, size) == lacking
        assert how_many_lack(held + 31, mark, size) is None  # one rank is a step ahead


def test_a_rank_that_lacks_its_snapshot_tells_all_and_all_pass(stand: Stand) -> None:
    assert stand.enter() is True
    stand.group.others = 2 * LACKS
    assert stand.enter(FIRST.after_step()) is False


class TestBuddies:
    """With ranks on several nodes, records go to buddies before the all-reduce."""

    def test_all_records_have_come_before_it_is_entered(self, stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[Any] = []
        monkeypatch.setattr(stand.buddies, "active", True)
        monkeypatch.setattr(stand.buddies, "at_gate", lambda *told: seen.append((told, stand.group.entered)))
        stand.enter()
        assert seen == [((Point(1), (b"record of 1",)), 0)]
        assert stand.position.committed == Point(1)

    def test_one_that_is_lost_breaks_the_gate(self, stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
        def lost(*_: object) -> None:
            raise Parted("the ward has closed the connection")

        monkeypatch.setattr(stand.buddies, "active", True)
        monkeypatch.setattr(stand.buddies, "at_gate", lost)
        stand.then = lambda: stand.interrupt(Verdict.REDO, START)
        with pytest.raises(StepInterrupted):
            stand.enter()
        assert isinstance(stand.said[0], CollectiveFailed)
        assert stand.group.entered == 0
