"""Pace: how long the target of a move rests, and when it need not."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrelay.worker.hardware import niceness
from torchrelay.worker.hardware.niceness import REST_LIMIT_S, SHARE, Pace, idle_and_all

REST = 1 / SHARE - 1  # seconds for each second of work


class Worker:
    """One that works beside others, on a machine whose processors are as idle as the test says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stat = folder / "stat"
        self.cpu_s = 100.0
        self.now_s = 0.0
        self.rests: list[float] = []
        self.ticks = [0, 0]  # busy, idle
        self.pass_ticks(busy=1, idle=0)
        monkeypatch.setattr(niceness, "_PROC_STAT", self.stat)
        monkeypatch.setattr("torchrelay.worker.hardware.niceness.time.monotonic", lambda: self.now_s)

    def pace(self, since_s: float | None = None) -> Pace:
        return Pace(self.rest, since_s, cpu_s=lambda: self.cpu_s)

    def rest(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.now_s += seconds
        self.pass_ticks(busy=10, idle=0)

    def pass_ticks(self, *, busy: int, idle: int) -> None:
        self.ticks[0] += busy
        self.ticks[1] += idle
        self.stat.write_text(f"cpu  {self.ticks[0]} 0 0 {self.ticks[1]} 0 0 0 0 77 0\ncpu0 1 1 1 1\n")


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    return Worker(tmp_path, monkeypatch)


def test_after_each_portion_it_rests_in_proportion(worker: Worker) -> None:
    step = worker.pace()
    for used in (0.02, 0.05):
        worker.cpu_s += used
        step()
    assert worker.rests == pytest.approx([0.02 * REST, 0.05 * REST])


def test_what_was_used_before_counts_if_it_is_told(worker: Worker) -> None:
    worker.pace(99.9)()
    assert worker.rests == pytest.approx([0.1 * REST])


def test_small_portions_add_up_to_one_that_is_worth_a_rest(worker: Worker) -> None:
    step = worker.pace()
    for _ in range(100):
        worker.cpu_s += 0.0001
        step()
    assert len(worker.rests) < 50
    assert sum(worker.rests) == pytest.approx(0.01 * REST, rel=0.1)


def test_all_rests_together_have_an_end(worker: Worker) -> None:
    step = worker.pace()
    for _ in range(10):
        worker.cpu_s += 0.1
        step()
    assert sum(worker.rests) == pytest.approx(REST_LIMIT_S)


def test_a_rest_that_was_cut_short_is_not_held_against_it(worker: Worker) -> None:
    asked: list[float] = []
    step = Pace(asked.append, cpu_s=lambda: worker.cpu_s)
    for _ in range(10):
        worker.cpu_s += 0.1
        step()
    assert asked == pytest.approx([0.1 * REST] * 10)


def test_where_a_processor_is_idle_nobody_rests(worker: Worker) -> None:
    step = worker.pace()
    worker.pass_ticks(busy=70, idle=30)
    worker.cpu_s += 0.1
    step()
    assert worker.rests == []
    worker.pass_ticks(busy=80, idle=20)
    worker.cpu_s += 0.1
    step()
    assert worker.rests == pytest.approx([0.1 * REST]), "and what it has used while there was room is forgotten"


def test_between_two_ticks_what_was_seen_last_holds(worker: Worker) -> None:
    step = worker.pace()
    worker.pass_ticks(busy=0, idle=5)
    for _ in range(3):
        worker.cpu_s += 0.1
        step()
    assert worker.rests == []


def test_who_cannot_look_rests(worker: Worker) -> None:
    worker.stat.unlink()
    assert idle_and_all() == (0, 0)
    step = worker.pace()
    worker.cpu_s += 0.1
    step()
    assert len(worker.rests) == 1


def test_waiting_for_a_disk_counts_as_idle(worker: Worker) -> None:
    worker.stat.write_text("cpu  5 1 2 30 4 1 1 1 99 99\n")
    assert idle_and_all() == (34, 45), "what guests use is part of user time"
