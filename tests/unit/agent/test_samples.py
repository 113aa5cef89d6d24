"""What an agent sees of a worker from outside."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from torchrelay.agent.workers import samples
from torchrelay.agent.workers.samples import MOST_BELOW, Sampler, descendants
from torchrelay.protocol.health.pulses import Sample
from torchrelay.protocol.messages.ids import Generation, Point, Rank, WorkerId, WorkerPhase
from torchrelay.wire.files.page import Page, Status

W = WorkerId("w1")
DEADLINE_S = 20.0


@contextmanager
def child(life: Callable[[], object]) -> Iterator[int]:
    """A process that lives like this; killed, with its children, in the end."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        life()
        os._exit(0)
    try:
        os.setpgid(pid, pid)  # whoever is first: it must have its group before it is killed
        yield pid
    finally:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def until(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def burn() -> None:
    while True:
        pass


def have_a_child_that_burns() -> None:
    if os.fork() == 0:
        burn()
    signal.pause()


def test_before_its_page_is_there_a_worker_is_booting(tmp_path: Path) -> None:
    sampler = Sampler(tmp_path)
    sample = sampler.sample(W, os.getpid(), None)
    assert sample is not None
    assert (sample.phase, sample.point, sample.generation, sample.process) == (WorkerPhase.BOOTING, None, 0, "R")
    sampler.path(W).touch()  # the moment between making and sizing it
    assert sampler.sample(W, os.getpid(), None) is not None
    with sampler.path(W).open("wb") as file:
        file.truncate(1 << 22)  # and the one before its header is written
    assert sampler.sample(W, os.getpid(), None) is not None


def test_a_page_is_read_while_it_changes(tmp_path: Path) -> None:
    sampler = Sampler(tmp_path)
    page = Page(sampler.path(W), create=True)
    now = time.monotonic_ns()
    status = Status(
        step=7,
        section=2,
        phase=WorkerPhase.SECTION,
        entered_ns=now - 60_000_000_000,
        committed_ns=now,
        step_ns=4_500_000,
        collectives=11,
        beat_ns=now - 50_000_000,
        generation=3,
    )
    page.write_status(status)
    sample = sampler.sample(W, os.getpid(), Rank(1))
    assert sample is not None
    assert (sample.rank, sample.point, sample.phase) == (1, Point(7, 2), WorkerPhase.SECTION)
    assert (sample.generation, sample.step_ms, sample.collectives) == (Generation(3), 4.5, 11)
    assert 60_000 <= sample.phase_ms < 77_000
    assert 50 <= sample.beat_ms < 17_000
    page.commit(Point(8), WorkerPhase.UPDATING, now, 1)
    again = sampler.sample(W, os.getpid(), Rank(1))
    assert again is not None
    assert (again.point, again.phase) == (Point(8), WorkerPhase.UPDATING)
    page.close()
    sampler.remove(W)


def test_a_process_that_has_ended_gives_no_sample(tmp_path: Path) -> None:
    with child(signal.pause) as pid:
        assert Sampler(tmp_path).sample(W, pid, None) is not None
    assert Sampler(tmp_path).sample(W, pid, None) is None


def test_the_cpu_time_of_children_counts(tmp_path: Path) -> None:
    sampler = Sampler(tmp_path)
    with child(have_a_child_that_burns) as pid:
        until(lambda: len(list(descendants(pid))) == 1)

        def used() -> int:
            sample = sampler.sample(W, pid, None)
            assert sample is not None
            return min(sample.cpu_ms, sample.main_ms)

        until(lambda: used() >= 100)


def burn_in_another_thread() -> None:
    threading.Thread(target=burn, daemon=True).start()
    signal.pause()


def test_the_main_threads_time_is_told_apart(tmp_path: Path) -> None:
    sampler = Sampler(tmp_path)
    with child(burn_in_another_thread) as pid:

        def sample() -> Sample:
            found = sampler.sample(W, pid, None)
            assert found is not None
            return found

        until(lambda: sample().cpu_ms >= 200)
        assert sample().main_ms < 100


def test_what_a_worker_left_is_read_and_then_removed(tmp_path: Path) -> None:
    sampler = Sampler(tmp_path)
    assert sampler.records(W) == ()
    page = Page(sampler.path(W), create=True)
    page.keep(Point(4), b"four")
    page.keep(Point(5), b"five")
    page.close()
    assert [(record.point, record.data) for record in sampler.records(W)] == [(Point(4), b"four"), (Point(5), b"five")]
    sampler.remove(W)
    assert list(tmp_path.iterdir()) == []
    sampler.remove(W)


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that a test moves."""
    now = [time.monotonic_ns()]
    monkeypatch.setattr("torchrelay.agent.workers.samples.time.monotonic_ns", lambda: now[0])

    def passed(by: float) -> None:
        now[0] += int(by * 1e9)

    return passed


def test_groups_are_told_of_who_stands_longer_than_a_step_and_again_from_time_to_time(
    tmp_path: Path, seconds: Callable[[float], None]
) -> None:
    sampler = Sampler(tmp_path)
    page = Page(sampler.path(W), create=True)

    def told(after: float, groups: list[tuple[int, int]], collectives: int = 1) -> tuple[object, int]:
        seconds(after)
        page.beat(1, collectives, 1, groups)
        sample = sampler.sample(W, os.getpid(), Rank(0))
        assert sample is not None
        return sample.groups, sample.elsewhere

    first, second = [(11, 2), (12, 5)], [(11, 3), (12, 5)]
    assert told(9.0, first) == (None, 7)
    assert told(0.9, first) == (None, 7)
    assert told(0.1, first) == (tuple(first), 7)
    assert told(1.9, first) == (None, 7)
    assert told(0.1, first) == (tuple(first), 7)
    assert told(0.1, second) == (None, 8)
    assert told(1.0, second) == (tuple(second), 8)
    assert told(1.0, second, collectives=2) == (None, 8)
    page.commit(Point(1), WorkerPhase.COMPUTING, 1, 3_000_000_000)
    assert told(1.0, second, collectives=2) == (None, 8)
    assert told(2.9, second, collectives=2) == (None, 8)
    assert told(0.1, second, collectives=2) == (tuple(second), 8)
    page.close()
    sampler.remove(W)


@pytest.mark.parametrize("below", [lambda pid: f"{pid + 1}", lambda pid: f"{2 * pid} {2 * pid + 1}"])
def test_however_many_processes_there_are_below_a_worker_they_are_counted_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch, below: Callable[[int], str]
) -> None:
    monkeypatch.setattr(samples, "read_proc", lambda path: below(int(path.split("/")[2])))
    assert list(descendants(1)) == list(range(2, MOST_BELOW + 2))
