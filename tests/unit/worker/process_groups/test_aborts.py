"""Aborts of communicators of one device end together, and nobody but who asks for it waits for them."""

from __future__ import annotations

import threading
import time

import pytest

from torchrelay.worker.process_groups.aborts import Aborts

LONG_S = 20.0


class Device:
    """A device on which memory is freed when no kernel of any communicator runs."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.idle = threading.Condition()


class Communicator:
    """Aborts as NCCL does: its own kernels quit, and then it waits for those of all others."""

    def __init__(self, device: Device, name: str, *, stuck: bool, fails: bool = False) -> None:
        self.device, self.name, self.fails = device, name, fails
        self.aborted = 0
        if stuck:
            device.running.add(name)

    def abort(self) -> None:
        with self.device.idle:
            self.device.running.discard(self.name)
            self.device.idle.notify_all()
            assert self.device.idle.wait_for(lambda: not self.device.running, LONG_S)
            self.aborted += 1
        if self.fails:
            raise RuntimeError("NCCL error")


class Blocked:
    """Its abort ends when it is told to."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.asked = 0

    def abort(self) -> None:
        self.asked += 1
        self.free.wait(LONG_S)


def soon() -> float:
    return time.monotonic() + LONG_S


def test_communicators_that_wait_for_one_another_end_together() -> None:
    device, aborts = Device(), Aborts()
    made = [Communicator(device, name, stuck=name != "world") for name in ("world", "shard", "replicate")]
    for each in made:
        aborts.add(each, blocks=True)
    assert aborts.begin() == 3
    aborts.finish(soon())
    assert not device.running
    assert all(each.aborted for each in made)


def test_the_one_that_asks_does_not_wait_and_asks_nobody_twice_at_once() -> None:
    aborts, blocked = Aborts(), Blocked()
    aborts.add(blocked, blocks=True)
    assert [aborts.begin() for _ in range(50)] == [1] + [0] * 49
    assert blocked.asked == 1
    blocked.free.set()
    aborts.finish(soon())


def test_what_was_connected_since_is_aborted_too() -> None:
    aborts, backend = Aborts(), Communicator(Device(), "world", stuck=False)
    aborts.add(backend, blocks=True)
    aborts.begin()
    aborts.finish(soon())
    assert backend.aborted == 2, "the first may have been before its first collective"
    aborts.finish(soon())
    assert backend.aborted == 2, "it is of a generation that is over"


def test_one_that_does_not_end_is_said_in_time() -> None:
    aborts, blocked = Aborts(), Blocked()
    aborts.add(blocked, blocks=True)
    with pytest.raises(RuntimeError, match="does not end"):
        aborts.finish(time.monotonic() + 0.05)
    blocked.free.set()
    aborts.finish(soon())


def test_one_that_fails_is_over(caplog: pytest.LogCaptureFixture) -> None:
    device, aborts = Device(), Aborts()
    failing, fine = Communicator(device, "a", stuck=True, fails=True), Communicator(device, "b", stuck=True)
    aborts.add(failing, blocks=True)
    aborts.add(fine, blocks=True)
    aborts.finish(soon())
    assert fine.aborted
    assert "could not be aborted: NCCL error" in caplog.text


def test_a_group_of_paths_is_aborted_at_once_and_each_time() -> None:
    aborts, group = Aborts(), Communicator(Device(), "paths", stuck=True)
    aborts.add(group, blocks=False)
    assert aborts.begin() == 1
    assert aborts.begin() == 1
    aborts.finish(soon())
    assert group.aborted == 3
    assert aborts.begin() == 1, "it stays: the next generation uses it again"


def test_what_is_gone_is_forgotten() -> None:
    aborts = Aborts()
    aborts.add(Communicator(Device(), "world", stuck=False), blocks=True)
    assert aborts.begin() == 0


def test_backends_may_be_added_while_others_are_aborted() -> None:
    aborts, over = Aborts(), threading.Event()
    kept = [Communicator(Device(), str(at), stuck=False) for at in range(2000)]

    def add() -> None:
        for each in kept:
            aborts.add(each, blocks=False)
        over.set()

    adding = threading.Thread(target=add)
    adding.start()
    while not over.is_set():
        aborts.begin()
    adding.join()
    assert aborts.begin() == len(kept)
